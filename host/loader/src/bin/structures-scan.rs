//! A scanner of its own: `structures-scan scan-plugin PATH`. Tests use it; the product's scanner is `structures`.

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    match arguments.as_slice() {
        [command, path] if command == structures_loader::SUBCOMMAND => {
            ExitCode::from(u8::try_from(structures_loader::scan_main(Path::new(path))).unwrap_or(1))
        }
        _ => {
            eprintln!(
                "usage: structures-scan {} PATH",
                structures_loader::SUBCOMMAND
            );
            ExitCode::from(2)
        }
    }
}
