//! The crate's error enum: what is wrong with the surroundings or with a call, as opposed to a refusal of one
//! candidate file, which is a value ([`crate::Refusal`]).

use std::path::PathBuf;

/// What stops a scan as a whole.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoaderError {
    /// A directory somebody named cannot be searched.
    #[error("plugin directory {} (from {origin}): {reason}", path.display())]
    SearchDir {
        /// The directory.
        path: PathBuf,
        /// Who named it.
        origin: &'static str,
        /// What is wrong.
        reason: String,
    },
    /// There is nowhere to put private copies.
    #[error(
        "no cache directory: expected a home directory or STRUCTURES_CACHE_DIR, found neither"
    )]
    NoCacheDir,
    /// The cache cannot be written.
    #[error("plugin cache {}: cannot {action}: {source}; free some space or set STRUCTURES_CACHE_DIR to a writable directory", path.display())]
    Cache {
        /// The file or directory.
        path: PathBuf,
        /// What was attempted.
        action: &'static str,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A lock file cannot be read, understood or written.
    #[error("lock file {}: {reason}", path.display())]
    Lock {
        /// The file.
        path: PathBuf,
        /// Expected and found.
        reason: String,
    },
    /// The trusted keys cannot be read.
    #[error("trusted key {}: {reason}", path.display())]
    TrustedKeys {
        /// The file or the directory.
        path: PathBuf,
        /// Expected and found.
        reason: String,
    },
    /// A tensor's shape and its memory contradict each other.
    #[error("tensor: {reason}")]
    Tensor {
        /// Expected and found.
        reason: String,
    },
    /// The thread pool was sized before.
    #[error("thread pool: expected to be sized before its first use, found {current} threads running, {requested} requested")]
    PoolRunning {
        /// Threads it has.
        current: usize,
        /// Threads asked for.
        requested: usize,
    },
}
