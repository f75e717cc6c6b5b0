//! A hermetic place to scan: own plugin directory, own cache, this crate's scanner, no environment.
#![allow(dead_code)] // each test binary uses its part

use std::os::unix::fs::PermissionsExt;
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

impl Place {
    /// As [`Place::scan`], believing what earlier scans found.
    pub fn list(&self) -> Registry {
        Registry::list(&self.options()).expect("the listing itself succeeds")
    }

    /// A scanner that runs the real one, with a shell command before and one after it; `$2` is the library.
    pub fn scanner(&self, name: &str, before: &str, after: &str) -> ScanMode {
        let path = self.root.join(name);
        let real = env!("CARGO_BIN_EXE_structures-scan");
        let text = format!(
            "#!/bin/sh\n{before}\n\"{real}\" \"$@\"\nrc=$?\n{after}\n\
             [ $rc -gt 128 ] && kill -$((rc - 128)) $$\nexit $rc\n"
        );
        std::fs::write(&path, text).expect("write");
        let mode = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(&path, mode).expect("chmod");
        ScanMode::Child(Some(path))
    }

    /// A scanner that leaves one line for each library, and the way to count them.
    pub fn counting(&self) -> (ScanMode, Box<dyn Fn() -> usize>) {
        let log = self.root.join("scans.log");
        let mode = self.scanner(
            "counting",
            &format!("echo \"$2\" >> {}", log.display()),
            ":",
        );
        let count = move || std::fs::read_to_string(&log).map_or(0, |text| text.lines().count());
        (mode, Box::new(count))
    }
}

/// `constructor.c`, built with these macros, as `dir`/`file`.
pub fn constructor(dir: &Path, file: &str, defines: &[&str]) -> PathBuf {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/constructor.c");
    let path = dir.join(file);
    let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    let built = std::process::Command::new(compiler)
        .args(["-shared", "-fPIC", "-o"])
        .arg(&path)
        .args(defines.iter().map(|d| format!("-D{d}")))
        .arg(source)
        .output()
        .expect("a C compiler");
    assert!(
        built.status.success(),
        "{}",
        String::from_utf8_lossy(&built.stderr)
    );
    let mode = std::fs::Permissions::from_mode(0o644);
    std::fs::set_permissions(&path, mode).expect("chmod");
    path
}

/// Long enough that the kernel's next time stamp is another one, and that the cache believes the last.
pub fn settle() {
    std::thread::sleep(std::time::Duration::from_millis(150));
}

/// Scan children of this process that are still there, dead or alive.
pub fn scan_children() -> usize {
    let mine = format!("\nPPid:\t{}\n", std::process::id());
    std::fs::read_dir("/proc")
        .expect("proc")
        .filter_map(|e| std::fs::read_to_string(e.ok()?.path().join("status")).ok())
        .filter(|status| status.contains(&mine) && status.contains("structures-scan"))
        .count()
}
