//! The committed header: fresh, complete, and accepted by C and C++ compilers with warnings as
//! errors.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use structures_plugin_api::abi;
use structures_plugin_header::{committed, definitions, generate, LAYOUTS, NAMES};

#[test]
fn the_committed_header_is_what_the_definitions_make() {
    let fresh = generate().expect("generates");
    let old = std::fs::read_to_string(committed()).expect("committed");
    let different = fresh
        .lines()
        .zip(old.lines())
        .enumerate()
        .find(|(_, (fresh, old))| fresh != old);
    assert!(
        fresh == old,
        "run `cargo xtask header`; first difference: {different:?}"
    );
}

#[test]
fn every_definition_has_a_c_name_and_every_field_an_assertion() {
    let text = std::fs::read_to_string(definitions()).expect("abi.rs");
    let text = text.split("#[cfg(test)]").next().expect("text");
    // Told in words of its own in the header.
    let apart = ["API_VERSION", "C_SYMBOL"];
    let mut defined = BTreeSet::new();
    for line in text.lines().filter_map(|l| l.strip_prefix("pub ")) {
        let name = ["const ", "type ", "struct ", "enum "]
            .iter()
            .find_map(|kind| line.strip_prefix(kind))
            .and_then(|rest| rest.split([':', ' ', ';', '=']).next());
        defined.extend(name.filter(|n| !apart.contains(n)));
    }
    let named: BTreeSet<&str> = NAMES.iter().map(|(rust, _)| *rust).collect();
    assert_eq!(defined, named);
    for layout in LAYOUTS {
        let start = format!("pub struct {} {{", layout.name);
        let body = text.split_once(start.as_str()).expect("defined").1;
        let body = body.split("\n}").next().expect("a body");
        let fields: Vec<&str> = body
            .lines()
            .filter_map(|l| l.strip_prefix("    pub ")?.split(':').next())
            .collect();
        let listed: Vec<&str> = layout.fields.iter().map(|(f, _)| *f).collect();
        assert_eq!(fields, listed, "{}", layout.name);
    }
    let structs = text.matches("pub struct ").count();
    assert_eq!(structs, LAYOUTS.len());
}

/// What 1.0 fixed, in numbers that do not come from the compiler.
#[test]
fn the_layout_of_1_0_never_moves() {
    let size = |name: &str| LAYOUTS.iter().find(|l| l.name == name).expect("listed");
    assert_eq!(size("TensorView").size, 152);
    for (name, bytes) in [
        ("PluginVTable", 64),
        ("FormVTable", 32),
        ("DeviceVTable", 88),
        ("HostVTable", 56),
    ] {
        assert_eq!(size(name).size_1_0, Some(bytes), "{name}");
    }
    for (name, bytes) in [
        ("Str", 16),
        ("Bytes", 32),
        ("Error", 64),
        ("Contract", 32),
        ("BindArgs", 112),
        ("CallCtx", 24),
        ("FormFacts", 24),
    ] {
        assert_eq!(size(name).size, bytes, "{name}");
    }
    assert_eq!(
        abi::C_SYMBOL,
        format!("structures_plugin_v{}", abi::API_MAJOR)
    );
}

const WARNINGS: [&str; 5] = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only"];

fn compile(compiler: &str, standard: &str, source: &Path) -> Result<(), String> {
    let include = committed().parent().expect("a directory").to_path_buf();
    let out = Command::new(compiler)
        .arg(format!("-std={standard}"))
        .args(WARNINGS)
        .arg("-I")
        .arg(include)
        .arg(source)
        .output()
        .map_err(|e| format!("{compiler}: {e}"))?;
    match out.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&out.stderr).into_owned()),
    }
}

const SOURCE: &str = "#include \"structures_plugin.h\"
#include \"structures_plugin.h\"
static const structures_form_vtable form = {0};
static structures_plugin_vtable table = {0};
const structures_plugin_vtable *structures_plugin_v1(const structures_host_vtable *host)
{
    if (host && host->struct_size < STRUCTURES_HOST_VTABLE_SIZE_1_0) return NULL;
    table.struct_size = sizeof table;
    table.form = &form;
    return &table;
}
";

#[test]
fn c_and_cpp_compilers_take_it_without_a_warning() {
    let dir = tempfile::tempdir().expect("temporary directory");
    let (c, cpp) = (dir.path().join("a.c"), dir.path().join("a.cpp"));
    std::fs::write(&c, SOURCE).expect("write");
    // `{0}` leaves members out, which C++ warns about.
    std::fs::write(&cpp, SOURCE.replace("{0}", "{}")).expect("write");
    let compilers = [("cc", "c11", &c), ("cc", "c17", &c), ("c++", "c++17", &cpp)];
    for (compiler, standard, source) in compilers {
        if let Err(message) = compile(compiler, standard, source) {
            // The README promises a C compiler, not a C++ one.
            if compiler == "c++" && Command::new(compiler).arg("--version").output().is_err() {
                println!("skipped: C++17, no `c++` here");
                continue;
            }
            panic!("{compiler} -std={standard}: {message}");
        }
    }
    for (compiler, standard, source) in [("clang", "c11", &c), ("clang++", "c++17", &cpp)] {
        match Command::new(compiler).arg("--version").output() {
            Ok(_) => compile(compiler, standard, source).expect(compiler),
            Err(e) => println!("skipped: {compiler} {standard}, {e}"),
        }
    }
}

#[test]
fn a_layout_that_differs_does_not_compile() {
    let dir = tempfile::tempdir().expect("temporary directory");
    let header = std::fs::read_to_string(committed()).expect("committed");
    let broken = header.replacen("uint32_t rank;", "uint64_t rank;", 1);
    assert_ne!(header, broken);
    std::fs::write(dir.path().join("broken.h"), broken).expect("write");
    let source = dir.path().join("a.c");
    std::fs::write(&source, "#include \"broken.h\"\n").expect("write");
    let message = compile("cc", "c11", &source).expect_err("refused");
    assert!(message.contains("structures_tensor_view"), "{message}");
}
