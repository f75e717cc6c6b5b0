//! The JSON reader of backends in C on texts that are JSON and on texts that are not: a C program built from it for the test.

use std::path::PathBuf;
use std::process::Command;

const CHECKS: &str = r#"
#include "json.h"
#include <assert.h>
#include <string.h>
static json text(const char *t) { return json_of(t, strlen(t)); }
int main(void)
{
    json doc = text(" {\"a\" : {\"b\":[1, 22,{\"x\":\"y]}\"}], \"c\":\"d\\\"e\"}, \"n\":18446744073709551615, \"t\":true}"), v, w;
    uint64_t n;
    assert(json_member(doc, "a", &v) && json_member(v, "b", &w));
    json item;
    assert(json_item(w, 1, &item) && json_u64(item, &n) && n == 22);
    assert(json_item(w, 2, &item) && json_member(item, "x", &item) && json_is(item, "y]}"));
    assert(!json_item(w, 3, &item));
    assert(json_member(v, "c", &w) && !json_is(w, "d\"e"));
    assert(json_member(doc, "n", &v) && !json_u64(v, &n));
    assert(json_member(doc, "t", &v) && !json_is(v, "true"));
    assert(!json_member(doc, "b", &v) && !json_member(v, "b", &w));
    const char *bad[] = {"", "{", "{\"a", "{\"a\"", "{\"a\":", "{\"a\":[", "{\"a\":[1,", "{\"a\":\"", "[", "[1", "\"", "{a:1}", "{\"a\" 1}", "\\"};
    for (unsigned i = 0; i < sizeof bad / sizeof *bad; i++) {
        json_item(text(bad[i]), 0, &v);
        assert(!json_member(text(bad[i]), "b", &v));
    }
    /* Every prefix of a good text ends cleanly, and so does one that is far too deep. */
    for (const char *end = doc.end; end > doc.at; end--) {
        json part = {doc.at, end};
        json_member(part, "zz", &v);
    }
    char deep[4096];
    memset(deep, '[', sizeof deep);
    assert(!json_item(json_of(deep, sizeof deep), 0, &v));
    return 0;
}
"#;

#[test]
fn the_reader_finds_what_is_there_and_survives_what_is_not() {
    let dir = tempfile::tempdir().expect("temporary directory");
    let own = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../plugin-api/c");
    let (source, program) = (dir.path().join("t.c"), dir.path().join("t"));
    std::fs::write(&source, CHECKS).expect("write");
    let build = |sanitize: &[&str]| {
        Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()))
            .args(["-std=c11", "-g", "-I"])
            .arg(&own)
            .args(sanitize)
            .arg(&source)
            .arg(own.join("json.c"))
            .arg("-o")
            .arg(&program)
            .output()
            .expect("a C compiler")
    };
    // Reads past the end are what this looks for; without the sanitisers' libraries it looks less closely.
    let checked = build(&["-fsanitize=address,undefined", "-fno-sanitize-recover"]);
    if !checked.status.success() {
        println!("skipped: sanitisers, the C compiler has none");
        assert!(build(&[]).status.success());
    }
    let ran = Command::new(&program).output().expect("runs");
    assert!(
        ran.status.success(),
        "{}",
        String::from_utf8_lossy(&ran.stderr)
    );
}
