//! Lists the entries beside this file, so that adding one touches nothing but its own directory.
//!
//! `<name>/structure.yaml` is the newest version, `<name>/v<k>/structure.yaml` an older one, each with an optional
//! `reference.rs`; `<name>/retired.yaml` says what became of the others.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::{env, fs, io};

fn main() -> io::Result<()> {
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default());
    let mut list = String::new();
    let mut modules = String::new();
    let mut retired = String::new();
    println!("cargo:rerun-if-changed={}", root.display());
    for dir in directories(&root)? {
        let name = name_of(&dir);
        watch(&dir);
        entry(&root, &dir, &name, &name, &mut list, &mut modules)?;
        for older in directories(&dir)? {
            watch(&older);
            let module = format!("{name}_{}", name_of(&older));
            entry(&root, &older, &name, &module, &mut list, &mut modules)?;
        }
        let notes = dir.join("retired.yaml");
        if notes.is_file() {
            watch(&notes);
            let file = shown(&root, &notes);
            let _ = writeln!(retired, "({name:?}, {file:?}, include_str!({notes:?})),");
        }
    }
    let text = format!(
        "{modules}\npub(crate) const ENTRIES: &[Entry] = &[\n{list}];\n\
         pub(crate) const RETIRED: &[(&str, &str, &str)] = &[\n{retired}];\n"
    );
    let out = PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default());
    fs::write(out.join("entries.rs"), text)
}

fn entry(
    root: &Path,
    dir: &Path,
    stored: &str,
    module: &str,
    list: &mut String,
    modules: &mut String,
) -> io::Result<()> {
    let yaml = dir.join("structure.yaml");
    if !yaml.is_file() {
        return Ok(());
    }
    watch(&yaml);
    let native = dir.join("reference.rs");
    let reference = if native.is_file() {
        watch(&native);
        let _ = writeln!(modules, "#[path = {native:?}]\nmod {module};");
        format!("Some({module}::reference)")
    } else {
        "None".into()
    };
    let file = shown(root, &yaml);
    let _ = writeln!(
        list,
        "Entry {{ stored: {stored:?}, file: {file:?}, text: include_str!({yaml:?}), reference: {reference} }},"
    );
    Ok(())
}

fn directories(of: &Path) -> io::Result<Vec<PathBuf>> {
    let mut dirs = Vec::new();
    for entry in fs::read_dir(of)? {
        let path = entry?.path();
        let known = path.join("structure.yaml").is_file()
            || path.join("retired.yaml").is_file()
            || path.join("v1").is_dir();
        if path.is_dir() && known {
            dirs.push(path);
        }
    }
    dirs.sort();
    Ok(dirs)
}

fn name_of(dir: &Path) -> String {
    dir.file_name().unwrap_or_default().to_string_lossy().into()
}

fn shown(root: &Path, file: &Path) -> String {
    let below = file.strip_prefix(root).unwrap_or(file);
    format!("catalog/{}", below.display())
}

fn watch(path: &Path) {
    println!("cargo:rerun-if-changed={}", path.display());
}
