//! Calls: macros, recursive loops, methods and the functions visible to every template.

use super::ast::Macro;
use super::call::CallArgs;
use super::error::{raise, Result};
use super::eval::Interpreter;
use super::methods;
use super::output::Output;
use super::value::{range_length, Closure, Dict, DictCell, Function, Items, Scope, Str, Value};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

/// Jinja2's sandbox rejects longer ranges.
const MAX_RANGE: usize = 100_000;

impl Interpreter {
    pub fn closure(&mut self, definition: &Arc<Macro>, scope: &Rc<Scope>) -> Value {
        self.capture(scope);
        Value::Macro(Rc::new(Closure { definition: definition.clone(), scope: scope.clone() }))
    }

    pub fn invoke(&mut self, callee: &Value, args: CallArgs) -> Result<Value> {
        match callee.defined()? {
            Value::Macro(closure) => self.invoke_macro(closure, args),
            Value::Method(method) => {
                if methods::changes_its_object(&method.1) {
                    self.note_change(&method.0);
                }
                methods::call(&method.0, &method.1, args)
            }
            Value::Function(function) => self.invoke_function(*function, args),
            Value::Loop(state) => {
                let Some((definition, scope)) = &state.recursive else {
                    return raise(
                        "TypeError: The loop must have the 'recursive' marker to be called recursively.",
                    );
                };
                let iterable = args.bind("loop", &["iterable"])?.required(0)?;
                let mut out = Output::default();
                self.for_loop(definition, iterable, scope, state.depth + 1, &mut out)?;
                Ok(Value::Str(Str { text: out.into(), markup: false }))
            }
            Value::Joiner(joiner) => {
                let used = joiner.1.replace(true);
                Ok(if used { joiner.0.clone() } else { Value::str("") })
            }
            other => raise(format!("TypeError: '{}' object is not callable", other.type_name())),
        }
    }

    fn invoke_macro(&mut self, closure: &Rc<Closure>, args: CallArgs) -> Result<Value> {
        let definition = closure.definition.clone();
        let name = &definition.name;
        let mut keyword = args.keyword;
        let mut take = |wanted: &str| {
            let at = keyword.iter().position(|(name, _)| &**name == wanted)?;
            Some(keyword.remove(at).1)
        };
        let mut positional = args.positional.into_iter();
        let mut given = Vec::new();
        for (parameter, _) in &definition.parameters {
            given.push(positional.next().or_else(|| take(parameter)));
        }
        let scope = Scope::child(&closure.scope);
        if definition.takes_caller {
            let caller = take("caller").unwrap_or_else(|| Value::undefined("No caller defined"));
            scope.set(&"caller".into(), caller);
        }
        if definition.takes_kwargs {
            let mut rest = Dict::default();
            for (name, value) in keyword {
                rest.insert(Value::str(name), value);
            }
            scope.set(&"kwargs".into(), Value::dict(rest));
        } else if let Some((unknown, _)) = keyword.first() {
            return raise(format!("TypeError: macro '{name}' takes no keyword argument '{unknown}'"));
        }
        let rest: Vec<Value> = positional.collect();
        if definition.takes_varargs {
            scope.set(&"varargs".into(), Value::tuple(rest));
        } else if !rest.is_empty() {
            let most = definition.parameters.len();
            return raise(format!("TypeError: macro '{name}' takes not more than {most} argument(s)"));
        }
        for ((parameter, default), value) in definition.parameters.iter().zip(given) {
            let value = match (value, default) {
                (Some(value), _) => value,
                (None, Some(default)) => self.eval(default, &scope)?,
                (None, None) => Value::undefined(format!("parameter '{parameter}' was not provided")),
            };
            scope.set(parameter, value);
        }
        let mut out = Output::default();
        self.run(&definition.body, &scope, &mut out)?;
        Ok(Value::Str(Str { text: out.into(), markup: false }))
    }

    fn invoke_function(&mut self, function: Function, args: CallArgs) -> Result<Value> {
        match function {
            Function::RaiseException => {
                let message = args.bind("raise_exception", &["message"])?.required(0)?;
                raise(super::text::to_text(&message)?)
            }
            Function::StrftimeNow => {
                let format = args.bind("strftime_now", &["format"])?.required_string(0)?;
                self.read_clock = true;
                Ok(Value::str(super::clock::strftime(&format, self.options.now)?))
            }
            Function::Range => range(args),
            Function::Dict => Ok(Value::dict(methods::entries_of(args)?)),
            Function::Namespace => {
                let entries = methods::entries_of(args)?;
                if entries.entries.iter().any(|(key, _)| key.as_str().is_some_and(|k| k.starts_with('_'))) {
                    return raise("SecurityError: a namespace cannot store underscore-prefixed attributes");
                }
                Ok(Value::Namespace(Rc::new(DictCell(RefCell::new(entries)))))
            }
            Function::Cycler => {
                if args.positional.is_empty() {
                    return raise("RuntimeError: at least one item has to be provided");
                }
                Ok(Value::Cycler(Rc::new((Items(RefCell::new(args.positional)), Cell::new(0)))))
            }
            Function::Joiner => {
                let separator = args.bind("joiner", &["sep"])?.take(0).unwrap_or_else(|| Value::str(", "));
                Ok(Value::Joiner(Rc::new((separator, Cell::new(false)))))
            }
            Function::Lipsum => raise("lipsum() gives random text and is not supported"),
        }
    }
}

fn range(args: CallArgs) -> Result<Value> {
    let given = args.positional.len();
    let mut bound = args.bind("range", &["start", "stop", "step"])?;
    let first = bound.required(0)?;
    let int = |value: Value| match value.as_int() {
        Some(int) => Ok(int),
        None => raise(format!(
            "TypeError: '{}' object cannot be interpreted as an integer",
            value.defined()?.type_name()
        )),
    };
    let (start, stop) = match given {
        0 | 1 => (0, int(first)?),
        _ => (int(first)?, int(bound.required(1)?)?),
    };
    let step = bound.int(2, 1)?;
    if step == 0 {
        return raise("ValueError: range() arg 3 must not be zero");
    }
    let limit = i128::from(i64::MAX);
    if [start, stop, step].iter().any(|v| v.abs() > limit) || range_length(start, stop, step) > MAX_RANGE {
        return raise(format!(
            "OverflowError: Range too big. The sandbox blocks ranges larger than MAX_RANGE ({MAX_RANGE})."
        ));
    }
    Ok(Value::Range(start, stop, step))
}
