//! Texts of string values. A long string of the context stays as it is in the JSON of the context: it is unescaped
//! when a template first reads its characters, and a template that only prints it copies nothing.

use memchr::memchr;
use std::cell::{Cell, OnceCell};
use std::ops::Deref;
use std::rc::Rc;
use std::sync::Arc;

/// Shorter strings are unescaped at once.
pub const MIN_BYTES: usize = 256;

/// The JSON of a context.
#[derive(Debug)]
pub struct Source {
    bytes: &'static [u8],
    /// Some string is no valid UTF-8 or has half of a surrogate pair.
    pub damaged: Cell<bool>,
    /// The result depends on characters of a string that stays, other than whether its ends are plain.
    pub read: Cell<bool>,
}

impl Source {
    /// `bytes` must outlive every text that refers to it.
    ///
    /// # Safety
    /// The caller drops the source and all texts before `bytes` changes or ends.
    pub unsafe fn new(bytes: &[u8]) -> Rc<Source> {
        let bytes = std::mem::transmute::<&[u8], &'static [u8]>(bytes);
        Rc::new(Source { bytes, damaged: Cell::new(false), read: Cell::new(false) })
    }

    pub fn bytes(&self) -> &[u8] {
        self.bytes
    }
}

/// A JSON string without its quotes, at `begin..end` of its source.
#[derive(Debug)]
pub struct Quoted {
    source: Rc<Source>,
    pub begin: usize,
    pub end: usize,
    plain: OnceCell<Arc<str>>,
}

impl Quoted {
    fn bytes(&self) -> &[u8] {
        &self.source.bytes[self.begin..self.end]
    }

    pub fn inside(&self) -> &[u8] {
        self.source.read.set(true);
        self.bytes()
    }

    pub fn plain(&self) -> &Arc<str> {
        self.source.read.set(true);
        self.plain.get_or_init(|| match unescape(self.bytes()) {
            Some(text) => text.into(),
            None => {
                self.source.damaged.set(true);
                "".into()
            }
        })
    }
}

/// Dereferences to the unescaped text.
#[derive(Clone, Debug)]
pub enum Text {
    Plain(Arc<str>),
    Quoted(Rc<Quoted>),
}

impl Text {
    /// The JSON string at `begin..end`, without its quotes. None: it is no valid string.
    pub fn of_json(source: &Rc<Source>, begin: usize, end: usize, may_stay: bool) -> Option<Text> {
        if may_stay && end - begin >= MIN_BYTES {
            let quoted = Quoted { source: source.clone(), begin, end, plain: OnceCell::new() };
            return Some(Text::Quoted(Rc::new(quoted)));
        }
        unescape(&source.bytes[begin..end]).map(Text::from)
    }

    pub fn to_arc(&self) -> Arc<str> {
        match self {
            Text::Plain(text) => text.clone(),
            Text::Quoted(quoted) => quoted.plain().clone(),
        }
    }

    pub fn is_empty(&self) -> bool {
        matches!(self, Text::Plain(text) if text.is_empty())
    }

    /// Returns a number that is not below the length: an escape is not shorter than its character.
    pub fn most_bytes(&self) -> usize {
        match self {
            Text::Plain(text) => text.len(),
            Text::Quoted(quoted) => quoted.end - quoted.begin,
        }
    }

    /// Returns whether both ends are seen to be printable ASCII characters, so that stripping space changes nothing.
    pub fn has_plain_ends(&self) -> bool {
        matches!(self, Text::Quoted(quoted) if has_plain_ends(quoted.bytes()))
    }

    pub fn begins_with(&self, prefix: &str) -> bool {
        if let Text::Quoted(quoted) = self {
            let head = &quoted.inside()[..prefix.len().min(MIN_BYTES)];
            if head.len() == prefix.len() && memchr(b'\\', head).is_none() {
                return head == prefix.as_bytes();
            }
        }
        self.starts_with(prefix)
    }

    pub fn finishes_with(&self, suffix: &str) -> bool {
        if let Text::Quoted(quoted) = self {
            let (inside, wanted) = (quoted.inside(), suffix.len() + LONGEST_ESCAPE);
            if wanted <= MIN_BYTES && memchr(b'\\', &inside[inside.len() - wanted..]).is_none() {
                return inside.ends_with(suffix.as_bytes());
            }
        }
        self.ends_with(suffix)
    }
}

/// Bytes of `\u0000`.
const LONGEST_ESCAPE: usize = 6;

/// Returns whether both ends of a long JSON string are seen to be printable ASCII characters.
pub fn has_plain_ends(inside: &[u8]) -> bool {
    let tail = &inside[inside.len() - LONGEST_ESCAPE..];
    inside[0].is_ascii_graphic()
        && inside[0] != b'\\'
        && tail[LONGEST_ESCAPE - 1].is_ascii_graphic()
        && memchr(b'\\', tail).is_none()
}

/// Returns the position of the quote that ends the string which begins at `begin`: the first one with an even number
/// of backslashes before it.
pub fn string_end(json: &[u8], begin: usize) -> Option<usize> {
    let mut end = begin;
    loop {
        end += memchr(b'"', json.get(end..)?)?;
        let slashes = json[begin..end].iter().rev().take_while(|byte| **byte == b'\\').count();
        if slashes % 2 == 0 {
            return Some(end);
        }
        end += 1;
    }
}

impl Deref for Text {
    type Target = str;

    fn deref(&self) -> &str {
        match self {
            Text::Plain(text) => text,
            Text::Quoted(quoted) => quoted.plain(),
        }
    }
}

impl PartialEq for Text {
    fn eq(&self, other: &Text) -> bool {
        match (self, other) {
            (Text::Quoted(a), Text::Quoted(b)) if Rc::ptr_eq(a, b) => true,
            // An unescaped text is not longer than its JSON.
            (Text::Plain(a), Text::Quoted(b)) | (Text::Quoted(b), Text::Plain(a))
                if a.len() > b.inside().len() =>
            {
                false
            }
            _ => **self == **other,
        }
    }
}

impl From<Arc<str>> for Text {
    fn from(text: Arc<str>) -> Text {
        Text::Plain(text)
    }
}

impl From<String> for Text {
    fn from(text: String) -> Text {
        Text::Plain(text.into())
    }
}

impl From<Text> for Arc<str> {
    fn from(text: Text) -> Arc<str> {
        text.to_arc()
    }
}

impl From<Text> for String {
    fn from(text: Text) -> String {
        text.to_string()
    }
}

/// Returns the text of the inside of a JSON string; None if it is not valid.
pub fn unescape(inside: &[u8]) -> Option<String> {
    // A fold, which is vectorized, unlike a search.
    if inside.iter().fold(false, |found, byte| found | (*byte < 0x20)) {
        return None;
    }
    let mut rest = std::str::from_utf8(inside).ok()?;
    let mut text = String::with_capacity(rest.len());
    while let Some(at) = memchr(b'\\', rest.as_bytes()) {
        text.push_str(&rest[..at]);
        let (c, length) = escaped(&rest[at + 1..])?;
        text.push(c);
        rest = &rest[at + 1 + length..];
    }
    text.push_str(rest);
    Some(text)
}

/// Returns the character of an escape after its backslash, and the number of bytes read.
fn escaped(rest: &str) -> Option<(char, usize)> {
    let simple = match rest.as_bytes().first()? {
        b'"' => '"',
        b'\\' => '\\',
        b'/' => '/',
        b'b' => '\x08',
        b'f' => '\x0c',
        b'n' => '\n',
        b'r' => '\r',
        b't' => '\t',
        b'u' => {
            let first = code_unit(rest.get(1..5)?)?;
            if !(0xd800..0xdc00).contains(&first) {
                return Some((char::from_u32(first)?, 5));
            }
            let second = code_unit(rest.get(5..11)?.strip_prefix("\\u")?)?;
            let low = second.checked_sub(0xdc00).filter(|low| *low < 0x400)?;
            return Some((char::from_u32(0x10000 + ((first - 0xd800) << 10) + low)?, 11));
        }
        _ => return None,
    };
    Some((simple, 1))
}

fn code_unit(digits: &str) -> Option<u32> {
    if !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    u32::from_str_radix(digits, 16).ok()
}
