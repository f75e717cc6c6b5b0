//! Packed weights on disk, so that a second start reads what the first one packed.
//!
//! One file a matrix: a head that says what the bytes are, the scales, the bytes as the kernels read them. A file is
//! written beside its place and renamed into it; it is read into the arena's huge pages in pieces on the host's
//! threads, for a mapped file has small pages, which cost a decode step 12 to 28 %. Every piece is checked by CRC-32C:
//! a damaged file is said, removed and packed again, and one that cannot be written costs the next start its packing.
//!
//! The directory and what must be equal for a file to fit are the host's ([`Kept`]); the CPU's rung is added here.

use std::arch::x86_64::_mm_crc32_u64;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use structures_plugin_api::abi::LogLevel;
use structures_plugin_api::describe::Kept;
use structures_plugin_api::sdk::{BindRequest, Failure};

use crate::isa::Isa;
use crate::packed::Packed;
use crate::Shared;

/// Begins every file; the digit changes with the layout of the head.
const MAGIC: [u8; 8] = *b"x86pack1";
/// Bytes of the head.
const HEAD: usize = 64;
/// Bytes read and checked at a time.
const PIECE: usize = 1 << 20;

/// What a file's head says beside its sizes: numbers of [`Packed`]'s choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Channels, inputs, lines, steps, bytes of a unit.
    pub sizes: [u32; 5],
    /// What the bytes are.
    pub body: u32,
    /// The bits of a scale of all.
    pub scale: u32,
    /// Scales of channels.
    pub scales: u32,
}

/// The files of one bind.
pub struct Keeper {
    stem: PathBuf,
    /// Matrices hold zeros: what is not found cannot be packed.
    without_matrices: bool,
    next: AtomicUsize,
}

impl Keeper {
    /// Where the request wants packed weights kept, if it does.
    pub fn of(request: &BindRequest<'_>, isa: Isa) -> Option<Self> {
        let Kept {
            dir,
            key,
            without_matrices,
        } = request.params.kept.as_ref()?;
        Some(Keeper {
            stem: Path::new(dir).join(format!("{key}-{}", isa.name())),
            without_matrices: *without_matrices,
            next: AtomicUsize::new(0),
        })
    }

    /// What is answered where nothing is kept and there is nothing to pack.
    pub fn not_kept(&self) -> Option<Failure> {
        let text = || format!("nothing is kept as {}", self.stem.display());
        self.without_matrices
            .then(|| Failure::refused("packed_missing", text()))
    }

    /// The matrix that comes next in this bind: as it was kept, else packed now and kept.
    pub fn packed(
        &self,
        shared: &Shared,
        [n, k]: [usize; 2],
        pack: impl FnOnce() -> Result<Packed, Failure>,
    ) -> Result<Packed, Failure> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let mut path = self.stem.clone().into_os_string();
        path.push(format!("-{number}.packed"));
        let path = PathBuf::from(path);
        let say = |level, what: &str, e: &io::Error| {
            let text = format!("{}: {what}: {e}", path.display());
            shared.host.log(level, "packed", &text);
        };
        match read(shared, &path, [n, k]) {
            Ok(packed) => return Ok(packed),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => {
                say(LogLevel::Warn, "cannot be used, packed again", &e);
                let _ = std::fs::remove_file(&path);
            }
        }
        if let Some(missing) = self.not_kept() {
            return Err(missing);
        }
        let packed = pack()?;
        if let Err(e) = write(&path, &packed) {
            say(LogLevel::Warn, "cannot be kept", &e);
        }
        Ok(packed)
    }
}

fn damaged(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_string())
}

/// Head, then scales, then bytes.
fn head(facts: &Facts, check: u64) -> [u8; HEAD] {
    let mut head = [0; HEAD];
    head[..8].copy_from_slice(&MAGIC);
    let Facts {
        sizes,
        body,
        scale,
        scales,
    } = *facts;
    let numbers = sizes.into_iter().chain([body, scale, scales]);
    for (i, number) in numbers.enumerate() {
        head[8 + 4 * i..][..4].copy_from_slice(&number.to_le_bytes());
    }
    head[48..56].copy_from_slice(&check.to_le_bytes());
    let own = u64::from(crc(&head[..56]));
    head[56..].copy_from_slice(&own.to_le_bytes());
    head
}

fn facts(head: &[u8; HEAD]) -> Option<(Facts, u64)> {
    let number = |i: usize| {
        let bytes = head[8 + 4 * i..][..4].try_into().unwrap_or_default();
        u32::from_le_bytes(bytes)
    };
    let long = |at: usize| u64::from_le_bytes(head[at..][..8].try_into().unwrap_or_default());
    let found = Facts {
        sizes: [0, 1, 2, 3, 4].map(number),
        body: number(5),
        scale: number(6),
        scales: number(7),
    };
    let whole = head[..8] == MAGIC && long(56) == u64::from(crc(&head[..56]));
    whole.then(|| (found, long(48)))
}

fn read(shared: &Shared, path: &Path, [n, k]: [usize; 2]) -> io::Result<Packed> {
    let file = File::open(path)?;
    let mut first = [0; HEAD];
    file.read_exact_at(&mut first, 0)?;
    let (facts, check) = facts(&first).ok_or_else(|| damaged("its head is damaged"))?;
    let mut packed = Packed::empty(shared, &facts)
        .filter(|p| [p.n(), p.k()] == [n, k])
        .ok_or_else(|| damaged("it holds another matrix"))?;
    let (scales, bytes) = packed.parts_mut();
    let mut own = vec![0; 4 * scales.len()];
    file.read_exact_at(&mut own, HEAD as u64)?;
    let sum = AtomicU64::new(u64::from(crc(&own)));
    for (scale, bytes) in scales.iter_mut().zip(own.chunks_exact(4)) {
        *scale = f32::from_le_bytes(bytes.try_into().unwrap_or_default());
    }
    let from = (HEAD + own.len()) as u64;
    let failed = |e: io::Error| Failure::failed("io", e.to_string());
    let done = shared
        .host
        .try_parallel_chunks(bytes, PIECE, |piece, bytes| {
            let at = from + (piece * PIECE) as u64;
            file.read_exact_at(bytes, at).map_err(failed)?;
            sum.fetch_add(placed(piece, crc(bytes)), Ordering::Relaxed);
            Ok(())
        });
    done.map_err(|f| io::Error::other(f.message))?;
    match sum.into_inner() == check {
        true => Ok(packed),
        false => Err(damaged("its bytes are damaged")),
    }
}

fn write(path: &Path, packed: &Packed) -> io::Result<()> {
    let (scales, bytes) = packed.parts();
    let scales: Vec<u8> = scales.iter().flat_map(|s| s.to_le_bytes()).collect();
    let pieces = bytes.chunks(PIECE).enumerate();
    let check = pieces.fold(u64::from(crc(&scales)), |sum, (i, piece)| {
        sum.wrapping_add(placed(i, crc(piece)))
    });
    // Nobody else has this name: a process binds one seat at a time, and its number is in it.
    let beside = path.with_extension(format!("{}.tmp", std::process::id()));
    let written = File::create(&beside).and_then(|mut file| {
        file.write_all(&head(&packed.facts(), check))?;
        file.write_all(&scales)?;
        file.write_all(bytes)
    });
    let renamed = written.and_then(|()| std::fs::rename(&beside, path));
    if renamed.is_err() {
        let _ = std::fs::remove_file(&beside);
    }
    renamed
}

/// A piece's sum where it is: pieces that changed places are not the same.
fn placed(piece: usize, crc: u32) -> u64 {
    (u64::from(crc) | 1 << 32)
        .wrapping_mul(0x9e37_79b9_7f4a_7c15_u64.wrapping_add(2 * piece as u64))
}

fn crc(bytes: &[u8]) -> u32 {
    // SAFETY: every rung of the ladder has AVX2, which no CPU has without SSE 4.2, and files are read at bind, after a
    // rung was found.
    unsafe { crc_sse42(bytes) }
}

/// # Safety
/// SSE 4.2 is present.
#[target_feature(enable = "sse4.2")]
unsafe fn crc_sse42(bytes: &[u8]) -> u32 {
    let mut sum = u64::from(u32::MAX);
    let mut chunks = bytes.chunks_exact(8);
    for chunk in &mut chunks {
        sum = _mm_crc32_u64(
            sum,
            u64::from_le_bytes(chunk.try_into().unwrap_or_default()),
        );
    }
    let mut last = [0; 8];
    let rest = chunks.remainder();
    last[..rest.len()].copy_from_slice(rest);
    let length = bytes.len() as u64;
    !(_mm_crc32_u64(_mm_crc32_u64(sum, u64::from_le_bytes(last)), length) as u32)
}

#[cfg(test)]
mod tests {
    use structures_plugin_api::abi::{Contract, DType};
    use structures_plugin_api::describe::BindParams;
    use structures_plugin_api::formats::BlockFormat;
    use structures_plugin_api::sdk::{PackedRows, Tensor, Weight};

    use super::*;
    use crate::format::Format;
    use crate::kernels::tests::{noise, shared};
    use crate::kernels::LANES;
    use crate::linear::{Linear, Out};
    use crate::pool::Line;
    use crate::source::Source;

    const N: usize = 70;
    const K: usize = 512;

    /// A directory of this test's own that is gone afterwards.
    struct Dir(PathBuf);
    impl Dir {
        fn new(name: &str) -> Self {
            let dir = std::env::temp_dir().join(format!("x86-kept-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&dir).expect("a directory");
            Dir(dir)
        }

        fn files(&self) -> Vec<PathBuf> {
            let entries = std::fs::read_dir(&self.0).expect("readable");
            entries.map(|e| e.expect("an entry").path()).collect()
        }
    }
    impl Drop for Dir {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    /// Three rows through a product of `w`, kept below `dir`.
    fn run(
        isa: Isa,
        format: Format,
        dir: &Path,
        without_matrices: bool,
        w: &[f32],
    ) -> Result<Vec<f32>, Failure> {
        let contract = Contract::capacity(DType::F32, 3);
        let amax = [1.0];
        let params = BindParams {
            kept: Some(Kept {
                dir: dir.display().to_string(),
                key: format!("k{format:?}"),
                without_matrices,
            }),
            ..BindParams::default()
        };
        let codes: Vec<u8> = w.iter().map(|v| (v * 100.0) as i8 as u8 & 0x3b).collect();
        let width = BlockFormat::Q4_1.row_bytes(K).expect("whole blocks");
        let rows = &codes[..N * width];
        let weight: Weight<'_> = match format {
            Format::F32 => PackedRows::new(BlockFormat::Q4_1, N, K, rows).map(Weight::Packed)?,
            _ => Tensor::from_f32(w, &[N, K])?.transpose(0, 1)?.into(),
        };
        let request = BindRequest::new("any", "any", params, &contract)
            .with_statistic("x|amax|tensor", Tensor::from_f32(&amax, &[1])?);
        let mut shared = shared(isa);
        shared.keeper = Keeper::of(&request, isa).map(std::sync::Arc::new);
        let source = Source::concatenated(&[weight])?;
        let linear = Linear::bind(&shared, format, &source, &request, "x")?;
        let x = noise(3 * K, 9);
        let mut out = vec![f32::NAN; 3 * N];
        let mut buffer = vec![Line::default(); linear.buffer(3)];
        let to = Out::new(&mut out, N);
        linear.run(&shared, &x, 3, &mut buffer, |cover, tile| {
            for (r, values) in tile.0.iter().enumerate().take(cover.rows) {
                let (row, first) = (cover.row + r, cover.line * LANES);
                // SAFETY: every place of the output is in one cover.
                let to = unsafe { to.row(row, first, cover.lines * LANES) };
                to.copy_from_slice(&values[..to.len()]);
            }
        });
        Ok(out)
    }

    #[test]
    fn what_was_kept_computes_as_what_was_packed_whatever_the_matrix_holds_then() {
        let w = noise(N * K, 5);
        let zeros = vec![0.0; N * K];
        for isa in Isa::here() {
            let dir = Dir::new("same");
            let formats = Format::ALL.iter().filter(|f| **f != Format::F32);
            for format in formats.copied().chain([Format::F32]) {
                let missing = run(isa, format, &dir.0, true, &zeros).expect_err("nothing is kept");
                assert_eq!(missing.code, "packed_missing");
                let first = run(isa, format, &dir.0, false, &w).expect("packed");
                let again = run(isa, format, &dir.0, true, &zeros).expect("kept");
                assert_eq!(first, again, "{isa:?} {format:?}");
            }
            assert_eq!(
                dir.files().len(),
                Format::ALL.len(),
                "one file each, no other"
            );
        }
    }

    #[test]
    fn a_damaged_file_is_packed_again_wherever_it_is_damaged() {
        let (isa, format) = (Isa::here()[0], Format::W8a16);
        let w = noise(N * K, 5);
        let dir = Dir::new("damaged");
        let first = run(isa, format, &dir.0, false, &w).expect("packed");
        let [file] = &dir.files()[..] else {
            panic!("one file")
        };
        let whole = std::fs::read(file).expect("readable");
        let damaged = |change: &dyn Fn(&mut Vec<u8>)| {
            let mut bytes = whole.clone();
            change(&mut bytes);
            std::fs::write(file, &bytes).expect("writable");
            let missing = run(isa, format, &dir.0, true, &w).expect_err("damaged");
            assert_eq!(missing.code, "packed_missing");
            std::fs::write(file, &bytes).expect("writable");
            let again = run(isa, format, &dir.0, false, &w).expect("packed again");
            assert_eq!(again, first);
            assert_eq!(std::fs::read(file).expect("readable"), whole);
        };
        for at in [
            0,
            9,
            13,
            30,
            50,
            HEAD + 1,
            HEAD + 4 * 80 + 77,
            whole.len() - 1,
        ] {
            damaged(&|bytes| bytes[at] ^= 0x40);
        }
        damaged(&|bytes| bytes.truncate(HEAD / 2));
        damaged(&|bytes| bytes.truncate(bytes.len() - 1));
        damaged(&Vec::clear);
    }

    #[test]
    fn a_place_that_cannot_be_written_costs_nothing_but_the_next_start() {
        let w = noise(N * K, 5);
        let nowhere = Path::new("/dev/null/nowhere");
        let out = run(Isa::here()[0], Format::Bf16, nowhere, false, &w);
        assert!(out.expect("packed").iter().all(|v| v.is_finite()));
    }

    #[test]
    fn pieces_that_changed_places_are_another_file() {
        let (a, b) = (crc(b"one"), crc(b"two"));
        assert_ne!(crc(b"one"), crc(b"one\0"));
        let sum = |x, y| placed(0, x).wrapping_add(placed(1, y));
        assert_ne!(sum(a, b), sum(b, a));
    }
}
