//! Python's rules for upper and lower case.

pub fn capitalize(text: &str) -> String {
    let mut chars = text.chars();
    match chars.next() {
        Some(first) => first.to_uppercase().collect::<String>() + &chars.as_str().to_lowercase(),
        None => String::new(),
    }
}

/// Uses upper case after a character without case, lower case after one with case.
pub fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut after_cased = false;
    for c in text.chars() {
        if after_cased {
            out.extend(c.to_lowercase());
        } else {
            out.extend(c.to_uppercase());
        }
        after_cased = is_cased(c);
    }
    out
}

pub fn swap_case(text: &str) -> String {
    text.chars()
        .flat_map(|c| {
            let swapped: Vec<char> =
                if c.is_uppercase() { c.to_lowercase().collect() } else { c.to_uppercase().collect() };
            swapped
        })
        .collect()
}

fn is_cased(c: char) -> bool {
    c.is_lowercase() || c.is_uppercase()
}

pub fn is_lower(text: &str) -> bool {
    text.chars().any(char::is_lowercase) && !text.chars().any(char::is_uppercase)
}

pub fn is_upper(text: &str) -> bool {
    text.chars().any(char::is_uppercase) && !text.chars().any(char::is_lowercase)
}

pub fn is_title(text: &str) -> bool {
    let mut after_cased = false;
    let mut any = false;
    for c in text.chars() {
        if (c.is_uppercase() && after_cased) || (c.is_lowercase() && !after_cased) {
            return false;
        }
        after_cased = is_cased(c);
        any |= after_cased;
    }
    any
}
