//! Where plugins are looked for: an ordered list of directories and the candidate files in them.
//!
//! Order: explicit directories, then `STRUCTURES_PLUGIN_PATH` (which replaces the rest), else
//! `STRUCTURES_ADD_PLUGIN_PATH`, the user's data directory, `<exe dir>/plugins`, `<exe dir>`. Candidates are every
//! `*.so` of a directory, not recursive, sorted by name; of `<exe dir>` only `libstructures_plugin_*.so`, so that
//! a plain build tree works without its other libraries being opened.
//!
//! Never the working directory: an empty component of a path variable is skipped, a relative one is an error.
//! A relative directory given on the command line is the user's own word and is taken.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::error::LoaderError;
use crate::sys;

/// Name of the variable that replaces the search path.
pub const PLUGIN_PATH: &str = "STRUCTURES_PLUGIN_PATH";
/// Name of the variable that adds directories.
pub const ADD_PLUGIN_PATH: &str = "STRUCTURES_ADD_PLUGIN_PATH";
/// Name of the variable that moves all caches.
pub const CACHE_DIR: &str = "STRUCTURES_CACHE_DIR";
/// Name of the variable that names the scanner program.
pub const SCANNER: &str = "STRUCTURES_SCANNER";

/// Name of the variable that names the directory of trusted keys.
pub const TRUSTED_KEYS: &str = "STRUCTURES_TRUSTED_KEYS";

/// Every variable above: what a process with raised rights ignores.
const VARIABLES: &[&str] = &[
    PLUGIN_PATH,
    ADD_PLUGIN_PATH,
    CACHE_DIR,
    SCANNER,
    TRUSTED_KEYS,
];

/// What the surroundings of the process say, read once. Empty under secure execution, except what does not come
/// from environment variables.
#[derive(Clone, Debug, Default)]
pub struct Environment {
    /// `STRUCTURES_PLUGIN_PATH`.
    pub plugin_path: Option<OsString>,
    /// `STRUCTURES_ADD_PLUGIN_PATH`.
    pub add_plugin_path: Option<OsString>,
    /// `STRUCTURES_SCANNER`.
    pub scanner: Option<PathBuf>,
    /// Where caches go: `STRUCTURES_CACHE_DIR`, else `$XDG_CACHE_HOME/structures`, else `~/.cache/structures`.
    pub cache_dir: Option<PathBuf>,
    /// `$XDG_DATA_HOME`, else `~/.local/share`.
    pub data_dir: Option<PathBuf>,
    /// Directory of the running program.
    pub exe_dir: Option<PathBuf>,
    /// `STRUCTURES_TRUSTED_KEYS`: a directory somebody named.
    pub trusted_keys: Option<PathBuf>,
    /// `$XDG_CONFIG_HOME`, else `~/.config`.
    pub config_dir: Option<PathBuf>,
    /// Variables that are set and ignored, because the process runs with raised rights.
    pub ignored: Vec<&'static str>,
}

impl Environment {
    /// Reads the process's surroundings.
    pub fn capture() -> Self {
        if sys::secure_execution() {
            let set = |name: &&&str| std::env::var_os(name).is_some();
            Environment {
                ignored: VARIABLES.iter().filter(set).copied().collect(),
                ..Self::from_lookup(|_| None, sys::home_from_user_database())
            }
        } else {
            let home = absolute(std::env::var_os("HOME")).or_else(sys::home_from_user_database);
            Self::from_lookup(|name| std::env::var_os(name), home)
        }
    }

    fn from_lookup(var: impl Fn(&str) -> Option<OsString>, home: Option<PathBuf>) -> Self {
        let under_home = |rest: &str| home.as_ref().map(|h| h.join(rest));
        let cache_dir = var(CACHE_DIR)
            .filter(|v| !v.is_empty())
            .map(PathBuf::from)
            .or_else(|| {
                absolute(var("XDG_CACHE_HOME"))
                    .or_else(|| under_home(".cache"))
                    .map(|d| d.join("structures"))
            });
        Environment {
            plugin_path: var(PLUGIN_PATH),
            add_plugin_path: var(ADD_PLUGIN_PATH),
            scanner: var(SCANNER).filter(|v| !v.is_empty()).map(PathBuf::from),
            cache_dir,
            trusted_keys: var(TRUSTED_KEYS)
                .filter(|v| !v.is_empty())
                .map(PathBuf::from),
            config_dir: absolute(var("XDG_CONFIG_HOME")).or_else(|| under_home(".config")),
            ignored: Vec::new(),
            data_dir: absolute(var("XDG_DATA_HOME")).or_else(|| under_home(".local/share")),
            exe_dir: std::env::current_exe()
                .ok()
                .and_then(|exe| exe.canonicalize().ok())
                .and_then(|exe| exe.parent().map(Path::to_path_buf)),
        }
    }
}

/// Why a directory is searched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Given by the caller (`--plugins`).
    Explicit,
    /// `STRUCTURES_PLUGIN_PATH`.
    PluginPath,
    /// `STRUCTURES_ADD_PLUGIN_PATH`.
    AddPluginPath,
    /// The user's data directory.
    UserData,
    /// `plugins` beside the program.
    ExePlugins,
    /// The program's own directory.
    ExeDir,
}

impl Source {
    /// For messages.
    pub fn name(self) -> &'static str {
        match self {
            Source::Explicit => "--plugins",
            Source::PluginPath => PLUGIN_PATH,
            Source::AddPluginPath => ADD_PLUGIN_PATH,
            Source::UserData => "the user's data directory",
            Source::ExePlugins => "`plugins` beside the program",
            Source::ExeDir => "the program's directory",
        }
    }

    /// Whether a person named the directory: then its absence is an error.
    fn named(self) -> bool {
        matches!(
            self,
            Source::Explicit | Source::PluginPath | Source::AddPluginPath
        )
    }
}

/// One directory of the search path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SearchDir {
    /// Absolute path, as reports show it.
    pub path: PathBuf,
    /// Why it is searched.
    pub source: Source,
}

/// One place of the search: a directory, or the reason why there is none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Why it was considered.
    pub source: Source,
    /// The directory, where one is known.
    pub path: Option<PathBuf>,
    /// Why it is not searched.
    pub skipped: Option<String>,
}

/// The ordered search path, without directories that are absent and that nobody named.
///
/// # Errors
/// [`LoaderError::SearchDir`] for a named directory that does not exist or cannot be read, and for a relative
/// directory in a variable.
pub fn search_path(
    explicit: &[PathBuf],
    environment: &Environment,
) -> Result<Vec<SearchDir>, LoaderError> {
    let places = places(explicit, environment)?;
    Ok(places.into_iter().filter_map(Place::searched).collect())
}

impl Place {
    /// The directory, if it is searched.
    pub fn searched(self) -> Option<SearchDir> {
        let source = self.source;
        self.path
            .filter(|_| self.skipped.is_none())
            .map(|path| SearchDir { path, source })
    }
}

/// Every place that was considered, in order, with the reason why it is not searched where it is not.
///
/// # Errors
/// As [`search_path`].
pub fn places(explicit: &[PathBuf], environment: &Environment) -> Result<Vec<Place>, LoaderError> {
    let mut seen = BTreeMap::new();
    let mut found = Vec::new();
    let skip = |source, path: Option<PathBuf>, why: String| Place {
        source,
        path,
        skipped: Some(why),
    };
    for dir in explicit {
        found.push(place(dir.clone(), Source::Explicit, &mut seen)?);
    }
    let variables = [
        (Source::PluginPath, &environment.plugin_path),
        (Source::AddPluginPath, &environment.add_plugin_path),
    ];
    let replaced = environment.plugin_path.is_some();
    for (source, value) in variables {
        let Some(value) = value else {
            let why = if environment.ignored.contains(&source.name()) {
                "ignored: the process runs with raised rights"
            } else {
                "not set"
            };
            found.push(skip(source, None, why.into()));
            continue;
        };
        if replaced && source != Source::PluginPath {
            found.push(skip(source, None, format!("{PLUGIN_PATH} replaces it")));
            continue;
        }
        for dir in std::env::split_paths(value) {
            if dir.as_os_str().is_empty() {
                let why = "an empty component: the working directory is never searched";
                found.push(skip(source, None, why.into()));
                continue;
            }
            if dir.is_relative() {
                let why = "expected an absolute path: the working directory is never searched";
                return Err(unusable(&dir, source, why));
            }
            found.push(place(dir, source, &mut seen)?);
        }
    }
    let data = environment.data_dir.as_ref();
    let program = environment.exe_dir.as_ref();
    for (source, dir) in [
        (
            Source::UserData,
            data.map(|d| d.join("structures").join("plugins")),
        ),
        (Source::ExePlugins, program.map(|d| d.join("plugins"))),
        (Source::ExeDir, program.cloned()),
    ] {
        found.push(match dir {
            dir if replaced => skip(source, dir, format!("{PLUGIN_PATH} replaces it")),
            None => skip(source, None, "not known".into()),
            Some(dir) => place(dir, source, &mut seen)?,
        });
    }
    Ok(found)
}

/// A directory as a place. `seen` holds what was taken before, by its canonical path.
fn place(
    dir: PathBuf,
    source: Source,
    seen: &mut BTreeMap<PathBuf, PathBuf>,
) -> Result<Place, LoaderError> {
    let why = match dir.canonicalize() {
        Ok(canonical) if canonical.is_dir() => {
            if let Some(first) = seen.get(&canonical) {
                Some(format!("the same directory as {}", first.display()))
            } else {
                let shown = if dir.is_absolute() {
                    dir
                } else {
                    canonical.clone()
                };
                seen.insert(canonical, shown.clone());
                return Ok(Place {
                    source,
                    path: Some(shown),
                    skipped: None,
                });
            }
        }
        Ok(_) if source.named() => return Err(unusable(&dir, source, "it is not a directory")),
        Err(e) if source.named() => return Err(unusable(&dir, source, &e.to_string())),
        Ok(_) => Some("it is not a directory".into()),
        Err(e) if e.kind() == ErrorKind::NotFound => Some("it does not exist".into()),
        Err(e) => Some(e.to_string()),
    };
    Ok(Place {
        source,
        path: Some(dir),
        skipped: why,
    })
}

/// The candidate files of one directory, sorted by name.
///
/// # Errors
/// [`LoaderError::SearchDir`] when a named directory cannot be listed; another one yields nothing.
pub fn candidates(dir: &SearchDir) -> Result<Vec<PathBuf>, LoaderError> {
    let entries = match std::fs::read_dir(&dir.path) {
        Ok(entries) => entries,
        Err(e) if dir.source.named() => {
            return Err(unusable(&dir.path, dir.source, &e.to_string()))
        }
        Err(_) => return Ok(Vec::new()),
    };
    let mut files = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|e| unusable(&dir.path, dir.source, &e.to_string()))?;
        let name = entry.file_name();
        let name = name.as_encoded_bytes();
        let ours = dir.source != Source::ExeDir || name.starts_with(b"libstructures_plugin_");
        if ours && name.ends_with(b".so") && name != b".so" {
            files.push(entry.path());
        }
    }
    files.sort();
    Ok(files)
}

fn unusable(path: &Path, source: Source, reason: &str) -> LoaderError {
    LoaderError::SearchDir {
        path: path.to_path_buf(),
        origin: source.name(),
        reason: reason.to_string(),
    }
}

fn absolute(value: Option<OsString>) -> Option<PathBuf> {
    value.map(PathBuf::from).filter(|p| p.is_absolute())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(path: &[SearchDir], root: &Path) -> Vec<(String, Source)> {
        path.iter()
            .map(|d| {
                let rest = d.path.strip_prefix(root).unwrap_or(&d.path);
                (rest.display().to_string(), d.source)
            })
            .collect()
    }

    fn tree() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().expect("temporary directory");
        let root = dir.path().canonicalize().expect("canonical");
        for sub in ["a", "b", "c", "data/structures/plugins", "exe/plugins"] {
            std::fs::create_dir_all(root.join(sub)).expect("create");
        }
        (dir, root)
    }

    fn environment(root: &Path) -> Environment {
        Environment {
            data_dir: Some(root.join("data")),
            exe_dir: Some(root.join("exe")),
            ..Environment::default()
        }
    }

    #[test]
    fn order_and_replacement() {
        let (_keep, root) = tree();
        let mut env = environment(&root);
        env.add_plugin_path = Some(root.join("b").into_os_string());
        let path = search_path(&[root.join("a")], &env).expect("path");
        let expected = [
            ("a", Source::Explicit),
            ("b", Source::AddPluginPath),
            ("data/structures/plugins", Source::UserData),
            ("exe/plugins", Source::ExePlugins),
            ("exe", Source::ExeDir),
        ];
        assert_eq!(
            shown(&path, &root),
            expected.map(|(p, s)| (p.to_string(), s))
        );

        env.plugin_path = Some(root.join("c").into_os_string());
        let path = search_path(&[root.join("a")], &env).expect("path");
        let expected = [("a", Source::Explicit), ("c", Source::PluginPath)];
        assert_eq!(
            shown(&path, &root),
            expected.map(|(p, s)| (p.to_string(), s))
        );

        env.plugin_path = Some(OsString::new());
        assert_eq!(search_path(&[], &env).expect("path"), Vec::new());
    }

    #[test]
    fn named_directories_must_exist_others_need_not() {
        let (_keep, root) = tree();
        let missing = root.join("missing");
        let error = search_path(std::slice::from_ref(&missing), &Environment::default())
            .expect_err("missing");
        assert!(error.to_string().contains("missing"), "{error}");
        let env = Environment {
            plugin_path: Some(missing.into()),
            ..Environment::default()
        };
        let error = search_path(&[], &env).expect_err("missing");
        assert!(error.to_string().contains(PLUGIN_PATH), "{error}");
        let env = Environment {
            exe_dir: Some(root.join("nowhere")),
            ..Environment::default()
        };
        assert_eq!(search_path(&[], &env).expect("path"), Vec::new());
        std::fs::write(root.join("file"), "x").expect("write");
        let error = search_path(&[root.join("file")], &env).expect_err("file");
        assert!(error.to_string().contains("not a directory"), "{error}");
    }

    #[test]
    fn the_working_directory_is_never_searched_by_a_variable() {
        let (_keep, root) = tree();
        let value = format!(":{}:", root.join("a").display());
        let env = Environment {
            plugin_path: Some(value.into()),
            ..Environment::default()
        };
        assert_eq!(search_path(&[], &env).expect("path").len(), 1);
        let env = Environment {
            add_plugin_path: Some("plugins".into()),
            ..Environment::default()
        };
        let error = search_path(&[], &env).expect_err("relative");
        assert!(error.to_string().contains("absolute"), "{error}");
    }

    #[test]
    fn one_directory_is_searched_once() {
        let (_keep, root) = tree();
        std::os::unix::fs::symlink(root.join("a"), root.join("link")).expect("link");
        let path = search_path(&[root.join("a"), root.join("link"), root.join("a")], &{
            Environment::default()
        });
        assert_eq!(path.expect("path").len(), 1);
    }

    #[test]
    fn candidates_are_sorted_and_the_program_directory_is_filtered() {
        let (_keep, root) = tree();
        for name in [
            "z.so",
            "b.so",
            "readme.txt",
            "x.so.1",
            ".so",
            "libstructures_plugin_q.so",
        ] {
            std::fs::write(root.join("a").join(name), "").expect("write");
        }
        std::fs::create_dir(root.join("a/dir.so")).expect("create");
        std::fs::create_dir(root.join("a/sub")).expect("create");
        std::fs::write(root.join("a/sub/deep.so"), "").expect("write");
        let names = |source| -> Vec<String> {
            candidates(&SearchDir {
                path: root.join("a"),
                source,
            })
            .expect("candidates")
            .iter()
            .map(|p| p.file_name().expect("name").to_string_lossy().into_owned())
            .collect()
        };
        assert_eq!(
            names(Source::Explicit),
            ["b.so", "dir.so", "libstructures_plugin_q.so", "z.so"]
        );
        assert_eq!(names(Source::ExeDir), ["libstructures_plugin_q.so"]);
    }

    #[test]
    fn variables_choose_the_cache() {
        let home = Some(PathBuf::from("/home/u"));
        let env = Environment::from_lookup(|_| None, home.clone());
        assert_eq!(
            env.cache_dir.as_deref(),
            Some(Path::new("/home/u/.cache/structures"))
        );
        assert_eq!(
            env.data_dir.as_deref(),
            Some(Path::new("/home/u/.local/share"))
        );
        let xdg = |n: &str| (n == "XDG_CACHE_HOME").then(|| OsString::from("/x"));
        let env = Environment::from_lookup(xdg, home.clone());
        assert_eq!(env.cache_dir.as_deref(), Some(Path::new("/x/structures")));
        let own = |n: &str| (n == CACHE_DIR).then(|| OsString::from("/own"));
        let env = Environment::from_lookup(own, home);
        assert_eq!(env.cache_dir.as_deref(), Some(Path::new("/own")));
    }
}
