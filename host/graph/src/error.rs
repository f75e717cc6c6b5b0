//! Errors of this crate.

/// What can go wrong with a tree, a graph or a run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GraphError {
    /// The graph breaks its normal form.
    #[error("graph `{phase}` is malformed at {at}: {what}")]
    Malformed {
        /// Phase.
        phase: String,
        /// Value or operation.
        at: String,
        /// What, expected and found.
        what: String,
    },
    /// A parameter is not there.
    #[error("parameter `{param}` is missing: {reason}")]
    MissingParam {
        /// Which.
        param: String,
        /// Why.
        reason: String,
    },
    /// A parameter was let go for good, and a host operation reads it.
    #[error("parameter `{param}` was released for good; a host operation cannot read it: open the model again")]
    Released {
        /// Which.
        param: String,
    },
    /// A tensor has another shape or dtype than the graph says.
    #[error("`{what}`: expected {expected}, found {found}")]
    Mismatch {
        /// Which.
        what: String,
        /// Expected.
        expected: String,
        /// Found.
        found: String,
    },
    /// An operation failed.
    #[error("{op} at `{at}` failed: {source}")]
    Kernel {
        /// Operation.
        op: String,
        /// Where.
        at: String,
        /// Cause.
        #[source]
        source: Box<candle_core::Error>,
    },
    /// Operands or attributes do not fit an operation.
    #[error("{op} at `{at}`: {what}")]
    Operands {
        /// Operation.
        op: String,
        /// Where (empty when a kernel is called outside a graph).
        at: String,
        /// What does not fit: shapes, attribute, expected and found.
        what: String,
    },
    /// A runner of an installed span failed beyond recovery.
    #[error("span `{name}` failed: {reason}")]
    Span {
        /// Which.
        name: String,
        /// Why.
        reason: String,
    },
    /// The memory of a place is gone, and with it what lay there.
    #[error("`{place}` is lost: {reason}")]
    PlaceLost {
        /// Which.
        place: String,
        /// Why.
        reason: String,
    },
    /// A place was lost with a region that had its home there: what the state held is gone.
    #[error(
        "the state is lost: its region `{region}` lay at `{place}`, which is gone ({reason}); reset it and run its tokens \
         again"
    )]
    StateLost {
        /// The first region.
        region: String,
        /// Where.
        place: String,
        /// Why.
        reason: String,
    },
    /// A step cannot be captured in this form; the session runs it.
    #[error("`{at}` cannot be captured: {reason}")]
    Capture {
        /// Value, operation or window.
        at: String,
        /// Stable code.
        code: &'static str,
        /// Why, expected and found.
        reason: String,
    },
    /// A guard fired in a captured step, which has no way round it: the step was not made.
    #[error("a guard fired in the captured step: `{name}`: {reason}")]
    Guard {
        /// The span.
        name: String,
        /// Code and reason.
        reason: String,
    },
    /// A window of a captured step was asked for and there is none of this name.
    #[error("no window `{name}`; there are: {known}")]
    NoWindow {
        /// Name.
        name: String,
        /// Names there are.
        known: String,
    },
    /// What is written to a window has another form than the captured one.
    #[error("window `{name}`: expected {expected}, given {given}")]
    WindowForm {
        /// Window.
        name: String,
        /// Shape, type and device.
        expected: String,
        /// The same of what was given.
        given: String,
    },
    /// A file of a module tree cannot be read.
    #[error("{path}: {reason}")]
    Tree {
        /// File.
        path: String,
        /// Why, and what to do.
        reason: String,
    },
}
