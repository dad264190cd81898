//! Template errors have the message that Jinja2 or Python would give.

#[derive(Debug, Clone)]
pub struct Error {
    pub message: String,
    pub line: Option<usize>,
}

pub type Result<T> = std::result::Result<T, Error>;

pub fn raise<T>(message: impl Into<String>) -> Result<T> {
    Err(Error { message: message.into(), line: None })
}

pub fn syntax<T>(line: usize, message: impl Into<String>) -> Result<T> {
    Err(Error { message: message.into(), line: Some(line) })
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.line {
            Some(line) => write!(f, "line {line}: {}", self.message),
            None => f.write_str(&self.message),
        }
    }
}
