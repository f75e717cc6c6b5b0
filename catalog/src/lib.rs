//! The catalog: versioned structure specs, their grammar, digests and references.
//!
//! Owns what a structure *is*: its document, how that is parsed and checked, the plain graph it becomes under a
//! variant, its dims, its reference. Does not own where a structure occurs (`structures-seams`) or who realises it
//! (plugins), and names no structure: entries are directories beside `src/`, listed at build time.

#![forbid(unsafe_code)]

mod builtin;
mod catalog;
pub mod constraint;
pub mod document;
mod error;
pub mod evaluate;
mod expand;
pub mod expr;
mod infer;
pub mod invariance;
mod names;
mod parse;
pub mod reference;
mod rows;
pub mod solve;
pub mod spec;
mod validate;
pub mod verify;

pub use catalog::Catalog;
pub use error::{CatalogError, Place};
pub use evaluate::{Feed, Tensors};
pub use names::nearest;
pub use parse::selects_hardware;
pub use reference::{Call, ReferenceFn};
pub use solve::{dim_size, Dims, Shape, Shapes};
pub use spec::{Kind, Plain, Spec};
pub use verify::{verify, Check, VerifyRow};
