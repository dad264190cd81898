//! Reads the variables of a rendering from JSON, with the values of Python's `json.loads`.

use super::error::{raise, Result};
use super::quoted::{string_end, Source, Text};
use super::value::{Dict, Str, Value};
use std::rc::Rc;

/// Maximum nesting: bounds the stack.
const MAX_DEPTH: usize = 128;

/// `name`: of the source, for errors. `may_stay`: long strings need not be unescaped.
pub fn parse(source: &Rc<Source>, name: &'static str, may_stay: bool) -> Result<Value> {
    let mut reader = Reader { source, name, at: 0, may_stay };
    let value = reader.value(0)?;
    reader.space();
    if reader.at < source.bytes().len() {
        return reader.fail("text follows the value");
    }
    Ok(value)
}

struct Reader<'a> {
    source: &'a Rc<Source>,
    name: &'static str,
    at: usize,
    may_stay: bool,
}

impl Reader<'_> {
    fn fail<T>(&self, fault: &str) -> Result<T> {
        raise(format!("{} is not JSON: {fault} at byte {}", self.name, self.at))
    }

    fn peek(&self) -> u8 {
        self.source.bytes().get(self.at).copied().unwrap_or(0)
    }

    fn space(&mut self) {
        while matches!(self.peek(), b' ' | b'\t' | b'\n' | b'\r') {
            self.at += 1;
        }
    }

    /// Skips space and takes `byte`, if it comes next.
    fn takes(&mut self, byte: u8) -> bool {
        self.space();
        let there = self.peek() == byte;
        self.at += usize::from(there);
        there
    }

    fn value(&mut self, depth: usize) -> Result<Value> {
        if depth > MAX_DEPTH {
            return self.fail("too deep nesting");
        }
        self.space();
        match self.peek() {
            b'{' => self.object(depth),
            b'[' => self.array(depth),
            b'"' => Ok(Value::Str(Str { text: self.string(self.may_stay)?, markup: false })),
            b'-' | b'0'..=b'9' => self.number(),
            b't' => self.word("true", Value::Bool(true)),
            b'f' => self.word("false", Value::Bool(false)),
            b'n' => self.word("null", Value::None),
            _ => self.fail("a value is missing"),
        }
    }

    fn object(&mut self, depth: usize) -> Result<Value> {
        self.at += 1;
        let mut dict = Dict::default();
        if self.takes(b'}') {
            return Ok(Value::dict(dict));
        }
        loop {
            self.space();
            if self.peek() != b'"' {
                return self.fail("a key is missing");
            }
            let key = self.string(false)?;
            if !self.takes(b':') {
                return self.fail("a colon is missing");
            }
            let value = self.value(depth + 1)?;
            dict.insert(Value::str(key.to_arc()), value);
            if self.takes(b'}') {
                return Ok(Value::dict(dict));
            }
            if !self.takes(b',') {
                return self.fail("expected ',' or '}'");
            }
        }
    }

    fn array(&mut self, depth: usize) -> Result<Value> {
        self.at += 1;
        let mut items = Vec::new();
        if self.takes(b']') {
            return Ok(Value::list(items));
        }
        loop {
            items.push(self.value(depth + 1)?);
            if self.takes(b']') {
                return Ok(Value::list(items));
            }
            if !self.takes(b',') {
                return self.fail("expected ',' or ']'");
            }
        }
    }

    fn string(&mut self, may_stay: bool) -> Result<Text> {
        let begin = self.at + 1;
        let Some(end) = string_end(self.source.bytes(), begin) else {
            return self.fail("a string has no end");
        };
        match Text::of_json(self.source, begin, end, may_stay) {
            Some(text) => {
                self.at = end + 1;
                Ok(text)
            }
            None => self.fail("a string is not valid"),
        }
    }

    fn digits(&mut self) -> Result<()> {
        if !self.peek().is_ascii_digit() {
            return self.fail("a digit is missing");
        }
        while self.peek().is_ascii_digit() {
            self.at += 1;
        }
        Ok(())
    }

    fn number(&mut self) -> Result<Value> {
        let begin = self.at;
        self.at += usize::from(self.peek() == b'-');
        if self.peek() == b'0' {
            self.at += 1;
        } else {
            self.digits()?;
        }
        let mut is_integer = true;
        if self.peek() == b'.' {
            is_integer = false;
            self.at += 1;
            self.digits()?;
        }
        if matches!(self.peek(), b'e' | b'E') {
            is_integer = false;
            self.at += 1;
            self.at += usize::from(matches!(self.peek(), b'+' | b'-'));
            self.digits()?;
        }
        let text = std::str::from_utf8(&self.source.bytes()[begin..self.at]).unwrap_or_default();
        if let (true, Ok(integer)) = (is_integer, text.parse()) {
            return Ok(Value::Int(integer));
        }
        match text.parse() {
            Ok(float) if !f64::is_finite(float) => self.fail("a number is too large"),
            Ok(float) => Ok(Value::Float(float)), // also an integer of more than 128 bits
            Err(_) => self.fail("a number is not valid"),
        }
    }

    fn word(&mut self, word: &str, value: Value) -> Result<Value> {
        if !self.source.bytes()[self.at..].starts_with(word.as_bytes()) {
            return self.fail("unknown word");
        }
        self.at += word.len();
        Ok(value)
    }
}
