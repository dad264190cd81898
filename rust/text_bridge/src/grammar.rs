//! Constrained decoding with llguidance: computes the tokens that a JSON schema, regex or Lark grammar allows
//! next.

use crate::ffi::GrammarLimits;
use crate::grammar_cost::{check_lark, check_schema, rehearse};
use crate::guard::{guarded, BridgeError, Result};
use crate::pieces::Piece;
use crate::tokenizer::{Inner, Tokenizer};
use llguidance::api::{GrammarInit, TopLevelGrammar};
use llguidance::earley::Parser;
use llguidance::toktrie::{InferenceCapabilities, TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};
use llguidance::{CancellationHandle, Matcher, ParserFactory};
use std::sync::Arc;

/// Maximum length of an llguidance message that is passed on: it may quote a grammar of many kilobytes.
const MAX_MESSAGE_CHARS: usize = 300;

/// Estimated memory of one grammar symbol with its rules and tables, in bytes; used for the size of cache
/// entries.
const SYMBOL_BYTES: usize = 400;

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

    /// A SentencePiece normalizer may prepend a space, so only byte-level forced tokens are canonical.
    fn tokenize_is_canonical(&self) -> bool {
        self.tokenizer.scheme == crate::pieces::Scheme::ByteLevel
    }
}

pub struct GrammarFactory {
    parsers: ParserFactory,
    regex_bytes: usize,
}

pub struct Matching {
    matcher: Matcher,
    /// Estimated memory without the lexer.
    parser_bytes: usize,
    /// Size of the lexer, which grows with each mask, and of the last mask. Measured after compilation and after the first mask.
    lexer_bytes: usize,
    /// Shares the lexer of `matcher`, until its size is measured the last time. None in copies.
    lexer: Option<Box<Parser>>,
}

// Several threads copy the same `Matching`.
const _: fn() = || {
    fn is_sync<T: Send + Sync>() {}
    is_sync::<Matching>();
};

/// Cancels the work of one `Matching` from another thread.
pub struct Canceller(CancellationHandle);

impl Canceller {
    pub fn cancel(&self) {
        self.0.cancel();
    }
}

/// Returns `error` without llguidance's dump of its state, truncated to a readable length.
fn message(error: &str) -> String {
    let text = error.split("\n<").next().unwrap_or_default().trim();
    let text = match text {
        "NoExtensionBias" | "NoExtension" => "no token can continue the text; the grammar matches no finite text here",
        "" => "unknown error",
        text => text,
    };
    match text.char_indices().nth(MAX_MESSAGE_CHARS) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_string(),
    }
}

fn fail<E: std::fmt::Display>(error: E) -> BridgeError {
    BridgeError(message(&error.to_string()))
}

/// `eos_ids`: tokens that end the text; the first is the one llguidance names EOS. At least one.
pub fn new_grammar_factory(
    tokenizer: &Tokenizer,
    eos_ids: &[i32],
    limits: &GrammarLimits,
) -> Result<Box<GrammarFactory>> {
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
                    // Special tokens never match text: llguidance marks them with a byte that is invalid in
                    // UTF-8.
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
        let bounds = factory.limits_mut();
        // Precomputation cannot be cancelled. The first mask does the same work and can be.
        bounds.precompute_large_lexemes = false;
        bounds.verbose_errors = false;
        if limits.compile_fuel > 0 {
            bounds.initial_lexer_fuel = limits.compile_fuel;
        }
        if limits.mask_fuel > 0 {
            bounds.step_lexer_fuel = limits.mask_fuel;
        }
        if limits.lexer_states > 0 {
            bounds.max_lexer_states = limits.lexer_states;
        }
        Ok(Box::new(GrammarFactory { parsers: factory, regex_bytes: limits.regex_bytes }))
    })
}

impl GrammarFactory {
    /// `kind`: "json_schema", "regex" or "lark".
    pub fn compile(&self, kind: &str, source: &[u8]) -> Result<Box<Matching>> {
        guarded("grammar", || {
            let text = std::str::from_utf8(source).map_err(|_| BridgeError("grammar is not UTF-8".into()))?;
            let grammar = match kind {
                "json_schema" => {
                    let schema =
                        serde_json::from_str(text).map_err(|e| BridgeError(format!("JSON schema: {e}")))?;
                    check_schema(&schema, self.regex_bytes)?;
                    TopLevelGrammar::from_json_schema(schema)
                }
                "regex" => TopLevelGrammar::from_regex(text),
                _ => {
                    check_lark(text, self.regex_bytes)?;
                    TopLevelGrammar::from_lark(text.to_string())
                }
            };
            let (grammar, lexer) = GrammarInit::Serialized(grammar)
                .to_internal(Some(self.parsers.tok_env().clone()), self.parsers.limits().clone())
                .map_err(fail)?;
            if let Some((warning, _)) = lexer.grammar_warnings.first() {
                return Err(BridgeError(message(warning)));
            }
            rehearse(&self.parsers, &lexer)?;
            let parser_bytes = source.len() + grammar.num_symbols() * SYMBOL_BYTES;
            let parser = self
                .parsers
                .create_parser_from_init_default(GrammarInit::Internal(grammar, lexer))
                .map_err(fail)?;
            let lexer = Box::new(parser.parser.clone());
            let lexer_bytes = lexer.lexer_stats().num_bytes;
            let matcher = Matcher::new(Ok(parser)).into_cancellable();
            match matcher.get_error() {
                Some(error) => Err(fail(error)),
                None => Ok(Box::new(Matching { matcher, parser_bytes, lexer_bytes, lexer: Some(lexer) })),
            }
        })
    }
}

impl Matching {
    pub fn fork(&self) -> Box<Matching> {
        Box::new(Matching {
            matcher: self.matcher.deep_clone(),
            parser_bytes: self.parser_bytes,
            lexer_bytes: self.lexer_bytes,
            lexer: None,
        })
    }

    /// Estimated memory, without the lexer states that later masks add.
    pub fn bytes(&self) -> usize {
        self.parser_bytes + self.lexer_bytes
    }

    pub fn canceller(&self) -> Box<Canceller> {
        Box::new(Canceller(self.matcher.cancellation_handle().unwrap_or_default()))
    }

    /// Sets bit `id % 32` of `words[id / 32]` for each token allowed next.
    pub fn mask(&mut self, words: &mut [u32]) -> Result<()> {
        guarded("grammar", || {
            let mask = self.matcher.compute_mask_or_eos().map_err(fail)?;
            let bits = mask.as_slice();
            if words.len() < bits.len() {
                return Err(BridgeError(format!("mask needs {} words, not {}", bits.len(), words.len())));
            }
            words[..bits.len()].copy_from_slice(bits);
            words[bits.len()..].fill(0);
            Ok(())
        })
    }

    pub fn first_mask(&mut self) -> Result<()> {
        guarded("grammar", || {
            let mask = self.matcher.compute_mask_or_eos().map_err(fail)?;
            if let Some(lexer) = self.lexer.take() {
                self.lexer_bytes = lexer.lexer_stats().num_bytes + std::mem::size_of_val(mask.as_slice());
            }
            Ok(())
        })
    }

    pub fn commit(&mut self, id: i32) -> Result<()> {
        guarded("grammar", || self.matcher.consume_token(id as u32).map_err(fail))
    }

    /// Returns the length of the longest prefix of `ids` that could be committed; changes nothing.
    pub fn count_valid(&mut self, ids: &[i32]) -> Result<usize> {
        guarded("grammar", || {
            let ids: Vec<u32> = ids.iter().map(|&id| id as u32).collect();
            self.matcher.validate_tokens(&ids).map_err(fail)
        })
    }

    pub fn accepting(&mut self) -> Result<bool> {
        guarded("grammar", || self.matcher.is_accepting().map_err(fail))
    }

    pub fn stopped(&self) -> bool {
        self.matcher.is_stopped()
    }
}
