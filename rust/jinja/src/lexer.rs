//! Splits a template into text, tags and the tokens inside tags, with Jinja2's rules for white space:
//! `trim_blocks` and `lstrip_blocks` are on, as in `transformers`.

use super::error::{syntax, Result};
use std::sync::Arc;

#[derive(Debug, Clone, PartialEq)]
pub enum Token {
    Text(Arc<str>),
    VariableBegin,
    VariableEnd,
    BlockBegin,
    BlockEnd,
    Name(Arc<str>),
    Str(Arc<str>),
    Int(i128),
    Float(f64),
    /// An operator or bracket, as spelled.
    Op(&'static str),
    End,
}

#[derive(Debug, Clone)]
pub struct Lexeme {
    pub token: Token,
    pub line: usize,
}

/// Longest first, so that the first match is the correct one.
const OPERATORS: &[&str] = &[
    "//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[", "]", "(", ")", "{", "}", ">", "<",
    "=", ".", ":", "|", ",", ";",
];

/// Matches the characters of Python's `str.isspace` and `\s`.
pub fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}

fn trim_end(text: &str) -> &str {
    text.trim_end_matches(is_space)
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

pub fn tokenize(source: &str) -> Result<Vec<Lexeme>> {
    let mut text = source.replace("\r\n", "\n").replace('\r', "\n");
    if text.ends_with('\n') {
        text.pop();
    }
    let mut lexer = Lexer { source: &text, at: 0, line: 1, line_starting: true, out: Vec::new() };
    lexer.run()?;
    Ok(lexer.out)
}

struct Lexer<'s> {
    source: &'s str,
    at: usize,
    line: usize,
    /// The text before this point ends a line, or is the start of the template.
    line_starting: bool,
    out: Vec<Lexeme>,
}

impl<'s> Lexer<'s> {
    fn rest(&self) -> &'s str {
        &self.source[self.at..]
    }

    fn advance(&mut self, bytes: usize) {
        let passed = &self.source[self.at..self.at + bytes];
        self.line += passed.matches('\n').count();
        if bytes > 0 {
            self.line_starting = passed.ends_with('\n');
        }
        self.at += bytes;
    }

    fn skip_space(&mut self) {
        let rest = self.rest();
        self.advance(rest.len() - rest.trim_start_matches(is_space).len());
    }

    fn push(&mut self, token: Token) {
        self.out.push(Lexeme { token, line: self.line });
    }

    fn run(&mut self) -> Result<()> {
        while self.at < self.source.len() {
            let rest = self.rest();
            let Some(offset) = find_tag(rest) else {
                self.push(Token::Text(rest.into()));
                self.advance(rest.len());
                break;
            };
            let opening = &rest[offset..offset + 2];
            let sign = rest[offset + 2..].chars().next().filter(|c| matches!(c, '-' | '+'));
            self.text_before_tag(&rest[..offset], sign, opening != "{{");
            self.advance(offset);
            match opening {
                "{#" => self.comment()?,
                "{%" if self.raw_begin().is_some() => self.raw()?,
                _ => {
                    self.advance(2 + sign.map_or(0, char::len_utf8));
                    self.tag(opening == "{%")?;
                }
            }
        }
        self.push(Token::End);
        Ok(())
    }

    /// Emits the text before a tag, without the white space that the tag's sign or `lstrip_blocks` removes.
    fn text_before_tag(&mut self, text: &str, sign: Option<char>, strips_line: bool) {
        let kept = match sign {
            Some('-') => trim_end(text),
            Some(_) => text,
            None if strips_line => {
                let line_at = text.rfind('\n').map_or(0, |i| i + 1);
                let blank = text[line_at..].chars().all(is_space);
                if blank && (line_at > 0 || self.line_starting) {
                    &text[..line_at]
                } else {
                    text
                }
            }
            None => text,
        };
        if !kept.is_empty() {
            self.push(Token::Text(kept.into()));
        }
    }

    fn comment(&mut self) -> Result<()> {
        let rest = self.rest();
        let Some(end) = rest[2..].find("#}") else {
            return syntax(self.line, "Missing end of comment tag");
        };
        let body = &rest[2..2 + end];
        self.advance(2 + end + 2);
        // "{#-#}" has one sign, which belongs to the opening.
        let sign = body.chars().last().filter(|_| !matches!(body, "-" | "+"));
        self.after_block_end(sign);
        Ok(())
    }

    /// Skips white space after a block end: all of it after `-%}`, none after `+%}`, otherwise one line break
    /// (`trim_blocks`).
    fn after_block_end(&mut self, sign: Option<char>) {
        match sign {
            Some('-') => self.skip_space(),
            Some('+') => {}
            _ => {
                if self.rest().starts_with('\n') {
                    self.advance(1);
                }
            }
        }
    }

    /// Returns the length of `{% raw %}` at this point, including the white space that `-%}` removes.
    fn raw_begin(&self) -> Option<usize> {
        let rest = self.rest();
        let (length, sign) = keyword_tag(rest, "raw")?;
        match sign {
            Some('+') => None,
            Some('-') => {
                let after = &rest[length..];
                Some(length + after.len() - after.trim_start_matches(is_space).len())
            }
            _ => Some(length),
        }
    }

    fn raw(&mut self) -> Result<()> {
        self.advance(self.raw_begin().unwrap_or(0));
        let rest = self.rest();
        let mut from = 0;
        while let Some(found) = rest[from..].find("{%") {
            let offset = from + found;
            if let Some((length, end_sign)) = keyword_tag(&rest[offset..], "endraw") {
                let sign = rest[offset + 2..].chars().next().filter(|c| matches!(c, '-' | '+'));
                self.text_before_tag(&rest[..offset], sign, true);
                self.advance(offset + length);
                self.after_block_end(end_sign);
                return Ok(());
            }
            from = offset + 2;
        }
        syntax(self.line, "Missing end of raw directive")
    }

    fn tag(&mut self, block: bool) -> Result<()> {
        self.push(if block { Token::BlockBegin } else { Token::VariableBegin });
        let mut open: Vec<&'static str> = Vec::new();
        loop {
            self.skip_space();
            let rest = self.rest();
            if rest.is_empty() {
                return syntax(self.line, "unexpected end of template inside a tag");
            }
            if open.is_empty() && self.tag_end(block) {
                return Ok(());
            }
            let c = rest.chars().next().unwrap_or(' ');
            if c.is_ascii_digit() {
                self.number()?;
            } else if is_word(c) {
                let length = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
                self.push(Token::Name(rest[..length].into()));
                self.advance(length);
            } else if c == '"' || c == '\'' {
                self.string(c)?;
            } else if let Some(op) = OPERATORS.iter().find(|op| rest.starts_with(**op)) {
                match *op {
                    "(" | "[" | "{" => open.push(op),
                    ")" | "]" | "}" => {
                        let expected = match open.pop() {
                            Some("(") => ")",
                            Some("[") => "]",
                            Some(_) => "}",
                            None => return syntax(self.line, format!("unexpected '{op}'")),
                        };
                        if expected != *op {
                            return syntax(self.line, format!("unexpected '{op}', expected '{expected}'"));
                        }
                    }
                    _ => {}
                }
                self.push(Token::Op(op));
                self.advance(op.len());
            } else {
                return syntax(self.line, format!("unexpected char '{c}'"));
            }
        }
    }

    /// Consumes the end of the tag if it is here.
    fn tag_end(&mut self, block: bool) -> bool {
        let rest = self.rest();
        let closing = if block { "%}" } else { "}}" };
        let sign = rest.chars().next().filter(|c| *c == '-' || (*c == '+' && block));
        let skipped = sign.map_or(0, char::len_utf8);
        if !rest[skipped..].starts_with(closing) {
            return false;
        }
        self.push(if block { Token::BlockEnd } else { Token::VariableEnd });
        self.advance(skipped + closing.len());
        if block {
            self.after_block_end(sign);
        } else if sign.is_some() {
            self.skip_space();
        }
        true
    }

    fn number(&mut self) -> Result<()> {
        let rest = self.rest();
        let bytes = rest.as_bytes();
        let digits = |from: usize| {
            let mut at = from;
            while at < bytes.len()
                && (bytes[at].is_ascii_digit()
                    || (bytes[at] == b'_' && at > from && bytes.get(at + 1).is_some_and(u8::is_ascii_digit)))
            {
                at += 1;
            }
            at
        };
        let lower = rest.get(..2).map(str::to_ascii_lowercase).unwrap_or_default();
        let radix = match lower.as_str() {
            "0x" => 16,
            "0o" => 8,
            "0b" => 2,
            _ => 10,
        };
        if radix != 10 {
            let length =
                rest[2..].find(|c: char| !(c.is_digit(radix) || c == '_')).map_or(rest.len(), |n| n + 2);
            let Ok(value) = i128::from_str_radix(&rest[2..length].replace('_', ""), radix) else {
                return syntax(self.line, format!("bad number '{}'", &rest[..length]));
            };
            self.push(Token::Int(value));
            self.advance(length);
            return Ok(());
        }
        let mut end = digits(0);
        let mut float = false;
        // In `a.0.1` the numbers are two attributes.
        let after_dot = self.source[..self.at].ends_with('.');
        if !after_dot && bytes.get(end) == Some(&b'.') && bytes.get(end + 1).is_some_and(u8::is_ascii_digit) {
            end = digits(end + 1);
            float = true;
        }
        if !after_dot && matches!(bytes.get(end), Some(b'e' | b'E')) {
            let sign = usize::from(matches!(bytes.get(end + 1), Some(b'+' | b'-')));
            if bytes.get(end + 1 + sign).is_some_and(u8::is_ascii_digit) {
                end = digits(end + 1 + sign);
                float = true;
            }
        }
        let spelt = rest[..end].replace('_', "");
        let token = if float {
            spelt.parse().ok().map(Token::Float)
        } else if spelt.len() > 1 && spelt.starts_with('0') && spelt.bytes().any(|b| b != b'0') {
            None
        } else {
            spelt.parse().ok().map(Token::Int)
        };
        match token {
            Some(token) => self.push(token),
            None => return syntax(self.line, format!("bad number '{spelt}'")),
        }
        self.advance(end);
        Ok(())
    }

    fn string(&mut self, quote: char) -> Result<()> {
        let rest = self.rest();
        let mut end = None;
        let mut escaped = false;
        for (offset, c) in rest.char_indices().skip(1) {
            if escaped {
                escaped = false;
            } else if c == '\\' {
                escaped = true;
            } else if c == quote {
                end = Some(offset);
                break;
            }
        }
        let Some(end) = end else {
            return syntax(self.line, format!("unexpected char '{quote}'"));
        };
        let Some(value) = unescape(&rest[1..end]) else {
            return syntax(self.line, "bad escape in a string");
        };
        self.push(Token::Str(value.into()));
        self.advance(end + 1);
        Ok(())
    }
}

/// Returns the offset of the next `{{`, `{%` or `{#`.
fn find_tag(text: &str) -> Option<usize> {
    let bytes = text.as_bytes();
    (0..bytes.len().saturating_sub(1))
        .find(|&i| bytes[i] == b'{' && matches!(bytes[i + 1], b'{' | b'%' | b'#'))
}

/// Matches `{%[+-] keyword [+-]%}` and returns its length and its closing sign.
fn keyword_tag(text: &str, keyword: &str) -> Option<(usize, Option<char>)> {
    let mut rest = text.strip_prefix("{%")?;
    rest = rest.strip_prefix(['-', '+']).unwrap_or(rest);
    rest = rest.trim_start_matches(is_space).strip_prefix(keyword)?.trim_start_matches(is_space);
    let sign = rest.chars().next().filter(|c| matches!(c, '-' | '+'));
    rest = rest[sign.map_or(0, char::len_utf8)..].strip_prefix("%}")?;
    Some((text.len() - rest.len(), sign))
}

/// Python's `unicode_escape`; an unknown escape keeps its backslash.
fn unescape(text: &str) -> Option<String> {
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        if c != '\\' {
            out.push(c);
            continue;
        }
        let kind = chars.next()?;
        match kind {
            '\n' => {}
            '\\' | '\'' | '"' => out.push(kind),
            'n' => out.push('\n'),
            't' => out.push('\t'),
            'r' => out.push('\r'),
            'a' => out.push('\x07'),
            'b' => out.push('\x08'),
            'f' => out.push('\x0c'),
            'v' => out.push('\x0b'),
            '0'..='7' => {
                let mut code = kind.to_digit(8)?;
                for _ in 0..2 {
                    let Some(digit) = chars.peek().and_then(|c| c.to_digit(8)) else {
                        break;
                    };
                    code = code * 8 + digit;
                    chars.next();
                }
                out.push(char::from_u32(code)?);
            }
            'x' | 'u' | 'U' => {
                let length = match kind {
                    'x' => 2,
                    'u' => 4,
                    _ => 8,
                };
                let mut code = 0u32;
                for _ in 0..length {
                    code = code.checked_mul(16)? + chars.next()?.to_digit(16)?;
                }
                out.push(char::from_u32(code)?);
            }
            'N' => return None,
            other => {
                out.push('\\');
                out.push(other);
            }
        }
    }
    Some(out)
}
