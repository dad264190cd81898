//! Filters over sequences and mappings. Filters that return a generator in Jinja2 return one here: it has no
//! length, cannot be serialised, and is exhausted by the first loop over it.

use super::ast::Binary;
use super::call::CallArgs;
use super::error::{raise, Result};
use super::eval::Interpreter;
use super::filters;
use super::methods::sorted;
use super::ops::{binary, concat};
use super::tests;
use super::text::to_text;
use super::value::{equal, order, Str, Value};

pub fn apply(interpreter: &mut Interpreter, name: &str, of: Value, args: CallArgs) -> Result<Value> {
    match name {
        "length" | "count" => Ok(Value::Int(of.length()? as i128)),
        "first" => {
            let first = of.iterate()?.into_iter().next();
            Ok(first.unwrap_or_else(|| Value::undefined("No first item, sequence was empty.")))
        }
        "last" => {
            if let Value::Iterator(iterator) = &of {
                return raise(format!("TypeError: '{}' object is not reversible", iterator.kind));
            }
            let last = of.iterate()?.pop();
            Ok(last.unwrap_or_else(|| Value::undefined("No last item, sequence was empty.")))
        }
        "list" => Ok(Value::list(of.iterate()?)),
        "items" => match &of {
            Value::Undefined(_) => Ok(Value::generator(Vec::new())),
            Value::Dict(dict) => Ok(Value::generator(dict.0.borrow().pairs())),
            _ => raise("TypeError: Can only get item pairs from a mapping."),
        },
        "reverse" => match &of {
            Value::Str(s) => {
                let text: String = s.text.chars().rev().collect();
                Ok(Value::Str(Str { text: text.into(), markup: s.markup }))
            }
            _ => {
                let mut items = of.iterate()?;
                items.reverse();
                Ok(Value::iterator("list_reverseiterator", items))
            }
        },
        "join" => join(interpreter, &of, args),
        // Jinja2 does not inspect a false value here; it need not even be iterable.
        "map" | "select" | "reject" | "selectattr" | "rejectattr" if !of.truthy() => {
            Ok(Value::generator(Vec::new()))
        }
        "map" => map(interpreter, &of, args),
        "select" | "reject" | "selectattr" | "rejectattr" => select(interpreter, name, &of, args),
        "sort" => {
            let mut bound = args.bind(name, &["reverse", "case_sensitive", "attribute"])?;
            let (reverse, cased) = (bound.bool(0, false), bound.bool(1, false));
            let attributes: Vec<Value> = match bound.take(2) {
                None | Some(Value::None) => Vec::new(),
                Some(Value::Str(s)) => s.text.split(',').map(Value::str).collect(),
                Some(other) => vec![other],
            };
            let key = |item: &Value| {
                if attributes.is_empty() {
                    return Ok(folded(item, cased));
                }
                let parts = attributes.iter().map(|a| Ok(folded(&path(interpreter, item, a, None)?, cased)));
                Ok(Value::list(parts.collect::<Result<_>>()?))
            };
            Ok(Value::list(sorted(of.iterate()?, reverse, key)?))
        }
        "dictsort" => {
            let mut bound = args.bind(name, &["case_sensitive", "by", "reverse"])?;
            let cased = bound.bool(0, false);
            let by = bound.string(1)?.unwrap_or_else(|| "key".into());
            let reverse = bound.bool(2, false);
            let at = match &*by {
                "key" => 0,
                "value" => 1,
                _ => return raise("You can only sort by either \"key\" or \"value\""),
            };
            let Value::Dict(dict) = &of else {
                return raise(format!("'{}' has no attribute 'items'", of.defined()?.object_name()));
            };
            let key = |pair: &Value| Ok(folded(&pair.iterate()?[at], cased));
            let pairs = dict.0.borrow().pairs();
            Ok(Value::list(sorted(pairs, reverse, key)?))
        }
        "groupby" => group_by(interpreter, &of, args),
        "unique" => {
            let mut bound = args.bind(name, &["case_sensitive", "attribute"])?;
            let cased = bound.bool(0, false);
            let attribute = bound.take(1).unwrap_or(Value::None);
            let mut seen: Vec<Value> = Vec::new();
            let mut kept = Vec::new();
            for item in of.iterate()? {
                let key = folded(&path(interpreter, &item, &attribute, None)?, cased);
                if !seen.iter().any(|other| equal(other, &key)) {
                    seen.push(key);
                    kept.push(item);
                }
            }
            Ok(Value::generator(kept))
        }
        "min" | "max" => {
            let mut bound = args.bind(name, &["case_sensitive", "attribute"])?;
            let cased = bound.bool(0, false);
            let attribute = bound.take(1).unwrap_or(Value::None);
            let mut best: Option<(Value, Value)> = None;
            for item in of.iterate()? {
                let key = folded(&path(interpreter, &item, &attribute, None)?, cased);
                let better = match &best {
                    None => true,
                    Some((top, _)) if name == "min" => order(&key, top, "<")?.is_lt(),
                    Some((top, _)) => order(&key, top, ">")?.is_gt(),
                };
                if better {
                    best = Some((key, item));
                }
            }
            let empty = || Value::undefined("No aggregated item, sequence was empty.");
            Ok(best.map_or_else(empty, |(_, item)| item))
        }
        "sum" => {
            let mut bound = args.bind(name, &["attribute", "start"])?;
            let attribute = bound.take(0).unwrap_or(Value::None);
            let mut total = bound.take(1).unwrap_or(Value::Int(0));
            for item in of.iterate()? {
                let item = path(interpreter, &item, &attribute, None)?;
                if item.as_str().is_some() {
                    return raise("TypeError: unsupported operand type(s) for +: 'int' and 'str'");
                }
                total = binary(Binary::Add, &total, &item)?;
            }
            Ok(total)
        }
        "batch" => {
            let mut bound = args.bind(name, &["linecount", "fill_with"])?;
            let count = bound.int(0, 0)?.max(1) as usize;
            let fill = bound.take(1).unwrap_or(Value::None);
            let mut rows = Vec::new();
            for row in of.iterate()?.chunks(count) {
                let mut row = row.to_vec();
                if !matches!(fill, Value::None) && count <= super::ops::MAX_SIZE {
                    row.resize(count, fill.clone());
                }
                rows.push(Value::list(row));
            }
            Ok(Value::generator(rows))
        }
        _ => {
            let mut bound = args.bind(name, &["slices", "fill_with"])?;
            let slices = bound.int(0, 1)?;
            if !(1..=100_000).contains(&slices) {
                return raise("ZeroDivisionError: integer division or modulo by zero");
            }
            Ok(Value::generator(columns(&of.iterate()?, slices as usize, bound.take(1))))
        }
    }
}

/// The `slice` filter: `count` columns of nearly equal length.
fn columns(items: &[Value], count: usize, fill: Option<Value>) -> Vec<Value> {
    let (per_slice, extra) = (items.len() / count, items.len() % count);
    let mut at = 0;
    (0..count)
        .map(|i| {
            let length = per_slice + usize::from(i < extra);
            let mut column = items[at..at + length].to_vec();
            at += length;
            match &fill {
                Some(value) if !matches!(value, Value::None) && i >= extra => column.push(value.clone()),
                _ => {}
            }
            Value::list(column)
        })
        .collect()
}

/// Returns the sort key of a value: strings compare case-insensitively unless `cased`.
fn folded(value: &Value, cased: bool) -> Value {
    match value {
        Value::Str(s) if !cased => Value::str(s.text.to_lowercase()),
        _ => value.clone(),
    }
}

/// Follows an attribute path such as "a.b.0"; None returns the item itself.
fn path(
    interpreter: &Interpreter,
    item: &Value,
    attribute: &Value,
    default: Option<&Value>,
) -> Result<Value> {
    let mut value = item.clone();
    match attribute {
        Value::None => {}
        Value::Str(s) => {
            for part in s.text.split('.') {
                let digits = !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
                let key = match part.parse::<i128>() {
                    Ok(index) if digits => Value::Int(index),
                    _ => Value::str(part),
                };
                value = interpreter.item(&value, &key)?;
                if let (Value::Undefined(_), Some(default)) = (&value, default) {
                    value = default.clone();
                }
            }
        }
        index => value = interpreter.item(&value, index)?,
    }
    Ok(value)
}

fn join(interpreter: &Interpreter, of: &Value, args: CallArgs) -> Result<Value> {
    let mut bound = args.bind("join", &["d", "attribute"])?;
    let separator = bound.take(0).map_or(Ok(String::new()), |d| to_text(&d).map(String::from))?;
    let attribute = bound.take(1).unwrap_or(Value::None);
    let mut parts = Vec::new();
    for (i, item) in of.iterate()?.iter().enumerate() {
        if i > 0 {
            parts.push(Value::str(separator.clone()));
        }
        parts.push(Value::str(to_text(&path(interpreter, item, &attribute, None)?)?));
    }
    concat(&parts)
}

fn map(interpreter: &mut Interpreter, of: &Value, mut args: CallArgs) -> Result<Value> {
    let mut mapped = Vec::new();
    let by_attribute =
        args.positional.is_empty() && args.keyword.iter().any(|(name, _)| &**name == "attribute");
    if by_attribute {
        let mut bound = args.bind("map", &["attribute", "default"])?;
        let attribute = bound.required(0)?;
        let default = bound.take(1).filter(|value| !matches!(value, Value::None));
        for item in of.iterate()? {
            mapped.push(path(interpreter, &item, &attribute, default.as_ref())?);
        }
        return Ok(Value::generator(mapped));
    }
    if args.positional.is_empty() {
        return raise("map requires a filter argument");
    }
    let Value::Str(filter) = args.positional.remove(0) else {
        return raise("No filter named by that value found.");
    };
    for item in of.iterate()? {
        mapped.push(filters::apply(interpreter, &filter.text, item, args.clone())?);
    }
    Ok(Value::generator(mapped))
}

fn select(interpreter: &Interpreter, name: &str, of: &Value, mut args: CallArgs) -> Result<Value> {
    let mut attribute = Value::None;
    if name.ends_with("attr") {
        if args.positional.is_empty() {
            return raise("Missing parameter for attribute name");
        }
        attribute = args.positional.remove(0);
    }
    let test = if args.positional.is_empty() { None } else { Some(to_text(&args.positional.remove(0))?) };
    let wanted = name.starts_with("select");
    let mut kept = Vec::new();
    for item in of.iterate()? {
        let value = path(interpreter, &item, &attribute, None)?;
        let passed = match &test {
            Some(test) => tests::apply(test, &value, args.clone())?,
            None => value.truthy(),
        };
        if passed == wanted {
            kept.push(item);
        }
    }
    Ok(Value::generator(kept))
}

fn group_by(interpreter: &Interpreter, of: &Value, args: CallArgs) -> Result<Value> {
    let mut bound = args.bind("groupby", &["attribute", "default", "case_sensitive"])?;
    let attribute = bound.required(0)?;
    let default = bound.take(1).filter(|value| !matches!(value, Value::None));
    let cased = bound.bool(2, false);
    let key = |item: &Value| path(interpreter, item, &attribute, default.as_ref());
    let items = sorted(of.iterate()?, false, |item| Ok(folded(&key(item)?, cased)))?;
    let mut groups: Vec<(Value, Vec<Value>)> = Vec::new();
    for item in items {
        let found = key(&item)?;
        match groups.last_mut() {
            Some((last, group)) if equal(&folded(last, cased), &folded(&found, cased)) => group.push(item),
            _ => groups.push((found, vec![item])),
        }
    }
    let pairs = groups.into_iter().map(|(key, group)| Value::tuple(vec![key, Value::list(group)]));
    Ok(Value::list(pairs.collect()))
}
