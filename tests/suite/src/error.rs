//! Why the suite itself cannot go on.

/// Errors of the suite, never of a plugin.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SuiteError {
    /// The plugin does not load.
    #[error("{path}: expected a plugin, found `{code}`: {reason}")]
    Plugin {
        /// File.
        path: String,
        /// Code of the refusal.
        code: String,
        /// For people.
        reason: String,
    },
    /// A file cannot be read or copied.
    #[error("{path}: {source}")]
    File {
        /// File.
        path: String,
        /// What the system says.
        source: std::io::Error,
    },
    /// A line of an ignore list.
    #[error(
        "{path}:{line}: expected `<structure> <form> [<span> [<case>]] # reason`, found `{found}`"
    )]
    Ignore {
        /// File.
        path: String,
        /// Line, from 1.
        line: usize,
        /// The line.
        found: String,
    },
    /// The loader.
    #[error(transparent)]
    Loader(#[from] structures_loader::LoaderError),
    /// The catalog.
    #[error(transparent)]
    Catalog(#[from] structures_catalog::CatalogError),
    /// The host's bind parity.
    #[error(transparent)]
    Host(#[from] structures::Error),
    /// A tensor.
    #[error("tensor: {0}")]
    Tensor(#[from] candle_core::Error),
    /// A params document.
    #[error("params: {0}")]
    Params(#[from] serde_json::Error),
}
