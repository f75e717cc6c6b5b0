//! The checkpoint readers on mutated files: safetensors header, index, configuration, tokenizer, GGUF. No panic, no
//! hang, and no more memory at once than the file has bytes, and 64 MB: every allocation is counted. The time is
//! shared by the targets: 20 s by default, `STRUCTURES_FUZZ_SECONDS` for longer, `STRUCTURES_FUZZ_SEED` for other cases.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use peak_alloc::PeakAlloc;
use structures_models::{Checkpoint, Description, Tokenizer};
use structures_mutate::{run, Limits, Target};

#[global_allocator]
static COUNTED: PeakAlloc = PeakAlloc;

/// What a reader may take beside a file's own bytes.
const BESIDE: usize = 64 << 20;

/// One at a time: what is counted is the whole process.
static ALONE: Mutex<()> = Mutex::new(());

/// Does the work, and holds it to the limit.
fn bounded(bytes: usize, work: impl FnOnce()) {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    COUNTED.reset_peak_usage();
    let before = COUNTED.current_usage();
    work();
    let most = COUNTED.peak_usage().saturating_sub(before);
    assert!(
        most <= bytes + BESIDE,
        "{most} bytes at once for a file of {bytes}"
    );
}

/// Reads everything that headers say.
fn open(path: &Path, bytes: usize) {
    bounded(bytes, || match Checkpoint::open_headers(path) {
        Ok(headers) => {
            headers.outline();
            if let Err(e) = Description::open(path) {
                assert!(!e.to_string().is_empty());
            }
            if let Ok(Some(t)) = Tokenizer::of(&headers, None, Vec::new()) {
                if let Ok(ids) = t.encode("a <s> \u{e9}\r\n 12", true) {
                    assert!(t.decode(&ids).is_ok() || !ids.is_empty());
                }
            }
        }
        Err(e) => assert!(!e.to_string().is_empty() && !e.code().is_empty()),
    });
}

/// The limit is one: a reader that takes what a header claims is caught.
#[test]
fn more_than_the_limit_is_a_fault() {
    let taking = |bytes: usize| {
        let work = || drop(std::hint::black_box(vec![1u8; bytes]));
        std::panic::catch_unwind(|| bounded(1000, work)).is_ok()
    };
    assert!(taking(BESIDE / 2));
    assert!(!taking(BESIDE + (1 << 20)));
}

/// Files that are as large in memory as one of their size can be.
#[test]
fn the_most_a_small_file_can_ask_for_is_within_the_limit() {
    let dir = here("most");
    let only_open = |path: &Path| {
        let files = std::fs::read_dir(&dir).expect("a directory");
        let bytes = files.filter_map(|f| Some(f.ok()?.metadata().ok()?.len() as usize));
        let bytes = if path.is_dir() {
            bytes.sum()
        } else {
            std::fs::read(path).expect("read").len()
        };
        bounded(bytes, || drop(Checkpoint::open(path).map(|c| c.outline())));
    };
    let mut gguf = b"GGUF".to_vec();
    gguf.extend(3u32.to_le_bytes());
    for n in [0u64, 1, 1] {
        gguf.extend(n.to_le_bytes());
    }
    gguf.push(b'a');
    gguf.extend([9u32, 0].map(u32::to_le_bytes).concat());
    gguf.extend(1_900_000u64.to_le_bytes());
    gguf.resize(gguf.len() + 1_900_032, 7);
    let path = dir.join("m.gguf");
    std::fs::write(&path, &gguf).expect("written");
    assert!(Checkpoint::open(&path).is_ok());
    only_open(&path);
    std::fs::remove_file(&path).expect("removed");

    let rows: Vec<String> = (0..80_000)
        .map(|i| format!("\"{i:x}\":{{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}"))
        .collect();
    let header = format!("{{{}}}", rows.join(","));
    let weights = [
        (header.len() as u64).to_le_bytes().as_slice(),
        header.as_bytes(),
    ]
    .concat();
    std::fs::write(dir.join("model.safetensors"), weights).expect("written");
    let config = format!("{{\"a\":[{}0]}}", "0,".repeat(399_900));
    std::fs::write(dir.join("config.json"), config).expect("written");
    assert!(Checkpoint::open(&dir).is_ok());
    only_open(&dir);
}

fn here(name: &str) -> PathBuf {
    let dir = std::env::temp_dir().join(format!("structures-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a directory");
    dir
}

fn fixture(path: &str) -> Vec<u8> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    std::fs::read(root.join(path)).expect(path)
}

fn unpacked(name: &str) -> Vec<u8> {
    let packed = fixture(&format!("host/models/tests/fixtures/tokens/{name}.gz"));
    let mut out = Vec::new();
    let mut reader = flate2::read::GzDecoder::new(packed.as_slice());
    std::io::Read::read_to_end(&mut reader, &mut out).expect("gzip");
    out
}

/// One file of a directory is fed, the others are those of a small model.
fn directory(
    name: &'static str,
    file: &'static str,
    others: &[(&str, Vec<u8>)],
    seeds: Vec<Vec<u8>>,
) -> Target {
    let dir = here(name);
    for (other, bytes) in others {
        std::fs::write(dir.join(other), bytes).expect("written");
    }
    Target {
        name: name.into(),
        seeds,
        feed: Box::new(move |bytes| {
            std::fs::write(dir.join(file), bytes).expect("written");
            let beside = std::fs::read_dir(&dir).expect("a directory");
            let all = beside.filter_map(|f| Some(f.ok()?.metadata().ok()?.len() as usize));
            open(&dir, all.sum());
        }),
    }
}

fn targets() -> Vec<Target> {
    const E2E: &str = "tests/fixtures/oracle/e2e/llama";
    let config = fixture(&format!("{E2E}/config.json"));
    let weights = fixture(&format!("{E2E}/model.safetensors"));
    let header = u64::from_le_bytes(weights[..8].try_into().expect("8 bytes")) as usize;
    let names: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(&weights[8..8 + header]).expect("JSON");
    let map: serde_json::Map<String, serde_json::Value> = names
        .keys()
        .filter(|n| *n != "__metadata__")
        .map(|n| (n.clone(), "one.safetensors".into()))
        .collect();
    let index = serde_json::json!({ "weight_map": map })
        .to_string()
        .into_bytes();
    // The header's length follows the text, so that more than the length is tried.
    let (dir, tail) = (here("header"), weights[8 + header..].to_vec());
    std::fs::write(dir.join("config.json"), &config).expect("written");
    let text = Target {
        name: "safetensors header".into(),
        seeds: vec![weights[8..8 + header].to_vec()],
        feed: Box::new(move |bytes| {
            let mut file = (bytes.len() as u64).to_le_bytes().to_vec();
            file.extend(bytes);
            file.extend(&tail);
            std::fs::write(dir.join("model.safetensors"), &file).expect("written");
            open(&dir, file.len());
        }),
    };
    let whole = vec![
        ("config.json", config.clone()),
        ("model.safetensors", weights.clone()),
    ];
    let gguf = here("gguf");
    vec![
        text,
        directory(
            "safetensors",
            "model.safetensors",
            &whole[..1],
            vec![weights.clone()],
        ),
        directory("config", "config.json", &whole[1..], vec![config.clone()]),
        directory(
            "index",
            "model.safetensors.index.json",
            &[("config.json", config), ("one.safetensors", weights)],
            vec![index],
        ),
        directory(
            "tokenizer",
            "tokenizer.json",
            &whole,
            ["wordpiece", "metaspace_bpe", "unigram", "up_to_three"]
                .map(|n| unpacked(&format!("{n}.tokenizer.json")))
                .to_vec(),
        ),
        Target {
            name: "gguf".into(),
            seeds: ["stored_merges", "stored_scores", "stored_words"]
                .map(|n| unpacked(&format!("{n}.gguf")))
                .to_vec(),
            feed: Box::new(move |bytes| {
                let path = gguf.join("m.gguf");
                std::fs::write(&path, bytes).expect("written");
                open(&path, bytes.len());
            }),
        },
    ]
}

#[test]
fn no_file_makes_a_reader_panic_hang_or_grow() {
    let number = |name: &str| std::env::var(name).ok().and_then(|v| v.parse::<u64>().ok());
    let seconds = number("STRUCTURES_FUZZ_SECONDS").unwrap_or(20);
    let seed = number("STRUCTURES_FUZZ_SEED").unwrap_or(1);
    let targets = targets();
    let limits = Limits {
        run: Duration::from_millis(seconds * 1000 / targets.len() as u64),
        case: Duration::from_secs(10),
        bytes: 1 << 30,
    };
    for target in targets {
        let report = run(target, seed, limits);
        println!(
            "{}: {} cases, slowest {:?}",
            report.target, report.cases, report.slowest
        );
        if let Some(failure) = report.failure {
            let file = here("fault").join("document");
            std::fs::write(&file, &failure.document).expect("written");
            panic!(
                "{} seed {seed} case {}: {:?}; the document is {}",
                report.target,
                failure.case,
                failure.fault,
                file.display()
            );
        }
        assert!(report.cases > 0, "{}", report.target);
    }
}
