//! The page of codes says what the code says.

#![allow(clippy::expect_used)] // a test that panics has failed

use std::fmt::Write;
use std::path::Path;

use structures_conform::Code;

const BEGIN: &str = "<!-- codes of conform: begin.";
const END: &str = "<!-- codes of conform: end -->";

#[test]
fn the_table_of_codes_is_the_list_the_validator_uses() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/codes.md");
    let page = std::fs::read_to_string(&path).expect("docs/codes.md");
    let begin = page.find(BEGIN).expect("the mark in front");
    let start = begin + page[begin..].find('\n').expect("a line") + 1;
    let end = page.find(END).expect("the mark behind");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        let wanted = format!("{}{}{}", &page[..start], table(), &page[end..]);
        std::fs::write(&path, wanted).expect("written");
        return;
    }
    assert_eq!(
        &page[start..end],
        table(),
        "docs/codes.md differs from Code::ALL: run this test with UPDATE_DOCS=1"
    );
}

fn table() -> String {
    let mut text = String::from("\n| code | meaning | what to do |\n|---|---|---|\n");
    for code in Code::ALL {
        let cell = |text: &str| text.replace('|', "\\|");
        let (meaning, help) = (cell(code.meaning()), cell(code.help()));
        writeln!(text, "| `{}` | {meaning} | {help} |", code.name())
            .expect("a String takes everything");
    }
    text.push('\n');
    text
}
