//! A plugin for tests, built once, that is good or bad in one chosen way.
//!
//! Which fault it shows is said by a trailer appended to a copy of the library file, `STRUCTURES_FIXTURE:<fault>:<id>`
//! and a newline. An ELF file does not mind; and because the loader opens content-addressed copies, a file's name
//! does not reach the plugin, its bytes do. It finds its own file through `/proc/self/maps`.
//!
//! Two faces: the cdylib is the plugin; the rlib is what tests link to make copies ([`fixture_copy`]) and to iterate
//! over the faults ([`Fault::ALL`]). It is never named `libstructures_plugin_*`, so no search of a build tree finds it.
//!
//! Without a fault it executes, correctly, `decoder_ffn`, `linear_proj` and `qkv_pack` in f32, each unquantised and
//! with int8 weights, and is written for being obviously right, not for speed.
//!
//! Beside it, one C file for the C door, built by tests as they need it ([`c_fixture`]).

mod c;
mod copies;
mod fault;
mod kernels;
mod matrix;
mod plugin;
mod trailer;

pub use c::{c_compiler, c_fixture, c_fixture_by, c_fixture_with};
pub use copies::{fixture_copy, fixture_copy_as, library};
pub use fault::Fault;
pub use trailer::{trailer, Trailer};
