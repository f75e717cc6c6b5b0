//! The x86 backend capped at AVX2, in a process of its own: the variable is read when the backend opens.

mod common;

#[test]
fn x86_does_what_it_declares_on_avx2_too() {
    std::env::set_var("STRUCTURES_X86_ISA", "avx2");
    common::run("x86");
}
