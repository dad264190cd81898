//! Jinja2's tests, the operators of `is`.

use super::ast::{Binary, Compare};
use super::call::CallArgs;
use super::cased::{is_lower, is_upper};
use super::error::{raise, Result};
use super::ops::{binary, compare, contains};
use super::text::to_text;
use super::value::{same_object, Value};

pub const NAMES: &[&str] = &[
    "!=",
    "<",
    "<=",
    "==",
    ">",
    ">=",
    "boolean",
    "callable",
    "defined",
    "divisibleby",
    "eq",
    "equalto",
    "escaped",
    "even",
    "false",
    "filter",
    "float",
    "ge",
    "greaterthan",
    "gt",
    "in",
    "integer",
    "iterable",
    "le",
    "lessthan",
    "lower",
    "lt",
    "mapping",
    "ne",
    "none",
    "number",
    "odd",
    "sameas",
    "sequence",
    "string",
    "test",
    "true",
    "undefined",
    "upper",
];

pub fn apply(name: &str, of: &Value, args: CallArgs) -> Result<bool> {
    if !NAMES.contains(&name) {
        return raise(format!("No test named '{name}' found."));
    }
    let takes_argument = matches!(
        name,
        "!=" | "<"
            | "<="
            | "=="
            | ">"
            | ">="
            | "divisibleby"
            | "eq"
            | "equalto"
            | "ge"
            | "greaterthan"
            | "gt"
            | "in"
            | "le"
            | "lessthan"
            | "lt"
            | "ne"
            | "sameas"
    );
    if !takes_argument {
        args.bind(name, &[])?;
        return plain(name, of);
    }
    let other = args.bind(name, &["other"])?.required(0)?;
    match name {
        "eq" | "equalto" | "==" => compare(Compare::Eq, of, &other),
        "ne" | "!=" => compare(Compare::Ne, of, &other),
        "lt" | "lessthan" | "<" => compare(Compare::Lt, of, &other),
        "le" | "<=" => compare(Compare::Le, of, &other),
        "gt" | "greaterthan" | ">" => compare(Compare::Gt, of, &other),
        "ge" | ">=" => compare(Compare::Ge, of, &other),
        "in" => contains(&other, of),
        "sameas" => Ok(same_object(of, &other)),
        _ => Ok(!binary(Binary::Mod, of, &other)?.truthy()),
    }
}

fn plain(name: &str, of: &Value) -> Result<bool> {
    Ok(match name {
        "defined" => !matches!(of, Value::Undefined(_)),
        "undefined" => matches!(of, Value::Undefined(_)),
        "none" => matches!(of, Value::None),
        "boolean" => matches!(of, Value::Bool(_)),
        "true" => matches!(of, Value::Bool(true)),
        "false" => matches!(of, Value::Bool(false)),
        "integer" => matches!(of, Value::Int(_)),
        "float" => matches!(of, Value::Float(_)),
        "number" => matches!(of, Value::Int(_) | Value::Float(_) | Value::Bool(_)),
        "string" => matches!(of, Value::Str(_)),
        "mapping" => matches!(of, Value::Dict(_)),
        "iterable" => of.is_iterable(),
        "sequence" => matches!(
            of,
            Value::Str(_)
                | Value::List(_)
                | Value::Tuple(_)
                | Value::Dict(_)
                | Value::Range(..)
                | Value::Undefined(_)
        ),
        "callable" => matches!(
            of,
            Value::Undefined(_)
                | Value::Macro(_)
                | Value::Function(_)
                | Value::Method(_)
                | Value::Joiner(_)
                | Value::Loop(_)
        ),
        "escaped" => matches!(of, Value::Str(s) if s.markup),
        "lower" => is_lower(&to_text(of)?),
        "upper" => is_upper(&to_text(of)?),
        "even" => !binary(Binary::Mod, of, &Value::Int(2))?.truthy(),
        "odd" => compare(Compare::Eq, &binary(Binary::Mod, of, &Value::Int(2))?, &Value::Int(1))?,
        "filter" => of.as_str().is_some_and(|name| super::filters::NAMES.contains(&name)),
        _ => of.as_str().is_some_and(|name| NAMES.contains(&name)),
    })
}
