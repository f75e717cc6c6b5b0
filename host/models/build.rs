//! Lists the builders of `src/families`: adding a host family is adding its builder here and its file to `bindings/`,
//! nothing else.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs, io};

fn main() -> io::Result<()> {
    let manifest = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default());
    let out = PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default());
    let (mut modules, mut list) = (String::new(), String::new());
    for (stem, file) in sorted(&manifest.join("src/families"), "rs")? {
        if stem != "mod" {
            writeln!(modules, "#[path = {file:?}]\nmod {stem};").map_err(io::Error::other)?;
            writeln!(list, "    {stem}::FAMILY,").map_err(io::Error::other)?;
        }
    }
    let doc = "/// Every family this version can build, searched in order.";
    let code = format!("{modules}{doc}\npub const FAMILIES: &[&dyn Family] = &[\n{list}];\n");
    fs::write(out.join("families.rs"), code)
}

/// Stem and full path of every file of a directory with this extension, by name.
fn sorted(dir: &Path, extension: &str) -> io::Result<Vec<(String, String)>> {
    println!("cargo:rerun-if-changed={}", dir.display());
    let mut files: Vec<PathBuf> = fs::read_dir(dir)?
        .filter_map(|entry| entry.ok().map(|e| e.path()))
        .filter(|path| path.extension().is_some_and(|e| e == extension))
        .collect();
    files.sort();
    files
        .iter()
        .map(|path| {
            let stem = path.file_stem().unwrap_or_default().to_string_lossy();
            let path = path.canonicalize()?;
            Ok((stem.into_owned(), path.to_string_lossy().into_owned()))
        })
        .collect()
}
