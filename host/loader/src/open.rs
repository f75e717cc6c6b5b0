//! Opens a library and goes through its door: the raw and the checked layer of loading.
//!
//! `RTLD_NOW`, so that a missing symbol is a refusal here and not a crash in the first call; `RTLD_LOCAL`, so that
//! libraries do not see each other's symbols; `RTLD_NODELETE` and a leaked handle, because code that started threads
//! or registered thread-local destructors cannot be unmapped safely. Never `RootModule::load_from`: it keeps one
//! library per type, so a second plugin would silently be the first one again.
//!
//! Two doors, one exchange: the Rust door, abi_stable's checked root module, and the C door, one exported function.
//! Both give the host's table and answer the plugin's; nothing above this file knows which one it was. A library with
//! both is taken through the Rust door, whose layout can be checked.

use std::path::Path;

use abi_stable::library::{
    AbiHeader, AbiHeaderRef, LibHeader, LibraryError, RootModuleError,
    ROOT_MODULE_LOADER_NAME_WITH_NUL,
};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use structures_plugin_api::abi::{
    Bytes, DeviceVTable, Error, FormVTable, HostVTable, PluginVTable, API_MAJOR, API_VERSION,
    C_SYMBOL, STATUS_OK,
};
use structures_plugin_api::door::{PluginRootRef, DOOR_VERSION};
use structures_plugin_api::owned;

use crate::code::{Code, Refusal};
use crate::table;

/// Longest `describe` document that is read.
pub(crate) const LONGEST_DOCUMENT: usize = 16 << 20;

/// The C door.
type CDoor = unsafe extern "C" fn(host: *const HostVTable) -> *const PluginVTable;

/// A library whose door was found and checked as far as it can be.
#[derive(Clone)]
pub(crate) enum Doorway {
    Rust(PluginRootRef),
    C(CDoor),
}

/// The plugin's tables in this host's layout, entries checked.
#[derive(Clone, Copy)]
pub(crate) struct Tables {
    pub(crate) plugin: PluginVTable,
    pub(crate) form: FormVTable,
    pub(crate) device: Option<DeviceVTable>,
}

impl Doorway {
    /// Opens the library at `path` (a private copy that passed the ELF check) for the rest of the process.
    pub(crate) fn open(path: &Path) -> Result<Self, Refusal> {
        // SAFETY: this runs a stranger's initialisers, which is what loading a plugin means: the file passed the
        // path rules and the ELF check, and it was opened in a throw-away process before.
        let library =
            unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL | libc::RTLD_NODELETE) }
                .map_err(|e| Code::OpenFailed.because(one_line(&chain(&e))))?;
        let door = through_rust_door(&library)
            .map(|root| root.map(Doorway::Rust))
            .or_else(|| through_c_door(&library).map(|door| Ok(Doorway::C(door))))
            .unwrap_or_else(|| Err(no_door(&library)));
        // Also when refused: its initialisers have run.
        std::mem::forget(library);
        door
    }

    /// Id and version as the door itself states them, where it does.
    pub(crate) fn identity(&self) -> Option<(&str, &str)> {
        match self {
            Doorway::Rust(root) => Some((root.id().as_str(), root.version().as_str())),
            Doorway::C(_) => None,
        }
    }

    /// Exchanges the tables. `host` is null for a process that only describes.
    ///
    /// # Safety
    /// `host` is null, or a table that lives as long as the process.
    pub(crate) unsafe fn exchange(&self, host: *const HostVTable) -> Result<Tables, Refusal> {
        let plugin = match self {
            // SAFETY: the layout of the root module was checked; the host's table is promised by the caller.
            Doorway::Rust(root) => unsafe { root.exchange()(host.cast()) }.cast::<PluginVTable>(),
            // SAFETY: a symbol of this name is this function, says the ABI; the host's table as above.
            Doorway::C(door) => unsafe { door(host) },
        };
        // SAFETY: the door promises null or a table that is valid for ever, and so are the tables in it.
        unsafe {
            let plugin = table::read(plugin)?;
            Ok(Tables {
                plugin,
                form: table::read(plugin.form)?,
                device: match plugin.device.is_null() {
                    true => None,
                    false => Some(table::read(plugin.device)?),
                },
            })
        }
    }
}

impl Tables {
    /// The `describe` document, as text.
    pub(crate) fn describe(&self) -> Result<String, Refusal> {
        let mut out = Bytes::EMPTY;
        let mut error = Error::EMPTY;
        // SAFETY: both out-parameters are live and empty, as the ABI asks.
        let status = unsafe { (self.plugin.describe)(&mut out, &mut error) };
        if status != STATUS_OK {
            // SAFETY: the plugin filled the error, or left it empty.
            let failure = unsafe { owned::take_error(status, &mut error) };
            return Err(Code::DescribeFailed.because(one_line(&failure.to_string())));
        }
        if out.len > LONGEST_DOCUMENT {
            return Err(Code::BadDescribe.because(format!(
                "expected at most {LONGEST_DOCUMENT} bytes, found {}",
                out.len
            )));
        }
        // SAFETY: the plugin answered success, so `out` is as it made it.
        let bytes = unsafe { owned::read_bytes(&mut out) };
        String::from_utf8(bytes)
            .map_err(|e| Code::BadDescribe.because(format!("expected UTF-8: {e}")))
    }
}

/// `None`: the library has no such door.
fn through_rust_door(library: &Library) -> Option<Result<PluginRootRef, Refusal>> {
    // SAFETY: a symbol of this name is an `AbiHeader`; everything else about it is checked before it is believed.
    let header =
        unsafe { library.get::<AbiHeaderRef>(ROOT_MODULE_LOADER_NAME_WITH_NUL.as_bytes()) };
    let header = *header.ok()?;
    Some(root_module(header))
}

fn root_module(header: AbiHeaderRef) -> Result<PluginRootRef, Refusal> {
    let header: &'static LibHeader = header.upgrade().map_err(|e| refusal(&e, None))?;
    let door = header.version_strings().version;
    if header.layout().is_none() {
        return Err(Code::LayoutMissing.because(format!(
            "expected a layout constant, found none; {}",
            doors(Some(door.as_str()))
        )));
    }
    let root: PluginRootRef = header
        .init_root_module()
        .map_err(|e| refusal(&e, Some(door.as_str())))?;
    let api = root.api();
    if !same_major(api.as_str()) {
        return Err(api_major(api.as_str()));
    }
    Ok(root)
}

fn through_c_door(library: &Library) -> Option<CDoor> {
    // SAFETY: a symbol of this name is the C door, says the ABI. Nothing about it can be checked before it is called;
    // it was, in a throw-away process.
    let door = unsafe { library.get::<Option<CDoor>>(C_SYMBOL.as_bytes()) };
    *door.ok()?
}

/// Majors whose C door is recognised, to name the version of a library of another one.
const OTHER_MAJORS: std::ops::Range<u32> = 0..10;

fn no_door(library: &Library) -> Refusal {
    let stem = C_SYMBOL.trim_end_matches(|c: char| c.is_ascii_digit());
    let other = OTHER_MAJORS
        .filter(|major| *major != API_MAJOR)
        .find(|major| {
            // SAFETY: only the presence of the symbol is asked, it is not used.
            unsafe { library.get::<*const ()>(format!("{stem}{major}").as_bytes()) }.is_ok()
        });
    match other {
        Some(major) => api_major(&format!("{major}.x (`{stem}{major}`)")),
        None => Code::NotAPlugin.because(format!(
            "expected the Rust door's root module or the C door `{C_SYMBOL}`, found neither symbol"
        )),
    }
}

/// Both sides' versions, for the refusals of the Rust door, which come before an API version is known.
fn doors(found: Option<&str>) -> String {
    let found = found.map_or(String::new(), |v| {
        format!("the library's door is version {v}, ")
    });
    format!("{found}this host's is {DOOR_VERSION} of API {API_VERSION}")
}

/// The refusal of a plugin of another API major; both versions are named.
pub(crate) fn api_major(found: &str) -> Refusal {
    Code::ApiMajor.because(format!(
        "the plugin was built for API {found}, this host serves API {API_VERSION} (major {API_MAJOR})"
    ))
}

/// Whether `api` is a version of this host's major.
pub(crate) fn same_major(api: &str) -> bool {
    semver::Version::parse(api).is_ok_and(|v| v.major == u64::from(API_MAJOR))
}

/// One line for people; the whole text, which may be kilobytes of layouts, goes to the log.
fn refusal(error: &LibraryError, door: Option<&str>) -> Refusal {
    let whole = error.to_string();
    match error {
        LibraryError::InvalidAbiHeader(found) => Code::AbiHeader.because(format!(
            "expected abi_stable ABI {}.{}, found {}.{}; {}",
            AbiHeader::VALUE.abi_major,
            AbiHeader::VALUE.abi_minor,
            found.abi_major,
            found.abi_minor,
            doors(door)
        )),
        LibraryError::IncompatibleVersionNumber {
            expected_version,
            actual_version,
            ..
        } => Code::ApiMajor.because(format!(
            "the plugin's door is version {actual_version}, this host's is {expected_version}"
        )),
        LibraryError::RootModule {
            err: RootModuleError::Returned(e),
            ..
        } => Code::DescribeFailed.because(one_line(&e.to_string())),
        LibraryError::RootModule { .. } | LibraryError::ParseVersionError(_) => {
            Code::DoorFailed.because(one_line(&whole))
        }
        _ => Code::LayoutMismatch
            .because(format!("{}; {}", summary(&whole), doors(door)))
            .with_detail(whole),
    }
}

/// First lines that say something, and how much more there is.
fn summary(text: &str) -> String {
    let telling: Vec<&str> = text
        .lines()
        .map(str::trim)
        .filter(|l| l.chars().any(char::is_alphanumeric))
        .collect();
    let mut line = telling
        .iter()
        .take(4)
        .copied()
        .collect::<Vec<_>>()
        .join(" / ");
    if line.len() > 300 {
        line.truncate(
            (0..=300)
                .rev()
                .find(|i| line.is_char_boundary(*i))
                .unwrap_or(0),
        );
        line.push_str(" ...");
    }
    if telling.len() > 4 {
        line.push_str(&format!(" ({} more lines in the log)", telling.len() - 4));
    }
    line
}

/// Joins the lines of a short text.
pub(crate) fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(e) = next {
        let cause = e.to_string();
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
        next = e.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn majors_are_compared_as_versions() {
        assert!(same_major("1.0.0") && same_major("1.7.3"));
        assert!(
            !same_major("2.0.0") && !same_major("0.9.0") && !same_major("1") && !same_major("")
        );
        let text = api_major("2.1.0").reason;
        assert!(
            text.contains("2.1.0") && text.contains(API_VERSION),
            "{text}"
        );
    }

    #[test]
    fn a_long_layout_error_becomes_one_line() {
        let long: String = (0..200)
            .map(|i| format!("\n\n  line {i} of a layout\n-----"))
            .collect();
        let line = summary(&long);
        assert!(!line.contains('\n') && line.len() < 400, "{line}");
        assert!(
            line.starts_with("line 0 of a layout / line 1") && line.contains("196 more"),
            "{line}"
        );
    }

    #[test]
    fn a_missing_library_is_a_refusal() {
        let refusal = Doorway::open(Path::new("/nowhere/x.so"))
            .err()
            .expect("refused");
        assert_eq!(refusal.code, Code::OpenFailed);
        assert!(refusal.reason.contains("/nowhere/x.so"), "{refusal}");
    }
}
