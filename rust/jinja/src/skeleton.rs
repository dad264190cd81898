//! Renderings that do not depend on the long strings of the messages. Chats that differ only in such strings have the
//! same skeleton, and with most templates the same rendering around its holes, which is rendered once.

use super::ops::MAX_SIZE;
use super::quoted::{has_plain_ends, string_end, MIN_BYTES};
use super::{Context, Hole, Options, Rendered};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Limits of the memory of one template.
const MAX_ENTRIES: usize = 256;
const MAX_KEY_BYTES: usize = 4096;
const MAX_TEXT_BYTES: usize = 16384;

/// Everything that a rendering reads, if it reads no character of long strings: the options, the variables, and the
/// messages in which each long string is replaced by a byte that JSON does not have.
pub struct Skeleton {
    key: Vec<u8>,
    /// Long strings of the messages without their quotes, in order.
    strings: Vec<(usize, usize)>,
    message_bytes: usize,
}

struct Known {
    text: String,
    /// Bytes of `text` before each hole, and the number of its long string.
    holes: Vec<(usize, usize)>,
    steps: u64,
}

impl Skeleton {
    /// None: the skeleton is too long, or has a long key. The messages are valid JSON.
    pub fn new(context: &Context, options: &Options) -> Option<Skeleton> {
        let messages = context.messages;
        if context.variables.len() > MAX_KEY_BYTES {
            return None;
        }
        let mut key = Vec::with_capacity(512);
        key.extend([u8::from(options.may_mutate), u8::from(context.aliases)]);
        key.extend(context.variables);
        key.push(0);
        let mut strings = Vec::new();
        let mut copied = 0;
        let mut at = 0;
        while let Some(quote) = memchr::memchr(b'"', &messages[at..]) {
            let begin = at + quote + 1;
            let end = string_end(messages, begin)?;
            at = end + 1;
            if end - begin < MIN_BYTES {
                continue;
            }
            let after = messages[at..].iter().find(|byte| !byte.is_ascii_whitespace());
            if after == Some(&b':') {
                return None;
            }
            key.extend(&messages[copied..begin]);
            key.push(1 + u8::from(has_plain_ends(&messages[begin..end])));
            copied = end;
            strings.push((begin, end));
            if key.len() > MAX_KEY_BYTES {
                return None;
            }
        }
        key.extend(&messages[copied..]);
        (key.len() <= MAX_KEY_BYTES && !strings.is_empty()).then_some(Skeleton {
            key,
            strings,
            message_bytes: messages.len(),
        })
    }

    /// Returns whether no text of a rendering can exceed the limit: each step adds one string at most.
    fn is_small(&self, steps: u64) -> bool {
        steps.saturating_mul(self.message_bytes as u64) <= MAX_SIZE as u64
    }
}

/// Renderings of one template by their skeletons.
#[derive(Default)]
pub struct KnownRenderings(Mutex<HashMap<Vec<u8>, Arc<Known>>>);

impl KnownRenderings {
    pub fn find(&self, skeleton: &Skeleton) -> Option<Rendered> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&skeleton.key)?.clone();
        if !skeleton.is_small(known.steps) {
            return None;
        }
        let hole = |(at, string): &(usize, usize)| {
            let (begin, end) = skeleton.strings[*string];
            Hole { at: *at, begin, end }
        };
        Some(Rendered { text: known.text.clone(), holes: known.holes.iter().map(hole).collect() })
    }

    /// `rendered` has read no character of a long string.
    pub fn insert(&self, skeleton: Skeleton, rendered: &Rendered, steps: u64) {
        if rendered.text.len() > MAX_TEXT_BYTES || !skeleton.is_small(steps) {
            return;
        }
        let number = |hole: &Hole| {
            let string = skeleton.strings.iter().position(|(begin, _)| *begin == hole.begin)?;
            Some((hole.at, string))
        };
        let Some(holes) = rendered.holes.iter().map(number).collect() else { return };
        let known = Arc::new(Known { text: rendered.text.clone(), holes, steps });
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() >= MAX_ENTRIES {
            all.clear();
        }
        all.insert(skeleton.key, known);
    }
}
