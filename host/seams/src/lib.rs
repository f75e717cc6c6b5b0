//! Where structures are: candidates in a module tree ([`discover`]), their place in a host graph ([`locate`]), and who
//! keeps an operation that two of them want ([`ownership`]).
//!
//! Everything is read from the structures' own documents; this crate knows no structure, no host family and no
//! plugin. It reads no weights and executes nothing. What to bind at a seam, and whether, is decided above it.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod binding;
mod dims;
pub mod discover;
pub mod facts;
pub mod locate;
pub mod ownership;
pub mod refusal;
mod roles;
pub mod seam;
mod unsaid;

pub use binding::{seam_from_binding, BoundSeam};
pub use discover::discover;
pub use facts::HostFacts;
pub use locate::{locate, locate_anchored, Located, LocatedSpan, Locator};
pub use ownership::{resolve_ownership, Claim, Owned, Ownership};
pub use refusal::Refusal;
pub use seam::{Assumption, Discovery, Seam, SlotWeight, Source, WeightAddress};
