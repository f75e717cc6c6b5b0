//! The x86 backend. It is judged where it loads: elsewhere the loader names the instructions that are not there.

mod common;

#[test]
fn x86_does_what_it_declares() {
    common::run("x86");
}
