//! The contribution of each token id to decoded text, extracted from a tokenizer's decoder once at load.

use crate::guard::{BridgeError, Result};
use serde_json::Value;

/// Rule for joining the text of consecutive tokens.
#[derive(Debug, Clone, PartialEq)]
pub enum Scheme {
    /// GPT-2's byte alphabet: the concatenated bytes of all tokens, decoded as UTF-8 with U+FFFD for invalid
    /// bytes.
    ByteLevel,
    /// SentencePiece's: text pieces, runs of `<0xNN>` bytes, and spaces stripped at the start.
    SentencePiece(Spm),
    /// No decoder: tokens joined by one space.
    Joined,
}

#[derive(Debug, Clone, PartialEq, Default)]
pub struct Spm {
    /// `▁` and its replacement, in the order of the decoder's `Replace` steps.
    pub replacements: Vec<(String, String)>,
    /// Tokens `<0xNN>` are raw bytes.
    pub byte_fallback: bool,
    /// Maximum number of `strip_char` removed at the start of the text.
    pub strip_start: usize,
    pub strip_char: char,
    /// The Metaspace decoder drops `▁` from the first token of a text.
    pub drop_in_first: Option<char>,
}

/// Reads the scheme from the `decoder` of a tokenizer.json. Kinds that cannot be streamed exactly are
/// rejected.
pub fn scheme_of(decoder: &Value) -> Result<Scheme> {
    if decoder.is_null() {
        return Ok(Scheme::Joined);
    }
    if kind(decoder) == "ByteLevel" {
        return Ok(Scheme::ByteLevel);
    }
    let steps: Vec<&Value> = match decoder["decoders"].as_array() {
        Some(list) => list.iter().collect(),
        None => vec![decoder],
    };
    if steps.iter().any(|s| kind(s) == "ByteLevel") {
        if steps.len() == 1 {
            return Ok(Scheme::ByteLevel);
        }
        return Err(refused("a ByteLevel step among others"));
    }
    let mut spm = Spm { strip_char: ' ', ..Spm::default() };
    let mut fused = false;
    for step in steps {
        match kind(step) {
            "Replace" if !fused && !spm.byte_fallback => {
                let from = step["pattern"]["String"].as_str().ok_or_else(|| refused("Replace by a regex"))?;
                let to = step["content"].as_str().unwrap_or_default();
                spm.replacements.push((from.to_string(), to.to_string()));
            }
            "Metaspace" if !fused && !spm.byte_fallback => {
                let mark = step["replacement"].as_str().unwrap_or("▁").to_string();
                let scheme = step["prepend_scheme"].as_str();
                let prepends = match scheme {
                    Some(s) => s != "never",
                    None => step["add_prefix_space"].as_bool().unwrap_or(true),
                };
                if prepends {
                    spm.drop_in_first = mark.chars().next();
                }
                spm.replacements.push((mark, " ".to_string()));
            }
            "ByteFallback" if !fused => spm.byte_fallback = true,
            "Fuse" => fused = true,
            "Strip" if fused => {
                if step["stop"].as_u64().unwrap_or(0) != 0 {
                    return Err(refused("Strip at the end of the text"));
                }
                spm.strip_char = step["content"].as_str().and_then(|s| s.chars().next()).unwrap_or(' ');
                spm.strip_start += step["start"].as_u64().unwrap_or(0) as usize;
            }
            other => return Err(refused(other)),
        }
    }
    Ok(Scheme::SentencePiece(spm))
}

fn kind(step: &Value) -> &str {
    step["type"].as_str().unwrap_or("?")
}

fn refused(what: &str) -> BridgeError {
    BridgeError(format!("tokenizer.json: \"decoder\" is not supported: {what}"))
}

/// Bytes of one token.
#[derive(Debug, Clone, PartialEq)]
pub enum Piece {
    Bytes(Vec<u8>),
    /// A `<0xNN>` token under byte fallback.
    RawByte(u8),
}

/// Maximum bytes that replacements may add to a token. Each step of a forged file may double it.
const MAX_ADDED_BYTES: usize = 1 << 12;

impl Scheme {
    pub fn piece(&self, token: &str) -> Result<Piece> {
        Ok(match self {
            Scheme::ByteLevel => Piece::Bytes(byte_level_bytes(token)),
            Scheme::Joined => Piece::Bytes(token.as_bytes().to_vec()),
            Scheme::SentencePiece(spm) => {
                let mut text = token.to_string();
                for (from, to) in &spm.replacements {
                    let growth = to.len().saturating_sub(from.len());
                    let added = text.matches(from.as_str()).count().saturating_mul(growth);
                    if text.len().saturating_add(added) > token.len() + MAX_ADDED_BYTES {
                        return Err(refused(&format!("Replace adds {added} bytes to a token")));
                    }
                    text = text.replace(from.as_str(), to);
                }
                match raw_byte(&text) {
                    Some(byte) if spm.byte_fallback => Piece::RawByte(byte),
                    _ => Piece::Bytes(text.into_bytes()),
                }
            }
        })
    }
}

fn raw_byte(token: &str) -> Option<u8> {
    let is_byte = token.len() == 6 && token.starts_with("<0x") && token.ends_with('>');
    is_byte.then(|| u8::from_str_radix(token.get(3..5)?, 16).ok()).flatten()
}

/// Decodes GPT-2's byte alphabet; a token with a character outside it is taken as UTF-8.
fn byte_level_bytes(token: &str) -> Vec<u8> {
    token.chars().map(byte_of_char).collect::<Option<Vec<u8>>>().unwrap_or_else(|| token.as_bytes().to_vec())
}

/// GPT-2 maps printable Latin-1 to itself and the 68 other bytes, in order, to U+0100 and up.
fn byte_of_char(c: char) -> Option<u8> {
    let code = c as u32;
    match code {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => Some(code as u8),
        0x100..=0x120 => Some((code - 0x100) as u8),
        0x121..=0x142 => Some((code - 0x121 + 0x7f) as u8),
        0x143 => Some(0xad),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replacements_that_double_a_token_are_refused() {
        let double = serde_json::json!({"type": "Replace", "pattern": {"String": "a"}, "content": "aa"});
        let decoder = serde_json::json!({"type": "Sequence", "decoders": vec![double; 64]});
        assert!(scheme_of(&decoder).unwrap().piece("a").is_err());
    }

    #[test]
    fn replacements_that_shrink_a_token_have_no_bound() {
        let space = serde_json::json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "});
        let length = MAX_ADDED_BYTES + 1;
        let piece = scheme_of(&space).unwrap().piece(&"▁".repeat(length)).unwrap();
        assert_eq!(piece, Piece::Bytes(vec![b' '; length]));
    }

    #[test]
    fn byte_alphabet_is_a_bijection() {
        let mut seen: Vec<u8> = (0..0x200).filter_map(char::from_u32).filter_map(byte_of_char).collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..=255).collect::<Vec<u8>>());
    }
}
