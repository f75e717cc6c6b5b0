//! Errors of the doors. A refusal of one seam, unit or plugin is a value in the receipt; what is here ends the door.

use structures_bindings::BindingError;
use structures_catalog::CatalogError;
use structures_graph::GraphError;
use structures_loader::LoaderError;
use structures_models::ModelError;

/// What ends a door.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The catalog does not load or does not know an entry.
    #[error(transparent)]
    Catalog(#[from] CatalogError),
    /// A binding file breaks a rule, or none has the name asked for.
    #[error(transparent)]
    Binding(#[from] BindingError),
    /// The host path failed.
    #[error(transparent)]
    Graph(#[from] GraphError),
    /// The checkpoint does not open or does not run.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Plugins cannot be searched at all.
    #[error(transparent)]
    Loader(#[from] LoaderError),
    /// Statistics cannot be measured or reduced.
    #[error(transparent)]
    Stats(#[from] crate::stats::StatsError),
    /// A gate's arguments make no sense.
    #[error(transparent)]
    Gate(#[from] crate::gates::GateError),
    /// A scheme cannot be used.
    #[error(transparent)]
    Scheme(#[from] crate::schemes::SchemeError),
    /// Samples cannot be read.
    #[error(transparent)]
    Samples(#[from] crate::samples::SampleError),
    /// A scale cannot be recorded.
    #[error(transparent)]
    Precision(#[from] crate::precision::PrecisionError),
    /// A record cannot be digested.
    #[error(transparent)]
    Digest(#[from] crate::digest::DigestError),
    /// A file cannot be written.
    #[error(transparent)]
    Write(#[from] crate::fsio::WriteError),
    /// An argument makes no sense.
    #[error("{message}")]
    Invalid {
        /// Stable code.
        code: &'static str,
        /// What, expected and found, what to do.
        message: String,
    },
    /// The command worked and its answer is no.
    #[error("{message}")]
    Refused {
        /// Stable code.
        code: String,
        /// Why, and what to do.
        message: String,
    },
    /// A file cannot be read or written.
    #[error("{path}: {reason}")]
    Io {
        /// File.
        path: String,
        /// Why, and what to do.
        reason: String,
    },
    /// The unmodified host is not repeatable, so nothing can be judged against it.
    #[error("the unmodified host gave two different results for the same input ({detail}); nothing can be judged against it")]
    Control {
        /// Where.
        detail: String,
    },
}

impl Error {
    /// Stable code for JSON errors.
    pub fn code(&self) -> String {
        match self {
            Error::Catalog(e) => e.code().to_string(),
            Error::Binding(e) => e.code().to_string(),
            Error::Graph(e) | Error::Model(ModelError::Graph(e)) => graph_code(e).into(),
            Error::Model(e) => e.code().to_string(),
            Error::Loader(e) => loader_code(e).into(),
            Error::Stats(e) => e.code().into(),
            Error::Gate(e) => e.code().into(),
            Error::Scheme(e) => e.code().into(),
            Error::Samples(e) => e.code().into(),
            Error::Precision(e) => e.code().into(),
            Error::Digest(_) => "record_invalid".into(),
            Error::Write(_) => "io".into(),
            Error::Invalid { code, .. } => (*code).to_string(),
            Error::Refused { code, .. } => code.clone(),
            Error::Io { .. } => "io".into(),
            Error::Control { .. } => "control_differs".into(),
        }
    }

    /// Whether the command worked and its answer is no.
    pub fn is_refusal(&self) -> bool {
        matches!(self, Error::Refused { .. })
    }

    /// An invalid argument.
    pub fn invalid(code: &'static str, message: impl Into<String>) -> Self {
        Error::Invalid {
            code,
            message: message.into(),
        }
    }

    /// A refusal.
    pub fn refused(code: impl Into<String>, message: impl Into<String>) -> Self {
        Error::Refused {
            code: code.into(),
            message: message.into(),
        }
    }
}

/// One code for one event, whichever door it comes through.
fn graph_code(e: &GraphError) -> &'static str {
    match e {
        GraphError::Tree { .. } => "malformed",
        GraphError::PlaceLost { .. } => "device_lost",
        GraphError::StateLost { .. } => "state_lost",
        GraphError::Span { reason, .. } if names_a_code(reason) => "strict_fallback",
        GraphError::Capture { code, .. } => code,
        GraphError::Guard { .. } => "capture_guard",
        GraphError::Released { .. } => "released_for_good",
        GraphError::NoWindow { .. } => "window_unknown",
        GraphError::WindowForm { .. } => "window_form",
        _ => "host_failed",
    }
}

/// A seat's own reason is `code: text`; a plan's or a session's is prose.
fn names_a_code(reason: &str) -> bool {
    let word = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    reason
        .split_once(": ")
        .is_some_and(|(code, _)| !code.is_empty() && code.chars().all(word))
}

fn loader_code(e: &LoaderError) -> &'static str {
    match e {
        LoaderError::NoCacheDir | LoaderError::Cache { .. } => "cache_unwritable",
        LoaderError::Lock { .. } => "lock_invalid",
        LoaderError::TrustedKeys { .. } => "trusted_keys",
        LoaderError::PoolRunning { .. } => "pool_running",
        LoaderError::Tensor { .. } => "argument",
        _ => "plugins_unreadable",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(reason: &str) -> GraphError {
        GraphError::Span {
            name: "a.b".into(),
            reason: reason.into(),
        }
    }

    #[test]
    fn a_strict_seat_has_one_code_through_both_doors() {
        let missed = "rt_width: expected 4, found 5";
        for (reason, code) in [
            (missed, "strict_fallback"),
            (
                "planted_error: planted in the third call",
                "strict_fallback",
            ),
            ("its runner made 2 outputs, 1 are declared", "host_failed"),
            ("operation `x`: taken twice", "host_failed"),
        ] {
            assert_eq!(Error::from(span(reason)).code(), code, "{reason}");
            let through_model = Error::from(ModelError::from(span(reason)));
            assert_eq!(through_model.code(), code, "{reason}");
        }
    }

    #[test]
    fn what_stops_a_scan_is_told_apart() {
        let cases = [
            (LoaderError::NoCacheDir, "cache_unwritable"),
            (
                LoaderError::PoolRunning {
                    current: 2,
                    requested: 4,
                },
                "pool_running",
            ),
            (
                LoaderError::SearchDir {
                    path: "no-such".into(),
                    origin: "--plugins",
                    reason: "it is not a directory".into(),
                },
                "plugins_unreadable",
            ),
        ];
        for (e, code) in cases {
            assert_eq!(Error::from(e).code(), code);
        }
    }
}
