//! Python's operators on template values.

use super::ast::{Binary, Compare};
use super::error::{raise, Result};
use super::printf::percent_format;
use super::text::{escape, repr, to_text};
use super::value::{equal, order, range_length, Str, Value};

/// Maximum bytes of a string, or elements of a list, that a template may build.
pub const MAX_SIZE: usize = 64 << 20;

fn unsupported<T>(op: &str, a: &Value, b: &Value) -> Result<T> {
    a.defined()?;
    b.defined()?;
    raise(format!(
        "TypeError: unsupported operand type(s) for {op}: '{}' and '{}'",
        a.type_name(),
        b.type_name()
    ))
}

fn overflow<T>() -> Result<T> {
    raise("OverflowError: integer result is too large")
}

fn int_or_overflow(value: Option<i128>) -> Result<Value> {
    value.map_or_else(overflow, |v| Ok(Value::Int(v)))
}

/// Concatenates strings; if one is markup, the others are escaped.
pub fn join_strings(a: &Str, b: &Str) -> Result<Value> {
    if a.text.len() + b.text.len() > MAX_SIZE {
        return raise("MemoryError: string too large");
    }
    let markup = a.markup || b.markup;
    if !markup {
        return Ok(Value::str([&*a.text, &*b.text].concat()));
    }
    let part = |s: &Str| if s.markup { s.text.to_string() } else { escape(&s.text) };
    Ok(Value::Str(Str { text: (part(a) + &part(b)).into(), markup }))
}

/// `a ~ b ~ ...`: plain text, even for markup.
pub fn concat(parts: &[Value]) -> Result<Value> {
    let mut out = String::new();
    for part in parts {
        match part {
            Value::Str(s) => out.push_str(&s.text),
            _ => out.push_str(&to_text(part)?),
        }
        if out.len() > MAX_SIZE {
            return raise("MemoryError: string too large");
        }
    }
    Ok(Value::str(out))
}

fn repeat(value: &Value, times: i128) -> Result<Value> {
    let length = value.length()?.max(value.as_str().map_or(0, str::len));
    let times = times.max(0) as usize;
    if length.saturating_mul(times) > MAX_SIZE {
        return raise("MemoryError: repetition too large");
    }
    Ok(match value {
        Value::Str(s) => Value::Str(Str { text: s.text.repeat(times).into(), markup: s.markup }),
        Value::List(items) => Value::list(repeated(&items.0.borrow(), times)),
        Value::Tuple(items) => Value::tuple(repeated(&items.0.borrow(), times)),
        _ => return raise("TypeError: can't multiply sequence by non-int"),
    })
}

fn repeated(items: &[Value], times: usize) -> Vec<Value> {
    (0..times).flat_map(|_| items.iter().cloned()).collect()
}

pub fn binary(op: Binary, a: &Value, b: &Value) -> Result<Value> {
    match op {
        Binary::Add => add(a, b),
        Binary::Sub => arithmetic("-", a, b, i128::checked_sub, |x, y| x - y),
        Binary::Mul => match (a, b) {
            (Value::Str(_) | Value::List(_) | Value::Tuple(_), _) if b.as_int().is_some() => {
                repeat(a, b.as_int().unwrap_or(0))
            }
            (_, Value::Str(_) | Value::List(_) | Value::Tuple(_)) if a.as_int().is_some() => {
                repeat(b, a.as_int().unwrap_or(0))
            }
            _ => arithmetic("*", a, b, i128::checked_mul, |x, y| x * y),
        },
        Binary::Div => match (a.as_float(), b.as_float()) {
            (Some(_), Some(0.0)) => raise("ZeroDivisionError: division by zero"),
            (Some(x), Some(y)) => Ok(Value::Float(x / y)),
            _ => unsupported("/", a, b),
        },
        Binary::FloorDiv => match (a.as_int(), b.as_int(), a.as_float(), b.as_float()) {
            (.., Some(0.0)) if a.as_float().is_some() => {
                raise("ZeroDivisionError: integer division or modulo by zero")
            }
            (Some(x), Some(y), ..) => {
                int_or_overflow(x.checked_sub(modulo(x, y)).and_then(|n| n.checked_div(y)))
            }
            (.., Some(x), Some(y)) => Ok(Value::Float((x / y).floor())),
            _ => unsupported("//", a, b),
        },
        Binary::Mod => match (a, a.as_int(), b.as_int(), a.as_float(), b.as_float()) {
            (Value::Str(s), ..) => percent_format(s, b),
            (.., Some(_), Some(0.0)) => raise("ZeroDivisionError: integer modulo by zero"),
            (_, Some(x), Some(y), ..) => Ok(Value::Int(modulo(x, y))),
            (.., Some(x), Some(y)) => {
                let rest = x % y;
                Ok(Value::Float(if rest != 0.0 && (rest < 0.0) != (y < 0.0) { rest + y } else { rest }))
            }
            _ => unsupported("%", a, b),
        },
        Binary::Pow => match (a.as_int(), b.as_int(), a.as_float(), b.as_float()) {
            (Some(x), Some(y), ..) if y >= 0 => {
                int_or_overflow(u32::try_from(y).ok().and_then(|y| x.checked_pow(y)))
            }
            (.., Some(0.0), Some(y)) if y < 0.0 => {
                raise("ZeroDivisionError: 0.0 cannot be raised to a negative power")
            }
            (.., Some(x), Some(y)) => Ok(Value::Float(x.powf(y))),
            _ => unsupported("** or pow()", a, b),
        },
    }
}

/// Python's remainder, with the sign of the divisor. `y` is not zero.
fn modulo(x: i128, y: i128) -> i128 {
    let rest = x.wrapping_rem(y);
    if rest != 0 && (rest < 0) != (y < 0) {
        rest + y
    } else {
        rest
    }
}

fn arithmetic(
    name: &str,
    a: &Value,
    b: &Value,
    ints: fn(i128, i128) -> Option<i128>,
    floats: fn(f64, f64) -> f64,
) -> Result<Value> {
    match (a.as_int(), b.as_int(), a.as_float(), b.as_float()) {
        (Some(x), Some(y), ..) => int_or_overflow(ints(x, y)),
        (.., Some(x), Some(y)) => Ok(Value::Float(floats(x, y))),
        _ => unsupported(name, a, b),
    }
}

fn add(a: &Value, b: &Value) -> Result<Value> {
    match (a, b) {
        (Value::Str(x), Value::Str(y)) => join_strings(x, y),
        (Value::List(x), Value::List(y)) => {
            Ok(Value::list(x.0.borrow().iter().chain(y.0.borrow().iter()).cloned().collect()))
        }
        (Value::Tuple(x), Value::Tuple(y)) => {
            Ok(Value::tuple(x.0.borrow().iter().chain(y.0.borrow().iter()).cloned().collect()))
        }
        (Value::Str(_) | Value::List(_) | Value::Tuple(_), _) => {
            b.defined()?;
            let kind = a.type_name();
            raise(format!("TypeError: can only concatenate {kind} (not \"{}\") to {kind}", b.type_name()))
        }
        _ => arithmetic("+", a, b, i128::checked_add, |x, y| x + y),
    }
}

pub fn negate(value: &Value) -> Result<Value> {
    match (value.as_int(), value) {
        (Some(i), _) => int_or_overflow(i.checked_neg()),
        (_, Value::Float(f)) => Ok(Value::Float(-f)),
        _ => raise(format!("TypeError: bad operand type for unary -: '{}'", value.defined()?.type_name())),
    }
}

pub fn plus(value: &Value) -> Result<Value> {
    match (value.as_int(), value) {
        (Some(i), _) => Ok(Value::Int(i)),
        (_, Value::Float(f)) => Ok(Value::Float(*f)),
        _ => raise(format!("TypeError: bad operand type for unary +: '{}'", value.defined()?.type_name())),
    }
}

pub fn compare(op: Compare, a: &Value, b: &Value) -> Result<bool> {
    Ok(match op {
        Compare::Eq => equal(a, b),
        Compare::Ne => !equal(a, b),
        Compare::Lt => order(a, b, "<")?.is_lt(),
        Compare::Le => order(a, b, "<=")?.is_le(),
        Compare::Gt => order(a, b, ">")?.is_gt(),
        Compare::Ge => order(a, b, ">=")?.is_ge(),
        Compare::In => contains(b, a)?,
        Compare::NotIn => !contains(b, a)?,
    })
}

/// `needle in container`.
pub fn contains(container: &Value, needle: &Value) -> Result<bool> {
    match container {
        Value::Str(s) => match needle {
            Value::Str(n) => Ok(s.text.contains(&*n.text)),
            _ => raise(format!(
                "TypeError: 'in <string>' requires string as left operand, not {}",
                needle.type_name()
            )),
        },
        Value::Dict(dict) => {
            hashable(needle)?;
            Ok(dict.0.borrow().get(needle).is_some())
        }
        _ if container.is_iterable() => Ok(container.iterate()?.iter().any(|item| equal(item, needle))),
        _ => raise(format!("TypeError: argument of type '{}' is not iterable", container.type_name())),
    }
}

/// Only hashable values can be keys.
pub fn hashable(value: &Value) -> Result<()> {
    match value {
        Value::List(_) | Value::Dict(_) => {
            raise(format!("TypeError: unhashable type: '{}'", value.type_name()))
        }
        Value::Tuple(items) => items.0.borrow().iter().try_for_each(|item| match item {
            Value::Tuple(_) => Ok(()),
            _ => hashable(item),
        }),
        _ => Ok(()),
    }
}

/// Python's index rule: negative indices count from the end.
fn wrap_index(index: i128, length: usize) -> Option<usize> {
    let at = if index < 0 { index + length as i128 } else { index };
    (0..length as i128).contains(&at).then_some(at as usize)
}

/// `of[index]` for the types that support it.
pub fn index(of: &Value, index: &Value) -> Option<Value> {
    match of {
        Value::Dict(dict) => {
            hashable(index).ok()?;
            dict.0.borrow().get(index).cloned()
        }
        Value::Str(s) => {
            let at = index.as_int()?;
            let c = if at >= 0 {
                s.text.chars().nth(usize::try_from(at).ok()?)?
            } else {
                s.text.chars().nth_back(usize::try_from(-1 - at).ok()?)?
            };
            Some(Value::Str(Str { text: c.to_string().into(), markup: s.markup }))
        }
        Value::List(items) | Value::Tuple(items) => {
            let items = items.0.borrow();
            items.get(wrap_index(index.as_int()?, items.len())?).cloned()
        }
        Value::Range(start, stop, step) => {
            let at = wrap_index(index.as_int()?, range_length(*start, *stop, *step))?;
            Some(Value::Int(start + step * at as i128))
        }
        _ => None,
    }
}

/// `of[start:stop:step]`.
pub fn slice(of: &Value, start: &Value, stop: &Value, step: &Value) -> Result<Value> {
    let bound = |value: &Value| match value {
        Value::None => Ok(None),
        _ => match value.as_int() {
            Some(i) => Ok(Some(i)),
            None => {
                value.defined()?;
                raise("TypeError: slice indices must be integers or None or have an __index__ method")
            }
        },
    };
    let (start, stop, step) = (bound(start)?, bound(stop)?, bound(step)?.unwrap_or(1));
    if step == 0 {
        return raise("ValueError: slice step cannot be zero");
    }
    let items = match of {
        Value::Str(_) | Value::List(_) | Value::Tuple(_) | Value::Range(..) => of.iterate()?,
        _ => return raise(format!("TypeError: '{}' object is not subscriptable", of.defined()?.type_name())),
    };
    let length = items.len() as i128;
    let clamp = |at: i128| {
        let at = if at < 0 { at.saturating_add(length) } else { at };
        if step > 0 {
            at.clamp(0, length)
        } else {
            at.clamp(-1, length - 1)
        }
    };
    let from = start.map_or(if step > 0 { 0 } else { length - 1 }, clamp);
    let to = stop.map_or(if step > 0 { length } else { -1 }, clamp);
    let mut picked = Vec::new();
    let mut at = from;
    while (step > 0 && at < to) || (step < 0 && at > to) {
        picked.push(items[at as usize].clone());
        at = at.saturating_add(step);
    }
    Ok(match of {
        Value::Str(s) => {
            let text: String = picked.iter().filter_map(Value::as_str).collect();
            Value::Str(Str { text: text.into(), markup: s.markup })
        }
        Value::Tuple(_) => Value::tuple(picked),
        _ => Value::list(picked),
    })
}

/// Returns the undefined value for a missing attribute or element, with Jinja2's message.
pub fn missing(of: &Value, name: &Value) -> Value {
    let message = match name {
        Value::Str(s) => {
            let quoted = repr(&Value::Str(Str { text: s.text.clone(), markup: false })).unwrap_or_default();
            format!("'{}' has no attribute {quoted}", of.object_name())
        }
        _ => format!("{} has no element {}", of.object_name(), repr(name).unwrap_or_default()),
    };
    Value::undefined(message)
}
