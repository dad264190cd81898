//! The text that a rendering writes.

use super::quoted::{Quoted, Text};
use std::rc::Rc;

/// Text in which long strings of the context are not copied: each is a hole that follows `at` bytes of `text`.
#[derive(Default)]
pub struct Output {
    pub text: String,
    pub holes: Vec<(usize, Rc<Quoted>)>,
    /// Sum of the bytes of all holes: exact for the first `exact_holes`, upper bounds for the others.
    hole_bytes: usize,
    exact_holes: usize,
}

impl Output {
    pub fn push_str(&mut self, text: &str) {
        self.text.push_str(text);
    }

    pub fn push(&mut self, text: &Text) {
        match text {
            Text::Plain(text) => self.text.push_str(text),
            Text::Quoted(quoted) => {
                self.hole_bytes += quoted.end - quoted.begin;
                self.holes.push((self.text.len(), quoted.clone()));
            }
        }
    }

    pub fn append(&mut self, other: Output) {
        let before = self.text.len();
        self.text.push_str(&other.text);
        self.hole_bytes += other.holes.iter().map(|(_, quoted)| quoted.end - quoted.begin).sum::<usize>();
        self.holes.extend(other.holes.into_iter().map(|(at, quoted)| (before + at, quoted)));
    }

    pub fn is_longer_than(&mut self, most: usize) -> bool {
        if self.text.len() + self.hole_bytes <= most {
            return false;
        }
        for (_, quoted) in &self.holes[self.exact_holes..] {
            self.hole_bytes -= quoted.end - quoted.begin - quoted.plain().len();
        }
        self.exact_holes = self.holes.len();
        self.text.len() + self.hole_bytes > most
    }

    /// Returns the text with its holes filled.
    pub fn join(self) -> String {
        if self.holes.is_empty() {
            return self.text;
        }
        let mut joined = String::with_capacity(self.text.len() + self.hole_bytes);
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
