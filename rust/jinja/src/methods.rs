//! Methods of strings, lists, tuples and dictionaries.

use super::call::CallArgs;
use super::error::{raise, Result};
use super::ops::hashable;
use super::str_methods;
use super::value::{equal, order, Dict, Value, View};

const LIST: &[&str] = &["copy", "count", "index"];
const LIST_MUTATORS: &[&str] = &["append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"];
const TUPLE: &[&str] = &["count", "index"];
const DICT: &[&str] = &["copy", "fromkeys", "get", "items", "keys", "values"];
const DICT_MUTATORS: &[&str] = &["clear", "pop", "popitem", "setdefault", "update"];
const CYCLER: &[&str] = &["next", "reset"];
const LOOP: &[&str] = &["cycle", "changed"];

/// Result of reading an attribute as a method.
pub enum Lookup {
    Found,
    /// The method mutates its object, which the sandbox forbids.
    Forbidden,
    Absent,
}

pub fn lookup(value: &Value, name: &str, may_mutate: bool) -> Lookup {
    let (plain, mutators): (&[&str], &[&str]) = match value {
        Value::Str(_) => (str_methods::NAMES, &[]),
        Value::List(_) => (LIST, LIST_MUTATORS),
        Value::Tuple(_) | Value::Range(..) => (TUPLE, &[]),
        Value::Dict(_) => (DICT, DICT_MUTATORS),
        Value::Cycler(_) => (CYCLER, &[]),
        Value::Loop(_) => (LOOP, &[]),
        Value::Float(_) => (&["is_integer"], &[]),
        Value::Int(_) | Value::Bool(_) => (&["bit_length"], &[]),
        Value::Function(super::value::Function::Dict) => (&["fromkeys"], &[]),
        _ => (&[], &[]),
    };
    if plain.contains(&name) || (may_mutate && mutators.contains(&name)) {
        Lookup::Found
    } else if mutators.contains(&name) {
        Lookup::Forbidden
    } else {
        Lookup::Absent
    }
}

/// Returns whether the method may store its arguments in its object.
pub fn changes_its_object(name: &str) -> bool {
    LIST_MUTATORS.contains(&name) || DICT_MUTATORS.contains(&name) || name == "changed"
}

pub fn call(of: &Value, name: &str, args: CallArgs) -> Result<Value> {
    match of {
        Value::Str(s) => str_methods::call(s, name, args),
        Value::List(items) => list_method(of, items, name, args),
        Value::Tuple(_) | Value::Range(..) => sequence_method(of, name, args),
        Value::Dict(_) => dict_method(of, name, args),
        Value::Function(_) => from_keys(args),
        Value::Cycler(cycler) => {
            let items = cycler.0 .0.borrow();
            let at = cycler.1.get();
            cycler.1.set(if name == "reset" { 0 } else { (at + 1) % items.len().max(1) });
            Ok(if name == "reset" { Value::None } else { items.get(at).cloned().unwrap_or(Value::None) })
        }
        Value::Loop(state) if name == "cycle" => {
            if args.positional.is_empty() {
                return raise("TypeError: no items for cycling given");
            }
            Ok(args.positional[state.at.get() % args.positional.len()].clone())
        }
        Value::Loop(state) => {
            let now = Value::tuple(args.positional);
            let changed = !state.changed.borrow().as_ref().is_some_and(|before| equal(before, &now));
            *state.changed.borrow_mut() = Some(now);
            Ok(Value::Bool(changed))
        }
        Value::Float(f) => Ok(Value::Bool(f.fract() == 0.0 && f.is_finite())),
        _ => Ok(Value::Int(i128::from(128 - of.as_int().unwrap_or(0).unsigned_abs().leading_zeros()))),
    }
}

fn sequence_method(of: &Value, name: &str, args: CallArgs) -> Result<Value> {
    if name == "copy" {
        return Ok(Value::list(of.iterate()?));
    }
    let mut bound = args.bind(name, &["value", "start", "stop"])?;
    let wanted = bound.required(0)?;
    let items = of.iterate()?;
    if name == "count" {
        return Ok(Value::Int(items.iter().filter(|item| equal(item, &wanted)).count() as i128));
    }
    let length = items.len() as i128;
    let clamp = |at: i128| if at < 0 { (at + length).max(0) } else { at.min(length) };
    let (start, stop) = (clamp(bound.int(1, 0)?), clamp(bound.int(2, length)?));
    match (start..stop).find(|&at| equal(&items[at as usize], &wanted)) {
        Some(at) => Ok(Value::Int(at)),
        None => raise(format!("ValueError: {} is not in {}", super::text::repr(&wanted)?, of.type_name())),
    }
}

fn list_method(of: &Value, items: &super::value::Items, name: &str, args: CallArgs) -> Result<Value> {
    let clamp = |at: i128, length: usize| {
        let length = length as i128;
        (if at < 0 { (at + length).max(0) } else { at.min(length) }) as usize
    };
    match name {
        "append" => {
            let value = args.bind(name, &["object"])?.required(0)?;
            items.0.borrow_mut().push(value);
        }
        "extend" => {
            let more = args.bind(name, &["iterable"])?.required(0)?.iterate()?;
            items.0.borrow_mut().extend(more);
        }
        "insert" => {
            let mut bound = args.bind(name, &["index", "object"])?;
            let at = clamp(bound.int(0, 0)?, items.0.borrow().len());
            let value = bound.required(1)?;
            items.0.borrow_mut().insert(at, value);
        }
        "clear" => items.0.borrow_mut().clear(),
        "reverse" => items.0.borrow_mut().reverse(),
        "pop" => {
            let at = args.bind(name, &["index"])?.int(0, -1)?;
            let mut items = items.0.borrow_mut();
            let length = items.len() as i128;
            let at = if at < 0 { at + length } else { at };
            if !(0..length).contains(&at) {
                return raise("IndexError: pop index out of range");
            }
            return Ok(items.remove(at as usize));
        }
        "remove" => {
            let wanted = args.bind(name, &["value"])?.required(0)?;
            let found = items.0.borrow().iter().position(|item| equal(item, &wanted));
            match found {
                Some(at) => {
                    items.0.borrow_mut().remove(at);
                }
                None => return raise("ValueError: list.remove(x): x not in list"),
            }
        }
        "sort" => {
            let reverse = args.bind(name, &["key", "reverse"])?.bool(1, false);
            let sorted = sorted(items.0.borrow().clone(), reverse, |item| Ok(item.clone()))?;
            *items.0.borrow_mut() = sorted;
        }
        _ => return sequence_method(of, name, args),
    }
    Ok(Value::None)
}

/// Python's stable sort by `key`.
pub fn sorted(items: Vec<Value>, reverse: bool, key: impl Fn(&Value) -> Result<Value>) -> Result<Vec<Value>> {
    let mut keyed = items.into_iter().map(|item| Ok((key(&item)?, item))).collect::<Result<Vec<_>>>()?;
    let mut failed = Ok(());
    keyed.sort_by(|(a, _), (b, _)| {
        let (a, b) = if reverse { (b, a) } else { (a, b) };
        order(a, b, "<").unwrap_or_else(|error| {
            failed = Err(error);
            std::cmp::Ordering::Equal
        })
    });
    failed?;
    Ok(keyed.into_iter().map(|(_, item)| item).collect())
}

fn from_keys(args: CallArgs) -> Result<Value> {
    let mut bound = args.bind("fromkeys", &["iterable", "value"])?;
    let keys = bound.required(0)?.iterate()?;
    let value = bound.take(1).unwrap_or(Value::None);
    let mut dict = Dict::default();
    for key in keys {
        hashable(&key)?;
        dict.insert(key, value.clone());
    }
    Ok(Value::dict(dict))
}

/// Builds the dictionary of `dict(...)`, `namespace(...)` and `update(...)` from a mapping or pairs, then
/// keywords.
pub fn entries_of(args: CallArgs) -> Result<Dict> {
    let mut dict = Dict::default();
    if args.positional.len() > 1 {
        return raise(format!("TypeError: dict expected at most 1 argument, got {}", args.positional.len()));
    }
    match args.positional.first() {
        None => {}
        Some(Value::Dict(other) | Value::Namespace(other)) => dict = other.0.borrow().clone(),
        Some(pairs) => {
            for pair in pairs.iterate()? {
                let pair = pair.iterate()?;
                let [key, value] = pair.as_slice() else {
                    return raise(format!(
                        "ValueError: dictionary update sequence element has length {}; 2 is required",
                        pair.len()
                    ));
                };
                hashable(key)?;
                dict.insert(key.clone(), value.clone());
            }
        }
    }
    for (name, value) in args.keyword {
        dict.insert(Value::str(name), value);
    }
    Ok(dict)
}

fn dict_method(of: &Value, name: &str, args: CallArgs) -> Result<Value> {
    let Value::Dict(dict) = of else {
        return raise("TypeError: not a dict");
    };
    match name {
        "keys" => Ok(Value::View(View::Keys, dict.clone())),
        "values" => Ok(Value::View(View::Values, dict.clone())),
        "items" => Ok(Value::View(View::Items, dict.clone())),
        "copy" => Ok(Value::dict(dict.0.borrow().clone())),
        "fromkeys" => from_keys(args),
        "get" => {
            let mut bound = args.bind("get", &["key", "default"])?;
            let key = bound.required(0)?;
            hashable(&key)?;
            let found = dict.0.borrow().get(&key).cloned();
            Ok(found.or_else(|| bound.take(1)).unwrap_or(Value::None))
        }
        "clear" => {
            dict.0.borrow_mut().clear();
            Ok(Value::None)
        }
        "update" => {
            let more = entries_of(args)?;
            for (key, value) in &more.entries {
                dict.0.borrow_mut().insert(key.clone(), value.clone());
            }
            Ok(Value::None)
        }
        "pop" => {
            let mut bound = args.bind("pop", &["key", "default"])?;
            let key = bound.required(0)?;
            let found = dict.0.borrow_mut().remove(&key).or_else(|| bound.take(1));
            match found {
                Some(value) => Ok(value),
                None => raise(format!("KeyError: {}", super::text::repr(&key)?)),
            }
        }
        "popitem" => {
            let last = dict.0.borrow().entries.last().cloned();
            match last {
                Some((key, value)) => {
                    dict.0.borrow_mut().remove(&key);
                    Ok(Value::tuple(vec![key, value]))
                }
                None => raise("KeyError: 'popitem(): dictionary is empty'"),
            }
        }
        _ => {
            let mut bound = args.bind("setdefault", &["key", "default"])?;
            let key = bound.required(0)?;
            hashable(&key)?;
            let found = dict.0.borrow().get(&key).cloned();
            if let Some(value) = found {
                return Ok(value);
            }
            let value = bound.take(1).unwrap_or(Value::None);
            dict.0.borrow_mut().insert(key, value.clone());
            Ok(value)
        }
    }
}
