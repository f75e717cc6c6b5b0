//! The ABI between the structures host and its backends, and the safe layer a backend is written
//! with.
//!
//! # Why it exists A *backend* is a shared library that somebody else built, with another compiler
//! at another time. The host lends it tensors and services, and executes its *forms* (realisations
//! of a structure) in seats of a model. Everything the two sides agree on is here, and nothing else
//! is shared: plugins depend on this crate alone.
//!
//! # What it owns
//! - [`abi`]: the layout. Views, vtables, statuses; plain `#[repr(C)]`, growing only at the end.
//! - [`describe`]: what a backend declares, as one JSON document, and the JSON of `probe` and
//!   `bind`.
//! - [`sdk`]: the safe layer: implement [`sdk::Backend`] and [`sdk::BoundForm`].
//! - [`door`]: the frozen abi_stable root module and [`export_backend!`], which wraps every entry
//!   so that a panic becomes a status and nothing unwinds across the boundary.
//! - [`formats`]: E4M3, E5M2, bf16, f16, NVFP4 and int8, to the last code.
//! - [`owned`]: memory that crosses the boundary, freed by its maker.
//!
//! # What it does not own It knows no structure, no host and no plugin: names of structures, slots,
//! points and spans are the catalog's and reach a plugin as text. Opening, checking and trusting a
//! library is the host's.
//!
//! # Life of a plugin
//! 1. `describe`, in a throw-away process: pure data, no device touched.
//! 2. `open`, once: the plugin gets the host's services ([`sdk::Host`]) for as long as it lives.
//! 3. `probe(form, device, shapes)`: may this form run here?
//! 4. `bind(form, span, weights, statistics, params, contract)`: packs the weights. Views are valid
//!    only meanwhile. The host then compares one call with the structure's reference on the same
//!    weights rounded through the declared [`describe::WeightFormat`], within the declared
//!    `tolerance`.
//! 5. `call`, many times, one at a time an instance: nothing is looked up and nothing is allocated.
//!    [`sdk::Failure`] tells what went wrong: `invalid` (the host's mistake) and `refused` (not
//!    this form, not here) leave the instance alive, `failed` and a panic poison it.
//! 6. The form is dropped, then the plugin is closed. Libraries are never unloaded.
//!
//! # A whole backend
//! `examples/example_backend.rs`, compiled and run as a test:
//!
//! ```
#![doc = include_str!("../examples/example_backend.rs")]
//! ```

pub mod abi;
pub mod describe;
pub mod door;
pub mod formats;
pub mod owned;
pub mod sdk;

pub use abi::{DType, API_MAJOR, API_MINOR, API_VERSION};
pub use describe::{Description, FormDecl};
pub use sdk::{Backend, BindRequest, BoundForm, Failure, Host, Tensor, TensorMut};
