//! Jinja2 as `transformers` runs chat templates: its grammar, its white space, and Python's values under it, so that
//! a prompt is the same to the byte, and a template that must raise does.

mod ast;
mod call;
mod cased;
mod check;
mod clock;
mod error;
mod eval;
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

use error::raise;
pub use error::Result;
pub use eval::Options;
use value::{Dict, Value};

/// A compiled template; rendering it changes nothing, so threads may share it.
pub struct Template {
    body: Vec<ast::Stmt>,
}

impl Template {
    pub fn compile(source: &str) -> Result<Template> {
        let body = parser::parse(source)?;
        check::check(&body, false)?;
        Ok(Template { body })
    }

    /// Renders with the members of the JSON object `context` as variables.
    pub fn render(&self, context: serde_json::Value, options: Options) -> Result<String> {
        let serde_json::Value::Object(members) = context else {
            return raise("the context of a chat template is a JSON object");
        };
        let mut variables = Dict::default();
        for (name, value) in members {
            variables.insert(Value::str(name), from_json(value));
        }
        eval::Interpreter::new(options, variables).render(&self.body)
    }
}

fn from_json(json: serde_json::Value) -> Value {
    match json {
        serde_json::Value::Null => Value::None,
        serde_json::Value::Bool(b) => Value::Bool(b),
        serde_json::Value::Number(n) => match (n.as_i64(), n.as_u64()) {
            (Some(i), _) => Value::Int(i.into()),
            (_, Some(u)) => Value::Int(u.into()),
            _ => Value::Float(n.as_f64().unwrap_or(f64::NAN)),
        },
        serde_json::Value::String(s) => Value::str(s),
        serde_json::Value::Array(items) => Value::list(items.into_iter().map(from_json).collect()),
        serde_json::Value::Object(members) => {
            let mut dict = Dict::default();
            for (key, value) in members {
                dict.insert(Value::str(key), from_json(value));
            }
            Value::dict(dict)
        }
    }
}
