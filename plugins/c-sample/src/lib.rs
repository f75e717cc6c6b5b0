//! A backend in plain C. The code is in `c/`, the build script runs the C compiler; this crate only says where the
//! library is, for tests.

#![forbid(unsafe_code)]

use std::path::Path;

/// The built library.
pub fn library() -> &'static Path {
    Path::new(env!("C_SAMPLE_LIBRARY"))
}
