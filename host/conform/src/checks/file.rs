//! `symbols`, `libraries`, `panic`: what the ELF file says, without opening it as a library.

use std::path::Path;

use object::elf;
use object::read::elf::{Dyn, FileHeader, ProgramHeader, Sym};
use object::{Endianness, StringTable};
use structures_loader::Throwaway;
use structures_plugin_api::abi::C_SYMBOL;

use super::{Context, Verdict};
use crate::code::Code;

type Header = elf::FileHeader64<Endianness>;

/// The Rust door's symbol begins so; the rest is abi_stable's own.
const RUST_DOOR: &str = "_1as_0lib_1header_0root_bmodule_bloader";
/// Symbols that linkers and compilers put into every library.
const USUAL: [&str; 8] = [
    "_init",
    "_fini",
    "_edata",
    "_end",
    "__bss_start",
    "_start",
    "__cxa_finalize",
    "rust_eh_personality",
];
/// As mangled: what every Rust library that can panic has, and what only one has whose panics unwind. The runtime that
/// aborts leaves no name of its own.
const PANICKING: &str = "9panicking";
const UNWINDING: &str = "12panic_unwind";

fn read(path: &Path) -> Result<Vec<u8>, Verdict> {
    std::fs::read(path).map_err(|e| Code::Broken.because(format!("{}: {e}", path.display())))
}

/// What `load` refuses is not told again.
fn foreign(e: object::Error) -> Verdict {
    Verdict::Skipped(format!("the file is not read as ELF: {e}; see `load`"))
}

pub(super) fn symbols(path: &Path, throwaway: &Throwaway) -> Verdict {
    let bytes = match read(path) {
        Ok(bytes) => bytes,
        Err(verdict) => return verdict,
    };
    exported(&bytes)
        .map(|all| judge_symbols(&all, &|name| throwaway.defines(name)))
        .unwrap_or_else(foreign)
}

struct Exported {
    name: String,
    unique: bool,
}

fn exported(bytes: &[u8]) -> object::Result<Vec<Exported>> {
    let header = Header::parse(bytes)?;
    let endian = header.endian()?;
    let sections = header.sections(endian, bytes)?;
    let table = sections.symbols(endian, bytes, elf::SHT_DYNSYM)?;
    let mut all = Vec::new();
    for symbol in table.iter() {
        let outside = matches!(
            symbol.st_bind(),
            elf::STB_GLOBAL | elf::STB_WEAK | elf::STB_GNU_UNIQUE
        );
        let visible = matches!(
            symbol.st_visibility(),
            elf::STV_DEFAULT | elf::STV_PROTECTED
        );
        if !outside || !visible || symbol.is_undefined(endian) {
            continue;
        }
        let name = symbol.name(endian, table.strings())?;
        all.push(Exported {
            name: String::from_utf8_lossy(name).into_owned(),
            unique: symbol.st_bind() == elf::STB_GNU_UNIQUE,
        });
    }
    Ok(all)
}

fn judge_symbols(all: &[Exported], defined: &dyn Fn(&str) -> bool) -> Verdict {
    let doors = |e: &&Exported| e.name == C_SYMBOL || e.name == RUST_DOOR;
    let door: Vec<&str> = all.iter().filter(doors).map(|e| e.name.as_str()).collect();
    if door.is_empty() {
        return Code::EntryMissing.because(format!(
            "{} symbols are exported, none is `{C_SYMBOL}` or `{RUST_DOOR}`",
            all.len()
        ));
    }
    if let Some(unique) = all.iter().find(|e| e.unique) {
        return Code::UniqueSymbol.because(format!("`{}`", unique.name));
    }
    let own = |e: &&Exported| !door.contains(&e.name.as_str()) && !USUAL.contains(&e.name.as_str());
    let rest: Vec<&str> = all.iter().filter(own).map(|e| e.name.as_str()).collect();
    if let Some(clash) = rest.iter().find(|name| defined(name)) {
        return Code::ExportClash.because(format!(
            "`{clash}`: its own code would call the process's `{clash}` instead"
        ));
    }
    let shown: Vec<&str> = rest.iter().take(5).copied().collect();
    Verdict::passed(match rest.len() {
        0 => format!("`{}` and nothing else", door.join("`, `")),
        n => format!(
            "`{}`, and {n} more than a plugin needs: {} ...",
            door.join("`, `"),
            shown.join(", ")
        ),
    })
}

pub(super) fn libraries(path: &Path, _: &Throwaway) -> Verdict {
    match read(path) {
        Ok(bytes) => linked(&bytes).unwrap_or_else(foreign),
        Err(verdict) => verdict,
    }
}

fn linked(bytes: &[u8]) -> object::Result<Verdict> {
    let header = Header::parse(bytes)?;
    let endian = header.endian()?;
    let segments = header.program_headers(endian, bytes)?;
    for segment in segments {
        if segment.p_type(endian) == elf::PT_GNU_STACK && segment.p_flags(endian) & elf::PF_X != 0 {
            return Ok(Code::ExecutableStack.because("its stack segment is executable"));
        }
    }
    let sections = header.sections(endian, bytes)?;
    let Some((dynamic, link)) = sections.dynamic(endian, bytes)? else {
        return Ok(Verdict::Skipped("no dynamic section; see `load`".into()));
    };
    let strings: StringTable<'_> = sections.strings(endian, bytes, link)?;
    let (mut needed, mut paths) = (Vec::new(), Vec::new());
    for entry in dynamic {
        let text = || -> object::Result<String> {
            Ok(String::from_utf8_lossy(entry.string(endian, strings)?).into_owned())
        };
        match entry.tag32(endian) {
            Some(elf::DT_NEEDED) => needed.push(text()?),
            Some(elf::DT_RPATH | elf::DT_RUNPATH) => paths.push(text()?),
            Some(elf::DT_TEXTREL) => {
                return Ok(Code::TextRelocations.because("DT_TEXTREL is there"))
            }
            Some(elf::DT_FLAGS) if entry.d_val.get(endian) & u64::from(elf::DF_TEXTREL) != 0 => {
                return Ok(Code::TextRelocations.because("DF_TEXTREL is set"))
            }
            _ => {}
        }
    }
    let relative =
        |p: &&str| !p.starts_with('/') && !p.starts_with("$ORIGIN") && !p.starts_with("${ORIGIN}");
    let parts = paths.iter().flat_map(|p| p.split(':'));
    if let Some(path) = parts.into_iter().find(relative) {
        return Ok(Code::LibraryPath.because(format!("search path `{path}`")));
    }
    if let Some(name) = needed
        .iter()
        .find(|n| n.contains('/') && !n.starts_with('/'))
    {
        return Ok(Code::LibraryPath.because(format!("needed library `{name}`")));
    }
    let searched = match paths.is_empty() {
        true => String::new(),
        false => format!("; searched in {}", paths.join(":")),
    };
    Ok(Verdict::passed(match needed.is_empty() {
        true => "needs no library".into(),
        false => format!("needs {}{searched}", needed.join(", ")),
    }))
}

pub(super) fn panic(cx: &Context<'_>) -> Verdict {
    let stated = cx.loaded.plugin().description().panic.as_deref();
    if stated == Some("abort") {
        return Code::PanicAborts
            .because("its description says so: a panic ends the host's process");
    }
    // A file without a table of local symbols says nothing; then the description is all there is.
    let runtimes = read(&cx.task.file).map(|bytes| runtimes(&bytes).unwrap_or_default());
    match (stated, runtimes) {
        (_, Err(verdict)) => verdict,
        (_, Ok((true, false))) => Code::PanicAborts.because(format!(
            "its symbols have no trace of unwinding, its description says {}",
            stated.unwrap_or("nothing")
        )),
        (Some(stated), _) => Verdict::passed(format!("a panic unwinds (`{stated}`)")),
        (None, Ok((_, true))) => Verdict::passed("a panic unwinds; its description does not say"),
        (None, _) => Verdict::passed("nothing in it says that it panics"),
    }
}

/// Whether symbols of panicking, and of panics that unwind, are there.
fn runtimes(bytes: &[u8]) -> object::Result<(bool, bool)> {
    let header = Header::parse(bytes)?;
    let endian = header.endian()?;
    let sections = header.sections(endian, bytes)?;
    let table = sections.symbols(endian, bytes, elf::SHT_SYMTAB)?;
    let mut found = (false, false);
    for symbol in table.iter() {
        let name = symbol.name(endian, table.strings()).unwrap_or_default();
        let name = String::from_utf8_lossy(name);
        found.0 |= name.contains(PANICKING);
        found.1 |= name.contains(UNWINDING);
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(all: &[(&str, bool)], defined: &[&str]) -> Option<Code> {
        let all: Vec<Exported> = all
            .iter()
            .map(|(name, unique)| Exported {
                name: (*name).into(),
                unique: *unique,
            })
            .collect();
        match judge_symbols(&all, &|name| defined.contains(&name)) {
            Verdict::Failed { code, .. } => Some(code),
            _ => None,
        }
    }

    #[test]
    fn exports_are_judged_by_what_they_do_to_a_process() {
        let door = (C_SYMBOL, false);
        assert_eq!(code(&[door], &[]), None);
        assert_eq!(code(&[(RUST_DOOR, false)], &[]), None);
        assert_eq!(code(&[], &[]), Some(Code::EntryMissing));
        assert_eq!(code(&[door, ("helper", false)], &[]), None);
        assert_eq!(
            code(&[door, ("malloc", false)], &["malloc"]),
            Some(Code::ExportClash)
        );
        assert_eq!(
            code(&[door, ("_ZN1sE", true)], &[]),
            Some(Code::UniqueSymbol)
        );
        assert_eq!(code(&[door, ("_fini", false)], &["_fini"]), None);
    }

    #[test]
    fn what_is_no_elf_is_another_check_s() {
        assert!(exported(b"nothing").is_err() && linked(b"nothing").is_err());
    }
}
