//! `strftime_now`: local time through the C library, like Python.

use super::error::{raise, Result};
use std::ffi::CString;
use std::time::{SystemTime, UNIX_EPOCH};

/// Formats `now` (seconds since 1970), or the current time.
pub fn strftime(format: &str, now: Option<i64>) -> Result<String> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let seconds = now.unwrap_or(since.as_secs() as i64);
    let micros = if now.is_some() { 0 } else { since.subsec_micros() };
    // Python adds %f, microseconds, to the C library's list.
    let mut expanded = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        match (c, if c == '%' { chars.next() } else { None }) {
            ('%', Some('f')) => expanded.push_str(&format!("{micros:06}")),
            ('%', Some(other)) => expanded.extend(['%', other]),
            (c, _) => expanded.push(c),
        }
    }
    if expanded.is_empty() {
        return Ok(expanded);
    }
    let Ok(pattern) = CString::new(expanded) else {
        return raise("ValueError: embedded null character");
    };
    let mut buffer = vec![0u8; 256 + 64 * pattern.as_bytes().len()];
    // SAFETY: `parts` is a plain C struct that localtime_r fills; strftime receives the true length of
    // `buffer`.
    let written = unsafe {
        let mut parts: libc::tm = std::mem::zeroed();
        if libc::localtime_r(&seconds, &mut parts).is_null() {
            return raise("ValueError: year is out of range");
        }
        libc::strftime(buffer.as_mut_ptr().cast(), buffer.len(), pattern.as_ptr(), &parts)
    };
    Ok(String::from_utf8_lossy(&buffer[..written]).into_owned())
}
