//! Arguments of a call, bound to parameters.

use super::error::{raise, Result};
use super::value::Value;
use std::sync::Arc;

#[derive(Default, Clone)]
pub struct CallArgs {
    pub positional: Vec<Value>,
    pub keyword: Vec<(Arc<str>, Value)>,
}

/// Values of named parameters; absent ones keep their defaults.
pub struct Bound {
    function: String,
    names: &'static [&'static str],
    values: Vec<Option<Value>>,
}

impl CallArgs {
    pub fn of(positional: Vec<Value>) -> CallArgs {
        CallArgs { positional, keyword: Vec::new() }
    }

    /// Binds arguments to `names` in order. Too many arguments or unknown keywords are a TypeError.
    pub fn bind(self, function: &str, names: &'static [&'static str]) -> Result<Bound> {
        if self.positional.len() > names.len() {
            return raise(format!(
                "TypeError: {function}() takes at most {} arguments ({} given)",
                names.len(),
                self.positional.len()
            ));
        }
        let mut values: Vec<Option<Value>> = self.positional.into_iter().map(Some).collect();
        values.resize_with(names.len(), || None);
        for (name, value) in self.keyword {
            match names.iter().position(|n| **n == *name) {
                Some(at) if values[at].is_none() => values[at] = Some(value),
                Some(_) => {
                    return raise(format!(
                        "TypeError: {function}() got multiple values for argument '{name}'"
                    ))
                }
                None => {
                    return raise(format!(
                        "TypeError: {function}() got an unexpected keyword argument '{name}'"
                    ));
                }
            }
        }
        Ok(Bound { function: function.to_string(), names, values })
    }
}

impl Bound {
    pub fn take(&mut self, at: usize) -> Option<Value> {
        self.values[at].take()
    }

    pub fn required(&mut self, at: usize) -> Result<Value> {
        match self.values[at].take() {
            Some(value) => Ok(value),
            None => raise(format!(
                "TypeError: {}() missing 1 required positional argument: '{}'",
                self.function, self.names[at]
            )),
        }
    }

    /// Returns an optional integer; `None` counts as absent.
    pub fn int(&mut self, at: usize, default: i128) -> Result<i128> {
        match self.values[at].take() {
            None | Some(Value::None) => Ok(default),
            Some(value) => match value.as_int() {
                Some(int) => Ok(int),
                None => raise(format!(
                    "TypeError: '{}' object cannot be interpreted as an integer",
                    value.defined()?.type_name()
                )),
            },
        }
    }

    pub fn bool(&mut self, at: usize, default: bool) -> bool {
        self.values[at].take().map_or(default, |value| value.truthy())
    }

    /// Returns an optional string; `None` counts as absent.
    pub fn string(&mut self, at: usize) -> Result<Option<Arc<str>>> {
        match self.values[at].take() {
            None | Some(Value::None) => Ok(None),
            Some(Value::Str(s)) => Ok(Some(s.text.to_arc())),
            Some(value) => raise(format!("TypeError: must be str, not {}", value.defined()?.type_name())),
        }
    }

    pub fn required_string(&mut self, at: usize) -> Result<Arc<str>> {
        match self.required(at)? {
            Value::Str(s) => Ok(s.text.to_arc()),
            value => raise(format!("TypeError: must be str, not {}", value.defined()?.type_name())),
        }
    }
}
