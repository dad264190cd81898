//! The text that a rendering writes.

use super::quoted::{Quoted, Text};
use std::rc::Rc;

/// Text in which long strings of the context are not copied: each is a hole that follows `at` bytes of `text`.
#[derive(Default)]
pub struct Output {
    pub text: String,
    pub holes: Vec<(usize, Rc<Quoted>)>,
    /// At most the bytes of all holes.
    most_bytes: usize,
}

impl Output {
    pub fn push_str(&mut self, text: &str) {
        self.text.push_str(text);
    }

    pub fn push(&mut self, text: &Text) {
        match text {
            Text::Plain(text) => self.text.push_str(text),
            Text::Quoted(quoted) => {
                self.most_bytes += quoted.end - quoted.begin;
                self.holes.push((self.text.len(), quoted.clone()));
            }
        }
    }

    pub fn append(&mut self, other: Output) {
        let before = self.text.len();
        self.text.push_str(&other.text);
        self.most_bytes += other.most_bytes;
        self.holes.extend(other.holes.into_iter().map(|(at, quoted)| (before + at, quoted)));
    }

    pub fn is_longer_than(&self, most: usize) -> bool {
        self.text.len() + self.most_bytes > most
            && self.text.len() + self.holes.iter().map(|(_, quoted)| quoted.plain().len()).sum::<usize>()
                > most
    }

    /// Returns the text with its holes filled.
    pub fn join(self) -> String {
        if self.holes.is_empty() {
            return self.text;
        }
        let mut joined = String::with_capacity(self.text.len() + self.most_bytes);
        let mut copied = 0;
        for (at, quoted) in &self.holes {
            joined.push_str(&self.text[copied..*at]);
            joined.push_str(quoted.plain());
            copied = *at;
        }
        joined.push_str(&self.text[copied..]);
        joined
    }
}

impl From<Output> for Text {
    fn from(output: Output) -> Text {
        match (output.text.is_empty(), output.holes.as_slice()) {
            (true, [(_, quoted)]) => Text::Quoted(quoted.clone()),
            _ => output.join().into(),
        }
    }
}
