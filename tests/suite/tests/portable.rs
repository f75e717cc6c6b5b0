//! The portable backend, which has an unquantised form of every region.

#![allow(clippy::expect_used)] // a test that panics has failed

mod common;

use structures_catalog::Catalog;
use structures_suite::{gaps, Executor};

#[test]
fn portable_does_what_it_declares() {
    common::run("portable");
}

#[test]
fn portable_has_an_unquantised_form_of_every_span() {
    let catalog = Catalog::builtin().expect("the built-in catalog loads");
    let plugin = common::built("portable");
    let gaps = gaps(plugin.description(), &catalog, "none").expect("entries expand");
    assert!(gaps.is_empty(), "no form of {gaps:#?}");
}
