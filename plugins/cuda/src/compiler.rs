//! NVRTC, found and held: CUDA C++ to machine code for one architecture.
//!
//! Straight to CUBIN, because PTX for a virtual architecture is not a check: it accepts code that no machine runs.
//! The library is opened here and not by the bindings, which know neither an explicit path nor an order of versions.
//! It is found by `STRUCTURES_NVRTC` (a path; then nothing else is tried), below `CUDA_HOME` and `CUDA_PATH`, by its usual
//! names, below the usual place of a toolkit; of two, that of the driver's own major version comes first. One that is too
//! old is passed over.
//! Nothing here needs a driver or a device.

use std::ffi::{c_char, c_int, c_void, CStr, CString};
use std::path::PathBuf;

use libloading::Library;
use structures_plugin_api::sdk::Failure;

use crate::libraries::{self, given, majors, named, Variable};

/// The variable that names the library.
pub const NVRTC: &str = "STRUCTURES_NVRTC";
/// The oldest version the sources compile with: it brought E4M3 to `mma.sync`.
pub const NEEDED: (i32, i32) = (12, 4);

const LIBRARY: &str = "libnvrtc.so";

type Program = *mut c_void;

/// An open NVRTC.
pub struct Compiler {
    calls: Calls,
    version: (i32, i32),
    path: String,
    archs: Vec<i32>,
    _library: Library,
}

struct Calls {
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> c_int,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    log: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    image_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    image: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    destroy: unsafe extern "C" fn(*mut Program) -> c_int,
}

/// A source with everything it includes.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    /// Name for messages.
    pub name: &'a str,
    /// The text.
    pub text: &'a str,
    /// What `#include` finds: name and text.
    pub headers: &'a [(&'a str, &'a str)],
}

/// Machine code, and what the compiler said about it.
#[derive(Debug)]
pub struct Compiled {
    /// The CUBIN.
    pub image: Vec<u8>,
    /// Its log.
    pub log: String,
}

impl std::fmt::Debug for Compiler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Compiler")
            .field("path", &self.path)
            .field("version", &self.version)
            .finish_non_exhaustive()
    }
}

impl Compiler {
    /// Opens the first that can be had. `driver_major` orders the usual names.
    ///
    /// # Errors
    /// `nvrtc_absent` with everything that was tried, `nvrtc_too_old` with versions.
    pub fn find(variable: impl Variable, driver_major: i32) -> Result<Self, Failure> {
        let (mut tried, mut old) = (Vec::new(), false);
        for path in candidates(&variable, driver_major) {
            match Self::open(&path) {
                Ok(compiler) if compiler.version < NEEDED => {
                    let (major, minor) = compiler.version;
                    old = true;
                    tried.push(format!("{} (NVRTC {major}.{minor})", compiler.path));
                }
                Ok(compiler) => return Ok(compiler),
                Err(why) => tried.push(format!("{} ({why})", path.display())),
            }
        }
        let tried = tried.join(", ");
        Err(match old {
            true => Failure::refused(
                "nvrtc_too_old",
                format!(
                    "the kernels need NVRTC {}.{} or newer; tried {tried}",
                    NEEDED.0, NEEDED.1
                ),
            ),
            false => Failure::refused(
                "nvrtc_absent",
                format!(
                    "no NVRTC, the compiler of the kernels; tried {tried}; install the CUDA toolkit's NVRTC library or \
                     name it in {NVRTC}"
                ),
            ),
        })
    }

    fn open(path: &PathBuf) -> Result<Self, String> {
        // SAFETY: NVRTC's initialisers do nothing a process could not have; the operator or the system named it.
        let library = unsafe { Library::new(path) }.map_err(|e| libraries::why(&e))?;
        fn symbol<T: Copy>(library: &Library, name: &str) -> Result<T, String> {
            // SAFETY: the types below are those of NVRTC's documented interface.
            let found = unsafe { library.get::<T>(name.as_bytes()) };
            found.map(|s| *s).map_err(|_| format!("lacks {name}"))
        }
        let calls = Calls {
            create: symbol(&library, "nvrtcCreateProgram")?,
            compile: symbol(&library, "nvrtcCompileProgram")?,
            log_size: symbol(&library, "nvrtcGetProgramLogSize")?,
            log: symbol(&library, "nvrtcGetProgramLog")?,
            image_size: symbol(&library, "nvrtcGetCUBINSize")?,
            image: symbol(&library, "nvrtcGetCUBIN")?,
            destroy: symbol(&library, "nvrtcDestroyProgram")?,
        };
        let version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int =
            symbol(&library, "nvrtcVersion")?;
        let count: unsafe extern "C" fn(*mut c_int) -> c_int =
            symbol(&library, "nvrtcGetNumSupportedArchs")?;
        let list: unsafe extern "C" fn(*mut c_int) -> c_int =
            symbol(&library, "nvrtcGetSupportedArchs")?;
        let (mut major, mut minor, mut n) = (0, 0, 0);
        // SAFETY: the out-parameters are live.
        if unsafe { version(&mut major, &mut minor) } != 0 || unsafe { count(&mut n) } != 0 {
            return Err("does not tell its version".into());
        }
        let mut archs = vec![0; usize::try_from(n).unwrap_or(0)];
        // SAFETY: as many as it said there are.
        if unsafe { list(archs.as_mut_ptr()) } != 0 {
            return Err("does not tell its architectures".into());
        }
        Ok(Compiler {
            calls,
            version: (major, minor),
            path: path.display().to_string(),
            archs,
            _library: library,
        })
    }

    /// Its version.
    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    /// Where it was found.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Whether it makes machine code for a compute capability such as 90.
    pub fn knows(&self, capability: u32) -> bool {
        self.archs.iter().any(|arch| *arch as u32 == capability)
    }

    /// Compiles for an architecture such as `sm_90a`.
    ///
    /// # Errors
    /// `kernel_source` with the compiler's log.
    pub fn compile(&self, source: &Source<'_>, arch: &str) -> Result<Compiled, Failure> {
        let bad = |what: String| Failure::failed("kernel_source", what);
        let c = |text: &str| CString::new(text).map_err(|_| bad(format!("{}: a NUL", source.name)));
        let (text, name) = (c(source.text)?, c(source.name)?);
        let headers = source.headers.iter();
        let owned = headers
            .map(|(name, text)| Ok((c(name)?, c(text)?)))
            .collect::<Result<Vec<_>, Failure>>()?;
        let names: Vec<*const c_char> = owned.iter().map(|h| h.0.as_ptr()).collect();
        let texts: Vec<*const c_char> = owned.iter().map(|h| h.1.as_ptr()).collect();
        let options = options(arch)
            .iter()
            .map(|o| c(o))
            .collect::<Result<Vec<_>, _>>()?;
        let options: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        let mut program: Program = std::ptr::null_mut();
        // SAFETY: NUL-terminated texts and arrays of the stated length, live until the program is destroyed below.
        let made = unsafe {
            (self.calls.create)(
                &mut program,
                text.as_ptr(),
                name.as_ptr(),
                owned.len() as c_int,
                texts.as_ptr(),
                names.as_ptr(),
            )
        };
        if made != 0 {
            return Err(bad(format!(
                "{}: NVRTC makes no program ({made})",
                source.name
            )));
        }
        // SAFETY: the program is live; the options are as above.
        let compiled =
            unsafe { (self.calls.compile)(program, options.len() as c_int, options.as_ptr()) };
        let log = self.text(program);
        let image = match compiled {
            0 => self.image(program),
            _ => None,
        };
        // SAFETY: made above, destroyed once.
        unsafe { (self.calls.destroy)(&mut program) };
        let image = image.filter(|image| !image.is_empty()).ok_or_else(|| {
            let path = &self.path;
            bad(format!(
                "{} for {arch} with {path} ({compiled}):\n{log}",
                source.name
            ))
        })?;
        Ok(Compiled { image, log })
    }

    fn text(&self, program: Program) -> String {
        let mut size = 0;
        // SAFETY: the program is live; the buffer has the size it asks for.
        unsafe {
            if (self.calls.log_size)(program, &mut size) != 0 || size == 0 {
                return String::new();
            }
            let mut log = vec![0_u8; size + 1];
            (self.calls.log)(program, log.as_mut_ptr().cast());
            CStr::from_bytes_until_nul(&log)
                .map(|text| text.to_string_lossy().into_owned())
                .unwrap_or_default()
        }
    }

    fn image(&self, program: Program) -> Option<Vec<u8>> {
        let mut size = 0;
        // SAFETY: as in `text`.
        unsafe {
            if (self.calls.image_size)(program, &mut size) != 0 {
                return None;
            }
            let mut image = vec![0_u8; size];
            ((self.calls.image)(program, image.as_mut_ptr().cast()) == 0).then_some(image)
        }
    }
}

/// What every compilation is asked for.
pub fn options(arch: &str) -> [String; 3] {
    [
        format!("--gpu-architecture={arch}"),
        "--std=c++17".into(),
        "--ptxas-options=-v".into(),
    ]
}

fn candidates(variable: &impl Variable, driver_major: i32) -> Vec<PathBuf> {
    if let Some(path) = given(variable, NVRTC) {
        return vec![path];
    }
    let majors = majors(driver_major);
    let mut all = named(variable, LIBRARY, majors);
    all.extend(majors.map(|major| format!("{LIBRARY}.{major}").into()));
    all.push(LIBRARY.into());
    all.extend(libraries::usual(LIBRARY, majors));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_explicit_path_is_the_only_one() {
        let found = |name: &str| (name == NVRTC).then(|| "/nowhere/libnvrtc.so.13".into());
        assert_eq!(
            candidates(&found, 13),
            [PathBuf::from("/nowhere/libnvrtc.so.13")]
        );
        let failure = Compiler::find(found, 13).expect_err("absent");
        assert_eq!(failure.code, "nvrtc_absent");
        assert!(
            failure.message.contains("/nowhere/libnvrtc.so.13"),
            "{failure}"
        );
    }

    #[test]
    fn the_drivers_own_version_comes_first() {
        let names = |major| -> Vec<String> {
            let all = candidates(&|_: &str| None, major);
            all[..3].iter().map(|p| p.display().to_string()).collect()
        };
        assert_eq!(
            names(13),
            ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]
        );
        assert_eq!(
            names(12),
            ["libnvrtc.so.12", "libnvrtc.so.13", "libnvrtc.so"]
        );
    }
}
