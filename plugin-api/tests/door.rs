//! The Rust door as a host uses it: the example is built as a library of its own, opened, checked
//! and called.

use std::ffi::c_void;
use std::path::PathBuf;

use abi_stable::library::lib_header_from_path;
use structures_plugin_api::abi::{Bytes, Error, PluginVTable, API_VERSION, STATUS_OK};
use structures_plugin_api::describe::Description;
use structures_plugin_api::door::PluginRootRef;
use structures_plugin_api::owned::read_bytes;

/// `target/<profile>/examples`, beside the `deps` this test runs from.
fn example() -> PathBuf {
    let exe = std::env::current_exe().expect("a path");
    let profile = exe
        .parent()
        .and_then(|deps| deps.parent())
        .expect("target/<profile>/deps");
    let name = libloading_name("example_backend");
    let path = profile.join("examples").join(name);
    assert!(
        path.exists(),
        "{}: `cargo build --release --examples` makes it",
        path.display()
    );
    path
}

fn libloading_name(stem: &str) -> String {
    format!(
        "{}{stem}{}",
        std::env::consts::DLL_PREFIX,
        std::env::consts::DLL_SUFFIX
    )
}

#[test]
fn a_library_is_opened_its_layout_checked_and_its_tables_exchanged() {
    let header = lib_header_from_path(&example()).expect("an abi_stable library");
    assert!(header.layout().is_some(), "the layout constant is exported");
    let root = header
        .init_root_module::<PluginRootRef>()
        .expect("the same root module");
    assert_eq!(
        (root.id().as_str(), root.version().as_str()),
        ("example", "0.1.0")
    );
    assert_eq!(root.api().as_str(), API_VERSION);

    // SAFETY: null is what a host gives while it only describes.
    let table = unsafe { root.exchange()(std::ptr::null::<c_void>()) }.cast::<PluginVTable>();
    // SAFETY: the door answers null or a table that lives for ever.
    let table = unsafe { table.as_ref() }.expect("a table");
    let (mut out, mut error) = (Bytes::EMPTY, Error::EMPTY);
    // SAFETY: the table is the library's own, both out-parameters are writable.
    let json = unsafe {
        assert_eq!((table.describe)(&mut out, &mut error), STATUS_OK);
        read_bytes(&mut out)
    };
    let description: Description = serde_json::from_slice(&json).expect("a document");
    assert_eq!((description.schema, description.forms.len()), (1, 1));
}
