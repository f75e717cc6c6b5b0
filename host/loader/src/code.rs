//! The one list of load-time codes: name, what it means, what to do.
//!
//! A refusal is a value with a code and a reason; scripts rely on the code, people read the reason. Messages,
//! the documentation of codes and the tests that reach each of them are driven by [`Code::ALL`]. Codes of later
//! stages (probe, bind, call) belong to the plugin that answers them and pass through as text.

use std::fmt;

use serde::{Serialize, Serializer};

/// One list of codes: an enum with the name, the meaning and the help of each. The documents of docs/codes.md are
/// written from such lists, each crate's from its own.
#[macro_export]
macro_rules! codes {
    ($(#[$attribute:meta])* $($variant:ident $name:literal: $meaning:literal, $help:literal;)*) => {
        $(#[$attribute])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum Code {
            $(#[doc = $meaning] $variant,)*
        }

        impl Code {
            /// Every code, in the order in which they can be answered.
            pub const ALL: &'static [Code] = &[$(Code::$variant,)*];

            /// The stable name.
            pub fn name(self) -> &'static str {
                match self { $(Code::$variant => $name,)* }
            }

            /// What it means.
            pub fn meaning(self) -> &'static str {
                match self { $(Code::$variant => $meaning,)* }
            }

            /// What to do about it.
            pub fn help(self) -> &'static str {
                match self { $(Code::$variant => $help,)* }
            }
        }
    };
}

codes! {
    /// Why a candidate file was not loaded.
    SameFile "same_file": "The file was already listed under another name.",
        "Nothing: one file loads once. Remove the second link if it confuses.";
    NotAFile "not_a_file": "The candidate is not a regular file.",
        "Move directories, pipes and devices whose name ends in `.so` out of the plugin directory.";
    Unreadable "unreadable": "The file cannot be opened for reading.",
        "Check its permissions and, for a link, that its target exists.";
    PathWorldWritable "path_world_writable": "The file, its directory or an ancestor without the sticky bit can be written by everybody.",
        "Remove the permission: `chmod o-w`.";
    PathGroupWritable "path_group_writable": "The file or its directory can be written by a group that is not your own.",
        "Remove the permission: `chmod g-w`.";
    TooLarge "too_large": "The file is larger than any library is, or far longer than its own headers say.",
        "Fetch the file again; a library of more than 4 GiB is not supported.";
    NotElf "not_elf": "The file does not start with the ELF magic.",
        "It is not a shared library; install the vendor's build for this system.";
    ElfTruncated "elf_truncated": "A header or a segment lies past the end of the file.",
        "The download or copy is incomplete; fetch the file again.";
    ElfClass "elf_class": "The library is not 64-bit.",
        "Install the 64-bit build.";
    ElfEndian "elf_endian": "The library's byte order is not this machine's.",
        "Install the build for this machine.";
    ElfMachine "elf_machine": "The library was built for another machine.",
        "Install the build for this machine.";
    ElfType "elf_type": "The ELF file is not a shared object.",
        "Install the shared library, not an object file or a core dump.";
    ElfMalformed "elf_malformed": "The ELF headers contradict themselves.",
        "The file is damaged; fetch it again.";
    LockMissing "lock_missing": "A lock is demanded (`--locked`) and there is no lock file.",
        "Write it with `structures plugins lock`, or name it with `--lock-file`.";
    LockUnlisted "lock_unlisted": "The lock is enforced and does not list the file.",
        "If the file is wanted, write the lock again with `structures plugins lock`.";
    LockChanged "lock_changed": "The lock lists the file's name with other bytes.",
        "Find out who changed the file; if the change is wanted, `structures plugins lock`.";
    SignatureMissing "signature_missing": "Signatures are required and the file has none.",
        "Get the vendor's `<name>.so.sig`, or leave `--require-signed` out.";
    SignatureBad "signature_bad": "The signature does not fit the file, or cannot be read.",
        "The file or its signature was altered: fetch both again.";
    SignatureUntrusted "signature_untrusted": "Signatures are required and the key that made this one is not trusted.",
        "If you trust the vendor, put the public key into the directory of trusted keys.";
    SidecarInvalid "sidecar_invalid": "The sidecar `<name>.plugin.json` is not a describe document with a digest, or others may write it.",
        "Fetch it again, correct its permissions, or remove it.";
    SidecarMismatch "sidecar_mismatch": "The sidecar states another digest than the file has, or another document than the library.",
        "Install library and sidecar of one package, or remove the sidecar.";
    ScannerMissing "scanner_missing": "There is no program to describe plugins in a process of their own.",
        "Set STRUCTURES_SCANNER to the `structures` program or install it beside this executable.";
    ScanTimeout "scan_timeout": "Describing or opening the plugin did not finish in time; the child was killed.",
        "Report it to the vendor: loading and `describe` must not wait for anything, `open` only for its devices. It is tried again after an hour or `plugins rescan`.";
    ScanCrashed "scan_crashed": "Describing the plugin, or opening or closing it once, ended the child by a signal.",
        "Report it to the vendor with the signal; the plugin stays out until the file changes or `plugins rescan`.";
    ScanFailed "scan_failed": "The scan child ended without an answer.",
        "Run the scanner by hand on the file; its messages are in the log. It is tried again after an hour or `plugins rescan`.";
    ScanLeftProcesses "scan_left_processes": "The plugin started processes that outlived the scan child; they were ended.",
        "Report it to the vendor: loading, `describe`, `open` and `close` must leave nothing behind.";
    LoadCrashed "load_crashed": "A host process ended while it opened the plugin, which a scan child had opened before.",
        "Report it to the vendor: the plugin behaves differently in a host. It is tried again after an hour or `plugins rescan`.";
    OpenFailed "open_failed": "The dynamic linker refused the library.",
        "Install what it needs (missing library or symbol), or a build for this system; a cache on a `noexec` mount is moved by STRUCTURES_CACHE_DIR.";
    NotAPlugin "not_a_plugin": "A shared library without a plugin door.",
        "Remove it from the plugin directory, or build it with the export macro.";
    AbiHeader "abi_header": "The library was built with an incompatible abi_stable.",
        "Rebuild the plugin against this host's plugin API.";
    LayoutMissing "layout_missing": "The library exports no layout constant, so that its layout cannot be checked.",
        "Rebuild it with the export macro, layout constant included.";
    LayoutMismatch "layout_mismatch": "The layout of the library's root module is not the host's.",
        "Rebuild the plugin against this host's plugin API.";
    DoorFailed "door_failed": "The library's door returned an error or an incomplete table.",
        "Report it to the vendor.";
    DescribeFailed "describe_failed": "The plugin's `describe` answered an error.",
        "Report it to the vendor.";
    BadDescribe "bad_describe": "The `describe` document is not valid.",
        "Report it to the vendor; `conform` names each fault.";
    IdDuplicate "id_duplicate": "Two files of one directory declare the same id; both are refused.",
        "Remove one of the two.";
    ApiMajor "api_major": "The plugin was built for another major version of the plugin API.",
        "Install the plugin's build for this host's API version.";
    ApiRequires "api_requires": "The plugin requires a host feature that this host does not have.",
        "Install a newer host or an older plugin.";
    ArchMalformed "arch_malformed": "An architecture declaration cannot be read, so it is not admitted.",
        "Report it to the vendor.";
    ArchNotDeclared "arch_not_declared": "No declared architecture matches this device.",
        "Install the plugin's build for this device.";
    Shadowed "shadowed": "A plugin with the same id was loaded from an earlier directory.",
        "Nothing, or remove the earlier one.";
    BytesChanged "bytes_changed": "The bytes to be opened are not the bytes that were scanned.",
        "Run it again; if it stays, something rewrites the file or the cache.";
    DescribeChanged "describe_changed": "The loaded library describes itself differently from its scan.",
        "Report it to the vendor: `describe` must depend on nothing.";
    PluginOpenFailed "plugin_open_failed": "The plugin's `open` answered an error.",
        "Read the reason; it is the plugin's own.";
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Serialize for Code {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(self.name())
    }
}

impl Code {
    /// The code with this name.
    pub fn from_name(name: &str) -> Option<Code> {
        Code::ALL.iter().copied().find(|c| c.name() == name)
    }

    /// A refusal with this code.
    pub fn because(self, reason: impl Into<String>) -> Refusal {
        Refusal {
            code: self,
            reason: reason.into(),
            detail: None,
        }
    }
}

/// Why one candidate is not used. A value, never an error: the others go on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Refusal {
    /// Stable code.
    pub code: Code,
    /// Facts, expected and found, in one line.
    pub reason: String,
    /// The whole text where the reason is a summary; for the log.
    #[serde(skip)]
    pub detail: Option<String>,
}

impl Refusal {
    /// Adds the whole text behind a summary.
    #[must_use]
    pub fn with_detail(mut self, text: impl Into<String>) -> Self {
        self.detail = Some(text.into());
        self
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.code, self.reason)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_read_back() {
        for code in Code::ALL {
            assert_eq!(Code::from_name(code.name()), Some(*code));
            assert!(!code.meaning().is_empty() && !code.help().is_empty());
        }
        let names: std::collections::BTreeSet<_> = Code::ALL.iter().map(|c| c.name()).collect();
        assert_eq!(names.len(), Code::ALL.len());
    }
}
