//! Text for people, from whoever it comes: what is shown may neither steer a terminal nor look like a line of ours,
//! and a stderr that is full or gone is no reason to end otherwise.

use std::io::{self, Write};

/// Whether a character moves or reorders what is shown instead of being shown.
fn steers(c: char) -> bool {
    c.is_control()
        || matches!(
            c,
            '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
        )
}

/// One line: line ends are escaped, too.
pub fn one_line(text: &str) -> String {
    escaped(text, |_| false)
}

/// Text that may have lines of its own.
pub fn lines(text: &str) -> String {
    escaped(text, |c| matches!(c, '\n' | '\t'))
}

fn escaped(text: &str, kept: impl Fn(char) -> bool) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        match steers(c) && !kept(c) {
            true => shown.extend(c.escape_default()),
            false => shown.push(c),
        }
    }
    shown
}

/// A line on stderr.
pub fn say(text: &str) {
    put(&lines(text));
}

/// As [`say`] for text whose colours are ours: whatever else is in it was escaped before.
pub fn put(text: &str) {
    // Nobody is left to be told that nobody can be told.
    let _ = io::stderr().write_all(format!("{text}\n").as_bytes());
}

/// Stderr for the log: it never fails, and lets nothing through but text and, where asked, colours.
#[derive(Clone, Copy)]
pub struct Log {
    /// Whether colours are written.
    pub colors: bool,
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(bytes);
        let text = match self.colors {
            true => colored(&text),
            false => lines(&text),
        };
        let _ = io::stderr().write_all(text.as_bytes());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Colours (`ESC [ digits ; m`) stay, the rest is escaped.
fn colored(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    let mut parts = text.split('\u{1b}');
    shown.push_str(&lines(parts.next().unwrap_or_default()));
    for part in parts {
        let color = part
            .strip_prefix('[')
            .and_then(|rest| rest.split_once('m'))
            .filter(|(digits, _)| digits.chars().all(|c| c.is_ascii_digit() || c == ';'));
        shown.push_str(if color.is_some() { "\u{1b}" } else { "\\u{1b}" });
        shown.push_str(&lines(part));
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_steers_is_shown_and_the_rest_stays() {
        assert_eq!(one_line("a\u{e9}\u{4e2d} b"), "a\u{e9}\u{4e2d} b");
        assert_eq!(one_line("a\nb\u{1b}[2J"), "a\\nb\\u{1b}[2J");
        assert_eq!(
            one_line("\u{202e}x\u{9b}\u{7f}"),
            "\\u{202e}x\\u{9b}\\u{7f}"
        );
        assert_eq!(lines("a\n\tb\r"), "a\n\tb\\r");
    }

    #[test]
    fn colours_stay_and_nothing_else() {
        assert_eq!(colored("\u{1b}[1;31mx\u{1b}[0m"), "\u{1b}[1;31mx\u{1b}[0m");
        assert_eq!(
            colored("a\u{1b}]0;t\u{7}\u{1b}[2Jb"),
            "a\\u{1b}]0;t\\u{7}\\u{1b}[2Jb"
        );
    }

    /// `eprintln!` and its kind end the program when their stream is full or closed.
    #[test]
    fn nothing_prints_past_this_file() {
        let mut left = vec![std::path::PathBuf::from(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/src"
        ))];
        while let Some(path) = left.pop() {
            if path.is_dir() {
                let entries = std::fs::read_dir(&path).unwrap();
                left.extend(entries.map(|e| e.unwrap().path()));
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap();
            for word in ["print", "eprint", "println", "eprintln", "dbg"] {
                let call = format!("{word}!(");
                assert!(!text.contains(&call), "{}: {call}", path.display());
            }
        }
    }
}
