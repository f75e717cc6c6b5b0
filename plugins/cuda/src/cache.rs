//! Machine code on disk, so that a second process does not compile again.
//!
//! A file a source, architecture and compiler version; its name is the digest of all that, its content begins with the
//! digest of what follows. What does not fit, or cannot be read, is compiled again and replaced; a directory that
//! cannot be written costs time, not an error. Written by rename.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use structures_plugin_api::sdk::Failure;

use crate::compiler::{options, Compiler, Source};
use crate::libraries::{given, Variable};

const MAGIC: &[u8; 8] = b"STRCUBN1";

/// Where images are kept; `None` keeps none.
#[derive(Clone, Debug)]
pub struct Cache(Option<PathBuf>);

/// Where an image came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Read from disk.
    Kept,
    /// Compiled now.
    Made,
}

impl Cache {
    /// `STRUCTURES_CACHE_DIR` as it is, as the host takes it, else the user's cache directory.
    pub fn of(variable: impl Variable) -> Self {
        let absolute = |name: &str| given(&variable, name).filter(|path| path.is_absolute());
        let dir = given(&variable, "STRUCTURES_CACHE_DIR")
            .or_else(|| Some(absolute("XDG_CACHE_HOME")?.join("structures")))
            .or_else(|| Some(absolute("HOME")?.join(".cache/structures")));
        Cache(dir.map(|dir| dir.join("kernels")))
    }

    /// The image of a source for an architecture.
    ///
    /// # Errors
    /// `kernel_source`.
    pub fn image(
        &self,
        compiler: &Compiler,
        source: &Source<'_>,
        arch: &str,
    ) -> Result<(Vec<u8>, Origin), Failure> {
        let file = self
            .0
            .as_ref()
            .map(|dir| dir.join(name(compiler, source, arch)));
        if let Some(image) = file.as_ref().and_then(|file| read(file)) {
            return Ok((image, Origin::Kept));
        }
        let image = compiler.compile(source, arch)?.image;
        if let Some(file) = file {
            // Best effort: the next process compiles again.
            let _ = write(&file, &image);
        }
        Ok((image, Origin::Made))
    }
}

fn name(compiler: &Compiler, source: &Source<'_>, arch: &str) -> String {
    let (major, minor) = compiler.version();
    let mut hasher = Sha256::new();
    let mut part = |text: &str| {
        hasher.update((text.len() as u64).to_le_bytes());
        hasher.update(text);
    };
    part(source.text);
    for (name, text) in source.headers {
        part(name);
        part(text);
    }
    options(arch).iter().for_each(|o| part(o));
    let digest = hex(&hasher.finalize());
    format!("{}-{arch}-nvrtc{major}.{minor}-{digest}.cubin", source.name)
}

fn read(file: &Path) -> Option<Vec<u8>> {
    // Machine code of somebody else's making is not run: the file is the user's own, and nobody else writes it.
    let facts = fs::symlink_metadata(file).ok()?;
    // SAFETY: takes nothing, cannot fail.
    let own = facts.is_file() && facts.uid() == unsafe { libc::geteuid() };
    if !own || facts.mode() & 0o022 != 0 {
        return None;
    }
    let bytes = fs::read(file).ok()?;
    let (magic, rest) = bytes.split_at_checked(MAGIC.len())?;
    let (digest, image) = rest.split_at_checked(32)?;
    let whole = magic == MAGIC && !image.is_empty() && Sha256::digest(image)[..] == *digest;
    whole.then(|| image.to_vec())
}

fn write(file: &Path, image: &[u8]) -> std::io::Result<()> {
    let dir = file.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(dir)?;
    let temporary = dir.join(format!(
        ".{}.{}",
        file.file_name().unwrap_or_default().to_string_lossy(),
        std::process::id()
    ));
    let content = [MAGIC.as_slice(), &Sha256::digest(image)[..], image].concat();
    let written = fs::write(&temporary, content)
        .and_then(|()| fs::set_permissions(&temporary, fs::Permissions::from_mode(0o600)))
        .and_then(|()| fs::rename(&temporary, file));
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    written
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_whole_file_is_believed() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("deep/a.cubin");
        write(&file, b"machine code").expect("writes");
        assert_eq!(read(&file).as_deref(), Some(&b"machine code"[..]));
        let whole = fs::read(&file).expect("reads");
        for cut in [0, 7, 8, 39, 40, whole.len() - 1] {
            fs::write(&file, &whole[..cut]).expect("writes");
            assert_eq!(read(&file), None, "cut at {cut}");
        }
        let mut flipped = whole.clone();
        flipped[45] ^= 1;
        fs::write(&file, flipped).expect("writes");
        assert_eq!(read(&file), None);
        fs::write(&file, &whole).expect("writes");
        assert!(read(&file).is_some());
        fs::set_permissions(&file, fs::Permissions::from_mode(0o666)).expect("sets");
        assert_eq!(read(&file), None, "others could have written it");
        let names = fs::read_dir(file.parent().expect("a parent"))
            .expect("lists")
            .count();
        assert_eq!(names, 1, "nothing half-written stays");
    }

    #[test]
    fn the_directory_is_the_hosts_or_an_absolute_one_of_the_user() {
        let at = |set: &'static str, value: &'static str| {
            Cache::of(move |name| (name == set).then(|| value.into())).0
        };
        assert_eq!(at("STRUCTURES_CACHE_DIR", "/c"), Some("/c/kernels".into()));
        assert_eq!(
            at("XDG_CACHE_HOME", "/c"),
            Some("/c/structures/kernels".into())
        );
        assert_eq!(
            at("HOME", "/h"),
            Some("/h/.cache/structures/kernels".into())
        );
        assert_eq!(
            at("STRUCTURES_CACHE_DIR", "here"),
            Some("here/kernels".into())
        );
        assert_eq!(at("XDG_CACHE_HOME", "here"), None);
        assert_eq!(at("PWD", "/w"), None);
    }
}
