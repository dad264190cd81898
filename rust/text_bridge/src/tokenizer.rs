//! Builds tokenizers from a tokenizer.json with the `tokenizers` crate.

use crate::ffi::{AddedToken, Wrapping};
use crate::guard::{fail, guarded, BridgeError, Result};
use crate::pieces::{scheme_of, Piece, Scheme};
use crate::wrapping::{add_tokens, wrap};
use std::sync::Arc;
use tokenizers::Tokenizer as HfTokenizer;

pub struct Inner {
    pub hf: HfTokenizer,
    pub scheme: Scheme,
    /// By id; ids without a token have no bytes.
    pub pieces: Vec<Piece>,
    /// By id: whether `skip_special` omits the token.
    pub special: Vec<bool>,
    /// By id: whether the token exists.
    pub known: Vec<bool>,
}

pub struct Tokenizer(pub Arc<Inner>);

/// Fields of the file that the crate does not expose.
#[derive(serde::Deserialize)]
struct Head {
    #[serde(default)]
    decoder: serde_json::Value,
}

/// Maximum accepted id: protects the tables by id from a forged file.
const MAX_ID: u32 = 1 << 24;

/// `added`: tokens required in addition to the file's own; `wrapping`: see its declaration.
pub fn tokenizer_from_json(
    json: &[u8],
    added: &Vec<AddedToken>,
    wrapping: &Wrapping,
) -> Result<Box<Tokenizer>> {
    guarded("tokenizer.json", || {
        let head: Head =
            serde_json::from_slice(json).map_err(|e| BridgeError(format!("tokenizer.json: {e}")))?;
        let scheme = scheme_of(&head.decoder)?;
        let mut hf =
            HfTokenizer::from_bytes(json).map_err(|e| BridgeError(format!("tokenizer.json: {e}")))?;
        // Files may contain the padding and truncation settings of a training run.
        hf.with_padding(None);
        hf.with_truncation(None).map_err(fail)?;
        add_tokens(&mut hf, added)?;
        if wrapping.replaces {
            wrap(&mut hf, &wrapping.bos, &wrapping.eos)?;
        }
        let vocab = hf.get_vocab(true);
        let Some(&top) = vocab.values().max() else {
            return Err(BridgeError("tokenizer.json: the vocabulary is empty".into()));
        };
        if top >= MAX_ID {
            return Err(BridgeError(format!("tokenizer.json: token ids reach {top}, more than {MAX_ID}")));
        }
        let size = top as usize + 1;
        let mut pieces = vec![Piece::Bytes(Vec::new()); size];
        let mut special = vec![false; size];
        let mut known = vec![false; size];
        for id in 0..size as u32 {
            let added = hf.get_added_vocabulary();
            // HF's own decode looks ids up in this order.
            let Some(token) = added.simple_id_to_token(id).or_else(|| hf.id_to_token(id)) else {
                continue;
            };
            pieces[id as usize] = scheme.piece(&token)?;
            special[id as usize] = added.is_special_token(&token);
            known[id as usize] = true;
        }
        Ok(Box::new(Tokenizer(Arc::new(Inner { hf, scheme, pieces, special, known }))))
    })
}

impl Tokenizer {
    pub fn encode(&self, text: &[u8], add_special: bool) -> Result<Vec<i32>> {
        guarded("encode", || {
            let text = std::str::from_utf8(text)
                .map_err(|e| BridgeError(format!("text is not UTF-8 at byte {}", e.valid_up_to())))?;
            let encoding = self.0.hf.encode_fast(text, add_special).map_err(fail)?;
            Ok(encoding.get_ids().iter().map(|&id| id as i32).collect())
        })
    }

    pub fn decode(&self, ids: &[i32], skip_special: bool) -> Result<Vec<u8>> {
        guarded("decode", || {
            let ids: Vec<u32> = ids.iter().map(|&id| id as u32).collect();
            Ok(self.0.hf.decode(&ids, skip_special).map_err(fail)?.into_bytes())
        })
    }

    /// Returns -1 if there is no such token.
    pub fn token_to_id(&self, token: &[u8]) -> i32 {
        std::str::from_utf8(token).ok().and_then(|t| self.0.hf.token_to_id(t)).map_or(-1, |id| id as i32)
    }

    /// Returns the token as spelled in the vocabulary.
    pub fn token_spelling(&self, id: i32) -> Vec<u8> {
        let id = id as u32;
        let added = self.0.hf.get_added_vocabulary();
        let token = added.simple_id_to_token(id).or_else(|| self.0.hf.id_to_token(id));
        token.unwrap_or_default().into_bytes()
    }

    /// Returns the bytes that the token adds to a text.
    pub fn token_bytes(&self, id: i32) -> Vec<u8> {
        match self.0.pieces.get(id as usize) {
            Some(Piece::Bytes(bytes)) => bytes.clone(),
            Some(Piece::RawByte(byte)) => vec![*byte],
            None => Vec::new(),
        }
    }

    pub fn has_token(&self, id: i32) -> bool {
        self.0.known.get(id as usize).copied().unwrap_or(false)
    }

    pub fn is_special(&self, id: i32) -> bool {
        self.0.special.get(id as usize).copied().unwrap_or(false)
    }

    /// Returns the largest id plus one.
    pub fn vocab_size(&self) -> i32 {
        self.0.pieces.len() as i32
    }
}
