//! `cargo xtask quality`: what schemes cost in quality beside llama.cpp's types of the same model, on the same tokens.
//!
//! The text is cut into lines of token ids once, by the model's own tokenizer, and both sides score exactly these: `exp` of
//! the mean `-ln p` of every token but a line's first, from logits, in f64. llama.cpp's types are made of the shipped file,
//! every tensor in the type. Each arm stands beside its own side's unquantised model: the two differ by what the sides
//! make of the shipped file.

use std::path::PathBuf;
use std::process::Command;

use serde_json::{json, Value};

use crate::peers::{answer, driver, quantised, tools, write_json, MODEL};
use crate::run::{release_dir, root};

const USAGE: &str = "quality [--python PATH] [--model FILE.gguf] [--text FILE] [--out FILE.json]";
/// Tokens of a line.
const LENGTH: &str = "128";
const THREADS: &str = "2";
/// Ours: name, switches of `structures perplexity`.
const OURS: [(&str, &[&str]); 5] = [
    ("host, f32", &[]),
    ("bf16_dense", &["--scheme", "bf16_dense"]),
    ("w8a16_decode", &["--scheme", "w8a16_decode"]),
    ("w4a16_full", &["--scheme", "w4a16_full"]),
    ("w8a8_static", &["--scheme", "w8a8_static"]),
];
/// Theirs, and the one that is not quantised first.
const THEIRS: [&str; 3] = ["BF16", "Q8_0", "Q4_0"];

/// See the module.
pub fn run(args: &[String]) -> Result<(), String> {
    let (mut python, mut out) = (None, None);
    let mut model = root().join(MODEL);
    let mut text = root().join("docs/receipts/held-out.txt");
    let mut rest = args.iter();
    while let Some(name) = rest.next() {
        let value = rest.next().ok_or_else(|| format!("usage: {USAGE}"))?;
        match name.as_str() {
            "--python" => python = Some(PathBuf::from(value)),
            "--model" => model = value.into(),
            "--text" => text = value.into(),
            "--out" => out = Some(PathBuf::from(value)),
            _ => return Err(format!("unknown switch `{name}`; usage: {USAGE}")),
        }
    }
    let (work, python) = tools(python.as_deref())?;
    let driver = driver(&work)?;
    let peer = || {
        let mut c = Command::new(&python);
        c.arg(&driver);
        c
    };
    let cut = answer(peer().arg("samples").args([&model, &text]).arg(LENGTH))?;
    let lines = work.join("quality.jsonl");
    std::fs::write(&lines, &cut).map_err(|e| format!("{}: {e}", lines.display()))?;
    println!("{} lines of {LENGTH} tokens", cut.lines().count());

    let mut rows: Vec<Value> = Vec::new();
    for kind in THEIRS {
        let file = quantised(&model, kind, &python, &driver, &work)?;
        let mut ask = peer();
        ask.arg("perplexity").arg(file).arg(THREADS).arg(&lines);
        let found = parsed(&answer(&mut ask)?)?;
        let plain = match rows.first() {
            Some(first) => &first["perplexity"],
            None => &found["perplexity"],
        };
        rows.push(row(&format!("llama.cpp {kind}"), &found, plain)?);
    }
    for (name, switches) in OURS {
        let found = answer(
            Command::new(release_dir().join("structures"))
                .args(["--threads", THREADS, "-q", "--json", "perplexity"])
                .arg(&model)
                .arg("--samples")
                .arg(&lines)
                .args(switches),
        )?;
        let mut found = parsed(&found)?;
        if switches.is_empty() {
            found["perplexity"] = found["host_perplexity"].clone();
        }
        // The same tokens: a scheme that fits scales leaves out the lines it fitted them on.
        let mut row = row(name, &found, &found["host_perplexity"])?;
        row["top1_agreement"] = found["top1_agreement"].clone();
        rows.push(row);
    }
    for row in &rows {
        println!("{}", said(row));
    }
    match out {
        None => Ok(()),
        Some(out) => {
            let name = |p: &PathBuf| p.file_name().map(|n| n.to_string_lossy().into_owned());
            let document = json!({
                "schema": 1, "model": name(&model), "text": name(&text), "length": LENGTH, "rows": rows,
            });
            write_json(&out, &document)
        }
    }
}

fn parsed(text: &str) -> Result<Value, String> {
    serde_json::from_str(text)
        .map_err(|e| format!("expected one JSON document, found `{text}`: {e}"))
}

/// A row beside what its side says unquantised of the same tokens.
fn row(name: &str, found: &Value, plain: &Value) -> Result<Value, String> {
    let number = |v: &Value| {
        let n = v.as_f64();
        n.ok_or_else(|| format!("{name}: expected a perplexity, found {v} in {found}"))
    };
    let (perplexity, plain) = (number(&found["perplexity"])?, number(plain)?);
    Ok(json!({
        "arm": name, "tokens": found["tokens"], "perplexity": perplexity, "plain": plain,
        "over_plain": perplexity / plain - 1.0,
    }))
}

fn said(row: &Value) -> String {
    let n = |key: &str| row[key].as_f64().unwrap_or(f64::NAN);
    let agreement = match row["top1_agreement"].as_f64() {
        Some(share) => format!(", top-1 {share:.3}"),
        None => String::new(),
    };
    format!(
        "{:<16} {:>6} tokens, perplexity {:>7.2} of {:>7.2} ({:+.1} %){agreement}",
        row["arm"].as_str().unwrap_or(""),
        n("tokens"),
        n("perplexity"),
        n("plain"),
        n("over_plain") * 100.0,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_stands_beside_its_own_side_on_the_same_tokens() {
        let found = json!({"tokens": 3, "perplexity": 12.5});
        let made = row("a", &found, &json!(10.0)).unwrap();
        assert_eq!(made["over_plain"], json!(0.25));
        assert!(said(&made).contains("(+25.0 %)") && !said(&made).contains("top-1"));
        let missing = row("c", &json!({}), &json!(1.0)).unwrap_err();
        assert!(missing.contains("expected a perplexity"), "{missing}");
    }
}
