//! Python's two string formatters: `"%s" % x` and `"{}".format(x)`.

use super::call::CallArgs;
use super::error::{raise, Result};
use super::ops::{index, missing, MAX_SIZE};
use super::text::{float_repr, repr, to_text};
use super::value::{Str, Value};

/// Format of one value.
#[derive(Clone)]
struct Layout {
    fill: char,
    /// `<`, `>`, `^`, or `=` (padding after the sign); None: the type's default.
    align: Option<char>,
    /// `+`, `-` or a space.
    sign: char,
    alternate: bool,
    width: usize,
    grouping: Option<char>,
    precision: Option<usize>,
    kind: char,
}

fn checked_width(digits: &str) -> Result<usize> {
    match digits.parse::<usize>() {
        Ok(width) if width <= MAX_SIZE => Ok(width),
        _ => raise("ValueError: Too many decimal digits in format string"),
    }
}

fn pad(body: &str, layout: &Layout, default_align: char) -> String {
    let missing = layout.width.saturating_sub(body.chars().count());
    let fill = |n: usize| layout.fill.to_string().repeat(n);
    match layout.align.unwrap_or(default_align) {
        '<' => body.to_string() + &fill(missing),
        '^' => fill(missing / 2) + body + &fill(missing - missing / 2),
        '=' => {
            let sign = body.len() - body.trim_start_matches(['+', '-', ' ']).len();
            body[..sign].to_string() + &fill(missing) + &body[sign..]
        }
        _ => fill(missing) + body,
    }
}

fn sign_text(negative: bool, sign: char) -> &'static str {
    match (negative, sign) {
        (true, _) => "-",
        (_, '+') => "+",
        (_, ' ') => " ",
        _ => "",
    }
}

fn group(digits: &str, separator: char) -> String {
    let (whole, rest) = digits.split_at(digits.find(['.', 'e']).unwrap_or(digits.len()));
    let mut out = String::new();
    for (i, c) in whole.chars().enumerate() {
        if i > 0 && (whole.len() - i) % 3 == 0 {
            out.push(separator);
        }
        out.push(c);
    }
    out + rest
}

fn exponent_form(value: f64, precision: usize) -> String {
    let spelt = format!("{value:.precision$e}");
    let (mantissa, exponent) = spelt.split_once('e').unwrap_or((&spelt, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    format!("{mantissa}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
}

/// C's `%g` of a non-negative value.
fn general_form(value: f64, precision: usize, alternate: bool) -> String {
    let precision = precision.max(1);
    let spelt = format!("{value:.*e}", precision - 1);
    let exponent: i32 = spelt.split_once('e').and_then(|(_, e)| e.parse().ok()).unwrap_or(0);
    let strip = |s: String| {
        if alternate || !s.contains('.') {
            return s;
        }
        s.trim_end_matches('0').trim_end_matches('.').to_string()
    };
    if exponent < -4 || exponent >= precision as i32 {
        let form = exponent_form(value, precision - 1);
        let (mantissa, rest) = form.split_once('e').unwrap_or((&form, "+00"));
        return format!("{}e{rest}", strip(mantissa.to_string()));
    }
    strip(format!("{value:.*}", (precision as i32 - 1 - exponent).max(0) as usize))
}

fn float_form(value: f64, layout: &Layout) -> String {
    let magnitude = value.abs();
    let negative = value.is_sign_negative() && !value.is_nan();
    let mut body = if value.is_nan() {
        "nan".to_string()
    } else if value.is_infinite() {
        "inf".to_string()
    } else {
        let precision = layout.precision.unwrap_or(6).min(1000);
        match layout.kind.to_ascii_lowercase() {
            'f' => format!("{magnitude:.precision$}"),
            '%' => format!("{:.precision$}%", magnitude * 100.0),
            'e' => exponent_form(magnitude, precision),
            'g' => general_form(magnitude, precision, layout.alternate),
            _ => match layout.precision {
                Some(precision) => general_form(magnitude, precision, layout.alternate),
                None => float_repr(magnitude),
            },
        }
    };
    if layout.kind.is_ascii_uppercase() {
        body = body.to_uppercase();
    }
    if let Some(separator) = layout.grouping {
        body = group(&body, separator);
    }
    pad(&format!("{}{body}", sign_text(negative, layout.sign)), layout, '>')
}

fn int_form(value: i128, layout: &Layout) -> Result<String> {
    let magnitude = value.unsigned_abs();
    let (digits, prefix) = match layout.kind {
        'x' => (format!("{magnitude:x}"), "0x"),
        'X' => (format!("{magnitude:X}"), "0X"),
        'o' => (format!("{magnitude:o}"), "0o"),
        'b' => (format!("{magnitude:b}"), "0b"),
        'c' => match u32::try_from(value).ok().and_then(char::from_u32) {
            Some(c) => return Ok(pad(&c.to_string(), layout, '<')),
            None => return raise("OverflowError: %c arg not in range(0x110000)"),
        },
        _ => (magnitude.to_string(), ""),
    };
    let digits = layout.grouping.map_or(digits.clone(), |separator| group(&digits, separator));
    let prefix = if layout.alternate { prefix } else { "" };
    Ok(pad(&format!("{}{prefix}{digits}", sign_text(value < 0, layout.sign)), layout, '>'))
}

/// `format % value`.
pub fn percent_format(format: &Str, value: &Value) -> Result<Value> {
    let arguments = match value {
        Value::Tuple(items) => items.0.borrow().clone(),
        _ => vec![value.clone()],
    };
    let mapping = matches!(value, Value::Dict(_));
    let mut used = 0;
    let mut next = || {
        used += 1;
        match arguments.get(used - 1) {
            Some(value) => Ok(value.clone()),
            None => raise("TypeError: not enough arguments for format string"),
        }
    };
    let mut named = false;
    let mut out = String::new();
    let mut chars = format.text.chars().peekable();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut layout = Layout {
            fill: ' ',
            align: None,
            sign: '-',
            alternate: false,
            width: 0,
            grouping: None,
            precision: None,
            kind: 's',
        };
        let mut from_mapping = None;
        if chars.peek() == Some(&'(') {
            chars.next();
            let key: String = chars.by_ref().take_while(|c| *c != ')').collect();
            named = true;
            match index(value, &Value::str(key.clone())) {
                Some(found) if mapping => from_mapping = Some(found),
                _ if mapping => return raise(format!("KeyError: '{key}'")),
                _ => return raise("TypeError: format requires a mapping"),
            }
        }
        while let Some(flag) = chars.peek().copied().filter(|c| "#0- +".contains(*c)) {
            chars.next();
            match flag {
                '#' => layout.alternate = true,
                '0' => (layout.fill, layout.align) = ('0', layout.align.or(Some('='))),
                '-' => layout.align = Some('<'),
                sign => layout.sign = sign,
            }
        }
        if layout.align == Some('<') {
            layout.fill = ' ';
        }
        let mut number = |chars: &mut std::iter::Peekable<std::str::Chars>| -> Result<Option<usize>> {
            if chars.peek() == Some(&'*') {
                chars.next();
                return match next()?.as_int() {
                    Some(n) => Ok(Some(checked_width(&n.max(0).to_string())?)),
                    None => raise("TypeError: * wants int"),
                };
            }
            let mut digits = String::new();
            while let Some(digit) = chars.peek().filter(|c| c.is_ascii_digit()) {
                digits.push(*digit);
                chars.next();
            }
            Ok(if digits.is_empty() { None } else { Some(checked_width(&digits)?) })
        };
        layout.width = number(&mut chars)?.unwrap_or(0);
        if chars.peek() == Some(&'.') {
            chars.next();
            layout.precision = Some(number(&mut chars)?.unwrap_or(0));
        }
        while chars.peek().is_some_and(|c| "hlL".contains(*c)) {
            chars.next();
        }
        let Some(kind) = chars.next() else {
            return raise("ValueError: incomplete format");
        };
        if kind == '%' {
            out.push('%');
            continue;
        }
        let argument = match from_mapping {
            Some(found) => found,
            None => next()?,
        };
        layout.kind = kind;
        out.push_str(&percent_one(&argument, layout)?);
        if out.len() > MAX_SIZE {
            return raise("MemoryError: string too large");
        }
    }
    if used < arguments.len() && !(mapping || named) {
        return raise("TypeError: not all arguments converted during string formatting");
    }
    Ok(Value::Str(Str { text: out.into(), markup: format.markup }))
}

fn percent_one(argument: &Value, mut layout: Layout) -> Result<String> {
    let kind = layout.kind;
    match kind {
        's' | 'r' | 'a' => {
            let mut text = if kind == 's' { String::from(to_text(argument)?) } else { repr(argument)? };
            if let Some(precision) = layout.precision {
                text = text.chars().take(precision).collect();
            }
            layout.fill = ' ';
            layout.align = layout.align.filter(|a| *a == '<');
            Ok(pad(&text, &layout, '>'))
        }
        'c' if argument.as_str().is_some_and(|s| s.chars().count() == 1) => {
            Ok(pad(argument.as_str().unwrap_or_default(), &layout, '>'))
        }
        'd' | 'i' | 'u' | 'x' | 'X' | 'o' | 'c' => {
            let value = match (argument.as_int(), argument) {
                (Some(i), _) => i,
                (None, Value::Float(f)) if matches!(kind, 'd' | 'i' | 'u') => f.trunc() as i128,
                _ => {
                    return raise(format!(
                        "TypeError: %{kind} format: a real number is required, not {}",
                        argument.defined()?.type_name()
                    ))
                }
            };
            layout.kind = if matches!(kind, 'i' | 'u') { 'd' } else { kind };
            if let Some(precision) = layout.precision.take() {
                let digits =
                    Layout { width: precision, fill: '0', align: Some('>'), sign: '-', ..layout.clone() };
                let body = int_form(value.checked_abs().unwrap_or(i128::MAX), &digits)?;
                return Ok(pad(&format!("{}{body}", sign_text(value < 0, layout.sign)), &layout, '>'));
            }
            int_form(value, &layout)
        }
        'f' | 'F' | 'e' | 'E' | 'g' | 'G' => match argument.as_float() {
            Some(value) => Ok(float_form(value, &layout)),
            None => raise(format!("TypeError: must be real number, not {}", argument.defined()?.type_name())),
        },
        other => raise(format!("ValueError: unsupported format character '{other}'")),
    }
}

/// `format.format(*args, **kwargs)`.
pub fn brace_format(format: &Str, args: &CallArgs) -> Result<Value> {
    let mut automatic = 0;
    let text = brace_text(&format.text, args, &mut automatic, 2)?;
    Ok(Value::Str(Str { text: text.into(), markup: format.markup }))
}

fn brace_text(format: &str, args: &CallArgs, automatic: &mut usize, depth: usize) -> Result<String> {
    if depth == 0 {
        return raise("ValueError: Max string recursion exceeded");
    }
    let mut out = String::new();
    let mut rest = format;
    while let Some(at) = rest.find(['{', '}']) {
        out.push_str(&rest[..at]);
        let brace = &rest[at..at + 1];
        rest = &rest[at + 1..];
        if let Some(after) = rest.strip_prefix(brace) {
            out.push_str(brace);
            rest = after;
            continue;
        }
        if brace == "}" {
            return raise("ValueError: Single '}' encountered in format string");
        }
        let mut nested = 1;
        let end = rest.char_indices().find(|(_, c)| {
            match c {
                '{' => nested += 1,
                '}' => nested -= 1,
                _ => {}
            }
            nested == 0
        });
        let Some((end, _)) = end else {
            return raise("ValueError: expected '}' before end of string");
        };
        let field = &rest[..end];
        rest = &rest[end + 1..];
        let (head, spec) = field.split_once(':').unwrap_or((field, ""));
        let (path, conversion) = head.split_once('!').map_or((head, None), |(p, c)| (p, Some(c)));
        let mut value = resolve_field(path, args, automatic)?;
        match conversion {
            None => {}
            Some("s") => value = Value::str(to_text(&value)?),
            Some("r" | "a") => value = Value::str(repr(&value)?),
            Some(other) => return raise(format!("ValueError: Unknown conversion specifier '{other}'")),
        }
        let spec = brace_text(spec, args, automatic, depth - 1)?;
        out.push_str(&format_value(&value, &spec)?);
        if out.len() > MAX_SIZE {
            return raise("MemoryError: string too large");
        }
    }
    Ok(out + rest)
}

fn resolve_field(path: &str, args: &CallArgs, automatic: &mut usize) -> Result<Value> {
    let head_end = path.find(['.', '[']).unwrap_or(path.len());
    let (head, mut rest) = path.split_at(head_end);
    let positional = |at: usize| match args.positional.get(at) {
        Some(value) => Ok(value.clone()),
        None => raise("IndexError: Replacement index out of range for positional args tuple"),
    };
    let mut value = if head.is_empty() {
        *automatic += 1;
        positional(*automatic - 1)?
    } else if let Ok(at) = head.parse::<usize>() {
        positional(at)?
    } else {
        match args.keyword.iter().find(|(name, _)| &**name == head) {
            Some((_, value)) => value.clone(),
            None => return raise(format!("KeyError: '{head}'")),
        }
    };
    while !rest.is_empty() {
        let (key, after, by_index) = if let Some(inner) = rest.strip_prefix('[') {
            let end =
                inner.find(']').map_or_else(|| raise("ValueError: Missing ']' in format string"), Ok)?;
            (&inner[..end], &inner[end + 1..], true)
        } else {
            let inner = &rest[1..];
            let end = inner.find(['.', '[']).unwrap_or(inner.len());
            (&inner[..end], &inner[end..], false)
        };
        let key_value = match key.parse::<i128>() {
            Ok(at) if by_index => Value::Int(at),
            _ => Value::str(key),
        };
        let found = index(&value, &key_value);
        value = found.unwrap_or_else(|| missing(&value, &key_value)).defined()?.clone();
        rest = after;
    }
    Ok(value)
}

/// `format(value, spec)`.
fn format_value(value: &Value, spec: &str) -> Result<String> {
    if spec.is_empty() {
        return to_text(value).map(String::from);
    }
    let chars: Vec<char> = spec.chars().collect();
    let mut at = 0;
    let mut layout = Layout {
        fill: ' ',
        align: None,
        sign: '-',
        alternate: false,
        width: 0,
        grouping: None,
        precision: None,
        kind: ' ',
    };
    if chars.len() > 1 && "<>^=".contains(chars[1]) {
        (layout.fill, layout.align, at) = (chars[0], Some(chars[1]), 2);
    } else if "<>^=".contains(chars[0]) {
        (layout.align, at) = (Some(chars[0]), 1);
    }
    if let Some(sign) = chars.get(at).filter(|c| "+- ".contains(**c)) {
        layout.sign = *sign;
        at += 1;
    }
    if chars.get(at) == Some(&'#') {
        layout.alternate = true;
        at += 1;
    }
    if chars.get(at) == Some(&'0') {
        layout.fill = '0';
        layout.align = layout.align.or(if value.as_str().is_some() { None } else { Some('=') });
        at += 1;
    }
    let digits = |at: &mut usize| {
        let start = *at;
        while chars.get(*at).is_some_and(char::is_ascii_digit) {
            *at += 1;
        }
        chars[start..*at].iter().collect::<String>()
    };
    let width = digits(&mut at);
    if !width.is_empty() {
        layout.width = checked_width(&width)?;
    }
    if let Some(separator) = chars.get(at).filter(|c| **c == ',' || **c == '_') {
        layout.grouping = Some(*separator);
        at += 1;
    }
    if chars.get(at) == Some(&'.') {
        at += 1;
        layout.precision = Some(checked_width(&digits(&mut at))?);
    }
    if let Some(kind) = chars.get(at) {
        layout.kind = *kind;
        at += 1;
    }
    if at != chars.len() {
        return raise("ValueError: Invalid format specifier");
    }
    let bad = |kind: char| {
        raise(format!("ValueError: Unknown format code '{kind}' for object of type '{}'", value.type_name()))
    };
    match (value, layout.kind) {
        (Value::Str(s), ' ' | 's') => {
            let text: String = match layout.precision {
                Some(precision) => s.text.chars().take(precision).collect(),
                None => s.text.to_string(),
            };
            Ok(pad(&text, &layout, '<'))
        }
        (Value::Int(_) | Value::Bool(_), ' ' | 'd' | 'n' | 'x' | 'X' | 'o' | 'b' | 'c') => {
            int_form(value.as_int().unwrap_or(0), &layout)
        }
        (Value::Int(_) | Value::Bool(_) | Value::Float(_), 'f' | 'F' | 'e' | 'E' | 'g' | 'G' | '%')
        | (Value::Float(_), ' ' | 'n') => Ok(float_form(value.as_float().unwrap_or(0.0), &layout)),
        (Value::Str(_) | Value::Int(_) | Value::Bool(_) | Value::Float(_), kind) => bad(kind),
        _ => raise(format!(
            "TypeError: unsupported format string passed to {}.__format__",
            value.defined()?.type_name()
        )),
    }
}
