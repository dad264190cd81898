//! Stops Rust panics at the bridge: each becomes an error with the panic's message.

use std::panic::{catch_unwind, set_hook, AssertUnwindSafe};
use std::sync::Once;

/// An error with the message that the C++ side reports.
#[derive(Debug)]
pub struct BridgeError(pub String);

impl std::fmt::Display for BridgeError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

pub type Result<T> = std::result::Result<T, BridgeError>;

/// The context name that `guarded` uses for all errors of the Jinja interpreter.
pub const CHAT_TEMPLATE: &str = "chat template";

/// Converts any displayable error to a `BridgeError`.
pub fn fail<E: std::fmt::Display>(error: E) -> BridgeError {
    BridgeError(error.to_string())
}

/// Runs `body` and converts a panic inside it to an error. A library never prints, so the panic hook is
/// silenced.
pub fn guarded<T>(what: &str, body: impl FnOnce() -> Result<T>) -> Result<T> {
    static SILENCE: Once = Once::new();
    SILENCE.call_once(|| set_hook(Box::new(|_| {})));
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|payload| {
        let message = payload
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| payload.downcast_ref::<&str>().copied())
            .unwrap_or("unknown panic");
        // Under fuzzing, a panic of our own interpreter is a bug; panics of libraries on hostile files are
        // not ours.
        if cfg!(fuzzing) && what == CHAT_TEMPLATE {
            eprintln!("panic: {message}");
            std::process::abort();
        }
        Err(BridgeError(format!("{what}: {message}")))
    })
}
