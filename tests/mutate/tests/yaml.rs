//! The loaders of structures and bindings on mutated documents: no panic, no case above a few seconds, no more than
//! 256 MB. 20 s by default, `STRUCTURES_FUZZ_SECONDS` for longer (`cargo xtask fuzz`), `STRUCTURES_FUZZ_SEED` for other
//! cases.

use std::time::Duration;

use structures_bindings::Bindings;
use structures_catalog::verify::verify_spec;
use structures_catalog::Catalog;
use structures_mutate::{run, Limits, Target};

const SMALL: &str = "
name: small
version: 1
boundary:
  inputs: [{name: x, dims: [[M, K], [K]]}, {name: gate, dims: [M, N], optional: true}]
  outputs: [{name: y, dims: [M, N]}]
weights: {w: [K, N], b: {dims: [N], optional: true}}
symbols: {K: width}
constraints: [{that: K % 2 == 0 and has(width), when: {kind: silu}, else: odd}]
variants: {kind: {host: true, values: {silu: silu, gelu: gelu_tanh}}}
points: [p]
gates: {parity: [cosine]}
slots: {at: module, roles: {q: q_proj}, weights: {w: {from: q.weight, layout: out_in}, b: q.bias}}
dataflow:
  spans: {whole: {in: [x, gate], out: [y]}}
  ops:
    - {let: p, op: linear, in: [x, w]}
    - {let: s, op: bias, in: [p, b], needs: [b]}
    - {let: [a, c], op: split, in: [s], attrs: {sizes: [=N/2, =N/2]}, dims: [[M, N/2], ~]}
    - {let: d, op: act, in: [a], attrs: {kind: <kind>}}
    - {let: [e], op: call, in: [d, c], attrs: {role: mix}, dims: [M, N]}
    - {let: y, op: mul, in: [e, gate], needs: [gate]}
";

fn catalog_target() -> Target {
    let catalog = Catalog::builtin().expect("loads");
    let seeds = catalog.list().into_iter();
    Target {
        name: "structures".into(),
        seeds: seeds.map(|s| s.document.as_bytes().to_vec()).collect(),
        feed: Box::new(move |bytes| {
            let Ok(text) = std::str::from_utf8(bytes) else {
                return;
            };
            // Whatever name it still has, so that it is read to its end.
            let name = text
                .lines()
                .find_map(|l| l.strip_prefix("name: "))
                .unwrap_or("x");
            if let Err(e) = Catalog::default().with_document(name.trim(), "f.yaml", text) {
                assert!(!e.to_string().is_empty() && !e.code().is_empty());
            }
        }),
    }
}

fn verify_target() -> Target {
    Target {
        name: "structures that are run".into(),
        seeds: vec![SMALL.as_bytes().to_vec()],
        feed: Box::new(|bytes| {
            let Ok(text) = std::str::from_utf8(bytes) else {
                return;
            };
            let name = text
                .lines()
                .find_map(|l| l.strip_prefix("name: "))
                .unwrap_or("x");
            let Ok(catalog) = Catalog::default().with_document(name.trim(), "f.yaml", text) else {
                return;
            };
            for spec in catalog.list() {
                verify_spec(spec);
            }
        }),
    }
}

fn bindings_target() -> Target {
    let catalog = Catalog::builtin().expect("loads");
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/../../bindings");
    let mut files: Vec<_> = std::fs::read_dir(directory)
        .expect("bindings")
        .map(|e| e.expect("entry").path())
        .filter(|p| p.extension().is_some_and(|e| e == "yaml"))
        .collect();
    files.sort();
    let here = std::env::temp_dir().join(format!("structures-mutate-{}", std::process::id()));
    std::fs::create_dir_all(&here).expect("a directory");
    Target {
        name: "bindings".into(),
        seeds: files
            .iter()
            .map(|f| std::fs::read(f).expect("readable"))
            .collect(),
        feed: Box::new(move |bytes| {
            std::fs::write(here.join("f.yaml"), bytes).expect("written");
            let mut bindings = Bindings::default();
            if let Err(e) = bindings.add_directory(&here, &catalog) {
                assert!(!e.to_string().is_empty());
            }
        }),
    }
}

#[test]
fn no_document_makes_a_loader_panic_hang_or_grow() {
    let number = |name: &str| std::env::var(name).ok().and_then(|v| v.parse::<u64>().ok());
    let seconds = number("STRUCTURES_FUZZ_SECONDS").unwrap_or(20);
    let seed = number("STRUCTURES_FUZZ_SEED").unwrap_or(1);
    let targets = [catalog_target(), verify_target(), bindings_target()];
    let limits = Limits {
        run: Duration::from_millis(seconds * 1000 / targets.len() as u64),
        case: Duration::from_secs(10),
        bytes: 256 << 20,
    };
    for target in targets {
        let report = run(target, seed, limits);
        println!(
            "{}: {} cases, slowest {:?}, grown by {:?} bytes",
            report.target, report.cases, report.slowest, report.peak_bytes
        );
        if let Some(failure) = report.failure {
            let kept = std::env::temp_dir()
                .join(format!("structures-mutate-{seed}-{}.yaml", failure.case));
            std::fs::write(&kept, &failure.document).expect("written");
            panic!(
                "{} seed {seed} case {}: {:?}; the document is {}",
                report.target,
                failure.case,
                failure.fault,
                kept.display()
            );
        }
        assert!(report.cases > 0);
    }
}
