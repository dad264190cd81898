//! Python's `str` methods.

use super::call::CallArgs;
use super::cased::{capitalize, is_lower, is_title, is_upper, swap_case, title};
use super::error::{raise, Result};
use super::lexer::is_space;
use super::ops::MAX_SIZE;
use super::printf::brace_format;
use super::text::is_printable;
use super::value::{Str, Value};

pub const NAMES: &[&str] = &[
    "capitalize",
    "casefold",
    "center",
    "count",
    "endswith",
    "expandtabs",
    "find",
    "format",
    "index",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "isidentifier",
    "islower",
    "isnumeric",
    "isprintable",
    "isspace",
    "istitle",
    "isupper",
    "join",
    "ljust",
    "lower",
    "lstrip",
    "partition",
    "removeprefix",
    "removesuffix",
    "replace",
    "rfind",
    "rindex",
    "rjust",
    "rpartition",
    "rsplit",
    "rstrip",
    "split",
    "splitlines",
    "startswith",
    "strip",
    "swapcase",
    "title",
    "upper",
    "zfill",
];

fn text(value: impl Into<String>) -> Result<Value> {
    Ok(Value::str(value.into()))
}

fn every(s: &str, test: impl Fn(char) -> bool) -> Result<Value> {
    Ok(Value::Bool(!s.is_empty() && s.chars().all(test)))
}

fn row<'s>(parts: impl IntoIterator<Item = &'s str>) -> Result<Value> {
    Ok(Value::list(parts.into_iter().map(Value::str).collect()))
}

pub fn call(of: &Str, name: &str, args: CallArgs) -> Result<Value> {
    match name {
        // Often called on whole messages, whose text they seldom need.
        "strip" | "lstrip" | "rstrip" => return strip(of, name, args),
        "startswith" | "endswith" => return starts_or_ends(of, name, args),
        _ => {}
    }
    let s = &*of.text;
    match name {
        "upper" => text(s.to_uppercase()),
        "lower" | "casefold" => text(s.to_lowercase()),
        "capitalize" => text(capitalize(s)),
        "title" => text(title(s)),
        "swapcase" => text(swap_case(s)),
        "isalnum" => every(s, char::is_alphanumeric),
        "isalpha" => every(s, char::is_alphabetic),
        "isascii" => Ok(Value::Bool(s.is_ascii())),
        "isdecimal" | "isdigit" | "isnumeric" => every(s, char::is_numeric),
        "isspace" => every(s, is_space),
        "isprintable" => Ok(Value::Bool(s.chars().all(is_printable))),
        "islower" => Ok(Value::Bool(is_lower(s))),
        "isupper" => Ok(Value::Bool(is_upper(s))),
        "istitle" => Ok(Value::Bool(is_title(s))),
        "isidentifier" => Ok(Value::Bool(
            !s.starts_with(char::is_numeric)
                && !s.is_empty()
                && s.chars().all(|c| c.is_alphanumeric() || c == '_'),
        )),
        "split" | "rsplit" => split(s, name, args),
        "splitlines" => {
            let keep = args.bind(name, &["keepends"])?.bool(0, false);
            Ok(Value::list(split_lines(s, keep).into_iter().map(Value::str).collect()))
        }
        "join" => join(of, args),
        "format" => brace_format(of, &args),
        "replace" => {
            let mut bound = args.bind(name, &["old", "new", "count"])?;
            let (old, new) = (bound.required_string(0)?, bound.required_string(1)?);
            replace(s, &old, &new, bound.int(2, -1)?)
        }
        "find" | "rfind" | "index" | "rindex" | "count" => search(s, name, args),
        "removeprefix" => {
            let prefix = args.bind(name, &["prefix"])?.required_string(0)?;
            text(s.strip_prefix(&*prefix).unwrap_or(s))
        }
        "removesuffix" => {
            let suffix = args.bind(name, &["suffix"])?.required_string(0)?;
            text(s.strip_suffix(&*suffix).unwrap_or(s))
        }
        "partition" | "rpartition" => {
            let separator = args.bind(name, &["sep"])?.required_string(0)?;
            if separator.is_empty() {
                return raise("ValueError: empty separator");
            }
            let found = if name == "partition" { s.find(&*separator) } else { s.rfind(&*separator) };
            let parts = match (found, name) {
                (Some(at), _) => [&s[..at], &*separator, &s[at + separator.len()..]],
                (None, "partition") => [s, "", ""],
                (None, _) => ["", "", s],
            };
            Ok(Value::tuple(parts.into_iter().map(Value::str).collect()))
        }
        "center" | "ljust" | "rjust" | "zfill" => justify(s, name, args),
        "expandtabs" => {
            let size = args.bind(name, &["tabsize"])?.int(0, 8)?.clamp(0, 1000) as usize;
            text(expand_tabs(s, size))
        }
        other => raise(format!("AttributeError: 'str' object has no attribute '{other}'")),
    }
}

fn strip(of: &Str, name: &str, args: CallArgs) -> Result<Value> {
    let chars = args.bind(name, &["chars"])?.string(0)?;
    let whole = || Ok(Value::Str(Str { text: of.text.clone(), markup: false }));
    if chars.is_none() && of.text.has_plain_ends() {
        return whole();
    }
    let s = &*of.text;
    let drop = |c: char| chars.as_ref().map_or_else(|| is_space(c), |set| set.contains(c));
    let kept = match name {
        "strip" => s.trim_matches(drop),
        "lstrip" => s.trim_start_matches(drop),
        _ => s.trim_end_matches(drop),
    };
    if kept.len() == s.len() {
        return whole();
    }
    text(kept)
}

fn split(s: &str, name: &str, args: CallArgs) -> Result<Value> {
    let mut bound = args.bind(name, &["sep", "maxsplit"])?;
    let separator = bound.string(0)?;
    let limit = bound.int(1, -1)?;
    let limit = if limit < 0 { usize::MAX - 1 } else { limit as usize };
    let mut parts: Vec<&str> = match (&separator, name) {
        (Some(separator), _) if separator.is_empty() => return raise("ValueError: empty separator"),
        (Some(separator), "split") => return row(s.splitn(limit + 1, &**separator)),
        (Some(separator), _) => s.rsplitn(limit + 1, &**separator).collect(),
        (None, "split") => {
            let mut rest = s.trim_start_matches(is_space);
            let mut parts = Vec::new();
            while !rest.is_empty() {
                if parts.len() == limit {
                    parts.push(rest);
                    break;
                }
                let end = rest.find(is_space).unwrap_or(rest.len());
                parts.push(&rest[..end]);
                rest = rest[end..].trim_start_matches(is_space);
            }
            return row(parts);
        }
        (None, _) => {
            let mut rest = s.trim_end_matches(is_space);
            let mut parts = Vec::new();
            while !rest.is_empty() {
                if parts.len() == limit {
                    parts.push(rest);
                    break;
                }
                let start = rest
                    .char_indices()
                    .rev()
                    .find(|(_, c)| is_space(*c))
                    .map_or(0, |(i, c)| i + c.len_utf8());
                parts.push(&rest[start..]);
                rest = rest[..start].trim_end_matches(is_space);
            }
            parts
        }
    };
    parts.reverse();
    row(parts)
}

/// Python recognizes more line ends than `\n`.
pub fn split_lines(s: &str, keep_ends: bool) -> Vec<String> {
    let is_end = |c: char| {
        matches!(c, '\n' | '\r' | '\x0b' | '\x0c' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}')
    };
    let mut lines = Vec::new();
    let mut rest = s;
    while !rest.is_empty() {
        let Some(at) = rest.find(is_end) else {
            lines.push(rest.to_string());
            break;
        };
        let length = if rest[at..].starts_with("\r\n") {
            2
        } else {
            rest[at..].chars().next().map_or(1, char::len_utf8)
        };
        lines.push(rest[..if keep_ends { at + length } else { at }].to_string());
        rest = &rest[at + length..];
    }
    lines
}

fn join(of: &Str, args: CallArgs) -> Result<Value> {
    let items = args.bind("join", &["iterable"])?.required(0)?.iterate()?;
    let mut out = String::new();
    for (i, item) in items.iter().enumerate() {
        let Some(part) = item.as_str() else {
            return raise(format!(
                "TypeError: sequence item {i}: expected str instance, {} found",
                item.type_name()
            ));
        };
        if i > 0 {
            out.push_str(&of.text);
        }
        out.push_str(part);
        if out.len() > MAX_SIZE {
            return raise("MemoryError: string too large");
        }
    }
    text(out)
}

pub fn replace(s: &str, old: &str, new: &str, count: i128) -> Result<Value> {
    let matches = if old.is_empty() { s.chars().count() + 1 } else { s.matches(old).count() };
    if s.len().saturating_add(matches.saturating_mul(new.len())) > MAX_SIZE {
        return raise("MemoryError: string too large");
    }
    text(if count < 0 { s.replace(old, new) } else { s.replacen(old, new, count as usize) })
}

/// Returns the part of `s` between two of Python's optional character positions, and the first position.
fn window(s: &str, start: Option<i128>, stop: Option<i128>) -> Option<(&str, usize)> {
    if start.is_none() && stop.is_none() {
        return Some((s, 0));
    }
    let length = s.chars().count() as i128;
    let clamp = |at: i128| if at < 0 { (at + length).max(0) } else { at };
    let (start, stop) = (start.map_or(0, clamp), stop.map_or(length, clamp).min(length));
    if start > stop {
        return None;
    }
    let byte = |at: i128| s.char_indices().nth(at as usize).map_or(s.len(), |(i, _)| i);
    Some((&s[byte(start)..byte(stop)], start as usize))
}

fn starts_or_ends(of: &Str, name: &str, args: CallArgs) -> Result<Value> {
    let mut bound = args.bind(name, &["prefix", "start", "end"])?;
    let affixes = match bound.required(0)? {
        Value::Tuple(items) => items.0.borrow().clone(),
        single => vec![single],
    };
    let start = bound.take(1).and_then(|v| v.as_int());
    let stop = bound.take(2).and_then(|v| v.as_int());
    let at_start = name == "startswith";
    let holds = |affix: &str| {
        if start.is_none() && stop.is_none() {
            return if at_start { of.text.begins_with(affix) } else { of.text.finishes_with(affix) };
        }
        window(&of.text, start, stop).is_some_and(|(w, _)| {
            if at_start {
                w.starts_with(affix)
            } else {
                w.ends_with(affix)
            }
        })
    };
    for affix in &affixes {
        let Some(affix) = affix.as_str() else {
            return raise(format!(
                "TypeError: {name} first arg must be str or a tuple of str, not {}",
                affix.defined()?.type_name()
            ));
        };
        if holds(affix) {
            return Ok(Value::Bool(true));
        }
    }
    Ok(Value::Bool(false))
}

fn search(s: &str, name: &str, args: CallArgs) -> Result<Value> {
    let mut bound = args.bind(name, &["sub", "start", "end"])?;
    let wanted = bound.required_string(0)?;
    let start = bound.take(1).and_then(|v| v.as_int());
    let stop = bound.take(2).and_then(|v| v.as_int());
    let window = window(s, start, stop);
    if name == "count" {
        let count = window.map_or(0, |(w, _)| {
            if wanted.is_empty() {
                w.chars().count() + 1
            } else {
                w.matches(&*wanted).count()
            }
        });
        return Ok(Value::Int(count as i128));
    }
    let found = window.and_then(|(w, from)| {
        let at = if name.starts_with('r') { w.rfind(&*wanted) } else { w.find(&*wanted) };
        at.map(|at| (from + w[..at].chars().count()) as i128)
    });
    match found {
        Some(at) => Ok(Value::Int(at)),
        None if name.ends_with("index") => raise("ValueError: substring not found"),
        None => Ok(Value::Int(-1)),
    }
}

fn justify(s: &str, name: &str, args: CallArgs) -> Result<Value> {
    let mut bound = args.bind(name, &["width", "fillchar"])?;
    bound.take(0).map_or_else(
        || raise(format!("TypeError: {name} expected at least 1 argument, got 0")),
        |width| {
            let Some(width) = width.as_int() else {
                return raise("TypeError: object cannot be interpreted as an integer");
            };
            if width > MAX_SIZE as i128 {
                return raise("MemoryError: string too large");
            }
            let fill = match bound.string(1)? {
                None => {
                    if name == "zfill" {
                        '0'
                    } else {
                        ' '
                    }
                }
                Some(fill) => match fill.chars().next() {
                    Some(c) if fill.chars().count() == 1 => c,
                    _ => return raise("TypeError: The fill character must be exactly one character long"),
                },
            };
            let length = s.chars().count();
            let missing = (width.max(0) as usize).saturating_sub(length);
            let filled = |n: usize| fill.to_string().repeat(n);
            text(match name {
                "ljust" => s.to_string() + &filled(missing),
                "rjust" => filled(missing) + s,
                "center" => {
                    // For odd widths Python puts the extra space on the left.
                    let left = missing / 2 + (missing & width as usize & 1);
                    filled(left) + s + &filled(missing - left)
                }
                _ => {
                    let sign = usize::from(s.starts_with(['+', '-']));
                    s[..sign].to_string() + &filled(missing) + &s[sign..]
                }
            })
        },
    )
}

fn expand_tabs(s: &str, size: usize) -> String {
    let mut out = String::new();
    let mut column = 0;
    for c in s.chars() {
        match c {
            '\t' if size > 0 => {
                let spaces = size - column % size;
                out.push_str(&" ".repeat(spaces));
                column += spaces;
            }
            '\t' => {}
            '\n' | '\r' => {
                out.push(c);
                column = 0;
            }
            _ => {
                out.push(c);
                column += 1;
            }
        }
    }
    out
}
