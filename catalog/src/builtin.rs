//! The entries that ship with the crate, listed at build time from the directories beside it.

use crate::reference::ReferenceFn;

/// A document and its native reference.
#[derive(Debug)]
pub(crate) struct Entry {
    /// Directory it is stored under.
    pub stored: &'static str,
    /// For messages.
    pub file: &'static str,
    /// The document.
    pub text: &'static str,
    /// Native reference.
    pub reference: Option<ReferenceFn>,
}

mod list {
    use super::Entry;

    include!(concat!(env!("OUT_DIR"), "/entries.rs"));
}

pub(crate) use list::{ENTRIES, RETIRED};

/// Name, version and digest of every entry that ships, one a line: bytes change only together with the version.
pub(crate) const DIGESTS: &str = include_str!("../digests.txt");
