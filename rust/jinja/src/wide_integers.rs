//! Integers of more than 64 bits in a rendering's variables. serde_json reads them as floats, which lose
//! digits, so they are passed as tagged strings.

use super::value::Value;
use std::borrow::Cow;

/// Integers with fewer digits fit 64 bits.
const FEWEST_DIGITS: usize = 19;

/// The prefix of the strings that encode integers; it occurs nowhere else in the text.
pub struct Tag(String);

/// Returns JSON text with long integers replaced by tagged strings, and their tag; None if there are no long
/// integers.
pub fn tag(json: &str) -> (Cow<'_, str>, Option<Tag>) {
    let integers = long_integers(json);
    if integers.is_empty() {
        return (Cow::Borrowed(json), None);
    }
    let mut tag = String::from("integer:");
    while json.contains(&tag) {
        tag.push(':');
    }
    let mut tagged = String::with_capacity(json.len() + integers.len() * (tag.len() + 2));
    let mut copied = 0;
    for (start, end) in integers {
        tagged.push_str(&json[copied..start]);
        tagged.push('"');
        tagged.push_str(&tag);
        tagged.push_str(&json[start..end]);
        tagged.push('"');
        copied = end;
    }
    tagged.push_str(&json[copied..]);
    (Cow::Owned(tagged), Some(Tag(tag)))
}

impl Tag {
    /// Returns the integer encoded by `text`. Beyond 128 bits it is a float.
    pub fn integer(&self, text: &str) -> Option<Value> {
        let digits = text.strip_prefix(&self.0)?;
        match digits.parse() {
            Ok(integer) => Some(Value::Int(integer)),
            Err(_) => digits.parse().ok().map(Value::Float),
        }
    }
}

/// Returns the ranges of integers of many digits, outside of strings.
fn long_integers(json: &str) -> Vec<(usize, usize)> {
    let bytes = json.as_bytes();
    let mut found = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        match bytes[at] {
            b'"' => at = end_of_string(json, at),
            b'-' | b'0'..=b'9' => {
                let start = at;
                let number = |b: &u8| matches!(b, b'-' | b'+' | b'.' | b'e' | b'E' | b'0'..=b'9');
                at += bytes[at..].iter().take_while(|b| number(b)).count();
                let digits = json[start..at].strip_prefix('-').unwrap_or(&json[start..at]);
                if digits.len() >= FEWEST_DIGITS && digits.bytes().all(|b| b.is_ascii_digit()) {
                    found.push((start, at));
                }
            }
            _ => at += 1,
        }
    }
    found
}

/// Returns the position after the string that begins at `start`.
fn end_of_string(json: &str, start: usize) -> usize {
    let mut at = start + 1;
    while let Some(text) = json[at..].find('"') {
        // A quote after an odd number of backslashes is escaped.
        let escaped = json.as_bytes()[at..at + text].iter().rev().take_while(|&&b| b == b'\\').count() % 2 == 1;
        at += text + 1;
        if !escaped {
            return at;
        }
    }
    json.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_end_at_the_first_quote_that_is_not_escaped() {
        let long = "12345678901234567890123";
        for (before, tagged) in [
            (r#"{"a":"\\","b":"#, true), // the backslash is escaped, not the quote
            (r#"{"a":"\\\"","b":"#, true),
            (r#"{"a":"\\\\","b":"#, true),
            (r#"{"a":"\"","b":"#, true),
            (r#"{"\\":"#, true),
            (r#"{"a":"\\\" "#, false), // inside of the string
            (r#"{"a":"\" "#, false),
        ] {
            assert_eq!(super::tag(&format!("{before}{long}}}")).1.is_some(), tagged, "{before}");
        }
    }

    #[test]
    fn tags_long_integers_outside_strings() {
        let (text, tag) =
            tag(r#"{"a":12345678901234567890123,"b":"12345678901234567890123 \" integer:","c":-1e30}"#);
        assert_eq!(
            text,
            r#"{"a":"integer::12345678901234567890123","b":"12345678901234567890123 \" integer:","c":-1e30}"#
        );
        assert!(tag.is_some());
        assert!(super::tag(r#"{"a":123456789012345678,"b":1.2345678901234567890123}"#).1.is_none());
    }
}
