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
mod lexer;
mod methods;
mod ops;
mod parser;
mod printf;
mod sequence_filters;
mod str_methods;
mod tests;
mod text;
mod value;
mod wide_integers;

use error::raise;
pub use error::Result;
pub use eval::Options;
pub use wide_integers::{tag, Tag};
use value::{Dict, Value};

/// A compiled template. Rendering does not change it, so threads may share it.
pub struct Template {
    body: Vec<ast::Stmt>,
}

impl Template {
    pub fn compile(source: &str) -> Result<Template> {
        let body = parser::parse(source)?;
        check::check(&body, false)?;
        Ok(Template { body })
    }

    /// Renders with the members of the JSON object `context` as variables. `tag` marks its wide integers.
    pub fn render(&self, context: serde_json::Value, tag: Option<&Tag>, options: Options) -> Result<String> {
        let serde_json::Value::Object(members) = context else {
            return raise("the context of a chat template is a JSON object");
        };
        let mut variables = Dict::default();
        for (name, value) in members {
            variables.insert(Value::str(name), from_json(value, tag));
        }
        eval::Interpreter::new(options, variables).render(&self.body)
    }
}

fn from_json(json: serde_json::Value, tag: Option<&Tag>) -> Value {
    match json {
        serde_json::Value::Null => Value::None,
        serde_json::Value::Bool(b) => Value::Bool(b),
        serde_json::Value::Number(n) => match (n.as_i64(), n.as_u64()) {
            (Some(i), _) => Value::Int(i.into()),
            (_, Some(u)) => Value::Int(u.into()),
            _ => Value::Float(n.as_f64().unwrap_or(f64::NAN)),
        },
        serde_json::Value::String(s) => tag.and_then(|tag| tag.integer(&s)).unwrap_or_else(|| Value::str(s)),
        serde_json::Value::Array(items) => Value::list(items.into_iter().map(|item| from_json(item, tag)).collect()),
        serde_json::Value::Object(members) => {
            let mut dict = Dict::default();
            for (key, value) in members {
                dict.insert(Value::str(key), from_json(value, tag));
            }
            Value::dict(dict)
        }
    }
}
