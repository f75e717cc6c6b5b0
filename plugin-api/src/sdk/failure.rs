//! A status with its reason: what every fallible entry answers.

use std::fmt;

use crate::abi::{
    Status, STATUS_FAILED, STATUS_INVALID, STATUS_PANICKED, STATUS_POISONED, STATUS_REFUSED,
};

/// Why something was not done. `code` is stable and short (`envelope`), `message` is for people and
/// says what was expected and what was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// One of the `STATUS_*` constants, never 0.
    pub status: Status,
    /// Stable code, `[a-z0-9_]+`.
    pub code: String,
    /// For people.
    pub message: String,
}

impl Failure {
    fn new(status: Status, code: impl Into<String>, message: impl Into<String>) -> Self {
        Failure {
            status,
            code: code.into(),
            message: message.into(),
        }
    }

    /// The caller's mistake: an argument is malformed.
    pub fn invalid(code: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(STATUS_INVALID, code, message)
    }

    /// Well formed, but not something this form executes here.
    pub fn refused(code: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(STATUS_REFUSED, code, message)
    }

    /// It should have worked and did not. From a call, it poisons the instance.
    pub fn failed(code: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(STATUS_FAILED, code, message)
    }

    /// A caught panic; only the door makes one.
    pub(crate) fn panicked(message: impl Into<String>) -> Self {
        Self::new(STATUS_PANICKED, "panicked", message)
    }

    /// The answer of an instance that failed or panicked before; only the door makes one.
    pub(crate) fn poisoned(message: impl Into<String>) -> Self {
        Self::new(STATUS_POISONED, "poisoned", message)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.status {
            STATUS_INVALID => "invalid",
            STATUS_REFUSED => "refused",
            STATUS_FAILED => "failed",
            STATUS_PANICKED => "panicked",
            STATUS_POISONED => "poisoned",
            _ => "status",
        };
        write!(f, "{kind} ({}): {}", self.code, self.message)
    }
}

impl std::error::Error for Failure {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_names_kind_code_and_reason() {
        let text = Failure::refused("envelope", "K is 7").to_string();
        assert_eq!(text, "refused (envelope): K is 7");
        assert_eq!(Failure::invalid("a", "b").status, STATUS_INVALID);
        assert_eq!(Failure::failed("a", "b").status, STATUS_FAILED);
    }
}
