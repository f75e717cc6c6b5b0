//! The validator for plugin authors: everything a host relies on, tried on one library.
//!
//! # Why it exists
//! A vendor builds a plugin without us. Before an operator sees it, its author can ask what a host would find wrong,
//! and more than a host would: what happens at the edges of the declaration, with arguments no host passes, on several
//! threads, with memory watched. A crash or a hang is an answer here like any other.
//!
//! # What it owns
//! - [`run`]: the plan, and the parent of one child process a check.
//! - [`child`]: the other end of that, reached through a hidden sub-command of the program.
//! - [`checks`]: the checks, one file each.
//! - `place`: the private directory of a run, and what a check may leave behind.
//! - [`room`]: tensors with watched room around them.
//! - [`code`]: what a check answers with.
//!
//! # What it does not own
//! Cases, references and the judgement of numbers are the suite's and the catalog's; opening a plugin, and calling one
//! as no host would, are the loader's. It knows no structure and no plugin by name.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

pub mod checks;
pub mod child;
pub mod code;
mod place;
pub mod room;
pub mod run;

pub use child::{check_main, SUBCOMMAND};
pub use code::Code;
pub use run::{conform, ConformError, Options, Outcome, Report, Row};
