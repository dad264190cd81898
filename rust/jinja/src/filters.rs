//! Jinja2's filters, and `tojson` of `transformers`. Those over sequences are in sequence_filters.rs.

use super::call::CallArgs;
use super::cased::capitalize;
use super::error::{raise, Result};
use super::eval::Interpreter;
use super::lexer::is_space;
use super::printf::percent_format;
use super::sequence_filters;
use super::str_methods::{self, replace, split_lines};
use super::text::{escape, to_json, to_text, JsonStyle};
use super::value::{Dict, Str, Value};

pub const NAMES: &[&str] = &[
    "abs",
    "attr",
    "batch",
    "capitalize",
    "center",
    "count",
    "d",
    "default",
    "dictsort",
    "e",
    "escape",
    "filesizeformat",
    "first",
    "float",
    "forceescape",
    "format",
    "groupby",
    "indent",
    "int",
    "items",
    "join",
    "last",
    "length",
    "list",
    "lower",
    "map",
    "max",
    "min",
    "pprint",
    "random",
    "reject",
    "rejectattr",
    "replace",
    "reverse",
    "round",
    "safe",
    "select",
    "selectattr",
    "slice",
    "sort",
    "string",
    "striptags",
    "sum",
    "title",
    "tojson",
    "trim",
    "truncate",
    "unique",
    "upper",
    "urlencode",
    "urlize",
    "wordcount",
    "wordwrap",
    "xmlattr",
];

/// Normalizes a string for Python's `int(...)` and `float(...)`.
fn number_text(text: &str) -> String {
    text.trim_matches(is_space).replace('_', "")
}

fn text(value: impl Into<String>) -> Result<Value> {
    Ok(Value::str(value.into()))
}

pub fn apply(interpreter: &mut Interpreter, name: &str, of: Value, args: CallArgs) -> Result<Value> {
    match name {
        "default" | "d" => {
            let mut bound = args.bind(name, &["default_value", "boolean"])?;
            let missing = matches!(of, Value::Undefined(_)) || (bound.bool(1, false) && !of.truthy());
            Ok(if missing { bound.take(0).unwrap_or_else(|| Value::str("")) } else { of })
        }
        "tojson" => to_json_filter(&of, args),
        "string" => match of {
            Value::Str(_) => Ok(of),
            _ => text(to_text(&of)?),
        },
        "safe" => Ok(Value::Str(Str { text: to_text(&of)?, markup: true })),
        "escape" | "e" | "forceescape" => match &of {
            Value::Str(s) if s.markup && name != "forceescape" => Ok(of),
            _ => Ok(Value::Str(Str { text: escape(&to_text(&of)?).into(), markup: true })),
        },
        "upper" => text(to_text(&of)?.to_uppercase()),
        "lower" => text(to_text(&of)?.to_lowercase()),
        "capitalize" => text(capitalize(&to_text(&of)?)),
        "title" => text(title_words(&to_text(&of)?)),
        "trim" => {
            let chars = args.bind(name, &["chars"])?.take(0).unwrap_or(Value::None);
            let of = Str { text: to_text(&of)?, markup: false };
            str_methods::call(&of, "strip", CallArgs::of(vec![chars]))
        }
        "replace" => {
            let mut bound = args.bind(name, &["old", "new", "count"])?;
            let (old, new) = (to_text(&bound.required(0)?)?, to_text(&bound.required(1)?)?);
            replace(&to_text(&of)?, &old, &new, bound.int(2, -1)?)
        }
        "center" => {
            let width = args.bind(name, &["width"])?.int(0, 80)?;
            let of = Str { text: to_text(&of)?, markup: false };
            str_methods::call(&of, "center", CallArgs::of(vec![Value::Int(width)]))
        }
        "format" => {
            let of = Str { text: to_text(&of)?, markup: false };
            if !args.keyword.is_empty() && !args.positional.is_empty() {
                return raise("can't handle positional and keyword arguments at the same time");
            }
            if args.keyword.is_empty() {
                return percent_format(&of, &Value::tuple(args.positional));
            }
            let mut named = Dict::default();
            for (key, value) in args.keyword {
                named.insert(Value::str(key), value);
            }
            percent_format(&of, &Value::dict(named))
        }
        "indent" => indent(&of, args),
        "truncate" => truncate(&of, args),
        "wordcount" => {
            let of = to_text(&of)?;
            let words = of.split(|c: char| !(c.is_alphanumeric() || c == '_')).filter(|w| !w.is_empty());
            Ok(Value::Int(words.count() as i128))
        }
        "urlencode" => url_encode(&of),
        "abs" => match (of.as_int(), &of) {
            (Some(i), _) => Ok(Value::Int(i.checked_abs().unwrap_or(i128::MAX))),
            (_, Value::Float(f)) => Ok(Value::Float(f.abs())),
            _ => raise(format!("TypeError: bad operand type for abs(): '{}'", of.defined()?.type_name())),
        },
        "int" => int_filter(&of, args),
        "float" => {
            let default = args.bind(name, &["default"])?.take(0).unwrap_or(Value::Float(0.0));
            of.defined()?;
            let parsed = of.as_str().and_then(|s| number_text(s).parse().ok()).or(of.as_float());
            Ok(parsed.map_or(default, Value::Float))
        }
        "round" => round(&of, args),
        "filesizeformat" => file_size(&of, args),
        "attr" => {
            let attribute = args.bind(name, &["name"])?.required_string(0)?;
            let found = interpreter.own_attribute(&of, &attribute)?;
            Ok(found.unwrap_or_else(|| super::ops::missing(&of, &Value::str(attribute))))
        }
        "pprint" | "random" | "striptags" | "urlize" | "wordwrap" | "xmlattr" => {
            raise(format!("the filter '{name}' is not supported"))
        }
        _ if NAMES.contains(&name) => sequence_filters::apply(interpreter, name, of, args),
        _ => raise(format!("No filter named '{name}' found.")),
    }
}

fn to_json_filter(of: &Value, args: CallArgs) -> Result<Value> {
    let mut bound = args.bind("tojson", &["ensure_ascii", "indent", "separators", "sort_keys"])?;
    let indent = match bound.take(1) {
        None | Some(Value::None) => None,
        Some(Value::Str(s)) => Some(s.text.to_string()),
        Some(value) => match value.as_int() {
            Some(width) if width <= 1000 => Some(" ".repeat(width.max(0) as usize)),
            _ => return raise("TypeError: indent must be an integer or a string"),
        },
    };
    let (item_separator, key_separator) = match bound.take(2) {
        None | Some(Value::None) => (if indent.is_some() { "," } else { ", " }.to_string(), ": ".to_string()),
        Some(pair) => match pair.iterate()?.as_slice() {
            [Value::Str(item), Value::Str(key)] => (item.text.to_string(), key.text.to_string()),
            _ => return raise("TypeError: separators must be two strings"),
        },
    };
    let style = JsonStyle {
        ensure_ascii: bound.bool(0, false),
        indent,
        item_separator,
        key_separator,
        sort_keys: bound.bool(3, false),
    };
    text(to_json(of, &style)?)
}

/// Capitalizes each word; words start after white space, a dash or an opening bracket.
fn title_words(s: &str) -> String {
    let mut out = String::with_capacity(s.len());
    let mut starts = true;
    for c in s.chars() {
        if starts {
            out.extend(c.to_uppercase());
        } else {
            out.extend(c.to_lowercase());
        }
        starts = is_space(c) || "-({[<".contains(c);
    }
    out
}

fn indent(of: &Value, args: CallArgs) -> Result<Value> {
    let mut bound = args.bind("indent", &["width", "first", "blank"])?;
    let prefix = match bound.take(0) {
        None => "    ".to_string(),
        Some(Value::Str(s)) => s.text.to_string(),
        Some(value) => match value.as_int() {
            Some(width) if width <= 10_000 => " ".repeat(width.max(0) as usize),
            _ => return raise("TypeError: the width of indent must be an integer or a string"),
        },
    };
    let (first, blank) = (bound.bool(1, false), bound.bool(2, false));
    let Some(s) = of.as_str() else {
        return raise(format!(
            "TypeError: unsupported operand type(s) for +=: '{}' and 'str'",
            of.defined()?.type_name()
        ));
    };
    let mut out = String::new();
    for (i, line) in split_lines(&format!("{s}\n"), false).iter().enumerate() {
        if i > 0 {
            out.push('\n');
        }
        if (i > 0 && (blank || !line.is_empty())) || (i == 0 && first) {
            out.push_str(&prefix);
        }
        out.push_str(line);
        if out.len() > super::ops::MAX_SIZE {
            return raise("MemoryError: string too large");
        }
    }
    text(out)
}

fn truncate(of: &Value, args: CallArgs) -> Result<Value> {
    let mut bound = args.bind("truncate", &["length", "killwords", "end", "leeway"])?;
    let length = bound.int(0, 255)?;
    let kill_words = bound.bool(1, false);
    let end = bound.string(2)?.unwrap_or_else(|| "...".into());
    let leeway = bound.int(3, 5)?;
    let end_length = end.chars().count() as i128;
    if length < end_length || leeway < 0 {
        return raise(format!("AssertionError: expected length >= {end_length}, got {length}"));
    }
    let chars: Vec<char> = to_text(of)?.chars().collect();
    if chars.len() as i128 <= length + leeway {
        return text(chars.into_iter().collect::<String>());
    }
    let kept: String = chars[..(length - end_length) as usize].iter().collect();
    let kept = if kill_words { &kept } else { kept.rsplit_once(' ').map_or(&*kept, |(head, _)| head) };
    text(format!("{kept}{end}"))
}

/// `urllib.parse.quote`, or a query string from a mapping or pairs.
fn url_encode(of: &Value) -> Result<Value> {
    fn quote(text: &str, slash: bool) -> String {
        let keep = |b: u8| b.is_ascii_alphanumeric() || b"_.-~".contains(&b) || (slash && b == b'/');
        text.bytes().map(|b| if keep(b) { (b as char).to_string() } else { format!("%{b:02X}") }).collect()
    }
    let pairs = match of {
        Value::Dict(dict) => dict.0.borrow().pairs(),
        Value::List(_) | Value::Tuple(_) => of.iterate()?,
        _ => return text(quote(&to_text(of)?, true)),
    };
    let mut parts = Vec::new();
    for pair in pairs {
        let pair = pair.iterate()?;
        let [key, value] = pair.as_slice() else {
            return raise("ValueError: urlencode takes pairs");
        };
        let plus = |value: &Value| Ok(quote(&to_text(value)?, false).replace("%20", "+"));
        parts.push(format!("{}={}", plus(key)?, plus(value)?));
    }
    text(parts.join("&"))
}

fn int_filter(of: &Value, args: CallArgs) -> Result<Value> {
    let mut bound = args.bind("int", &["default", "base"])?;
    let default = bound.take(0).unwrap_or(Value::Int(0));
    let base = bound.int(1, 10)?;
    of.defined()?;
    if let Some(int) = of.as_int() {
        return Ok(Value::Int(int));
    }
    let from_float = |f: f64| if f.is_finite() && f.abs() < 1e38 { Some(f.trunc() as i128) } else { None };
    let parsed = match of {
        Value::Float(f) => from_float(*f),
        Value::Str(s) => {
            let spelt = number_text(&s.text);
            let (sign, digits) =
                spelt.strip_prefix('-').map_or((1, spelt.strip_prefix('+').unwrap_or(&spelt)), |d| (-1, d));
            let lower = digits.to_ascii_lowercase();
            let digits = match base {
                16 => lower.strip_prefix("0x").unwrap_or(&lower),
                8 => lower.strip_prefix("0o").unwrap_or(&lower),
                2 => lower.strip_prefix("0b").unwrap_or(&lower),
                _ => &lower,
            };
            let starts_with_digit = !digits.starts_with(['+', '-']);
            let whole = match base {
                2..=36 if starts_with_digit => {
                    i128::from_str_radix(digits, base as u32).ok().map(|n| n * sign)
                }
                _ => None,
            };
            whole.or_else(|| spelt.parse::<f64>().ok().and_then(from_float))
        }
        _ => None,
    };
    Ok(parsed.map_or(default, Value::Int))
}

fn round(of: &Value, args: CallArgs) -> Result<Value> {
    let mut bound = args.bind("round", &["precision", "method"])?;
    let precision = bound.int(0, 0)?.clamp(-300, 300) as i32;
    let method = bound.string(1)?.unwrap_or_else(|| "common".into());
    let Some(value) = of.as_float() else {
        return raise(format!(
            "TypeError: type {} doesn't define __round__ method",
            of.defined()?.type_name()
        ));
    };
    let scale = 10f64.powi(precision);
    match &*method {
        "common" => match of.as_int() {
            Some(int) if precision >= 0 => Ok(Value::Int(int)),
            Some(_) => Ok(Value::Int(((value * scale).round_ties_even() / scale) as i128)),
            None if precision >= 0 => {
                Ok(Value::Float(format!("{value:.*}", precision as usize).parse().unwrap_or(value)))
            }
            None => Ok(Value::Float((value * scale).round_ties_even() / scale)),
        },
        "ceil" => Ok(Value::Float((value * scale).ceil() / scale)),
        "floor" => Ok(Value::Float((value * scale).floor() / scale)),
        _ => raise("method must be common, ceil or floor"),
    }
}

fn file_size(of: &Value, args: CallArgs) -> Result<Value> {
    let binary = args.bind("filesizeformat", &["binary"])?.bool(0, false);
    let parsed = of.as_float().or_else(|| of.as_str().and_then(|s| s.trim().parse().ok()));
    let Some(bytes) = parsed else {
        return raise("ValueError: could not convert to float");
    };
    let base: f64 = if binary { 1024.0 } else { 1000.0 };
    if bytes == 1.0 {
        return text("1 Byte");
    }
    if bytes < base {
        return text(format!("{} Bytes", bytes.trunc()));
    }
    let units = if binary {
        ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB", "ZiB", "YiB"]
    } else {
        ["kB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB"]
    };
    let mut unit = base;
    for (i, name) in units.iter().enumerate() {
        unit = base.powi(i as i32 + 2);
        if bytes < unit {
            return text(format!("{:.1} {name}", base * bytes / unit));
        }
    }
    text(format!("{:.1} {}", base * bytes / unit, units[7]))
}
