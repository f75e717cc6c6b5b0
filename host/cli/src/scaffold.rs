//! A new plugin: which files it has, and how a tree of files is written whole or not at all.
//!
//! The templates live with the interface they are written against (`plugin-api/templates`) and are part of this
//! program, so that a scaffold fits the host that wrote it. Placeholders are `@WORD@`.
//!
//! Owns the rules for a plugin's name. Not here: what the command prints.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::args::Lang;

/// Longest id, as the loader has it.
const LONGEST: usize = 64;

/// Names whose package or library would be one of the interface's own crates.
const RESERVED: &[&str] = &["api", "door", "header"];

/// The interface that C sources are compiled against.
const HEADER: &str = include_str!("../../../plugin-api/include/structures_plugin.h");

/// Why a plugin cannot have this name.
#[derive(Debug, PartialEq, Eq)]
pub enum BadName {
    /// Not an id.
    Invalid(String),
    /// Taken by the interface itself.
    Reserved,
}

/// The rule for ids, and what a crate of that name may not be called.
pub fn check_name(name: &str) -> Result<(), BadName> {
    let invalid = |why: String| Err(BadName::Invalid(why));
    if name.is_empty() || name.len() > LONGEST {
        return invalid(format!("{} bytes, expected 1 to {LONGEST}", name.len()));
    }
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    if let Some(c) = name.chars().find(|c| !plain(*c) && !matches!(c, '_' | '-')) {
        return invalid(format!("{c:?} is not one of a-z, 0-9, _ and -"));
    }
    if !name.starts_with(plain) {
        return invalid("it starts with neither a letter nor a digit".into());
    }
    if RESERVED.contains(&name.replace('-', "_").as_str()) {
        return Err(BadName::Reserved);
    }
    Ok(())
}

/// Where the Rust interface comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Api {
    /// A checkout.
    Path(String),
    /// A registry.
    Version(String),
}

impl Api {
    /// The value of the dependency in `Cargo.toml`.
    fn dependency(&self) -> String {
        match self {
            Api::Path(path) => format!("{{ path = {} }}", quoted(path)),
            Api::Version(version) => quoted(version),
        }
    }

    /// For people.
    pub fn text(&self) -> String {
        match self {
            Api::Path(path) => format!("from `{path}`"),
            Api::Version(version) => format!("version {version} of the registry"),
        }
    }
}

/// A TOML basic string; JSON's escapes are among TOML's.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// The name of the library without `lib` and `.so`.
pub fn library(name: &str) -> String {
    format!("structures_plugin_{}", name.replace('-', "_"))
}

/// Path and content of every file.
pub fn files(name: &str, lang: Lang, api: &Api) -> Vec<(&'static str, String)> {
    let library = library(name);
    let api_text = match lang {
        Lang::Rust => api.text(),
        Lang::C => header_version().to_string(),
    };
    let made = |template: &str| {
        template
            .replace("@ID@", name)
            .replace("@LIB_FILE@", &format!("lib{library}"))
            .replace("@LIB@", &library)
            .replace("@API@", &api.dependency())
            .replace("@API_TEXT@", &api_text)
    };
    macro_rules! templates {
        ($dir:literal: $($to:literal <- $from:literal),* $(,)?) => {
            vec![$(($to, made(include_str!(concat!("../../../plugin-api/templates/", $dir, "/", $from))))),*]
        };
    }
    match lang {
        Lang::Rust => templates!("rust":
            ".gitignore" <- "gitignore",
            "Cargo.toml" <- "Cargo.toml.in",
            "README.md" <- "README.md",
            "src/lib.rs" <- "lib.rs",
        ),
        Lang::C => {
            let mut files = templates!("c":
                ".gitignore" <- "gitignore",
                "Makefile" <- "Makefile",
                "README.md" <- "README.md",
                "plugin.c" <- "plugin.c",
                "test.c" <- "test.c",
            );
            files.extend(
                [
                    ("json.c", include_str!("../../../plugin-api/c/json.c")),
                    ("json.h", include_str!("../../../plugin-api/c/json.h")),
                    ("support.h", include_str!("../../../plugin-api/c/support.h")),
                ]
                .map(|(name, text)| (name, text.into())),
            );
            files.push(("structures_plugin.h", HEADER.into()));
            files
        }
    }
}

/// The API version as the header states it.
fn header_version() -> &'static str {
    const MARK: &str = "STRUCTURES_API_VERSION \"";
    let after = HEADER.split_once(MARK).map_or("", |(_, rest)| rest);
    after.split_once('"').map_or("", |(version, _)| version)
}

/// Why a tree was not written.
#[derive(Debug)]
pub enum NotWritten {
    /// Something is there.
    Occupied(&'static str),
    /// It cannot be written.
    Io {
        /// What could not be written.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// Writes all files below `dir`, which is new or an empty directory: first beside it, then renamed, so that nobody
/// sees a part and a failure leaves nothing.
pub fn write(dir: &Path, files: &[(&'static str, String)]) -> Result<(), NotWritten> {
    occupied(dir)?;
    let parent = match dir.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    let name = dir.file_name().unwrap_or(dir.as_os_str()).to_string_lossy();
    let aside = parent.join(format!(".{name}.{}.tmp", std::process::id()));
    let failed = |path: &Path, source| NotWritten::Io {
        path: path.to_path_buf(),
        source,
    };
    fs::create_dir(&aside).map_err(|e| failed(dir, e))?;
    let written = files
        .iter()
        .try_for_each(|(name, text)| fill(&aside.join(name), text.as_bytes()))
        .map_err(|e| failed(dir, e))
        .and_then(|()| match fs::rename(&aside, dir) {
            Ok(()) => Ok(()),
            // Somebody was faster: say what is there now.
            Err(e) => occupied(dir).and(Err(failed(dir, e))),
        });
    if written.is_err() {
        // Already failing: the first error is the one to tell.
        let _ = fs::remove_dir_all(&aside);
    }
    written
}

/// A rename replaces an empty directory and nothing else.
fn occupied(dir: &Path) -> Result<(), NotWritten> {
    let Ok(metadata) = dir.symlink_metadata() else {
        return Ok(());
    };
    if !metadata.is_dir() {
        return Err(NotWritten::Occupied(match metadata.is_symlink() {
            true => "a link",
            false => "a file",
        }));
    }
    match fs::read_dir(dir).map(|mut entries| entries.next().is_none()) {
        Ok(true) => Ok(()),
        Ok(false) => Err(NotWritten::Occupied("a directory that is not empty")),
        Err(source) => Err(NotWritten::Io {
            path: dir.to_path_buf(),
            source,
        }),
    }
}

fn fill(path: &Path, bytes: &[u8]) -> io::Result<()> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    let mut file = OpenOptions::new().write(true).create_new(true).open(path)?;
    file.write_all(bytes)?;
    // A full disk may only show here.
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(name: &str) -> PathBuf {
        let dir =
            std::env::temp_dir().join(format!("structures-scaffold-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir(&dir).unwrap();
        dir
    }

    fn names(dir: &Path) -> Vec<String> {
        let entries = fs::read_dir(dir).unwrap();
        let mut names: Vec<String> = entries
            .map(|e| e.unwrap().file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_name_is_an_id_that_a_package_can_have() {
        for good in ["acme", "a", "9front", "my-backend_2", &"a".repeat(64)] {
            assert_eq!(check_name(good), Ok(()), "{good}");
        }
        for bad in [
            "", "Acme", "-a", "_a", "a b", "a/b", "..", "a.b", "ä", "a\n", "--out", "a\"",
        ] {
            assert!(
                matches!(check_name(bad), Err(BadName::Invalid(_))),
                "{bad:?}"
            );
        }
        assert!(matches!(
            check_name(&"a".repeat(65)),
            Err(BadName::Invalid(_))
        ));
        for taken in RESERVED {
            assert_eq!(check_name(taken), Err(BadName::Reserved));
        }
    }

    #[test]
    fn no_placeholder_is_left_and_paths_are_quoted() {
        let api = Api::Path("a \"b\"\\c".into());
        for lang in [Lang::Rust, Lang::C] {
            for (name, text) in files("my-kernels", lang, &api) {
                for word in ["@ID@", "@LIB", "@API"] {
                    assert!(!text.contains(word), "{name}: {word}");
                }
            }
        }
        let files = files("my-kernels", Lang::Rust, &api);
        let manifest = &files.iter().find(|(n, _)| *n == "Cargo.toml").unwrap().1;
        for line in [
            "name = \"structures-plugin-my-kernels\"",
            "name = \"structures_plugin_my_kernels\"",
            r#"structures-plugin-api = { path = "a \"b\"\\c" }"#,
        ] {
            assert!(manifest.contains(line), "{line} in\n{manifest}");
        }
        assert!(!header_version().is_empty());
    }

    #[test]
    fn a_tree_is_written_into_nothing_or_an_empty_directory() {
        let root = place("written");
        for out in ["new", "empty"] {
            let out = root.join(out);
            if out.ends_with("empty") {
                fs::create_dir(&out).unwrap();
            }
            write(&out, &[("a", "1".into()), ("b/c", "2".into())]).unwrap();
            assert_eq!(fs::read_to_string(out.join("b/c")).unwrap(), "2");
        }
        assert_eq!(names(&root), ["empty", "new"]);
        fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn what_is_there_is_kept_and_a_failure_leaves_nothing() {
        let root = place("refused");
        fs::create_dir(root.join("full")).unwrap();
        fs::write(root.join("full/mine"), "x").unwrap();
        fs::write(root.join("file"), "x").unwrap();
        std::os::unix::fs::symlink(root.join("nowhere"), root.join("link")).unwrap();
        let files = [("a", String::from("1"))];
        for (out, found) in [("full", "empty"), ("file", "file"), ("link", "link")] {
            match write(&root.join(out), &files) {
                Err(NotWritten::Occupied(what)) => assert!(what.contains(found), "{what}"),
                other => panic!("{out}: {other:?}"),
            }
        }
        assert!(matches!(
            write(&root.join("no/where"), &files),
            Err(NotWritten::Io { .. })
        ));
        // The second file cannot be made where the first one is.
        let clash = [("a", String::from("1")), ("a/b", String::from("2"))];
        assert!(matches!(
            write(&root.join("half"), &clash),
            Err(NotWritten::Io { .. })
        ));
        assert_eq!(names(&root), ["file", "full", "link"]);
        assert_eq!(names(&root.join("full")), ["mine"]);
        fs::remove_dir_all(&root).unwrap();
    }
}
