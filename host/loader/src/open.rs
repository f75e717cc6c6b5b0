//! Opens a library and goes through its door: the raw and the checked layer of loading.
//!
//! `RTLD_NOW`, so that a missing symbol is a refusal here and not a crash in the first call; `RTLD_LOCAL`, so that
//! libraries do not see each other's symbols; `RTLD_NODELETE` and a leaked handle, because code that started threads
//! or registered thread-local destructors cannot be unmapped safely. Never `RootModule::load_from`: it keeps one
//! library per type, so a second plugin would silently be the first one again.
//!
//! One door so far: the Rust door, abi_stable's checked root module. A library with the C door is recognised and
//! refused by name (`door_unsupported`); its exchange belongs beside [`through_rust_door`], and nothing above this
//! file will know the difference.

use std::path::Path;

use abi_stable::library::{
    AbiHeader, AbiHeaderRef, LibHeader, LibraryError, RootModuleError,
    ROOT_MODULE_LOADER_NAME_WITH_NUL,
};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use structures_plugin_api::abi::{
    Bytes, Error, FormVTable, HostVTable, PluginVTable, API_MAJOR, API_VERSION, C_SYMBOL, STATUS_OK,
};
use structures_plugin_api::door::PluginRootRef;
use structures_plugin_api::owned;

use crate::code::{Code, Refusal};

/// Longest `describe` document that is read.
pub(crate) const LONGEST_DOCUMENT: usize = 16 << 20;

/// A library whose door was checked.
#[derive(Clone)]
pub(crate) struct Doorway {
    root: PluginRootRef,
}

/// The plugin's tables, sizes checked.
#[derive(Clone, Copy)]
pub(crate) struct Tables {
    pub(crate) plugin: &'static PluginVTable,
    pub(crate) form: &'static FormVTable,
}

impl Doorway {
    /// Opens the library at `path` (a private copy that passed the ELF check) for the rest of the process.
    pub(crate) fn open(path: &Path) -> Result<Self, Refusal> {
        // SAFETY: this runs a stranger's initialisers, which is what loading a plugin means: the file passed the
        // path rules and the ELF check, and it was opened in a throw-away process before.
        let library =
            unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL | libc::RTLD_NODELETE) }
                .map_err(|e| Code::OpenFailed.because(one_line(&chain(&e))))?;
        let root = through_rust_door(&library);
        // Also when refused: its initialisers have run.
        std::mem::forget(library);
        Ok(Doorway { root: root? })
    }

    /// Id as the root module states it.
    pub(crate) fn id(&self) -> &str {
        self.root.id().as_str()
    }

    /// Version as the root module states it.
    pub(crate) fn version(&self) -> &str {
        self.root.version().as_str()
    }

    /// Exchanges the tables. `host` is null for a process that only describes.
    ///
    /// # Safety
    /// `host` is null, or a table that lives as long as the process.
    pub(crate) unsafe fn exchange(&self, host: *const HostVTable) -> Result<Tables, Refusal> {
        let exchange = self.root.exchange();
        // SAFETY: the layout of the root module was checked; the host's table is promised by the caller.
        let table = unsafe { exchange(host.cast()) }.cast::<PluginVTable>();
        if !table.is_aligned() {
            return Err(Code::DoorFailed.because("the door answered a misplaced table"));
        }
        // SAFETY: the door promises null or a table that is valid for ever.
        let plugin: &'static PluginVTable = unsafe { table.as_ref() }
            .ok_or_else(|| Code::DoorFailed.because("the door answered no table"))?;
        whole(
            "plugin table",
            plugin.struct_size,
            size_of::<PluginVTable>(),
        )?;
        // SAFETY: part of a table that is valid for ever.
        let form: &'static FormVTable = unsafe { plugin.form.as_ref() }
            .ok_or_else(|| Code::DoorFailed.because("the plugin table has no form table"))?;
        whole("form table", form.struct_size, size_of::<FormVTable>())?;
        Ok(Tables { plugin, form })
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

fn through_rust_door(library: &Library) -> Result<PluginRootRef, Refusal> {
    // SAFETY: a symbol of this name is an `AbiHeader`; everything else about it is checked before it is believed.
    let header =
        unsafe { library.get::<AbiHeaderRef>(ROOT_MODULE_LOADER_NAME_WITH_NUL.as_bytes()) };
    let Ok(header) = header else {
        // SAFETY: only the presence of the symbol is asked, it is not used.
        let c_door = unsafe { library.get::<*const ()>(C_SYMBOL.as_bytes()) }.is_ok();
        return Err(if c_door {
            Code::DoorUnsupported.because(format!(
                "found the C door `{C_SYMBOL}`, this version opens the Rust door only"
            ))
        } else {
            Code::NotAPlugin
                .because("expected the Rust door's root module or the C door, found neither symbol")
        });
    };
    let header: &'static LibHeader = (*header).upgrade().map_err(|e| refusal(&e))?;
    if header.layout().is_none() {
        return Err(Code::LayoutMissing.because("expected a layout constant, found none"));
    }
    let root: PluginRootRef = header.init_root_module().map_err(|e| refusal(&e))?;
    let api = root.api();
    if !same_major(api.as_str()) {
        return Err(api_major(api.as_str()));
    }
    Ok(root)
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

fn whole(what: &str, found: u32, expected: usize) -> Result<(), Refusal> {
    if found as usize >= expected {
        return Ok(());
    }
    Err(Code::DoorFailed.because(format!(
        "{what}: expected at least {expected} bytes, found {found}"
    )))
}

/// One line for people; the whole text, which may be kilobytes of layouts, goes to the log.
fn refusal(error: &LibraryError) -> Refusal {
    let whole = error.to_string();
    tracing::debug!("the root module was refused:\n{whole}");
    match error {
        LibraryError::InvalidAbiHeader(found) => Code::AbiHeader.because(format!(
            "expected abi_stable ABI {}.{}, found {}.{}",
            AbiHeader::VALUE.abi_major,
            AbiHeader::VALUE.abi_minor,
            found.abi_major,
            found.abi_minor
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
        _ => Code::LayoutMismatch.because(summary(&whole)),
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
