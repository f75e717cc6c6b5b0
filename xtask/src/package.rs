//! `cargo xtask package NAME`: a folder to give away, `target/package/NAME-VERSION`.
//!
//! The library of the crate `structures-plugin-NAME`, or with `package FILE.so` one that was built elsewhere (the folder
//! is then called by its id), its sidecar (the describe document and the digest), a README that
//! says what it declares, checksums, and a signature when `STRUCTURES_SIGNING_KEY` names an ed25519 key in PEM
//! (`openssl genpkey -algorithm ed25519`). The document comes from the same scan that a host would make, in a process
//! of its own. The folder is built aside and renamed, so half a package never has the final name.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use ed25519_dalek::pkcs8::DecodePrivateKey;
use ed25519_dalek::{Signer, SigningKey};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::run::{cargo, release_dir, root, step};

/// Names the file with the private key.
const KEY: &str = "STRUCTURES_SIGNING_KEY";

/// Builds, describes, signs and lays out.
pub fn run(args: &[String]) -> Result<(), String> {
    let [name] = args else {
        return Err(
            "usage: package NAME, for the crate structures-plugin-NAME, or package FILE.so".into(),
        );
    };
    let scan = ["-p", "structures-loader", "--bin", "structures-scan"];
    step("scanner", cargo().args(["build", "--release"]).args(scan))?;
    let built = match name.ends_with(".so") {
        true => std::path::absolute(name).map_err(|e| format!("{name}: {e}"))?,
        false => build(name)?,
    };
    let file = built
        .file_name()
        .map(|file| file.to_string_lossy().into_owned())
        .ok_or_else(|| format!("{name}: expected a file"))?;
    let bytes = std::fs::read(&built).map_err(|e| format!("{}: {e}", built.display()))?;
    let document = describe(&built)?;
    let version = text(&document, "version");
    let name = match name.ends_with(".so") {
        true => text(&document, "id"),
        false => name.clone(),
    };
    let folder = format!("{name}-{version}");

    let out = release_dir().with_file_name("package");
    let aside = out.join(format!(".{folder}.tmp"));
    let _ = std::fs::remove_dir_all(&aside);
    std::fs::create_dir_all(&aside).map_err(|e| format!("{}: {e}", aside.display()))?;
    let mut files = vec![
        (file.clone(), bytes.clone()),
        (sidecar_name(&file), sidecar(&document, &bytes)?),
    ];
    let signed = match std::env::var_os(KEY) {
        Some(path) => {
            let line = sign(Path::new(&path), &bytes)?;
            files.push((format!("{file}.sig"), line.into_bytes()));
            true
        }
        None => {
            eprintln!("== signature: skipped, {KEY} names no key");
            false
        }
    };
    files.push((
        "README.md".into(),
        readme(&document, &file, signed).into_bytes(),
    ));
    files.push(("SHA256SUMS".into(), sums(&files).into_bytes()));
    for (name, bytes) in &files {
        let path = aside.join(name);
        std::fs::write(&path, bytes).map_err(|e| format!("{}: {e}", path.display()))?;
    }
    let folder = out.join(folder);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::rename(&aside, &folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    println!(
        "{}",
        folder.strip_prefix(root()).unwrap_or(&folder).display()
    );
    for (name, bytes) in &files {
        println!("  {name} ({} bytes)", bytes.len());
    }
    Ok(())
}

/// Builds a crate of this workspace; its library.
fn build(name: &str) -> Result<PathBuf, String> {
    let package = format!("structures-plugin-{name}");
    step(
        "build",
        cargo().args(["build", "--release", "-p", &package]),
    )?;
    Ok(release_dir().join(format!("lib{}.so", package.replace('-', "_"))))
}

/// The document, from the program that scans for hosts.
fn describe(library: &Path) -> Result<Value, String> {
    let done = Command::new(release_dir().join("structures-scan"))
        .arg("scan-plugin")
        .arg(library)
        .output()
        .map_err(|e| format!("structures-scan: {e}"))?;
    let answer: Value = String::from_utf8_lossy(&done.stdout)
        .lines()
        .find_map(|line| serde_json::from_str(line).ok())
        .ok_or_else(|| format!("{}: the scan gave no answer", library.display()))?;
    let document = answer["description"].as_str().ok_or_else(|| {
        format!(
            "{}: {}: {}",
            library.display(),
            text(&answer, "code"),
            text(&answer, "reason")
        )
    })?;
    serde_json::from_str(document).map_err(|e| e.to_string())
}

fn sidecar_name(library: &str) -> String {
    library.trim_end_matches(".so").to_string() + ".plugin.json"
}

fn sidecar(document: &Value, library: &[u8]) -> Result<Vec<u8>, String> {
    let mut document = document.clone();
    document["sha256"] = digest(library).into();
    let mut text = serde_json::to_vec_pretty(&document).map_err(|e| e.to_string())?;
    text.push(b'\n');
    Ok(text)
}

/// The line that the host's loader reads: scheme, public key, signature.
fn sign(key: &Path, library: &[u8]) -> Result<String, String> {
    let bad = |e: String| format!("{}: {e}", key.display());
    let pem = std::fs::read_to_string(key).map_err(|e| bad(e.to_string()))?;
    let key = SigningKey::from_pkcs8_pem(&pem)
        .map_err(|e| bad(format!("expected an ed25519 private key in PEM ({e})")))?;
    Ok(format!(
        "ed25519 {} {}\n",
        hex(key.verifying_key().as_bytes()),
        hex(&key.sign(library).to_bytes())
    ))
}

fn readme(document: &Value, file: &str, signed: bool) -> String {
    let list = |key: &str| -> String {
        let words = document[key].as_array().into_iter().flatten();
        let words: Vec<&str> = words.filter_map(Value::as_str).collect();
        if words.is_empty() {
            "-".into()
        } else {
            words.join(", ")
        }
    };
    let mut out = format!(
        "# {} {}\n\nA backend for `structures` by {}, built for plugin API {}.\n\n\
         - architectures: {}\n- requires of the host: {}\n- optional entries: {}\n\n\
         | structure | form | format | spans | dtypes | architectures |\n|---|---|---|---|---|---|\n",
        text(document, "id"),
        text(document, "version"),
        text(document, "vendor"),
        text(document, "api"),
        list("archs"),
        list("requires"),
        list("entries"),
    );
    for form in document["forms"].as_array().into_iter().flatten() {
        let words = |key: &str| -> String {
            let words = form[key].as_array().into_iter().flatten();
            words
                .filter_map(Value::as_str)
                .collect::<Vec<_>>()
                .join(" ")
        };
        let row = [
            text(form, "structure"),
            text(form, "name"),
            text(form, "format"),
            words("spans"),
            words("dtypes"),
            match words("archs") {
                all if all.is_empty() => "all".into(),
                fewer => fewer,
            },
        ];
        let _ = writeln!(out, "| {} |", row.join(" | ")); // writing to a String does not fail
    }
    let _ = write!(
        out,
        "\n## Install\n\nCheck the files (`sha256sum -c SHA256SUMS`) and copy `{file}` and `{}`{} into one directory \
         of the plugin search path that only you can write. `structures plugins list` says what became of it.\n",
        sidecar_name(file),
        if signed {
            format!(" and `{file}.sig`")
        } else {
            String::new()
        },
    );
    if signed {
        out.push_str(
            "\nThe library is signed. Put the vendor's public key, which you got on another way, into \
             `~/.config/structures/trusted/` as a `.pub` file; `--require-signed` then takes nothing else.\n",
        );
    }
    out
}

fn sums(files: &[(String, Vec<u8>)]) -> String {
    files.iter().fold(String::new(), |mut out, (name, bytes)| {
        let _ = writeln!(out, "{}  {name}", digest(bytes)); // writing to a String does not fail
        out
    })
}

fn text(value: &Value, key: &str) -> String {
    value[key].as_str().unwrap_or("-").to_string()
}

fn digest(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_s_texts_name_what_is_in_it() {
        let document = serde_json::json!({
            "schema": 1, "id": "x", "vendor": "v", "version": "1.2.3", "api": "1.0.0",
            "archs": ["x86_64", "sm_90"],
            "forms": [{"structure": "s", "name": "f", "format": "none", "spans": ["a", "b"], "dtypes": ["f32"]},
                {"structure": "s", "name": "g", "format": "none", "spans": ["a"], "dtypes": ["f32"], "archs": ["sm_90"]}],
        });
        let file = "libstructures_plugin_x.so";
        assert_eq!(sidecar_name(file), "libstructures_plugin_x.plugin.json");
        let side: Value =
            serde_json::from_slice(&sidecar(&document, b"abc").expect("JSON")).expect("JSON");
        let known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!((&side["sha256"], &side["id"]), (&known.into(), &"x".into()));
        let readme = readme(&document, file, true);
        for fact in [
            "# x 1.2.3",
            "x86_64, sm_90",
            "| s | f | none | a b | f32 | all |",
            "| s | g | none | a | f32 | sm_90 |",
            ".so.sig",
        ] {
            assert!(readme.contains(fact), "{readme}");
        }
        assert_eq!(
            sums(&[("n".into(), b"abc".to_vec())]),
            format!("{known}  n\n")
        );
    }
}
