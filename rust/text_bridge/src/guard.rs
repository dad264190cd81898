//! Keeps Rust panics on this side of the bridge: each becomes an error with the panic's message.

use std::panic::{catch_unwind, set_hook, AssertUnwindSafe};
use std::sync::Once;

/// An error with the message the C++ side shows.
#[derive(Debug)]
pub struct BridgeError(pub String);

impl std::fmt::Display for BridgeError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

pub type Result<T> = std::result::Result<T, BridgeError>;

/// What `guarded` calls everything that the Jinja interpreter does.
pub const CHAT_TEMPLATE: &str = "chat template";

/// Turns any displayable error into a `BridgeError`.
pub fn fail<E: std::fmt::Display>(error: E) -> BridgeError {
    BridgeError(error.to_string())
}

/// Runs `body`; a panic inside it comes back as an error. A library never prints, so the panic hook is silenced.
pub fn guarded<T>(what: &str, body: impl FnOnce() -> Result<T>) -> Result<T> {
    static SILENCE: Once = Once::new();
    SILENCE.call_once(|| set_hook(Box::new(|_| {})));
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|payload| {
        let message = payload
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| payload.downcast_ref::<&str>().copied())
            .unwrap_or("unknown panic");
        // Our own interpreter has no reason to panic; what the libraries do with hostile files is theirs.
        if cfg!(fuzzing) && what == CHAT_TEMPLATE {
            eprintln!("panic: {message}");
            std::process::abort();
        }
        Err(BridgeError(format!("{what}: {message}")))
    })
}
