//! Tokenizers, chat templates and grammars for the C++ text room through one cxx interface. No panic crosses
//! the bridge (see guard.rs); every failure is an error with a message.

mod grammar;
mod grammar_cost;
mod guard;
mod pieces;
mod stream;
mod template;
mod tokenizer;
mod wrapping;

use grammar::{new_grammar_factory, Canceller, GrammarFactory, Matching};
use stream::{new_stream_decoder, StreamDecoder};
use template::{template_from_source, Template};
use tokenizer::{tokenizer_from_json, Tokenizer};

#[cxx::bridge(namespace = "moesaic::text::bridge")]
pub mod ffi {
    /// A token outside the model's own vocabulary.
    struct AddedToken {
        id: i32,
        content: String,
        special: bool,
        lstrip: bool,
        rstrip: bool,
        single_word: bool,
        normalized: bool,
    }

    /// Tokens put around a text if special tokens are requested; an empty string means no token.
    struct Wrapping {
        /// Whether these replace the setting of the tokenizer.json.
        replaces: bool,
        bos: String,
        eos: String,
    }

    extern "Rust" {
        type Tokenizer;
        fn tokenizer_from_json(
            json: &[u8],
            added: &Vec<AddedToken>,
            wrapping: &Wrapping,
        ) -> Result<Box<Tokenizer>>;
        fn encode(&self, text: &[u8], add_special: bool) -> Result<Vec<i32>>;
        fn decode(&self, ids: &[i32], skip_special: bool) -> Result<Vec<u8>>;
        fn token_to_id(&self, token: &[u8]) -> i32;
        fn token_spelling(&self, id: i32) -> Vec<u8>;
        fn token_bytes(&self, id: i32) -> Vec<u8>;
        fn has_token(&self, id: i32) -> bool;
        fn is_special(&self, id: i32) -> bool;
        fn vocab_size(&self) -> i32;
    }

    extern "Rust" {
        type StreamDecoder;
        fn new_stream_decoder(tokenizer: &Tokenizer, skip_special: bool) -> Box<StreamDecoder>;
        fn push(&mut self, id: i32) -> Result<Vec<u8>>;
        fn finish(&mut self) -> Result<Vec<u8>>;
    }

    /// A JSON string of the messages, without its quotes, that follows `at` bytes of a rendered text.
    struct TemplateHole {
        at: usize,
        begin: usize,
        end: usize,
    }

    struct TemplateText {
        text: Vec<u8>,
        holes: Vec<TemplateHole>,
    }

    extern "Rust" {
        type Template;
        fn template_from_source(source: &[u8]) -> Result<Box<Template>>;
        fn render(
            &self,
            variables: &[u8],
            messages: &[u8],
            may_mutate: bool,
            now: i64,
            aliases: bool,
        ) -> Result<Vec<u8>>;
        fn render_with_holes(
            &self,
            variables: &[u8],
            messages: &[u8],
            may_mutate: bool,
            now: i64,
        ) -> Result<TemplateText>;
    }

    /// Limits on the work for one grammar; 0 keeps llguidance's default.
    struct GrammarLimits {
        regex_bytes: usize,
        compile_fuel: u64,
        mask_fuel: u64,
        lexer_states: usize,
    }

    extern "Rust" {
        type GrammarFactory;
        fn new_grammar_factory(
            tokenizer: &Tokenizer,
            eos_ids: &[i32],
            limits: &GrammarLimits,
        ) -> Result<Box<GrammarFactory>>;
        fn compile(&self, kind: &str, source: &[u8]) -> Result<Box<Matching>>;
    }

    extern "Rust" {
        type Matching;
        fn fork(&self) -> Box<Matching>;
        fn mask(&mut self, words: &mut [u32]) -> Result<()>;
        fn first_mask(&mut self) -> Result<()>;
        fn commit(&mut self, id: i32) -> Result<()>;
        fn count_valid(&mut self, ids: &[i32]) -> Result<usize>;
        fn accepting(&mut self) -> Result<bool>;
        fn stopped(&self) -> bool;
        fn bytes(&self) -> usize;
        fn canceller(&self) -> Box<Canceller>;
    }

    extern "Rust" {
        type Canceller;
        fn cancel(&self);
    }
}
