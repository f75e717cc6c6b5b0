//! Token ids and texts of `tests/fixtures/tokens`, made by `scripts/token_cases.py`: for `tokenizer.json` files those of
//! the Python package, for vocabularies in GGUF files those of llama.cpp on the same file.

#![allow(clippy::unwrap_used)]

use std::collections::HashMap;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde_json::json;
use structures_models::{Checkpoint, Tokenizer};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokens")
}

fn unpacked(name: &str) -> Vec<u8> {
    let path = fixtures().join(format!("{name}.gz"));
    let packed = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let mut out = Vec::new();
    flate2::read::GzDecoder::new(packed.as_slice())
        .read_to_end(&mut out)
        .unwrap();
    out
}

fn lines() -> Vec<String> {
    serde_json::from_slice(&unpacked("lines.json")).unwrap()
}

/// Names of the fixtures that end so, without the ending.
fn names(ending: &str) -> Vec<String> {
    let files = std::fs::read_dir(fixtures()).unwrap();
    let mut names: Vec<String> = files
        .filter_map(|f| {
            let name = f.unwrap().file_name().into_string().unwrap();
            name.strip_suffix(ending).map(String::from)
        })
        .collect();
    names.sort();
    names
}

fn base36(ids: &[u32]) -> String {
    let one = |mut n: u32| {
        let mut digits = Vec::new();
        loop {
            digits.push(b"0123456789abcdefghijklmnopqrstuvwxyz"[(n % 36) as usize]);
            n /= 36;
            if n == 0 {
                break;
            }
        }
        digits.reverse();
        String::from_utf8(digits).unwrap()
    };
    let all: Vec<String> = ids.iter().map(|n| one(*n)).collect();
    all.join(" ")
}

/// A checkpoint with these files beside a small model's, or one file.
fn open(files: &[(&str, Vec<u8>)]) -> Tokenizer {
    let dir = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        std::fs::write(dir.path().join(name), bytes).unwrap();
    }
    let path = match files {
        [(name, _)] if name.ends_with(".gguf") => dir.path().join(name),
        _ => {
            let header = b"{}";
            let mut weights = (header.len() as u64).to_le_bytes().to_vec();
            weights.extend(header);
            std::fs::write(dir.path().join("model.safetensors"), weights).unwrap();
            std::fs::write(dir.path().join("config.json"), b"{}").unwrap();
            dir.path().to_path_buf()
        }
    };
    let checkpoint = Checkpoint::open(&path).unwrap();
    Tokenizer::of(&checkpoint, None, Vec::new())
        .unwrap()
        .unwrap()
}

/// Every line's ids and what they decode to.
fn compare(name: &str, tokenizer: &Tokenizer, faults: &mut Vec<String>) {
    let lines = lines();
    let ids = String::from_utf8(unpacked(&format!("{name}.ids"))).unwrap();
    let ids: Vec<&str> = ids.split('\n').collect();
    let texts: HashMap<String, String> =
        serde_json::from_slice(&unpacked(&format!("{name}.texts"))).unwrap();
    assert_eq!(ids.len(), lines.len());
    for (i, line) in lines.iter().enumerate() {
        let ours = tokenizer.encode(line, true).unwrap();
        if base36(&ours) != ids[i] {
            faults.push(format!(
                "{name} {i} {line:?}: {} not {}",
                base36(&ours),
                ids[i]
            ));
            continue;
        }
        let back = tokenizer.decode(&ours).unwrap();
        let want = texts.get(&i.to_string()).unwrap_or(line);
        // The reader of GGUF files gives pieces: a space that was put before a text is still there.
        let fits = back == *want
            || (name.starts_with("stored") && Some(back.as_str()) == want.strip_prefix(' '));
        if !fits {
            faults.push(format!("{name} {i}: decoded {back:?} not {want:?}"));
        }
    }
}

fn judge(compared: usize, faults: &[String]) {
    println!("{compared} tokenizers compared");
    let shown: Vec<&String> = faults.iter().take(25).collect();
    assert!(faults.is_empty(), "{} faults: {shown:#?}", faults.len());
}

#[test]
fn published_tokenizers_give_the_ids_of_the_python_package() {
    let names = names(".tokenizer.json.gz");
    assert!(names.len() >= 9, "{names:?}");
    let mut faults = Vec::new();
    for name in &names {
        let file = unpacked(&format!("{name}.tokenizer.json"));
        compare(name, &open(&[("tokenizer.json", file)]), &mut faults);
    }
    judge(names.len(), &faults);
}

#[test]
fn stored_vocabularies_give_the_ids_of_llama_cpp() {
    let names = names(".gguf.gz");
    assert!(names.len() >= 4, "{names:?}");
    let mut faults = Vec::new();
    for name in &names {
        let file = unpacked(&format!("{name}.gguf"));
        compare(name, &open(&[("m.gguf", file)]), &mut faults);
    }
    judge(names.len(), &faults);
}

/// The same vocabulary under other names of pre-tokenizers, compared by checksums of the ids.
#[test]
fn every_named_split_gives_the_ids_of_llama_cpp() {
    let lines = lines();
    let file = unpacked("stored_merges.gguf");
    let (mut faults, mut compared) = (Vec::new(), 0);
    for name in names(".crc") {
        let pre = name.strip_prefix("pre_").unwrap();
        let sums = std::fs::read(fixtures().join(format!("{name}.crc"))).unwrap();
        let tokenizer = open(&[("m.gguf", with_text(&file, "tokenizer.ggml.pre", pre))]);
        for (i, line) in lines.iter().enumerate() {
            let ids = tokenizer.encode(line, true).unwrap();
            let mut crc = flate2::Crc::new();
            crc.update(base36(&ids).as_bytes());
            if crc.sum().to_le_bytes() != sums[4 * i..4 * i + 4] {
                faults.push(format!("{pre} {i} {line:?}"));
            }
        }
        compared += 1;
    }
    assert!(compared >= 15);
    judge(compared, &faults);
}

/// Under some names one token takes the spaces in front of it away. The file and the lines are those above with the
/// token renamed; the checksums are llama.cpp's.
#[test]
fn a_mask_takes_the_spaces_in_front_of_it() {
    let (token, mask) = (b"<tool>", "<mask>");
    let mut file = unpacked("stored_merges.gguf");
    let at = file.windows(token.len()).position(|w| w == token).unwrap();
    file[at..at + token.len()].copy_from_slice(mask.as_bytes());
    let sums = std::fs::read(fixtures().join("mask_jina-v2-de.sums")).unwrap();
    let mut faults = Vec::new();
    for pre in ["jina-v2-de", "jina-v2-es", "jina-v2-code"] {
        let tokenizer = open(&[("m.gguf", with_text(&file, "tokenizer.ggml.pre", pre))]);
        for (i, line) in lines().iter().enumerate() {
            let line = line.replace("<tool>", mask);
            let ids = tokenizer.encode(&line, true).unwrap();
            let mut crc = flate2::Crc::new();
            crc.update(base36(&ids).as_bytes());
            if crc.sum().to_le_bytes() != sums[4 * i..4 * i + 4] {
                faults.push(format!("{pre} {i} {line:?}"));
            }
        }
    }
    judge(3, &faults);
}

/// A GGUF with this text in place of the one behind a key.
fn with_text(file: &[u8], key: &str, text: &str) -> Vec<u8> {
    let key = [key.as_bytes(), &8u32.to_le_bytes()].concat();
    let at = file.windows(key.len()).position(|w| w == key).unwrap() + key.len();
    let size = u64::from_le_bytes(file[at..at + 8].try_into().unwrap()) as usize;
    let length = (text.len() as u64).to_le_bytes();
    [
        &file[..at],
        &length,
        text.as_bytes(),
        &file[at + 8 + size..],
    ]
    .concat()
}

/// Other ids than the model was trained on would be worse than none: what is not known is refused by its name.
#[test]
fn what_is_not_known_of_a_stored_vocabulary_is_refused_by_name() {
    let file = unpacked("stored_merges.gguf");
    let refused = |bytes: Vec<u8>| {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.gguf");
        std::fs::write(&path, bytes).unwrap();
        let checkpoint = Checkpoint::open(&path).unwrap();
        let fault = Tokenizer::of(&checkpoint, None, Vec::new()).unwrap_err();
        assert_eq!(fault.code(), "unsupported");
        fault.to_string()
    };
    for pre in [
        "kimi-k2",
        "afmoe",
        "youtu",
        "tiny_aya",
        "gemma4",
        "sarvam-moe",
        "granite-embed-multi-311m",
        "never-heard-of",
    ] {
        let fault = refused(with_text(&file, "tokenizer.ggml.pre", pre));
        for part in [
            "m.gguf",
            "tokenizer.ggml.pre",
            pre,
            "llama-bpe",
            "tokenizer.json",
        ] {
            assert!(fault.contains(part), "{fault} lacks {part}");
        }
    }
    for model in ["t5", "rwkv", "plamo2", "never-heard-of"] {
        let fault = refused(with_text(&file, "tokenizer.ggml.model", model));
        for part in [
            "m.gguf",
            "tokenizer.ggml.model",
            model,
            "WordPiece",
            "tokenizer.json",
        ] {
            assert!(fault.contains(part), "{fault} lacks {part}");
        }
    }
}

/// Splits look ahead and back: a run of spaces must not take forever nor fail.
#[test]
fn long_runs_are_cut_in_time() {
    let start = std::time::Instant::now();
    for name in ["gpt2", "up_to_three", "sequence"] {
        let tokenizer = open(&[(
            "tokenizer.json",
            unpacked(&format!("{name}.tokenizer.json")),
        )]);
        for run in [" ", "\n", "\r\n ", "a", "1", "\u{301}", "'"] {
            let text = run.repeat(20_000);
            let ids = tokenizer.encode(&text, false).unwrap();
            assert_eq!(tokenizer.decode(&ids).unwrap(), text, "{name} {run:?}");
        }
    }
    assert!(start.elapsed().as_secs() < 60, "{:?}", start.elapsed());
}

#[test]
fn a_damaged_tokenizer_is_named() {
    for bytes in [
        b"".to_vec(),
        b"{}".to_vec(),
        json!({"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}})
            .to_string()
            .into_bytes(),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let header = [2u64.to_le_bytes().as_slice(), b"{}"].concat();
        std::fs::write(dir.path().join("model.safetensors"), header).unwrap();
        std::fs::write(dir.path().join("config.json"), b"{}").unwrap();
        std::fs::write(dir.path().join("tokenizer.json"), bytes).unwrap();
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        let fault = Tokenizer::of(&checkpoint, None, Vec::new()).unwrap_err();
        assert_eq!(fault.code(), "tokenizer");
        assert!(fault.to_string().contains("tokenizer.json"), "{fault}");
    }
}

/// Padding and truncation are for batches; a chain that rewrites a text into gigabytes is refused when it is read.
#[test]
fn a_tokenizer_cannot_ask_for_memory_without_bound() {
    let base: serde_json::Value = serde_json::from_slice(&unpacked("gpt2.tokenizer.json")).unwrap();
    let with = |key: &str, value: serde_json::Value| {
        let mut file = base.clone();
        file[key] = value;
        file.to_string().into_bytes()
    };
    let want = open(&[("tokenizer.json", base.to_string().into_bytes())])
        .encode("some words", false)
        .unwrap();
    let padding = |strategy: serde_json::Value, multiple: serde_json::Value| {
        json!({"strategy": strategy, "direction": "Right", "pad_to_multiple_of": multiple,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "x"})
    };
    let huge = 1u64 << 40;
    for file in [
        with("padding", padding(json!({"Fixed": huge}), json!(null))),
        with("padding", padding(json!("BatchLongest"), json!(huge))),
        with(
            "truncation",
            json!({"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}),
        ),
    ] {
        let tokenizer = open(&[("tokenizer.json", file)]);
        assert_eq!(tokenizer.encode("some words", false).unwrap(), want);
    }

    let dots = json!({"type": "Replace", "pattern": {"String": "."}, "content": ".".repeat(20)});
    let chain = json!({"type": "Sequence", "normalizers": vec![dots; 8]});
    let dir = tempfile::tempdir().unwrap();
    let header = [2u64.to_le_bytes().as_slice(), b"{}"].concat();
    std::fs::write(dir.path().join("model.safetensors"), header).unwrap();
    std::fs::write(dir.path().join("config.json"), b"{}").unwrap();
    std::fs::write(dir.path().join("tokenizer.json"), with("normalizer", chain)).unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let fault = Tokenizer::of(&checkpoint, None, Vec::new()).unwrap_err();
    assert_eq!(fault.code(), "tokenizer");
    assert!(fault.to_string().contains("normalizer"), "{fault}");
}
