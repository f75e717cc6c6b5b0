//! The table of behaviours: every id of the specification, what tests it, and what became of it.
//!
//! `docs/behaviours.txt` lists all ids with a title of ours; `docs/behaviours.md` is written from it and from the names
//! of the tests in the workspace, and compared here. `STRUCTURES_UPDATE_DOCS=1` writes it anew. An id that has neither
//! a test nor a stated reason fails, and so does a test that the list names and nobody has.

#![allow(clippy::unwrap_used)] // a test that panics has failed

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use structures_tests::root;

const UPDATE: &str = "STRUCTURES_UPDATE_DOCS";

/// What the list says about an id.
#[derive(Clone, Debug, PartialEq)]
enum Stated {
    /// A test is named after it, or these are its tests.
    Test(Vec<String>),
    /// Settled by the decisions.
    NotApplicable(String),
    /// Not done yet.
    Later(String),
}

struct Row {
    id: String,
    stated: Stated,
    title: String,
}

/// A line of the table and its heading, or a problem.
fn rows(list: &str) -> Result<Vec<(String, Row)>, String> {
    let mut heading = String::new();
    let mut seen = BTreeSet::new();
    let mut all = Vec::new();
    for line in list.lines() {
        if let Some(text) = line.strip_prefix("# ") {
            heading = text.to_string();
            continue;
        }
        if line.trim().is_empty() {
            continue;
        }
        let parts: Vec<&str> = line.splitn(3, '|').map(str::trim).collect();
        let [id, state, title] = parts[..] else {
            return Err(format!("`{line}`: expected `id | state | title`"));
        };
        let number = id.strip_prefix("B-").filter(|n| n.len() == 3);
        if !number.is_some_and(|n| n.bytes().all(|b| b.is_ascii_digit())) || title.is_empty() {
            return Err(format!("`{line}`: expected `B-nnn` and a title"));
        }
        if !seen.insert(id.to_string()) {
            return Err(format!("{id} stands twice"));
        }
        let (kind, rest) = state.split_once(':').unwrap_or((state, ""));
        let rest = rest.trim();
        let stated = match (kind, rest.is_empty()) {
            ("test", _) => {
                let names = rest.split(',').map(str::trim).filter(|n| !n.is_empty());
                Stated::Test(names.map(String::from).collect())
            }
            ("na", false) => Stated::NotApplicable(rest.into()),
            ("later", false) => Stated::Later(rest.into()),
            _ => {
                return Err(format!(
                    "{id}: state `{state}`, expected test, na: why or later: what"
                ))
            }
        };
        all.push((
            heading.clone(),
            Row {
                id: id.into(),
                stated,
                title: title.into(),
            },
        ));
    }
    Ok(all)
}

/// Names of all functions under a `#[test]`.
fn tests_of(source: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut under_test = false;
    for line in source.lines().map(str::trim) {
        if line.starts_with("#[test]") {
            under_test = true;
        } else if let Some(rest) = line.strip_prefix("fn ").filter(|_| under_test) {
            found.push(
                rest.chars()
                    .take_while(|c| c.is_alphanumeric() || *c == '_')
                    .collect(),
            );
            under_test = false;
        }
    }
    found
}

/// Ids in a test's name: `b_171_b_174_any_region`, `fault_receipt_edited_by_hand_b_440`.
fn ids_of(name: &str) -> Vec<String> {
    let words: Vec<&str> = name.split('_').collect();
    let number = |w: &str| w.len() == 3 && w.bytes().all(|b| b.is_ascii_digit());
    let pairs = words.windows(2).filter(|w| w[0] == "b" && number(w[1]));
    pairs.map(|w| format!("B-{}", w[1])).collect()
}

/// Every id of the specification, from and to.
const IDS: &[(u32, u32)] = &[
    (1, 15),
    (20, 37),
    (50, 73),
    (80, 83),
    (100, 111),
    (120, 129),
    (140, 153),
    (170, 175),
    (178, 180),
    (185, 197),
    (200, 200),
    (205, 212),
    (218, 223),
    (230, 243),
    (246, 248),
    (252, 257),
    (260, 264),
    (270, 292),
    (300, 310),
    (320, 324),
    (330, 338),
    (340, 345),
    (350, 361),
    (370, 379),
    (390, 391),
    (400, 408),
    (420, 428),
    (440, 445),
    (460, 474),
    (480, 494),
    (500, 509),
    (515, 526),
    (540, 543),
];

/// What is in one of the two and not in the other.
fn missing_or_new(rows: &[(String, Row)]) -> Vec<String> {
    let listed: BTreeSet<String> = rows.iter().map(|(_, row)| row.id.clone()).collect();
    let known: BTreeSet<String> = IDS
        .iter()
        .flat_map(|(from, to)| (*from..=*to).map(|n| format!("B-{n:03}")))
        .collect();
    let missing = known
        .difference(&listed)
        .map(|id| format!("{id} is left out"));
    let new = listed
        .difference(&known)
        .map(|id| format!("{id} is in no specification"));
    missing.chain(new).collect()
}

fn sources(dir: &Path, out: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).unwrap().map(Result::unwrap) {
        let path = entry.path();
        let name = entry.file_name().to_string_lossy().into_owned();
        if path.is_dir() && !name.starts_with('.') && name != "target" {
            sources(&path, out);
        } else if path.extension().is_some_and(|e| e == "rs") {
            out.push(path);
        }
    }
}

/// The document, and every problem of list and tests.
fn document(rows: &[(String, Row)], tests: &BTreeSet<String>) -> (String, Vec<String>) {
    let mut named: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for test in tests {
        for id in ids_of(test) {
            named.entry(id).or_default().push(test);
        }
    }
    let mut problems = Vec::new();
    for (id, tests) in &named {
        if !rows.iter().any(|(_, row)| row.id == *id) {
            problems.push(format!(
                "{id} is no behaviour, but {tests:?} are named after it"
            ));
        }
    }
    let mut text = String::from(
        "# Behaviours\n\nEvery numbered behaviour of the specification, the tests that hold it, and its state. Written by \
         `STRUCTURES_UPDATE_DOCS=1 cargo nextest run --release -p structures-tests --test behaviours` from \
         `behaviours.txt` and the names of the tests, not by hand.\n",
    );
    let (mut built, mut foreign, mut later) = (0, 0, 0);
    let mut table = String::new();
    let mut heading = "";
    for (section, row) in rows {
        if section != heading {
            heading = section;
            let _ = write!(
                table,
                "\n## {section}\n\n| id | title | tests | state |\n|---|---|---|---|\n"
            );
        }
        let mut found: Vec<&str> = named.get(&row.id).cloned().unwrap_or_default();
        if let Stated::Test(others) = &row.stated {
            for other in others {
                match tests.get(other) {
                    Some(test) => found.push(test),
                    None => problems.push(format!("{}: there is no test `{other}`", row.id)),
                }
            }
            if found.is_empty() && others.is_empty() {
                problems.push(format!("{}: no test is named after it", row.id));
            }
        }
        found.dedup();
        let state = match &row.stated {
            _ if !found.is_empty() => {
                built += 1;
                "built".to_string()
            }
            Stated::NotApplicable(why) => {
                foreign += 1;
                format!("not applicable: {why}")
            }
            Stated::Later(what) => {
                later += 1;
                format!("later: {what}")
            }
            Stated::Test(_) => "missing".to_string(),
        };
        let found: Vec<String> = found.iter().map(|t| format!("`{t}`")).collect();
        let found = found.join(", ");
        let _ = writeln!(table, "| {} | {} | {found} | {state} |", row.id, row.title);
    }
    let _ = write!(
        text,
        "\n{built} built, {later} later, {foreign} not applicable, {} in all.\n{table}",
        rows.len()
    );
    (text, problems)
}

fn all_tests() -> BTreeSet<String> {
    let mut files = Vec::new();
    sources(&root(), &mut files);
    let read = |path: &PathBuf| tests_of(&std::fs::read_to_string(path).unwrap());
    files.iter().flat_map(read).collect()
}

#[test]
fn every_behaviour_is_tested_or_says_why_not() {
    let list = std::fs::read_to_string(root().join("docs/behaviours.txt")).unwrap();
    let rows = rows(&list).unwrap();
    assert_eq!(missing_or_new(&rows), Vec::<String>::new());
    let (text, problems) = document(&rows, &all_tests());
    assert!(problems.is_empty(), "{problems:#?}");
    let path = root().join("docs/behaviours.md");
    if std::env::var_os(UPDATE).is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        written == text,
        "docs/behaviours.md is stale; run this test with {UPDATE}=1"
    );
}

#[test]
fn b_071_the_advice_on_samples_is_written_down() {
    let page = std::fs::read_to_string(root().join("docs/calibration.md")).unwrap();
    for fact in [
        "| fine-tuned | 8, stratified |",
        "| edge SoC | 64 |",
        "| base model | 1 |",
        "| 16 | 93 |",
        "| 64 | 98.5 |",
        "| 256 | 99.6 |",
    ] {
        assert!(page.contains(fact), "{fact}");
    }
}

#[test]
fn a_list_that_says_too_little_is_refused() {
    for (list, fact) in [
        ("B-001 | test", "expected `id"),
        ("B-1 | test | title", "B-nnn"),
        ("B-001 | test |  ", "title"),
        ("B-001 | later | title", "expected test"),
        ("B-001 | na: | title", "expected test"),
        ("B-001 | test | a\nB-001 | test | b", "twice"),
    ] {
        let problem = rows(list).err().unwrap();
        assert!(problem.contains(fact), "{problem}");
    }
    let one = |list: &str, tests: &[&str]| {
        let tests = tests.iter().map(|t| (*t).to_string()).collect();
        document(&rows(list).unwrap(), &tests)
    };
    assert!(one("B-001 | test | a", &[]).1[0].contains("no test is named"));
    assert!(one("B-001 | test: gone | a", &["b_001_x"]).1[0].contains("`gone`"));
    assert!(one("B-001 | test | a", &["b_001_x", "b_002_y"]).1[0].contains("B-002"));
    let (text, problems) = one("B-001 | later: x | a", &["b_001_x"]);
    assert!(
        problems.is_empty() && text.contains("| `b_001_x` | built |"),
        "{text}"
    );
}

#[test]
fn names_of_tests_and_their_ids_are_read() {
    let source =
        "#[test]\nfn b_171_b_174_any() {}\nfn helper() {}\n#[test]\n#[ignore]\nfn plain() {\n";
    assert_eq!(tests_of(source), ["b_171_b_174_any", "plain"]);
    assert_eq!(ids_of("b_171_b_174_any"), ["B-171", "B-174"]);
    assert_eq!(
        ids_of("fault_edited_by_hand_b_440_b_308"),
        ["B-440", "B-308"]
    );
    for none in ["b_minor", "xb_171", "b_1711", "a_b_17"] {
        assert!(ids_of(none).is_empty(), "{none}");
    }
    let gone = "B-002 | test | a\nB-999 | test | b";
    let found = missing_or_new(&rows(gone).unwrap());
    assert!(
        found.contains(&"B-001 is left out".to_string()),
        "{found:?}"
    );
    assert!(found.contains(&"B-999 is in no specification".to_string()));
    assert!(!found.iter().any(|f| f.starts_with("B-002")));
}
