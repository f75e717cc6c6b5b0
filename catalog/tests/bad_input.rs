//! Files that are no good entry: each refused with code, file, line and column, whatever is wrong with it.

use std::fs;
use std::path::Path;
use std::time::Instant;

use structures_catalog::{Catalog, CatalogError, Shape, Shapes};

const GOOD: &str = "name: good
version: 1
boundary:
  inputs: [{name: x, dims: [M, D]}]
  outputs: [{name: y, dims: [M, D]}]
weights: {w: {dims: [D, D], layout: out_in}}
points: [h]
gates: {parity: [cosine]}
slots: {at: module, roles: {q: q_proj}, weights: {w: q.weight}}
dataflow:
  spans: {s: {in: [x], out: [y]}}
  ops:
    - {let: h, op: scale, in: [x]}
    - {let: y, op: linear, in: [h, w]}
";

/// What is written, what the message must say, and where.
struct Bad(
    &'static str,
    &'static str,
    &'static str,
    &'static str,
    (usize, usize),
);

const BAD: &[Bad] = &[
    Bad(
        "unknown field",
        "points: [h]",
        "pionts: [h]",
        "unknown key `pionts`",
        (7, 1),
    ),
    Bad(
        "unknown field below",
        "op: scale,",
        "op: scale, after: 1,",
        "unknown key `after`",
        (13, 27),
    ),
    Bad(
        "wrong type",
        "version: 1",
        "version: [1]",
        "expected a whole number, found a list",
        (2, 10),
    ),
    Bad(
        "wrong type below",
        "in: [h, w]",
        "in: 3",
        "expected a list, found the number 3",
        (14, 32),
    ),
    Bad(
        "nothing where a word is meant",
        "name: good",
        "name:",
        "expected a word, found nothing",
        (1, 1),
    ),
    Bad("an alias", "points: [h]", "points: *x", "", (7, 9)),
    Bad(
        "an anchor",
        "points: [h]",
        "points: &x [h]",
        "anchors and tags are not allowed",
        (7, 12),
    ),
    Bad(
        "a tag",
        "points: [h]",
        "points: !!seq [h]",
        "anchors and tags are not allowed",
        (7, 15),
    ),
    Bad(
        "no where text is meant",
        "{name: x, dims",
        "{name: no, dims",
        "found `no`",
        (4, 19),
    ),
    Bad(
        "on where text is meant",
        "let: h",
        "let: on",
        "found `on`",
        (13, 13),
    ),
    Bad(
        "Off as a key",
        "roles: {q: q_proj}",
        "roles: {Off: q_proj}",
        "`Off` as a key",
        (9, 29),
    ),
    Bad(
        "no where a flag is meant",
        "layout: out_in",
        "optional: no",
        "expected true or false, found `no`",
        (6, 39),
    ),
    Bad(
        "a duplicate key",
        "points: [h]",
        "points: [h]\npoints: [h]",
        "this key stands here twice",
        (8, 1),
    ),
    Bad(
        "a duplicate key below",
        "in: [x]}",
        "in: [x], in: [x]}",
        "this key stands here twice",
        (13, 36),
    ),
    Bad(
        "a tab before a key",
        "  spans:",
        "\tspans:",
        "found a tab",
        (11, 1),
    ),
    Bad(
        "a tab after a key",
        "points: [h]",
        "points:\t[h]",
        "found a tab",
        (7, 8),
    ),
    Bad(
        "a byte-order mark",
        "name: good",
        "\u{feff}name: good",
        "a byte-order mark",
        (1, 1),
    ),
    Bad(
        "a point that is nothing",
        "points: [h]",
        "points: [h, g]",
        "point `g` is no value of the dataflow",
        (7, 13),
    ),
    Bad(
        "a slot nobody reads",
        "weights: {w:",
        "weights: {v: [D], w:",
        "slot `v` is read by no op",
        (6, 14),
    ),
    Bad(
        "a boundary name nobody makes",
        "name: y, dims: [M, D]",
        "name: z, dims: [M, D]",
        "output value `z` is made by no op",
        (5, 13),
    ),
    Bad(
        "a span of nothing",
        "out: [y]",
        "out: [z]",
        "`z` is made by no op",
        (11, 30),
    ),
    Bad(
        "a size divided by zero",
        "dims: [D, D]",
        "dims: [D, D/0]",
        "divides by zero",
        (6, 25),
    ),
    Bad(
        "a remainder by zero",
        "dims: [D, D]",
        "dims: [D, D/(2-2)]",
        "divides by zero",
        (6, 25),
    ),
    Bad(
        "a point twice",
        "points: [h]",
        "points: [h, h]",
        "`h` stands here twice",
        (7, 13),
    ),
    Bad(
        "an input twice",
        "{name: x, dims: [M, D]}",
        "{name: x, dims: [M, D]}, {name: x, dims: [M, D]}",
        "`x` stands here twice",
        (4, 44),
    ),
    Bad(
        "a value twice",
        "let: y, op: linear",
        "let: h, op: linear",
        "defined twice",
        (14, 7),
    ),
    Bad(
        "a slot called like an input",
        "weights: {w:",
        "weights: {x: [D], w:",
        "`x` is declared twice",
        (6, 14),
    ),
    Bad(
        "a value that needs itself",
        "op: scale, in: [x]",
        "op: scale, in: [y]",
        "depend on each other",
        (13, 7),
    ),
    Bad(
        "a name that is none",
        "name: good",
        "name: Good",
        "a name is small letters",
        (1, 7),
    ),
    Bad(
        "an empty document",
        GOOD,
        "",
        "expected a mapping, found nothing",
        (1, 1),
    ),
    Bad(
        "a list",
        GOOD,
        "- a\n",
        "expected a mapping, found a list",
        (1, 1),
    ),
];

fn load(bytes: &[u8]) -> (CatalogError, String) {
    let dir = tempfile::tempdir().expect("dir");
    let file = dir.path().join("good/structure.yaml");
    fs::create_dir_all(file.parent().expect("parent")).expect("mkdir");
    fs::write(&file, bytes).expect("written");
    let e = Catalog::default()
        .with_dir(dir.path())
        .map(|_| ())
        .expect_err("refused");
    // The check of the whole directory says the same.
    let (_, all) = Catalog::default()
        .with_good_of(dir.path())
        .expect("readable");
    assert_eq!(all.len(), 1, "{all:?}");
    assert_eq!(all[0].to_string(), e.to_string());
    (e, file.display().to_string())
}

#[test]
fn each_is_refused_with_code_file_line_and_column() {
    let mut wrong = Vec::new();
    for Bad(what, from, to, says, at) in BAD {
        assert!(GOOD.contains(from), "{what}");
        let (e, file) = load(GOOD.replacen(from, to, 1).as_bytes());
        let place = e.place().map(|p| (p.line, p.column));
        let good = e.code() == "entry_invalid"
            && e.to_string().contains(says)
            && e.place().is_some_and(|p| p.file == file)
            && place == Some(*at);
        if !good {
            wrong.push(format!(
                "{what}: {} {e}\n    expected {at:?} {says}",
                e.code()
            ));
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
    let (e, _) = load(format!("{GOOD}---\na: 1\n").as_bytes());
    assert!(
        e.to_string()
            .contains("structure.yaml:15:1: document: a second document"),
        "{e}"
    );
}

#[test]
fn an_alias_bomb_is_refused_before_it_grows() {
    let mut text = "name: good\na0: &a0 [x, x, x, x, x, x, x, x, x]\n".to_string();
    for i in 1..30 {
        let alias = format!("*a{}", i - 1);
        text += &format!("a{i}: &a{i} [{}]\n", [alias.as_str(); 9].join(", "));
    }
    let start = Instant::now();
    let (e, _) = load(text.as_bytes());
    assert!(
        e.code() == "entry_invalid" && e.to_string().contains("structure.yaml:2:"),
        "{e}"
    );
    assert!(start.elapsed().as_secs() < 2);
}

#[test]
fn bytes_that_are_no_text_are_told_where_they_begin() {
    let mut bytes = GOOD.as_bytes().to_vec();
    let at = GOOD.find("cosine").expect("cosine");
    bytes[at] = 0xff;
    let (e, _) = load(&bytes);
    assert_eq!(e.code(), "entry_invalid");
    assert!(
        e.to_string()
            .contains("structure.yaml:8:18: document: expected UTF-8, found the byte 0xff"),
        "{e}"
    );
}

#[test]
fn fifty_megabytes_are_refused_without_being_read() {
    let dir = tempfile::tempdir().expect("dir");
    let file = dir.path().join("good/structure.yaml");
    fs::create_dir_all(file.parent().expect("parent")).expect("mkdir");
    // Sparse: only its size is there.
    fs::File::create(&file)
        .and_then(|f| f.set_len(50 << 20))
        .expect("made");
    let start = Instant::now();
    let e = Catalog::default()
        .with_dir(dir.path())
        .map(|_| ())
        .expect_err("too large");
    assert!(start.elapsed().as_millis() < 500);
    assert!(
        e.code() == "entry_invalid"
            && e.to_string()
                .contains(":1:1: document: 52428800 bytes, expected at most 1048576"),
        "{e}"
    );
}

#[test]
fn what_is_no_file_is_not_read() {
    let dir = tempfile::tempdir().expect("dir");
    fs::create_dir_all(dir.path().join("good/structure.yaml")).expect("mkdir");
    let e = Catalog::default()
        .with_dir(dir.path())
        .map(|_| ())
        .expect_err("a directory");
    assert!(
        e.code() == "entry_unreadable" && e.to_string().contains("regular file"),
        "{e}"
    );
    let e = Catalog::default()
        .with_good_of(Path::new("/nowhere/at/all"))
        .map(|_| ())
        .expect_err("nowhere");
    assert_eq!(e.code(), "entry_unreadable");
    let (_, bad) = Catalog::default()
        .with_good_of(tempfile::tempdir().expect("dir").path())
        .expect("readable");
    assert!(
        bad[0]
            .to_string()
            .contains("expected <name>/structure.yaml"),
        "{}",
        bad[0]
    );
}

#[test]
fn every_bad_entry_of_a_directory_is_told_and_the_good_ones_stay() {
    let dir = tempfile::tempdir().expect("dir");
    let write = |name: &str, text: &str| {
        fs::create_dir_all(dir.path().join(name)).expect("mkdir");
        fs::write(dir.path().join(name).join("structure.yaml"), text).expect("written");
    };
    write("good", GOOD);
    write("a", &GOOD.replace("name: good", "name: b"));
    write(
        "b",
        &GOOD
            .replace("name: good", "name: b")
            .replace("points: [h]", "points: [g]"),
    );
    write(
        "c",
        &GOOD
            .replace("name: good", "name: c")
            .replace("points: [h]", "points: [h]\nkernel: fast"),
    );
    let (catalog, bad) = Catalog::default()
        .with_good_of(dir.path())
        .expect("readable");
    assert_eq!(catalog.names(), ["good"]);
    let codes: Vec<&str> = bad.iter().map(|e| e.code()).collect();
    assert_eq!(
        codes,
        ["entry_name_mismatch", "entry_invalid", "key_forbidden"]
    );
}

#[test]
fn a_size_that_becomes_a_divisor_of_zero_is_told_when_it_does() {
    let text = GOOD
        .replace(
            "{name: x, dims: [M, D]}",
            "{name: x, dims: [M, D]}, {name: c, dims: [D/(K-4), K]}",
        )
        .replace("op: scale, in: [x]}", "op: add, in: [x, c]}")
        .replace("in: [x],", "in: [x, c],");
    let catalog = Catalog::default()
        .with_document("good", "f", &text)
        .expect("loads");
    let spec = catalog.get("good").expect("good");
    let solve = |k: usize, first: usize| {
        let inputs: Shapes = [
            ("x".to_string(), vec![1, 6]),
            ("c".to_string(), vec![first, k]),
        ]
        .into();
        let weights: Shapes = [("w".to_string(), vec![6, 6])].into();
        spec.solve_dims(&inputs, &weights, Shape::Declared)
    };
    assert!(solve(7, 2).is_ok());
    let e = solve(4, 2).expect_err("zero");
    assert!(
        e.code() == "dim_conflict" && e.to_string().contains("6 is divided by zero"),
        "{e}"
    );
    let e = solve(8, 2).expect_err("remainder");
    assert!(
        e.code() == "dim_conflict" && e.to_string().contains("6 / 4 leaves a remainder"),
        "{e}"
    );
}

/// A pipe where a document should be: opening it would wait for a writer.
#[cfg(unix)]
#[test]
fn a_pipe_is_refused_and_not_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let pipe = dir.path().join("structure.yaml");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status();
    if !made.is_ok_and(|status| status.success()) {
        println!("skipped: no mkfifo here");
        return;
    }
    let refused = structures_catalog::document::read(&pipe).unwrap_err();
    assert!(refused.to_string().contains("regular file"), "{refused}");
}

const MANY: &str = "
name: many
version: 1
boundary:
  inputs: [{name: x, dims: [M, D]}]
  outputs: [{name: y, dims: [M, D]}]
weights: {}
variants: {AXES}
gates: {parity: [cosine]}
slots: {at: graph}
dataflow:
  spans: {all: {in: [x], out: [y]}}
  ops:
";

/// What a document may cost is bounded, whatever it says.
#[test]
fn operations_in_all_combinations_are_bounded() {
    let axes = |n: usize| -> String {
        let one = |i: usize| format!("a{i}: {{host: true, values: [p, q], default: p}}");
        (0..n).map(one).collect::<Vec<_>>().join(", ")
    };
    let document = |n_axes: usize, ops: usize| {
        let mut text = MANY.replace("AXES", &axes(n_axes));
        let mut from = "x".to_string();
        for i in 0..ops {
            let to = if i + 1 == ops {
                "y".into()
            } else {
                format!("v{i}")
            };
            let anchor = if i == 0 { ", anchor: true" } else { "" };
            text += &format!("    - {{let: {to}, op: scale, in: [{from}]{anchor}}}\n");
            from = to;
        }
        text
    };
    let load = |text: &str| {
        Catalog::builtin()
            .unwrap()
            .with_document("many", "many.yaml", text)
    };
    load(&document(0, 20)).unwrap();
    let refused = load(&document(6, 2000)).err().unwrap().to_string();
    assert!(
        refused.contains("128000") || refused.contains("2000 operations"),
        "{refused}"
    );
    assert!(refused.contains("many.yaml:"), "{refused}");
}

/// An output declared otherwise than it is made is found by verify.
#[test]
fn verify_holds_outputs_to_their_declared_dims() {
    let text = "
name: wide
version: 1
boundary:
  inputs: [{name: x, dims: [M, K]}]
  outputs: [{name: y, dims: [M, N]}]
weights: {w: [K, N]}
gates: {parity: [cosine]}
slots: {at: graph}
dataflow:
  spans: {all: {in: [x], out: [y]}}
  ops:
    - {let: y, op: linear, in: [x, w], anchor: true}
";
    let rows = |text: &str| {
        let catalog = Catalog::builtin()
            .unwrap()
            .with_document("wide", "wide.yaml", text)
            .unwrap();
        structures_catalog::verify::verify_spec(catalog.get("wide").unwrap())
    };
    assert!(rows(text).iter().all(|r| r.failure.is_none()));
    for wrong in ["[M, K]", "[M, N+1]", "[M, N, 7]", "[M, N/(N-N)]"] {
        let rows = rows(&text.replace(
            "name: y, dims: [M, N]",
            &format!(
                    "name: y, dims: {:?}",
                    wrong
                        .trim_matches(['[', ']'])
                        .split(", ")
                        .collect::<Vec<_>>()
                ),
        ));
        assert!(rows.iter().any(|r| r.failure.is_some()), "{wrong}");
    }
}
