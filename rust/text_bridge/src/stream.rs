//! Streaming decoder: its concatenated pieces equal the decoding of all tokens.

use crate::guard::{guarded, Result};
use crate::pieces::{Piece, Scheme};
use crate::tokenizer::{Inner, Tokenizer};
use std::sync::Arc;

pub struct StreamDecoder {
    tokenizer: Arc<Inner>,
    skip_special: bool,
    /// Bytes of a character, or of a run of `<0xNN>` tokens, that later tokens complete.
    pending: Vec<u8>,
    started: bool,
    strip_left: usize,
}

pub fn new_stream_decoder(tokenizer: &Tokenizer, skip_special: bool) -> Box<StreamDecoder> {
    let inner = tokenizer.0.clone();
    let strip_left = strip_of(&inner.scheme);
    Box::new(StreamDecoder {
        tokenizer: inner,
        skip_special,
        pending: Vec::new(),
        started: false,
        strip_left,
    })
}

fn strip_of(scheme: &Scheme) -> usize {
    match scheme {
        Scheme::SentencePiece(spm) => spm.strip_start,
        _ => 0,
    }
}

impl StreamDecoder {
    /// Returns the text completed by `id`; empty while a character is incomplete. Ids outside the vocabulary
    /// add nothing.
    pub fn push(&mut self, id: i32) -> Result<Vec<u8>> {
        guarded("stream decode", || {
            let tokenizer = self.tokenizer.clone();
            let index = id as usize;
            if !tokenizer.known.get(index).copied().unwrap_or(false) {
                return Ok(Vec::new());
            }
            if self.skip_special && tokenizer.special[index] {
                return Ok(Vec::new());
            }
            let first = !self.started;
            self.started = true;
            let mut out = Vec::new();
            match (&tokenizer.scheme, &tokenizer.pieces[index]) {
                (Scheme::ByteLevel, Piece::Bytes(bytes)) => {
                    self.pending.extend_from_slice(bytes);
                    settle_utf8(&mut self.pending, &mut out);
                }
                (Scheme::Joined, Piece::Bytes(bytes)) => {
                    if !first {
                        out.push(b' ');
                    }
                    out.extend_from_slice(bytes);
                }
                (Scheme::SentencePiece(spm), Piece::Bytes(bytes)) => {
                    settle_run(&mut self.pending, &mut out);
                    match spm.drop_in_first {
                        Some(mark) if first => out.extend(first_without(mark, &tokenizer, id)),
                        _ => out.extend_from_slice(bytes),
                    }
                    self.strip(spm.strip_char, &mut out);
                }
                (_, Piece::RawByte(byte)) => self.pending.push(*byte),
            }
            Ok(out)
        })
    }

    /// Returns the text still held back, with U+FFFD for bytes of incomplete characters, and resets the
    /// decoder.
    pub fn finish(&mut self) -> Result<Vec<u8>> {
        guarded("stream decode", || {
            let mut out = Vec::new();
            let tokenizer = self.tokenizer.clone();
            match &tokenizer.scheme {
                Scheme::SentencePiece(spm) => {
                    settle_run(&mut self.pending, &mut out);
                    self.strip(spm.strip_char, &mut out);
                }
                _ => out.extend_from_slice(String::from_utf8_lossy(&self.pending).as_bytes()),
            }
            self.pending.clear();
            self.started = false;
            self.strip_left = strip_of(&tokenizer.scheme);
            Ok(out)
        })
    }

    /// Removes `strip_char` at the start of the text, up to the decoder's count.
    fn strip(&mut self, strip_char: char, out: &mut Vec<u8>) {
        let mut encoded = [0; 4];
        let unit = strip_char.encode_utf8(&mut encoded).as_bytes();
        while self.strip_left > 0 && !out.is_empty() {
            if out.starts_with(unit) {
                out.drain(..unit.len());
                self.strip_left -= 1;
            } else {
                self.strip_left = 0;
            }
        }
    }
}

/// Decodes the first token of a text under Metaspace: its marks are dropped instead of becoming spaces.
fn first_without(mark: char, tokenizer: &Inner, id: i32) -> Vec<u8> {
    let token = tokenizer.hf.id_to_token(id as u32).unwrap_or_default();
    token.chars().filter(|&c| c != mark).collect::<String>().into_bytes()
}

/// Moves the completed prefix of `pending` to `out`, exactly like `String::from_utf8_lossy` over the whole
/// text.
fn settle_utf8(pending: &mut Vec<u8>, out: &mut Vec<u8>) {
    let mut done = 0;
    loop {
        match std::str::from_utf8(&pending[done..]) {
            Ok(_) => {
                out.extend_from_slice(&pending[done..]);
                done = pending.len();
                break;
            }
            Err(error) => {
                let valid = error.valid_up_to();
                out.extend_from_slice(&pending[done..done + valid]);
                done += valid;
                match error.error_len() {
                    Some(length) => {
                        out.extend_from_slice("\u{fffd}".as_bytes());
                        done += length;
                    }
                    None => break,
                }
            }
        }
    }
    pending.drain(..done);
}

/// A complete run of byte tokens is text if it is UTF-8, otherwise one U+FFFD per byte.
fn settle_run(pending: &mut Vec<u8>, out: &mut Vec<u8>) {
    if std::str::from_utf8(pending).is_ok() {
        out.extend_from_slice(pending);
    } else {
        out.extend_from_slice("\u{fffd}".repeat(pending.len()).as_bytes());
    }
    pending.clear();
}
