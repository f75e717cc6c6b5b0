//! Keeps `docs/architecture.md` true: the direction of dependencies, and which code knows which names.

#![allow(clippy::unwrap_used)] // a test that panics has failed

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("workspace root")
        .to_path_buf()
}

/// crate -> workspace crates it may depend on (normal dependencies).
const ALLOWED: &[(&str, &str, &[&str])] = &[
    (
        "structures-plugin-api",
        "plugin-api",
        &["structures-plugin-door"],
    ),
    ("structures-plugin-door", "plugin-api/door", &[]),
    (
        "structures-plugin-header",
        "plugin-api/header",
        &["structures-plugin-api"],
    ),
    ("structures-graph", "host/graph", &[]),
    ("structures-catalog", "catalog", &["structures-graph"]),
    (
        "structures-bindings",
        "host/bindings",
        &["structures-graph", "structures-catalog"],
    ),
    (
        "structures-models",
        "host/models",
        &["structures-graph", "structures-plugin-api"],
    ),
    (
        "structures-seams",
        "host/seams",
        &["structures-graph", "structures-catalog"],
    ),
    (
        "structures-loader",
        "host/loader",
        &["structures-plugin-api"],
    ),
    (
        "structures",
        "host/core",
        &[
            "structures-plugin-api",
            "structures-graph",
            "structures-catalog",
            "structures-bindings",
            "structures-models",
            "structures-seams",
            "structures-loader",
        ],
    ),
    (
        "structures-cli",
        "host/cli",
        &[
            "structures",
            "structures-graph",
            "structures-catalog",
            "structures-bindings",
            "structures-models",
            "structures-seams",
            "structures-loader",
            "structures-conform",
        ],
    ),
    (
        "structures-conform",
        "host/conform",
        &[
            "structures",
            "structures-plugin-api",
            "structures-catalog",
            "structures-loader",
            "structures-suite",
        ],
    ),
    ("xtask", "xtask", &[]),
    (
        "structures-plugin-portable",
        "plugins/portable",
        &["structures-plugin-api"],
    ),
    (
        "structures-plugin-x86",
        "plugins/x86",
        &["structures-plugin-api"],
    ),
    (
        "structures-plugin-cuda",
        "plugins/cuda",
        &["structures-plugin-api"],
    ),
    ("structures-mutate", "tests/mutate", &[]),
    (
        "structures-suite",
        "tests/suite",
        &[
            "structures",
            "structures-plugin-api",
            "structures-graph",
            "structures-catalog",
            "structures-loader",
        ],
    ),
];

#[test]
fn dependencies_point_one_way() {
    for (name, dir, allowed) in ALLOWED {
        let found = normal_dependencies(&root().join(dir).join("Cargo.toml"));
        for dep in found.iter().filter(|d| d.starts_with("structures")) {
            assert!(
                allowed.contains(&dep.as_str()),
                "{name} must not depend on {dep}"
            );
        }
    }
}

/// Directories whose sources must not know a structure, a host family or a plugin by name.
const CORE: &[&str] = &[
    "plugin-api/src",
    "catalog/src",
    "host/graph/src",
    "host/bindings/src",
    "host/seams/src",
    "host/loader/src",
    "host/core/src",
    "host/cli/src",
    "host/conform/src",
    "tests/suite/src",
];

#[test]
fn the_core_names_no_structure_plugin_or_family() {
    let mut names: BTreeMap<String, &str> = BTreeMap::new();
    for name in subdirectories("catalog")
        .into_iter()
        .filter(|n| n != "src" && n != "tests" && n != "benches")
    {
        names.insert(name, "structure");
    }
    for name in subdirectories("plugins") {
        names.insert(name, "plugin");
    }
    for file in files(&root().join("host/models/src/families"), "rs") {
        let stem = file
            .file_stem()
            .expect("stem")
            .to_string_lossy()
            .into_owned();
        if stem != "mod" {
            names.insert(stem, "host family");
        }
    }
    assert!(
        names.len() >= 7,
        "the test must see the leaves it guards: {names:?}"
    );
    let mut hits = Vec::new();
    for dir in CORE {
        for file in files(&root().join(dir), "rs") {
            let text = fs::read_to_string(&file).expect("source");
            for (number, line) in production_lines(&text) {
                for (name, what) in &names {
                    if line.contains(&format!("\"{name}\"")) {
                        hits.push(format!("{}:{number}: {what} `{name}`", file.display()));
                    }
                }
            }
        }
    }
    assert!(
        hits.is_empty(),
        "central code that knows a leaf:\n{}",
        hits.join("\n")
    );
}

#[test]
fn unsafe_has_an_address() {
    for dir in [
        "catalog",
        "host/graph",
        "host/models",
        "host/bindings",
        "host/seams",
        "host/core",
        "host/conform",
        "plugins/portable",
    ] {
        let lib = root().join(dir).join("src/lib.rs");
        let text = fs::read_to_string(&lib).expect("lib.rs");
        assert!(
            text.contains("#![forbid(unsafe_code)]"),
            "{} must forbid unsafe",
            lib.display()
        );
    }
    let main = fs::read_to_string(root().join("host/cli/src/main.rs")).expect("main.rs");
    assert!(main.contains("#![forbid(unsafe_code)]"));
}

#[test]
fn no_machine_paths_or_placeholders() {
    let mut bad = Vec::new();
    for ext in ["rs", "yaml", "toml", "md", "py", "sh"] {
        for file in files(&root(), ext) {
            let text = fs::read_to_string(&file).unwrap_or_default();
            if file.ends_with("tests/architecture.rs") {
                continue;
            }
            let lines: Vec<(usize, &str)> = if ext == "rs" {
                production_lines(&text).collect()
            } else {
                text.lines().enumerate().map(|(i, l)| (i + 1, l)).collect()
            };
            for (i, line) in lines {
                let marks = [
                    "todo!(",
                    "unimplemented!(",
                    "FIXME",
                    "/root/",
                    "/home/",
                    "/work/",
                ];
                if let Some(mark) = marks.iter().find(|m| line.contains(**m)) {
                    bad.push(format!("{}:{i}: `{mark}`", file.display()));
                }
            }
        }
    }
    assert!(bad.is_empty(), "{}", bad.join("\n"));
}

#[test]
fn links_of_the_documents_lead_somewhere() {
    let mut documents = files(&root().join("docs"), "md");
    documents.push(root().join("README.md"));
    let mut checked = 0;
    let mut bad = Vec::new();
    for document in &documents {
        let text = fs::read_to_string(document).expect("document");
        for (number, link) in links(&text) {
            let (path, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let target = match path {
                "" => document.clone(),
                path => document.parent().expect("directory").join(path),
            };
            checked += 1;
            let is_text = target.extension().is_some_and(|e| e == "md");
            let found = target.exists()
                && (anchor.is_empty()
                    || !is_text
                    || fs::read_to_string(&target)
                        .is_ok_and(|t| headings(&t).any(|h| h == anchor)));
            if !found {
                bad.push(format!("{}:{number}: `{link}`", document.display()));
            }
        }
    }
    assert!(bad.is_empty(), "links to nothing:\n{}", bad.join("\n"));
    assert!(
        documents.len() >= 3 && checked >= 3,
        "the test must see the documents: {checked} links in {documents:?}"
    );
}

#[test]
fn links_are_seen_where_they_are() {
    let text = "[a](b.md#c) and `[no](code)`\n```\n[no](fence)\n```\n![i](i.png \"title\") [w](https://x.y/z)\n\n[r]: d/e.md\n[s](<f g.md>)\n";
    let found: Vec<(usize, String)> = links(text);
    let expected = [(1, "b.md#c"), (5, "i.png"), (7, "d/e.md"), (8, "f g.md")];
    assert_eq!(found, expected.map(|(n, l)| (n, l.to_string())));
    let titles = "# The `x` of B, C\n```\n# no\n```\n## A form\n## A form\n";
    let found: Vec<String> = headings(titles).collect();
    assert_eq!(found, ["the-x-of-b-c", "a-form", "a-form-1"]);
}

/// Targets of links to local files, with their lines; code is no text.
fn links(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (number, line) in outside_fences(text) {
        // Every second part of a line stands between back quotes.
        let plain: String = line.split('`').step_by(2).collect();
        let mut targets: Vec<&str> = plain
            .split("](")
            .skip(1)
            .filter_map(|rest| rest.split(')').next())
            .collect();
        if plain.starts_with('[') && !plain.starts_with("[^") {
            targets.extend(plain.split_once("]: ").map(|(_, target)| target));
        }
        for target in targets {
            let target = match target.strip_prefix('<') {
                Some(rest) => rest.trim_end_matches('>'),
                None => target.split_whitespace().next().unwrap_or(""),
            };
            let elsewhere = target.contains("://") || target.starts_with("mailto:");
            if !target.is_empty() && !elsewhere {
                found.push((number, target.to_string()));
            }
        }
    }
    found
}

/// Anchors of a document's headings, as its readers make them: lower case, words joined by hyphens, numbered when
/// they repeat.
fn headings(text: &str) -> impl Iterator<Item = String> + '_ {
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    outside_fences(text)
        .filter(|(_, line)| line.starts_with('#'))
        .map(move |(_, line)| {
            let anchor: String = line
                .trim_start_matches('#')
                .trim()
                .chars()
                .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'))
                .map(|c| match c {
                    ' ' => '-',
                    c => c.to_ascii_lowercase(),
                })
                .collect();
            let times = seen.entry(anchor.clone()).or_default();
            *times += 1;
            match *times {
                1 => anchor,
                n => format!("{anchor}-{}", n - 1),
            }
        })
}

fn outside_fences(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut inside = false;
    text.lines()
        .enumerate()
        .filter(move |(_, line)| {
            let fence = line.trim_start().starts_with("```");
            inside ^= fence;
            !inside && !fence
        })
        .map(|(i, line)| (i + 1, line))
}

/// Lines before the unit-test module, comments left out.
fn production_lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.lines()
        .enumerate()
        .take_while(|(_, l)| !l.starts_with("#[cfg(test)]"))
        .filter(|(_, l)| !l.trim_start().starts_with("//"))
        .map(|(i, l)| (i + 1, l))
}

fn normal_dependencies(manifest: &Path) -> BTreeSet<String> {
    let text = fs::read_to_string(manifest).expect("manifest");
    let mut section = String::new();
    let mut found = BTreeSet::new();
    for line in text.lines() {
        if line.starts_with('[') {
            section = line.trim_matches(['[', ']']).to_string();
        } else if section == "dependencies" {
            let key = line.split(['=', '.', ' ']).next().unwrap_or("");
            if !key.is_empty() && !key.starts_with('#') {
                found.insert(key.to_string());
            }
        }
    }
    assert!(
        !found.is_empty() || !text.contains("[dependencies]"),
        "{}: its dependencies are not read",
        manifest.display()
    );
    found
}

fn subdirectories(dir: &str) -> Vec<String> {
    fs::read_dir(root().join(dir))
        .expect("directory")
        .filter_map(Result::ok)
        .filter(|e| e.path().is_dir())
        .map(|e| e.file_name().to_string_lossy().into_owned())
        .collect()
}

fn files(dir: &Path, ext: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut stack = vec![dir.to_path_buf()];
    while let Some(dir) = stack.pop() {
        for entry in fs::read_dir(&dir)
            .into_iter()
            .flatten()
            .filter_map(Result::ok)
        {
            let path = entry.path();
            let name = entry.file_name();
            if path.is_dir() {
                // `models` beside the workspace's crates holds fetched checkpoints.
                let fetched = name == "models" && !path.join("src").exists();
                let hidden = name.to_string_lossy().starts_with('.');
                if name != "target" && !fetched && !hidden {
                    stack.push(path);
                }
            } else if path.extension().is_some_and(|x| x == ext) {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

/// The example of the engineers' page is a file that is compiled; the page shows all of it but its head.
#[test]
fn the_example_of_the_engineers_page_is_compiled() {
    let page = std::fs::read_to_string(root().join("docs/engineers.md")).unwrap();
    let source = std::fs::read_to_string(root().join("host/core/examples/engineers.rs")).unwrap();
    let (_, shown) = source.split_once("\n\n").unwrap();
    assert!(
        page.contains(&format!("```rust\n{shown}```\n")),
        "docs/engineers.md and host/core/examples/engineers.rs differ: make them alike"
    );
}
