//! Constrained decoding through llguidance: which tokens may come next under a JSON schema, regex or Lark grammar.

use crate::guard::{fail, guarded, BridgeError, Result};
use crate::pieces::Piece;
use crate::tokenizer::{Inner, Tokenizer};
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{InferenceCapabilities, TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};
use llguidance::{Matcher, ParserFactory};
use std::sync::Arc;

/// llguidance's view of a tokenizer: its byte trie, and its canonical tokenization of text.
struct Env {
    trie: TokTrie,
    tokenizer: Arc<Inner>,
}

impl TokenizerEnv for Env {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        self.trie.tokenize_with_greedy_fallback(bytes, |text| {
            self.tokenizer.hf.encode_fast(text, false).map(|e| e.get_ids().to_vec()).unwrap_or_default()
        })
    }

    /// A SentencePiece normalizer may add a space in front, so only byte-level forced tokens are canonical.
    fn tokenize_is_canonical(&self) -> bool {
        self.tokenizer.scheme == crate::pieces::Scheme::ByteLevel
    }
}

pub struct GrammarFactory(ParserFactory);

pub struct Matching(Matcher);

/// `eos_ids`: tokens that end the text; the first is the one llguidance names EOS. At least one.
pub fn new_grammar_factory(tokenizer: &Tokenizer, eos_ids: &[i32]) -> Result<Box<GrammarFactory>> {
    guarded("grammar", || {
        let inner = tokenizer.0.clone();
        let size = inner.pieces.len();
        let Some(&eos) = eos_ids.first() else {
            return Err(BridgeError("grammar: the tokenizer has no end-of-text token".into()));
        };
        if let Some(bad) = eos_ids.iter().find(|&&id| id < 0 || id as usize >= size) {
            return Err(BridgeError(format!(
                "grammar: end-of-text token {bad} is outside the vocabulary of {size}"
            )));
        }
        let words: Vec<Vec<u8>> = (0..size)
            .map(|id| match &inner.pieces[id] {
                _ if inner.special[id] || eos_ids.contains(&(id as i32)) => {
                    // Special tokens never match text: llguidance marks them with a byte no UTF-8 has.
                    let mut word = vec![TokTrie::SPECIAL_TOKEN_MARKER];
                    word.extend(inner.hf.id_to_token(id as u32).unwrap_or_default().into_bytes());
                    word
                }
                Piece::Bytes(bytes) => bytes.clone(),
                Piece::RawByte(byte) => vec![*byte],
            })
            .collect();
        let info = TokRxInfo::new(size as u32, eos as u32);
        let all: Vec<u32> = eos_ids.iter().map(|&id| id as u32).collect();
        let trie = TokTrie::from(&info, &words).with_eos_tokens(&all);
        let env: TokEnv = Arc::new(Env { trie, tokenizer: inner });
        let slices = llguidance::earley::SlicedBiasComputer::general_slices();
        let mut factory =
            ParserFactory::new(&env, InferenceCapabilities::default(), &slices).map_err(fail)?;
        factory.quiet();
        Ok(Box::new(GrammarFactory(factory)))
    })
}

impl GrammarFactory {
    /// `kind`: "json_schema", "regex" or "lark".
    pub fn compile(&self, kind: &str, source: &[u8]) -> Result<Box<Matching>> {
        guarded("grammar", || {
            let text = std::str::from_utf8(source).map_err(|_| BridgeError("grammar is not UTF-8".into()))?;
            let grammar = match kind {
                "json_schema" => TopLevelGrammar::from_json_schema(
                    serde_json::from_str(text).map_err(|e| BridgeError(format!("JSON schema: {e}")))?,
                ),
                "regex" => TopLevelGrammar::from_regex(text),
                _ => TopLevelGrammar::from_lark(text.to_string()),
            };
            let mut matcher = Matcher::new(self.0.create_parser(grammar));
            match matcher.get_error() {
                Some(error) => Err(BridgeError(error)),
                None => {
                    let warnings = matcher.grammar_warnings();
                    match warnings.first() {
                        Some(warning) => Err(BridgeError(warning.clone())),
                        None => Ok(Box::new(Matching(matcher))),
                    }
                }
            }
        })
    }
}

impl Matching {
    pub fn fork(&self) -> Box<Matching> {
        Box::new(Matching(self.0.deep_clone()))
    }

    /// Sets bit `id % 32` of `words[id / 32]` for each token that may come next.
    pub fn mask(&mut self, words: &mut [u32]) -> Result<()> {
        guarded("grammar", || {
            let mask = self.0.compute_mask_or_eos().map_err(fail)?;
            let bits = mask.as_slice();
            if words.len() < bits.len() {
                return Err(BridgeError(format!("mask needs {} words, not {}", bits.len(), words.len())));
            }
            words[..bits.len()].copy_from_slice(bits);
            words[bits.len()..].fill(0);
            Ok(())
        })
    }

    pub fn commit(&mut self, id: i32) -> Result<()> {
        guarded("grammar", || self.0.consume_token(id as u32).map_err(fail))
    }

    /// How many of `ids` could be committed one after the other; changes nothing.
    pub fn count_valid(&mut self, ids: &[i32]) -> Result<usize> {
        guarded("grammar", || {
            let ids: Vec<u32> = ids.iter().map(|&id| id as u32).collect();
            self.0.validate_tokens(&ids).map_err(fail)
        })
    }

    pub fn accepting(&mut self) -> Result<bool> {
        guarded("grammar", || self.0.is_accepting().map_err(fail))
    }

    pub fn stopped(&self) -> bool {
        self.0.is_stopped()
    }
}
