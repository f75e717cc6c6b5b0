//! A hermetic place to scan: own plugin directory, own cache, this crate's scanner, no environment.
#![allow(dead_code)] // each test binary uses its part

use std::path::{Path, PathBuf};

use structures_loader::{Environment, PluginRow, Registry, ScanMode, ScanOptions};

pub struct Place {
    _keep: tempfile::TempDir,
    pub root: PathBuf,
    pub plugins: PathBuf,
}

impl Place {
    pub fn new() -> Self {
        let keep = tempfile::tempdir().expect("temporary directory");
        let root = keep.path().canonicalize().expect("canonical");
        let plugins = root.join("plugins");
        std::fs::create_dir(&plugins).expect("create");
        Place {
            _keep: keep,
            root,
            plugins,
        }
    }

    pub fn dir(&self, name: &str) -> PathBuf {
        let dir = self.root.join(name);
        std::fs::create_dir_all(&dir).expect("create");
        dir
    }

    pub fn options(&self) -> ScanOptions {
        let mut options = ScanOptions::new(vec![self.plugins.clone()]);
        options.environment = Environment {
            cache_dir: Some(self.root.join("cache")),
            ..Environment::default()
        };
        options.mode = ScanMode::Child(Some(env!("CARGO_BIN_EXE_structures-scan").into()));
        options
    }

    pub fn scan(&self) -> Registry {
        Registry::scan(&self.options()).expect("the scan itself succeeds")
    }
}

/// The row of the file named `file`.
pub fn row<'a>(registry: &'a Registry, file: &str) -> &'a PluginRow {
    let named = |r: &&PluginRow| r.path.file_name().is_some_and(|n| n == file);
    registry
        .plugins
        .iter()
        .find(named)
        .unwrap_or_else(|| panic!("no row for {file}"))
}

/// The code of the file named `file`; `loaded` when it was.
pub fn code(registry: &Registry, file: &str) -> &'static str {
    row(registry, file).code.map_or("loaded", |c| c.name())
}

/// A file of the system that is a shared library and no plugin.
pub fn foreign_library() -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let path = maps
        .lines()
        .filter_map(|l| l.find('/').map(|i| &l[i..]))
        .find(|p| p.contains("/libgcc_s"))?;
    Some(Path::new(path).to_path_buf())
}
