//! `new-plugin`: a backend to start from, out of this tree.

use std::path::{Path, PathBuf};

use semver::{Version, VersionReq};
use serde_json::json;

use super::Context;
use crate::args::{Lang, NewPluginArgs};
use crate::failure::Failure;
use crate::scaffold::{self, Api, BadName, NotWritten};

/// The crate of the interface, and the directory it has in a checkout.
const API_CRATE: &str = "structures-plugin-api";
const API_DIR: &str = "plugin-api";

/// See the module.
pub fn run(args: &NewPluginArgs, cx: &Context<'_>) -> Result<u8, Failure> {
    let name = args.name.as_str();
    scaffold::check_name(name).map_err(|why| bad_name(name, why))?;
    if args.lang == Lang::C && args.api.is_some() {
        return Err(Failure::usage(
            "--api is of Rust plugins: one in C gets the header itself",
            "leave --api out, or write a plugin with --lang rust",
        ));
    }
    let api = match &args.api {
        Some(text) => named_api(text)?,
        None => own_api(),
    };
    let out = args.out.clone().unwrap_or_else(|| PathBuf::from(name));
    let files = scaffold::files(name, args.lang, &api);
    scaffold::write(&out, &files).map_err(|why| not_written(&out, why))?;

    let library = scaffold::library(name);
    let (build, built) = match args.lang {
        Lang::Rust => (
            ["cargo build --release", "cargo test --release"],
            "target/release",
        ),
        Lang::C => (["make", "make test"], "build"),
    };
    let mut next = vec![
        build[0].to_string(),
        build[1].to_string(),
        format!("structures --plugins {built} plugins list"),
        format!("structures conform {built}/lib{library}.so"),
    ];
    if let (Api::Version(_), Lang::Rust) = (&api, args.lang) {
        next.insert(
            0,
            format!(
                "# where no registry has {API_CRATE}: new-plugin {name} --api DIR, with the {API_DIR} directory of a \
                 checkout"
            ),
        );
    }
    if cx.out.json() {
        let (path, version) = match (&api, args.lang) {
            (_, Lang::C) => (None, None),
            (Api::Path(path), _) => (Some(path), None),
            (Api::Version(version), _) => (None, Some(version)),
        };
        let names: Vec<&str> = files.iter().map(|(name, _)| *name).collect();
        cx.out.document(json!({"plugin": {
            "id": name,
            "lang": match args.lang { Lang::Rust => "rust", Lang::C => "c" },
            "path": out.to_string_lossy(), "files": names, "library": format!("{built}/lib{library}.so"),
            "api": {"path": path, "version": version}, "next": next,
        }}));
        return Ok(0);
    }
    cx.out
        .line(&format!("{}: {} files", out.display(), files.len()));
    for (name, _) in &files {
        cx.out.line(&format!("  {name}"));
    }
    if args.lang == Lang::Rust {
        cx.out.line(&format!("{API_CRATE}: {}", api.text()));
    }
    cx.out.line("");
    cx.out.line("next:");
    cx.out.line(&format!("  cd {}", out.display()));
    for line in &next {
        cx.out.line(&format!("  {line}"));
    }
    Ok(0)
}

fn bad_name(name: &str, why: BadName) -> Failure {
    let (code, message, help) = match why {
        BadName::Invalid(why) => (
            "plugin_name_invalid",
            format!("{name:?} is not a plugin's id: {why}"),
            "choose [a-z0-9][a-z0-9_-]*, at most 64 bytes",
        ),
        BadName::Reserved => (
            "plugin_name_reserved",
            format!("{name:?} is the name of a part of the plugin interface"),
            "choose another name",
        ),
    };
    Failure {
        exit: 2,
        ..Failure::failed(code, message, help)
    }
}

fn not_written(out: &Path, why: NotWritten) -> Failure {
    match why {
        NotWritten::Occupied(what) => Failure::failed(
            "out_occupied",
            format!(
                "{}: expected nothing or an empty directory, found {what}; nothing was written",
                out.display()
            ),
            "give --out another directory",
        ),
        NotWritten::Io { path, source } => Failure::failed(
            "io",
            format!(
                "{}: cannot be written: {source}; nothing was left",
                path.display()
            ),
            "give --out a place in a directory that exists, that you may write to and that has free space",
        ),
    }
}

/// A version of the registry, else a directory with the crate.
fn named_api(text: &str) -> Result<Api, Failure> {
    let no = |found: String| {
        Err(Failure {
            exit: 2,
            ..Failure::failed(
                "plugin_api_unknown",
                format!(
                    "--api {text}: expected a version or a directory with the crate {API_CRATE}, found {found}"
                ),
                format!("give the `{API_DIR}` directory of a checkout, or leave --api out"),
            )
        })
    };
    if let Ok(wanted) = VersionReq::parse(text) {
        return match served(&wanted) {
            true => Ok(Api::Version(text.into())),
            false => no(format!(
                "versions whose plugins this program cannot open: it serves {}",
                env!("CARGO_PKG_VERSION")
            )),
        };
    }
    let dir = match Path::new(text).canonicalize() {
        Ok(dir) => dir,
        Err(e) => return no(e.to_string()),
    };
    if !is_api(&dir) {
        return no("no such crate".into());
    }
    match dir.to_str() {
        Some(path) => Ok(Api::Path(path.into())),
        None => no("a path that is not UTF-8, which Cargo.toml cannot hold".into()),
    }
}

/// Whether every version that is asked for may be one that this program serves: Cargo takes the highest.
fn served(wanted: &VersionReq) -> bool {
    let Ok(own) = Version::parse(env!("CARGO_PKG_VERSION")) else {
        return true;
    };
    // What Cargo calls compatible: the same first number that is not 0.
    let next = match (own.major, own.minor) {
        (0, minor) => Version::new(0, minor + 1, 0),
        (major, _) => Version::new(major + 1, 0, 0),
    };
    let named = |c: &semver::Comparator| {
        c.major == own.major && (own.major > 0 || c.minor.is_none_or(|m| m == own.minor))
    };
    wanted.matches(&own) || (!wanted.matches(&next) && wanted.comparators.iter().all(named))
}

/// The interface of the checkout that this program lies in, else the version it was built with.
fn own_api() -> Api {
    let exe = std::env::current_exe().ok();
    exe.iter()
        .flat_map(|exe| exe.ancestors().skip(1))
        .map(|dir| dir.join(API_DIR))
        .filter(|dir| is_api(dir))
        .find_map(|dir| Some(Api::Path(dir.canonicalize().ok()?.to_str()?.into())))
        .unwrap_or_else(|| Api::Version(env!("CARGO_PKG_VERSION").into()))
}

/// Whether a directory holds the crate of the interface.
fn is_api(dir: &Path) -> bool {
    let name = format!("name = \"{API_CRATE}\"");
    std::fs::read_to_string(dir.join("Cargo.toml"))
        .is_ok_and(|manifest| manifest.lines().any(|line| line.trim() == name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_or_a_directory_with_the_crate() {
        for version in ["0.1", "=0.1.7", "^0", ">=0.1, <3"] {
            assert_eq!(named_api(version).unwrap(), Api::Version(version.into()));
        }
        let api = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../plugin-api");
        assert!(matches!(
            named_api(api.to_str().unwrap()),
            Ok(Api::Path(path)) if path.ends_with("plugin-api") && !path.contains("..")
        ));
        for bad in ["nowhere/at/all", "src", "", "1.2.3.4", "9", "=1.2.3", "0.2"] {
            let e = named_api(bad).unwrap_err();
            assert_eq!(
                (e.exit, e.code.as_str()),
                (2, "plugin_api_unknown"),
                "{bad}"
            );
        }
    }
}
