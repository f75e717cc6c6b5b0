//! Where the toolkit's libraries lie, and why one could not be opened.
//!
//! A library is named by a variable, lies below the toolkit that `CUDA_HOME` or `CUDA_PATH` names, or is found by the
//! system; last, below the toolkit's usual place.

use std::error::Error;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Reads a variable of the environment.
pub trait Variable: Fn(&str) -> Option<OsString> {}
impl<F: Fn(&str) -> Option<OsString>> Variable for F {}

/// Where a toolkit is when nobody says.
const USUAL: &str = "/usr/local/cuda";

/// A variable that is set to something.
pub fn given(variable: &impl Variable, name: &str) -> Option<PathBuf> {
    variable(name).filter(|v| !v.is_empty()).map(PathBuf::from)
}

/// Files of a library such as `libnvrtc.so` that lie in the toolkits a variable names, newest major version first where
/// several do; `majors` in that order.
pub fn named(variable: &impl Variable, library: &str, majors: [i32; 2]) -> Vec<PathBuf> {
    let homes = ["CUDA_HOME", "CUDA_PATH"];
    let homes = homes.iter().filter_map(|name| given(variable, name));
    homes
        .flat_map(|home| below(&home, library, majors))
        .collect()
}

/// The same in the usual place.
pub fn usual(library: &str, majors: [i32; 2]) -> Vec<PathBuf> {
    below(Path::new(USUAL), library, majors)
}

fn below(home: &Path, library: &str, majors: [i32; 2]) -> Vec<PathBuf> {
    let target = format!("targets/{}-linux/lib", std::env::consts::ARCH);
    let files = [
        library.to_string(),
        format!("{library}.{}", majors[0]),
        format!("{library}.{}", majors[1]),
    ];
    let dirs = ["lib64", "lib", &target].map(|dir| home.join(dir));
    let all = dirs
        .iter()
        .flat_map(|dir| files.iter().map(|file| dir.join(file)));
    all.filter(|path| path.exists()).collect()
}

/// Major versions of the toolkit, those of the driver's own first: machine code of a newer toolkit does not load.
pub fn majors(driver_major: i32) -> [i32; 2] {
    match driver_major {
        12 => [12, 13],
        _ => [13, 12],
    }
}

/// What the system said about a library that did not open.
pub fn why(error: &libloading::Error) -> String {
    let source = error.source().map(ToString::to_string);
    source.unwrap_or_else(|| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_toolkit_has_its_libraries_in_several_places_and_under_several_names() {
        let home = std::env::temp_dir().join(format!("toolkit-{}", std::process::id()));
        for file in ["lib/libx.so.12", "lib64/libx.so.12", "lib64/libx.so.13"] {
            let path = home.join(file);
            std::fs::create_dir_all(path.parent().unwrap_or(&home)).expect("creates");
            std::fs::write(path, "").expect("writes");
        }
        let variable = |name: &str| (name == "CUDA_PATH").then(|| home.clone().into_os_string());
        let found = |major| -> Vec<String> {
            let all = named(&variable, "libx.so", majors(major)).into_iter();
            all.filter_map(|p| Some(p.strip_prefix(&home).ok()?.display().to_string()))
                .collect()
        };
        let (new, old) = (found(13), found(12));
        let _ = std::fs::remove_dir_all(&home);
        assert_eq!(
            new,
            ["lib64/libx.so.13", "lib64/libx.so.12", "lib/libx.so.12"]
        );
        assert_eq!(
            old,
            ["lib64/libx.so.12", "lib64/libx.so.13", "lib/libx.so.12"]
        );
    }

    #[test]
    fn what_the_system_said_is_told() {
        // SAFETY: nothing is opened.
        let error = unsafe { libloading::Library::new("/nowhere/libx.so") }.expect_err("absent");
        assert!(why(&error).contains("No such file"), "{}", why(&error));
    }
}
