//! Executes `docs/adding-a-structure.md`: writes its files, applies its edits, runs its commands.
//!
//! A fence's info string says what it is. `yaml,file=PATH` is a file. `diff,file=PATH` replaces its `-` lines by its
//! `+` lines. `console` holds commands (`$ `) and, below each, lines that its output must contain: all words of such
//! a line, in order, close together in the output. `console,exit=N` expects that exit code, else 0 is expected.

#![allow(clippy::unwrap_used)] // a test that panics has failed

use std::path::Path;
use std::process::Command;

use structures_tests::{plugins, root, structures};

const PAGE: &str = "docs/adding-a-structure.md";

struct Fence {
    line: usize,
    info: Vec<String>,
    body: Vec<String>,
}

fn fences(text: &str) -> Vec<Fence> {
    let mut found = Vec::new();
    let mut open: Option<Fence> = None;
    for (i, line) in text.lines().enumerate() {
        match (line.strip_prefix("```"), &mut open) {
            (Some(info), None) => {
                open = Some(Fence {
                    line: i + 1,
                    info: info.split(',').map(str::to_string).collect(),
                    body: Vec::new(),
                });
            }
            (Some(_), Some(_)) => found.extend(open.take()),
            (None, Some(fence)) => fence.body.push(line.to_string()),
            (None, None) => {}
        }
    }
    assert!(open.is_none(), "{PAGE}: a fence is not closed");
    found
}

impl Fence {
    fn key(&self, key: &str) -> Option<&str> {
        let mut parts = self.info[1..].iter();
        parts.find_map(|p| p.strip_prefix(key)?.strip_prefix('='))
    }
}

fn edit(path: &Path, body: &[String], at: &str) {
    let lines = |sign: char| -> String {
        let of = body.iter().filter_map(|l| l.strip_prefix(sign));
        of.map(|l| format!("{l}\n")).collect()
    };
    let text = std::fs::read_to_string(path).unwrap();
    assert_eq!(
        text.matches(&lines('-')).count(),
        1,
        "{at}: the edit applies once"
    );
    std::fs::write(path, text.replacen(&lines('-'), &lines('+'), 1)).unwrap();
}

/// Every word of `wanted`, in order, in one line or, where a message is wrapped, in three.
fn says(output: &str, wanted: &str) -> bool {
    let lines: Vec<&str> = output.lines().collect();
    (0..lines.len()).any(|i| {
        let window = lines[i..lines.len().min(i + 3)].join(" ");
        let mut rest = window.as_str();
        wanted.split_whitespace().all(|word| match rest.find(word) {
            Some(i) => {
                rest = &rest[i + word.len()..];
                true
            }
            None => false,
        })
    })
}

#[test]
fn the_walk_through_holds() {
    let text = std::fs::read_to_string(root().join(PAGE)).unwrap();
    let here = tempfile::tempdir().unwrap();
    let loaded = plugins(&["portable"]);
    let (mut files, mut commands) = (0, 0);
    for fence in fences(&text) {
        let at = format!("{PAGE}:{}", fence.line);
        let file = fence.key("file").map(|f| here.path().join(f));
        match (fence.info[0].as_str(), file) {
            ("yaml", Some(file)) => {
                std::fs::create_dir_all(file.parent().unwrap()).unwrap();
                std::fs::write(&file, fence.body.join("\n") + "\n").unwrap();
                files += 1;
            }
            ("diff", Some(file)) => edit(&file, &fence.body, &at),
            ("console", None) => {
                let exit = fence.key("exit").map_or(0, |n| n.parse().unwrap());
                let mut output = String::new();
                for line in &fence.body {
                    let Some(command) = line.strip_prefix("$ structures ") else {
                        assert!(
                            says(&output, line),
                            "{at}: expected a line with the words `{line}`, found:\n{output}"
                        );
                        continue;
                    };
                    output = run(here.path(), structures(loaded.path()), command, exit, &at);
                    commands += 1;
                }
            }
            ("rust", None) => {}
            (other, _) => panic!("{at}: a fence `{other}` that nobody executes"),
        }
    }
    assert!(
        files > 0 && commands > 5,
        "{PAGE} is not read: {files} files, {commands} commands"
    );
}

fn run(dir: &Path, mut program: Command, command: &str, exit: i32, at: &str) -> String {
    for word in command.split_whitespace() {
        match word.strip_suffix("*.json") {
            Some(folder) => {
                let mut paths = std::fs::read_dir(dir.join(folder)).unwrap();
                let path = paths.next().expect("a file").unwrap().path();
                assert!(paths.next().is_none(), "{at}: one file in {folder}");
                program.arg(path);
            }
            None => {
                program.arg(word);
            }
        }
    }
    let out = program.current_dir(dir).output().unwrap();
    let text = format!(
        "{}{}",
        String::from_utf8_lossy(&out.stdout),
        String::from_utf8_lossy(&out.stderr)
    );
    assert_eq!(
        out.status.code(),
        Some(exit),
        "{at}: `{command}` said:\n{text}"
    );
    text
}
