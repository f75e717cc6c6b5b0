//! Reads the headers of a candidate without opening it as a library.
//!
//! The dynamic linker maps segments and trusts them: a truncated library passes `dlopen` and kills the process with
//! SIGBUS when a missing page is touched. So class, byte order, machine, type and the place of every header and
//! segment are compared with the file before anything is mapped. Owns nothing but this comparison; symbols and
//! needed libraries are the dynamic linker's business.

use std::fs::File;
use std::os::unix::fs::FileExt;

use crate::code::{Code, Refusal};

const HEADER: usize = 64;
const PROGRAM_HEADER: usize = 56;
/// Bounds the memory a hostile header can ask for; linkers write about ten.
const MOST_PROGRAM_HEADERS: u16 = 1024;

const CLASS_64: u8 = 2;
const LITTLE_ENDIAN: u8 = 1;
const TYPE_DYN: u16 = 3;
const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;

/// Longest candidate: beyond it nothing is read, hashed or copied.
pub(crate) const LARGEST: u64 = 4 << 30;
/// How much may follow what the headers describe: signatures, attributes, a trailer.
const MOST_TRAILER: u64 = 64 << 20;

/// ELF machine number of the host.
const HOST_MACHINE: u16 = if cfg!(target_arch = "x86_64") {
    62
} else if cfg!(target_arch = "aarch64") {
    183
} else if cfg!(target_arch = "riscv64") {
    243
} else {
    0
};

/// Checks that `file` is a whole shared object for this machine.
///
/// # Errors
/// The refusal with the first thing that is wrong, expected and found.
pub fn check(file: &File) -> Result<(), Refusal> {
    let unreadable = |e: std::io::Error| Code::Unreadable.because(format!("cannot be read: {e}"));
    let length = file.metadata().map_err(unreadable)?.len();

    if length > LARGEST {
        return Err(
            Code::TooLarge.because(format!("expected at most {LARGEST} bytes, found {length}"))
        );
    }
    let mut header = [0_u8; HEADER];
    let have = usize::try_from(length).map_or(HEADER, |l| l.min(HEADER));
    file.read_exact_at(&mut header[..have], 0)
        .map_err(unreadable)?;
    if have < 4 || header[..4] != *b"\x7fELF" {
        let found = header[..have.min(4)].escape_ascii().to_string();
        return Err(Code::NotElf.because(format!(
            "expected the magic `\\x7fELF`, found `{found}` in a file of {length} bytes"
        )));
    }
    if have < HEADER {
        return Err(Code::ElfTruncated.because(format!(
            "expected a header of {HEADER} bytes, found {length} bytes"
        )));
    }
    if header[4] != CLASS_64 {
        let found = if header[4] == 1 {
            "32-bit".into()
        } else {
            format!("class {}", header[4])
        };
        return Err(Code::ElfClass.because(format!("expected 64-bit, found {found}")));
    }
    if header[5] != LITTLE_ENDIAN {
        return Err(Code::ElfEndian.because(format!(
            "expected little endian (1), found data encoding {}",
            header[5]
        )));
    }
    let machine = u16_at(&header, 18);
    if machine != HOST_MACHINE {
        return Err(Code::ElfMachine.because(format!(
            "expected {}, found {}",
            machine_name(HOST_MACHINE),
            machine_name(machine)
        )));
    }
    let kind = u16_at(&header, 16);
    if kind != TYPE_DYN {
        return Err(Code::ElfType.because(format!(
            "expected a shared object (ET_DYN), found {}",
            type_name(kind)
        )));
    }

    let program_headers = u64_at(&header, 32);
    let (entry_size, count) = (u16_at(&header, 54), u16_at(&header, 56));
    if usize::from(entry_size) != PROGRAM_HEADER {
        return Err(Code::ElfMalformed.because(format!(
            "expected program headers of {PROGRAM_HEADER} bytes, found {entry_size}"
        )));
    }
    if count == 0 || count > MOST_PROGRAM_HEADERS {
        return Err(Code::ElfMalformed.because(format!(
            "expected 1..={MOST_PROGRAM_HEADERS} program headers, found {count}"
        )));
    }
    let table = PROGRAM_HEADER * usize::from(count);
    inside("the program headers", program_headers, table as u64, length)?;
    // The section headers come last in a linker's output, so they notice a cut that spares the segments.
    let (sections, section_size, section_count) = (
        u64_at(&header, 40),
        u16_at(&header, 58),
        u16_at(&header, 60),
    );
    let mut described = program_headers.saturating_add(table as u64);
    if sections != 0 {
        let bytes = u64::from(section_size) * u64::from(section_count);
        inside("the section headers", sections, bytes, length)?;
        described = described.max(sections.saturating_add(bytes));
    }

    let mut entries = vec![0_u8; table];
    file.read_exact_at(&mut entries, program_headers)
        .map_err(unreadable)?;
    let mut dynamic = false;
    let mut loads = 0;
    for (i, entry) in entries.chunks_exact(PROGRAM_HEADER).enumerate() {
        let kind = u32_at(entry, 0);
        dynamic |= kind == PT_DYNAMIC;
        if kind == PT_LOAD || kind == PT_DYNAMIC {
            let (in_file, in_memory) = (u64_at(entry, 32), u64_at(entry, 40));
            inside(&format!("segment {i}"), u64_at(entry, 8), in_file, length)?;
            described = described.max(u64_at(entry, 8).saturating_add(in_file));
            if in_file > in_memory {
                return Err(Code::ElfMalformed.because(format!(
                    "segment {i}: {in_file} bytes in the file, expected at most its {in_memory} in memory"
                )));
            }
            loads += u32::from(kind == PT_LOAD);
        }
    }
    if !dynamic || loads == 0 {
        let missing = if dynamic {
            "a loadable segment"
        } else {
            "a dynamic segment"
        };
        return Err(Code::ElfMalformed.because(format!(
            "expected {missing}, found none among {count} program headers"
        )));
    }
    if length - described.min(length) > MOST_TRAILER {
        return Err(Code::TooLarge.because(format!(
            "expected at most {MOST_TRAILER} bytes behind the {described} that its headers describe, found {length} \
             in all"
        )));
    }
    Ok(())
}

fn inside(what: &str, offset: u64, bytes: u64, length: u64) -> Result<(), Refusal> {
    match offset.checked_add(bytes) {
        Some(end) if end <= length => Ok(()),
        end => {
            let end = end.map_or("past any file".into(), |end| format!("at byte {end}"));
            Err(Code::ElfTruncated
                .because(format!("{what} end {end}, the file has {length} bytes")))
        }
    }
}

fn machine_name(machine: u16) -> String {
    let name = match machine {
        3 => "i386",
        40 => "arm",
        62 => "x86_64",
        183 => "aarch64",
        243 => "riscv",
        _ => "unknown",
    };
    format!("{name} ({machine})")
}

fn type_name(kind: u16) -> String {
    let name = match kind {
        1 => "a relocatable object",
        2 => "a fixed-address executable",
        4 => "a core dump",
        _ => "an unknown type",
    };
    format!("{name} ({kind})")
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(array(bytes, at))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array(bytes, at))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array(bytes, at))
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    std::array::from_fn(|i| bytes[at + i])
}

#[cfg(test)]
mod tests {
    use super::*;

    const LENGTH: usize = 4096;

    /// A minimal well-formed shared object: one load and one dynamic segment.
    fn minimal() -> Vec<u8> {
        let mut f = vec![0_u8; LENGTH];
        f[..6].copy_from_slice(b"\x7fELF\x02\x01");
        put(&mut f, 16, &TYPE_DYN.to_le_bytes());
        put(&mut f, 18, &HOST_MACHINE.to_le_bytes());
        put(&mut f, 32, &64_u64.to_le_bytes());
        put(&mut f, 54, &56_u16.to_le_bytes());
        put(&mut f, 56, &2_u16.to_le_bytes());
        for (i, kind) in [PT_LOAD, PT_DYNAMIC].into_iter().enumerate() {
            let at = 64 + 56 * i;
            put(&mut f, at, &kind.to_le_bytes());
            put(&mut f, at + 32, &(LENGTH as u64).to_le_bytes());
            put(&mut f, at + 40, &(LENGTH as u64).to_le_bytes());
        }
        f
    }

    fn put(f: &mut [u8], at: usize, bytes: &[u8]) {
        f[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn code(bytes: &[u8]) -> Option<Code> {
        let mut file = tempfile::tempfile().expect("temporary file");
        std::io::Write::write_all(&mut file, bytes).expect("write");
        check(&file).err().map(|r| r.code)
    }

    fn edited(at: usize, bytes: &[u8]) -> Option<Code> {
        let mut f = minimal();
        put(&mut f, at, bytes);
        code(&f)
    }

    #[test]
    fn each_header_field_has_its_code() {
        assert_eq!(code(&minimal()), None);
        assert_eq!(code(b""), Some(Code::NotElf));
        assert_eq!(code(b"\x7fE"), Some(Code::NotElf));
        assert_eq!(
            code(b"just a text, longer than a header .............................."),
            { Some(Code::NotElf) }
        );
        assert_eq!(edited(4, &[1]), Some(Code::ElfClass));
        assert_eq!(edited(5, &[2]), Some(Code::ElfEndian));
        assert_eq!(edited(18, &40_u16.to_le_bytes()), Some(Code::ElfMachine));
        assert_eq!(edited(16, &1_u16.to_le_bytes()), Some(Code::ElfType));
        assert_eq!(edited(54, &32_u16.to_le_bytes()), Some(Code::ElfMalformed));
        assert_eq!(edited(56, &0_u16.to_le_bytes()), Some(Code::ElfMalformed));
        assert_eq!(
            edited(56, &u16::MAX.to_le_bytes()),
            Some(Code::ElfMalformed)
        );
        assert_eq!(
            edited(32, &u64::MAX.to_le_bytes()),
            Some(Code::ElfTruncated)
        );
        assert_eq!(
            edited(40, &(LENGTH as u64 + 1).to_le_bytes()),
            Some(Code::ElfTruncated)
        );
        assert_eq!(
            edited(64 + 8, &8_u64.to_le_bytes()),
            Some(Code::ElfTruncated)
        );
        assert_eq!(
            edited(64 + 32, &u64::MAX.to_le_bytes()),
            Some(Code::ElfTruncated)
        );
        assert_eq!(
            edited(64 + 40, &8_u64.to_le_bytes()),
            Some(Code::ElfMalformed)
        );
        assert_eq!(
            edited(64 + 56, &6_u32.to_le_bytes()),
            Some(Code::ElfMalformed)
        );
        assert_eq!(edited(64, &6_u32.to_le_bytes()), Some(Code::ElfMalformed));
    }

    #[test]
    fn every_shorter_file_is_refused_and_a_trailer_is_harmless() {
        let whole = minimal();
        for length in [4, 63, 64, 100, 175, 176, 2048, LENGTH - 1] {
            assert_eq!(code(&whole[..length]), Some(Code::ElfTruncated), "{length}");
        }
        let mut longer = whole;
        longer.extend_from_slice(b"something appended");
        assert_eq!(code(&longer), None);
    }

    #[test]
    fn a_file_that_is_mostly_hole_is_refused_before_it_is_read() {
        let grown = |length: u64| {
            let mut file = tempfile::tempfile().expect("temporary file");
            std::io::Write::write_all(&mut file, &minimal()).expect("write");
            file.set_len(length).expect("grow");
            check(&file).err().map(|r| r.code)
        };
        assert_eq!(grown(LENGTH as u64 + MOST_TRAILER), None);
        assert_eq!(
            grown(LENGTH as u64 + MOST_TRAILER + 1),
            Some(Code::TooLarge)
        );
        assert_eq!(grown(LARGEST + 1), Some(Code::TooLarge));
    }

    #[test]
    fn this_program_s_own_kind_is_read() {
        let exe = File::open(std::env::current_exe().expect("path")).expect("open");
        assert_eq!(
            check(&exe).err(),
            None,
            "a position-independent executable is ET_DYN"
        );
    }
}
