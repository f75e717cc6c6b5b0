//! `<name>.plugin.json` beside `<name>.so`: the `describe` document and the digest of the library, readable without
//! opening it.
//!
//! It lets a host refuse a plugin for its API version or architecture before any of its code runs, and shows what a
//! library for another machine declares. It never makes a plugin acceptable: the bytes must have the digest it
//! states, and the library must describe itself in the same words, else the file is refused.

use std::io::Read;
use std::path::{Path, PathBuf};

use structures_plugin_api::describe::Description;

use crate::code::{Code, Refusal};
use crate::document;
use crate::open::LONGEST_DOCUMENT;
use crate::paths;

/// A sidecar that was read.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Sidecar {
    /// Digest it states, lower-case hexadecimal.
    pub(crate) sha256: String,
    /// Document it states.
    pub(crate) description: Description,
}

/// Where the sidecar of `library` would be.
pub(crate) fn path_of(library: &Path) -> PathBuf {
    library.with_extension("plugin.json")
}

impl Sidecar {
    /// Reads the sidecar of `library`, if there is one.
    ///
    /// # Errors
    /// `sidecar_invalid` for one that others may write, or that is not a document with a digest.
    pub(crate) fn read(library: &Path) -> Result<Option<Self>, Refusal> {
        let path = path_of(library);
        if path.symlink_metadata().is_err() {
            return Ok(None);
        }
        let invalid = |why: String| Code::SidecarInvalid.because(format!("{}: {why}", name(&path)));
        let opened = paths::open(&path).map_err(|r| invalid(r.to_string()))?;
        let mut text = String::new();
        opened
            .file
            .take(LONGEST_DOCUMENT as u64)
            .read_to_string(&mut text)
            .map_err(|e| invalid(e.to_string()))?;
        parse(&text).map(Some).map_err(invalid)
    }

    /// Compares the stated digest with the file's.
    ///
    /// # Errors
    /// `sidecar_mismatch`.
    pub(crate) fn covers(&self, library: &Path, sha256: &str) -> Result<(), Refusal> {
        if self.sha256 == sha256 {
            return Ok(());
        }
        Err(Code::SidecarMismatch.because(format!(
            "{} was written for the bytes {}, the library has {sha256}",
            name(&path_of(library)),
            self.sha256
        )))
    }

    /// Compares the stated document with the library's own.
    ///
    /// # Errors
    /// `sidecar_mismatch`, naming the fields that differ.
    pub(crate) fn agrees(&self, library: &Path, found: &Description) -> Result<(), Refusal> {
        if self.description == *found {
            return Ok(());
        }
        Err(Code::SidecarMismatch.because(format!(
            "{} and the library differ in {}",
            name(&path_of(library)),
            differing(&self.description, found).join(", ")
        )))
    }
}

fn parse(text: &str) -> Result<Sidecar, String> {
    let mut value: serde_json::Value = serde_json::from_str(text).map_err(|e| e.to_string())?;
    let sha256 = value
        .as_object_mut()
        .and_then(|map| map.shift_remove("sha256"))
        .and_then(|digest| digest.as_str().map(str::to_string))
        .filter(|d| d.len() == 64 && d.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')))
        .ok_or("expected `sha256` with 64 lower-case hexadecimal digits")?;
    let description: Description = serde_json::from_value(value).map_err(|e| e.to_string())?;
    document::check(&description).map_err(|r| r.reason)?;
    Ok(Sidecar {
        sha256,
        description,
    })
}

/// Names of the fields that differ.
fn differing(a: &Description, b: &Description) -> Vec<String> {
    let fields = |d: &Description| match serde_json::to_value(d) {
        Ok(serde_json::Value::Object(map)) => map,
        _ => serde_json::Map::new(),
    };
    let (a, b) = (fields(a), fields(b));
    let mut names: Vec<String> = a.keys().chain(b.keys()).cloned().collect();
    names.sort();
    names.dedup();
    names.retain(|name| a.get(name) != b.get(name));
    names.iter().map(|name| format!("`{name}`")).collect()
}

fn name(path: &Path) -> String {
    path.file_name()
        .unwrap_or(path.as_os_str())
        .to_string_lossy()
        .into_owned()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const DIGEST: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    fn text(edit: impl Fn(&mut serde_json::Value)) -> String {
        let mut value =
            serde_json::to_value(Description::new("p", "v", "1.0.0")).expect("serialises");
        value["sha256"] = DIGEST.into();
        edit(&mut value);
        value.to_string()
    }

    #[test]
    fn a_sidecar_is_the_document_and_a_digest() {
        let good = parse(&text(|_| ())).expect("parses");
        assert_eq!(good.sha256, DIGEST);
        assert_eq!(good.description, Description::new("p", "v", "1.0.0"));
        for bad in [
            text(|v| v["sha256"] = "ba78".into()),
            text(|v| v["sha256"] = DIGEST.to_uppercase().into()),
            text(|v| v["sha256"] = 7.into()),
            text(|v| v["id"] = "No Id".into()),
            text(|v| v["forms"] = 7.into()),
            "[]".into(),
            "nonsense".into(),
            serde_json::to_string(&Description::new("p", "v", "1.0.0")).expect("serialises"),
        ] {
            assert!(parse(&bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn disagreement_names_the_fields() {
        let sidecar = parse(&text(|v| v["vendor"] = "w".into())).expect("parses");
        let library = Path::new("/d/a.b.so");
        let found = Description::new("p", "v", "1.0.1");
        let refusal = sidecar.agrees(library, &found).expect_err("differs");
        assert_eq!(refusal.code, Code::SidecarMismatch);
        for fact in ["a.b.plugin.json", "`vendor`", "`version`"] {
            assert!(refusal.reason.contains(fact), "{refusal}");
        }
        assert!(!refusal.reason.contains("`id`"), "{refusal}");
        assert!(sidecar.covers(library, DIGEST).is_ok());
        let refusal = sidecar.covers(library, "00").expect_err("another file");
        assert!(refusal.reason.contains(DIGEST), "{refusal}");
    }

    #[test]
    fn an_absent_one_is_fine_and_a_public_one_is_not() {
        let keep = tempfile::tempdir().expect("temporary directory");
        let library = keep.path().join("a.so");
        assert_eq!(Sidecar::read(&library), Ok(None));
        let file = keep.path().join("a.plugin.json");
        std::fs::write(&file, text(|_| ())).expect("write");
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)).expect("chmod");
        assert!(matches!(Sidecar::read(&library), Ok(Some(_))));
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o666)).expect("chmod");
        let refusal = Sidecar::read(&library).expect_err("public");
        assert_eq!(refusal.code, Code::SidecarInvalid);
        assert!(refusal.reason.contains("path_world_writable"), "{refusal}");
    }
}
