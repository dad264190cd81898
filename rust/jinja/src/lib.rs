//! Jinja2 as `transformers` runs chat templates: its grammar, its white space rules, and Python's values. A
//! prompt is equal to the byte, and a template raises exactly where it raises there.

mod ast;
mod call;
mod cased;
mod check;
mod clock;
mod error;
mod eval;
#[cfg(test)]
mod eval_test;
mod expression;
mod filters;
mod invoke;
mod json;
#[cfg(test)]
mod json_test;
mod lexer;
mod methods;
mod ops;
mod output;
mod parser;
mod printf;
mod quoted;
mod sequence_filters;
mod skeleton;
mod str_methods;
mod tests;
mod text;
mod value;

use error::raise;
pub use error::{Error, Result};
pub use eval::Options;
use output::Output;
use quoted::Source;
use skeleton::{KnownRenderings, Skeleton};
use std::rc::Rc;
use value::{Dict, Value};

/// Variables of a rendering, as JSON.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    /// An object.
    pub variables: &'a [u8],
    /// Value of the variable `messages`, if `variables` has none of that name; empty: there is none.
    pub messages: &'a [u8],
    /// Each message's reasoning is provided under all its names, as `transformers` does.
    pub aliases: bool,
}

/// A rendered text. Long strings of the messages that it contains are left out: each is a hole.
pub struct Rendered {
    pub text: String,
    pub holes: Vec<Hole>,
}

pub struct Hole {
    /// Bytes of the text before the hole.
    pub at: usize,
    /// The inside of a JSON string, as bytes of `Context::messages`.
    pub begin: usize,
    pub end: usize,
}

/// A compiled template. Threads may share it.
pub struct Template {
    body: Vec<ast::Stmt>,
    known: KnownRenderings,
}

/// Properties of a rendering that decide whether it is kept.
struct Trace {
    /// It does not depend on characters of long strings, nor on the time.
    is_known_by_skeleton: bool,
    steps: u64,
}

impl Template {
    pub fn compile(source: &str) -> Result<Template> {
        let body = parser::parse(source)?;
        check::check(&body, false)?;
        Ok(Template { body, known: KnownRenderings::default() })
    }

    pub fn render(&self, context: Context, options: Options) -> Result<String> {
        Ok(self.render_with(context, options, Output::join)?.0)
    }

    /// Renders without copying long strings of the messages, which are valid JSON.
    pub fn render_with_holes(&self, context: Context, options: Options) -> Result<Rendered> {
        let skeleton = Skeleton::new(&context, &options);
        if let Some(known) = skeleton.as_ref().and_then(|skeleton| self.known.find(skeleton)) {
            return Ok(known);
        }
        let (rendered, trace) = self.render_with(context, options, |output| {
            let hole = |(at, quoted): &(usize, Rc<quoted::Quoted>)| Hole {
                at: *at,
                begin: quoted.begin,
                end: quoted.end,
            };
            Rendered { holes: output.holes.iter().map(hole).collect(), text: output.text }
        })?;
        if let (true, Some(skeleton)) = (trace.is_known_by_skeleton, skeleton) {
            self.known.insert(skeleton, &rendered, trace.steps);
        }
        Ok(rendered)
    }

    /// `finish` makes the result, while the values of the context still exist.
    fn render_with<T>(
        &self,
        context: Context,
        options: Options,
        finish: impl FnOnce(Output) -> T,
    ) -> Result<(T, Trace)> {
        // SAFETY: no value of a rendering is kept after it.
        let (variables, messages) =
            unsafe { (Source::new(context.variables), Source::new(context.messages)) };
        let Value::Dict(dict) = json::parse(&variables, "the context", false)? else {
            return raise("the context of a chat template is a JSON object");
        };
        let mut dict = std::mem::take(&mut *dict.0.borrow_mut());
        let name = Value::str("messages");
        if !context.messages.is_empty() && dict.get(&name).is_none() {
            dict.insert(name.clone(), json::parse(&messages, "messages", true)?);
        }
        if context.aliases {
            if let Some(Value::List(list)) = dict.get(&name) {
                list.0.borrow_mut().iter_mut().for_each(alias_reasoning);
            }
        }
        let mut interpreter = eval::Interpreter::new(options, dict);
        let result = finish(interpreter.render(&self.body)?);
        if messages.damaged.get() {
            return raise("messages is not JSON: a string is not valid");
        }
        let is_known_by_skeleton = !messages.read.get() && !interpreter.read_clock;
        Ok((result, Trace { is_known_by_skeleton, steps: interpreter.steps }))
    }
}

/// Templates read a message's reasoning under one of three names. The first one that a message has is copied to
/// `thinking`, if that is missing, and to `reasoning_content`.
fn alias_reasoning(message: &mut Value) {
    let Value::Dict(members) = message else { return };
    let mut members = members.0.borrow_mut();
    let found = ["reasoning_content", "thinking", "reasoning"]
        .iter()
        .find_map(|name| members.get_str(name).filter(|value| !matches!(value, Value::None)).cloned());
    let Some(reasoning) = found else { return };
    let mut aliased = Dict::default();
    aliased.insert(Value::str("thinking"), reasoning.clone());
    for (key, value) in std::mem::take(&mut *members).entries {
        aliased.insert(key, value);
    }
    aliased.insert(Value::str("reasoning_content"), reasoning);
    *members = aliased;
}
