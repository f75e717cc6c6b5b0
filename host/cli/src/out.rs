//! Where output goes: one document or tables on the real stdout, everything else on stderr.
//!
//! The real stdout is taken before any plugin is opened, so nothing a library prints can mix with a document.

use std::cell::RefCell;
use std::fs::File;
use std::io::Write;

use comfy_table::{presets, ContentArrangement, Table};
use serde_json::Value as Json;

use crate::say;

/// The output of a command.
pub struct Out {
    json: bool,
    file: RefCell<File>,
    failure: RefCell<Option<std::io::Error>>,
}

impl Out {
    /// Takes stdout.
    pub fn new(json: bool) -> std::io::Result<Self> {
        Ok(Out {
            json,
            file: RefCell::new(structures_loader::take_stdout()?),
            failure: RefCell::new(None),
        })
    }

    /// Whether a document is wanted.
    pub fn json(&self) -> bool {
        self.json
    }

    /// The document; its fields gain `schema` in front.
    pub fn document(&self, mut value: Json) {
        if let Json::Object(map) = &mut value {
            if !map.contains_key("schema") {
                map.shift_insert(0, "schema".into(), Json::from(1));
            }
        }
        self.raw(&format!("{value:#}\n"));
    }

    /// A line of text; line ends within it, which are a stranger's, are shown as such.
    pub fn line(&self, text: &str) {
        self.raw(&format!("{}\n", say::one_line(text)));
    }

    /// Text that has lines of its own.
    pub fn lines(&self, text: &str) {
        self.raw(&format!("{}\n", say::lines(text)));
    }

    /// Text as it is, without a line end.
    pub fn raw(&self, text: &str) {
        let mut file = self.file.borrow_mut();
        let written = file.write_all(text.as_bytes()).and_then(|()| file.flush());
        // A reader that went away (`| head`) is not an error of the command; a full disk is.
        if let Err(e) = written {
            if e.kind() != std::io::ErrorKind::BrokenPipe {
                self.failure.borrow_mut().get_or_insert(e);
            }
        }
    }

    /// The first write that failed.
    pub fn failure(&self) -> Option<std::io::Error> {
        self.failure.borrow_mut().take()
    }

    /// A table.
    pub fn table<const N: usize>(&self, header: [&str; N], rows: Vec<[String; N]>) {
        let mut table = Table::new();
        table
            .load_preset(presets::UTF8_FULL_CONDENSED)
            .set_content_arrangement(ContentArrangement::Dynamic)
            .set_header(header);
        for row in rows {
            table.add_row(row.map(|cell| say::one_line(&cell)));
        }
        self.raw(&format!("{table}\n"));
    }
}
