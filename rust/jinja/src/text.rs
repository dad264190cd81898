//! Converts values to text: `str()`, `repr()` and `json.dumps`.

use super::error::{raise, Result};
use super::quoted::Text;
use super::value::{Value, View};
use std::fmt::Write;

/// Deeper values are rejected: Python would raise a RecursionError.
const MAX_DEPTH: usize = 200;

/// `str(value)`.
pub fn to_text(value: &Value) -> Result<Text> {
    match value {
        Value::Str(s) => Ok(s.text.clone()),
        Value::Undefined(_) => Ok("".to_string().into()),
        _ => repr(value).map(Text::from),
    }
}

pub fn repr(value: &Value) -> Result<String> {
    let mut out = String::new();
    write_repr(value, &mut out, MAX_DEPTH)?;
    Ok(out)
}

fn write_repr(value: &Value, out: &mut String, depth: usize) -> Result<()> {
    if depth == 0 {
        return raise("RecursionError: maximum recursion depth exceeded while getting the repr of an object");
    }
    match value {
        Value::Undefined(_) => out.push_str("Undefined"),
        Value::None => out.push_str("None"),
        Value::Bool(b) => out.push_str(if *b { "True" } else { "False" }),
        Value::Int(i) => {
            let _ = write!(out, "{i}");
        }
        Value::Float(f) => out.push_str(&float_repr(*f)),
        Value::Str(s) if s.markup => {
            out.push_str("Markup(");
            str_repr(&s.text, out);
            out.push(')');
        }
        Value::Str(s) => str_repr(&s.text, out),
        Value::List(items) => {
            out.push('[');
            write_row(&items.0.borrow(), out, depth)?;
            out.push(']');
        }
        Value::Tuple(items) => {
            let items = items.0.borrow();
            out.push('(');
            write_row(&items, out, depth)?;
            out.push_str(if items.len() == 1 { ",)" } else { ")" });
        }
        Value::Dict(dict) => {
            out.push('{');
            for (i, (key, item)) in dict.0.borrow().entries.iter().enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                write_repr(key, out, depth - 1)?;
                out.push_str(": ");
                write_repr(item, out, depth - 1)?;
            }
            out.push('}');
        }
        Value::View(view, _) => {
            out.push_str(match view {
                View::Keys => "dict_keys([",
                View::Values => "dict_values([",
                View::Items => "dict_items([",
            });
            write_row(&value.iterate()?, out, depth)?;
            out.push_str("])");
        }
        Value::Range(start, stop, 1) => {
            let _ = write!(out, "range({start}, {stop})");
        }
        Value::Range(start, stop, step) => {
            let _ = write!(out, "range({start}, {stop}, {step})");
        }
        Value::Loop(state) => {
            let _ = write!(out, "<LoopContext {}/{}>", state.at.get() + 1, state.items.0.borrow().len());
        }
        Value::Macro(closure) => {
            let _ = write!(out, "<Macro '{}'>", closure.definition.name);
        }
        other => {
            let _ = write!(out, "<{}>", other.object_name());
        }
    }
    Ok(())
}

fn write_row(items: &[Value], out: &mut String, depth: usize) -> Result<()> {
    for (i, item) in items.iter().enumerate() {
        out.push_str(if i > 0 { ", " } else { "" });
        write_repr(item, out, depth - 1)?;
    }
    Ok(())
}

/// Formats the shortest float that reads back the same, in the notation that Python chooses.
pub fn float_repr(f: f64) -> String {
    if f.is_nan() {
        return "nan".into();
    }
    let sign = if f.is_sign_negative() { "-" } else { "" };
    if f.is_infinite() {
        return format!("{sign}inf");
    }
    let scientific = format!("{:e}", f.abs());
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let digits: String = mantissa.chars().filter(|c| *c != '.').collect();
    if (-4..0).contains(&exponent) {
        let zeros = "0".repeat((-exponent - 1) as usize);
        return format!("{sign}0.{zeros}{digits}");
    }
    if (0..16).contains(&exponent) {
        let whole = exponent as usize + 1;
        if digits.len() <= whole {
            return format!("{sign}{digits}{}.0", "0".repeat(whole - digits.len()));
        }
        return format!("{sign}{}.{}", &digits[..whole], &digits[whole..]);
    }
    let fraction = if digits.len() > 1 { format!(".{}", &digits[1..]) } else { String::new() };
    let exponent_sign = if exponent < 0 { '-' } else { '+' };
    format!("{sign}{}{fraction}e{exponent_sign}{:02}", &digits[..1], exponent.abs())
}

/// Implements Python's `str.isprintable` for one character.
pub fn is_printable(c: char) -> bool {
    if c.is_ascii() {
        return (' '..='~').contains(&c);
    }
    static UNPRINTABLE: std::sync::OnceLock<Option<regex::Regex>> = std::sync::OnceLock::new();
    let pattern = UNPRINTABLE.get_or_init(|| regex::Regex::new(r"^[\p{C}\p{Z}]$").ok());
    let mut encoded = [0; 4];
    !pattern.as_ref().is_some_and(|p| p.is_match(c.encode_utf8(&mut encoded)))
}

fn str_repr(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        let code = c as u32;
        let _ = match c {
            '\\' => write!(out, "\\\\"),
            '\n' => write!(out, "\\n"),
            '\r' => write!(out, "\\r"),
            '\t' => write!(out, "\\t"),
            c if c == quote => write!(out, "\\{c}"),
            c if is_printable(c) => write!(out, "{c}"),
            _ if code < 0x100 => write!(out, "\\x{code:02x}"),
            _ if code < 0x10000 => write!(out, "\\u{code:04x}"),
            _ => write!(out, "\\U{code:08x}"),
        };
    }
    out.push(quote);
}

/// The options of `tojson` in `transformers`: those of `json.dumps`.
pub struct JsonStyle {
    pub ensure_ascii: bool,
    /// Indentation of one level; None: all on one line.
    pub indent: Option<String>,
    pub item_separator: String,
    pub key_separator: String,
    pub sort_keys: bool,
}

pub fn to_json(value: &Value, style: &JsonStyle) -> Result<String> {
    let mut out = String::new();
    write_json(value, style, &mut out, 0)?;
    Ok(out)
}

fn line_break(style: &JsonStyle, out: &mut String, level: usize) {
    if let Some(indent) = &style.indent {
        out.push('\n');
        for _ in 0..level {
            out.push_str(indent);
        }
    }
}

fn write_json(value: &Value, style: &JsonStyle, out: &mut String, level: usize) -> Result<()> {
    if level > MAX_DEPTH {
        return raise("ValueError: Circular reference detected");
    }
    match value {
        Value::None => out.push_str("null"),
        Value::Bool(b) => out.push_str(if *b { "true" } else { "false" }),
        Value::Int(i) => {
            let _ = write!(out, "{i}");
        }
        Value::Float(f) => out.push_str(&json_float(*f)),
        Value::Str(s) => json_string(&s.text, style.ensure_ascii, out),
        Value::List(items) | Value::Tuple(items) => {
            let items = items.0.borrow();
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                out.push_str(if i > 0 { &style.item_separator } else { "" });
                line_break(style, out, level + 1);
                write_json(item, style, out, level + 1)?;
            }
            if !items.is_empty() {
                line_break(style, out, level);
            }
            out.push(']');
        }
        Value::Dict(dict) => {
            let mut entries = dict.0.borrow().entries.clone();
            if style.sort_keys {
                let mut failed = Ok(());
                entries.sort_by(|(a, _), (b, _)| {
                    super::value::order(a, b, "<").unwrap_or_else(|e| {
                        failed = Err(e);
                        std::cmp::Ordering::Equal
                    })
                });
                failed?;
            }
            out.push('{');
            for (i, (key, item)) in entries.iter().enumerate() {
                out.push_str(if i > 0 { &style.item_separator } else { "" });
                line_break(style, out, level + 1);
                let key = match key {
                    Value::Str(s) => s.text.to_string(),
                    Value::None => "null".into(),
                    Value::Bool(b) => b.to_string(),
                    Value::Int(i) => i.to_string(),
                    Value::Float(f) => json_float(*f),
                    other => {
                        return raise(format!(
                            "TypeError: keys must be str, int, float, bool or None, not {}",
                            other.type_name()
                        ))
                    }
                };
                json_string(&key, style.ensure_ascii, out);
                out.push_str(&style.key_separator);
                write_json(item, style, out, level + 1)?;
            }
            if !entries.is_empty() {
                line_break(style, out, level);
            }
            out.push('}');
        }
        other => {
            return raise(format!("TypeError: Object of type {} is not JSON serializable", other.type_name()))
        }
    }
    Ok(())
}

fn json_float(f: f64) -> String {
    if f.is_nan() {
        "NaN".into()
    } else if f.is_infinite() {
        if f > 0.0 {
            "Infinity".into()
        } else {
            "-Infinity".into()
        }
    } else {
        float_repr(f)
    }
}

fn json_string(text: &str, ensure_ascii: bool, out: &mut String) {
    out.push('"');
    for c in text.chars() {
        let _ = match c {
            '"' => write!(out, "\\\""),
            '\\' => write!(out, "\\\\"),
            '\n' => write!(out, "\\n"),
            '\r' => write!(out, "\\r"),
            '\t' => write!(out, "\\t"),
            '\x08' => write!(out, "\\b"),
            '\x0c' => write!(out, "\\f"),
            c if (c as u32) < 0x20 || (ensure_ascii && !(' '..='~').contains(&c)) => {
                let mut units = [0; 2];
                c.encode_utf16(&mut units).iter().try_for_each(|unit| write!(out, "\\u{unit:04x}"))
            }
            c => write!(out, "{c}"),
        };
    }
    out.push('"');
}

/// HTML escaping like markupsafe.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '\'' => out.push_str("&#39;"),
            '"' => out.push_str("&#34;"),
            c => out.push(c),
        }
    }
    out
}
