//! One file a command. Each gives its exit code or a failure.

mod attach;
mod bench;
mod bindings;
mod calibrate;
mod catalog;
mod conform;
mod decisions;
mod devices;
mod discover;
mod explain;
mod generate;
mod new_plugin;
mod perplexity;
mod plugins;
mod probe;
mod receipts;
mod served;

use std::cell::OnceCell;
use std::path::{Path, PathBuf};

use clap::CommandFactory;

use structures::choose::Pin;
use structures::host::{Host, HostOptions, Loaded};
use structures::samples::{self, SampleOptions, Samples};
use structures_loader::{LockPolicy, ScanOptions, LOCK_FILE};

use crate::args::{Cli, Command, Global, SampleArgs};
use crate::failure::Failure;
use crate::out::Out;

/// What every command gets.
pub struct Context<'a> {
    /// Output.
    pub out: &'a Out,
    /// Global switches.
    pub global: &'a Global,
}

impl Context<'_> {
    /// The host with catalog and plugins.
    pub fn host(&self) -> Result<Host, Failure> {
        Ok(Host::with_scan(
            &HostOptions {
                plugins: self.global.plugins.clone(),
                catalog: self.global.catalog.clone(),
                bindings: self.binding_dirs()?,
                decisions: self.decisions_file(),
                eager: false,
            },
            &self.scan_options()?,
        )?)
    }

    /// `--decisions`, else `STRUCTURES_DECISIONS` (not read under secure execution), else a file in the user's data
    /// directory; none where there is no such directory.
    pub fn decisions_file(&self) -> Option<PathBuf> {
        let named = match structures_loader::secure_execution() {
            true => None,
            false => std::env::var_os(DECISIONS).filter(|v| !v.is_empty()),
        };
        let given = self.global.decisions.clone();
        given
            .or(named.map(PathBuf::from))
            .or_else(|| Some(data_dir()?.join("decisions.json")))
    }

    /// Where plugins are looked for, and what they must show.
    pub fn scan_options(&self) -> Result<ScanOptions, Failure> {
        for dir in &self.global.plugins {
            directory(
                dir,
                "--plugins",
                "a directory with plugins",
                "give the directory that holds the *.so files, or leave --plugins out",
            )?;
        }
        let mut options = ScanOptions::new(self.global.plugins.clone());
        options.lock = LockPolicy {
            file: Some(self.lock_file()),
            enforced: self.global.locked,
        };
        options.require_signed = self.global.require_signed;
        Ok(options)
    }

    /// The lock that was named, else the working directory's.
    pub fn lock_file(&self) -> PathBuf {
        let named = self.global.lock_file.clone();
        let file = named.unwrap_or_else(|| LOCK_FILE.into());
        std::path::absolute(&file).unwrap_or(file)
    }

    /// The user's binding directories: `--bindings`, then `STRUCTURES_BINDING_PATH`, which is not read under secure
    /// execution.
    pub fn binding_dirs(&self) -> Result<Vec<PathBuf>, Failure> {
        let mut dirs: Vec<(PathBuf, &str)> = Vec::new();
        dirs.extend(
            self.global
                .bindings
                .iter()
                .map(|d| (d.clone(), "--bindings")),
        );
        let path = match structures_loader::secure_execution() {
            true => None,
            false => std::env::var_os(BINDING_PATH),
        };
        for dir in path.iter().flat_map(std::env::split_paths) {
            if !dir.as_os_str().is_empty() {
                dirs.push((dir, BINDING_PATH));
            }
        }
        let help = format!(
            "give directories that hold *.yaml files, or leave --bindings and {BINDING_PATH} out"
        );
        for (dir, origin) in &dirs {
            directory(dir, origin, "a directory with binding files", &help)?;
        }
        Ok(dirs.into_iter().map(|(dir, _)| dir).collect())
    }
}

/// More binding directories, separated as in `PATH`.
const BINDING_PATH: &str = "STRUCTURES_BINDING_PATH";

/// The file of recorded decisions.
const DECISIONS: &str = "STRUCTURES_DECISIONS";

/// `structures` in the user's data directory.
pub fn data_dir() -> Option<PathBuf> {
    let env = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty());
    let data = env("XDG_DATA_HOME")
        .map(PathBuf::from)
        .filter(|dir| dir.is_absolute())
        .or_else(|| env("HOME").map(|home| PathBuf::from(home).join(".local").join("share")))?;
    Some(data.join("structures"))
}

/// A directory that the user named must be one.
fn directory(dir: &Path, origin: &str, expected: &str, help: &str) -> Result<(), Failure> {
    if dir.is_dir() {
        return Ok(());
    }
    let found = match dir.exists() {
        true => "something else",
        false => "nothing",
    };
    let message = format!(
        "{origin} {}: expected {expected}, found {found}",
        dir.display()
    );
    Err(Failure::usage(message, help))
}

/// Runs a command.
pub fn run(command: Command, cx: &Context<'_>) -> Result<u8, Failure> {
    match command {
        Command::Plugins { action } => plugins::run(action, cx),
        Command::Devices { simulate } => devices::run(&simulate, cx),
        Command::Probe(args) => probe::run(&args, cx),
        Command::Catalog { action } => catalog::run(action, cx),
        Command::Bindings { action } => bindings::run(action, cx),
        Command::Discover(args) => discover::run(&args, cx),
        Command::Calibrate(args) => calibrate::run(&args, cx),
        Command::Attach(args) => attach::run(&args, cx),
        Command::Explain { receipt } => explain::run(&receipt, cx),
        Command::Receipts { action } => receipts::run(&action, cx),
        Command::Decisions { action } => decisions::run(action, cx),
        Command::Generate(args) => generate::run(&args, cx),
        Command::Perplexity(args) => perplexity::run(&args, cx),
        Command::Bench(args) => bench::run(&args, cx),
        Command::NewPlugin(args) => new_plugin::run(&args, cx),
        Command::Conform(args) => conform::run(&args, cx),
        Command::Completions { shell } => {
            let mut text = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "structures", &mut text);
            cx.out.raw(&String::from_utf8_lossy(&text));
            Ok(0)
        }
        // Ended in `main`.
        Command::ScanPlugin { .. } | Command::ConformCheck { .. } => Ok(0),
    }
}

/// `demo`, or a path.
pub fn model_path(model: &str) -> Result<PathBuf, Failure> {
    let path = PathBuf::from(model);
    if model != "demo" {
        if !path.exists() {
            return Err(Failure::failed(
                "model_missing",
                format!("{model}: no such file or directory"),
                "give a directory with config.json and safetensors, a .gguf file, or `demo`",
            ));
        }
        return Ok(path);
    }
    if let Some(dir) = std::env::var_os("STRUCTURES_DEMO_MODEL") {
        return Ok(PathBuf::from(dir));
    }
    // Beside the program, or in the repository it was built in.
    let exe = std::env::current_exe().ok();
    exe.iter()
        .flat_map(|e| e.ancestors().skip(1))
        .map(|dir| dir.join("demo").join("model"))
        .find(|dir| dir.join("config.json").is_file())
        .ok_or_else(|| {
            Failure::failed(
                "model_missing",
                "the demo model is not beside this program",
                "set STRUCTURES_DEMO_MODEL to the repository's demo/model directory",
            )
        })
}

/// Opens a model with its weights.
pub fn open_model(model: &str) -> Result<Loaded, Failure> {
    Ok(named(model, Loaded::open(&model_path(model)?)?))
}

/// As [`open_model`], and a weight is read when it is first used.
pub fn open_model_later(model: &str) -> Result<Loaded, Failure> {
    Ok(named(model, Loaded::open_later(&model_path(model)?)?))
}

fn named(model: &str, mut loaded: Loaded) -> Loaded {
    if model == "demo" {
        // Its directory is called `model`, which says nothing in a receipt.
        loaded.model.description.name = model.into();
    }
    loaded
}

/// Samples for a model. Its tokenizer is asked for when there is a text: token ids need none.
pub fn load_samples(model: &Loaded, args: &SampleArgs) -> Result<Samples, Failure> {
    let tokenizer = OnceCell::new();
    let tokenize = |text: &str| match tokenizer.get_or_init(|| model.model.tokenizer()) {
        Ok(tokenizer) => tokenizer.encode(text, true).map_err(|e| e.to_string()),
        Err(e) => Err(e.to_string()),
    };
    let options = SampleOptions {
        max_samples: args.max_samples,
        vocabulary: u32::try_from(model.model.config().vocab_size).ok(),
    };
    let loaded = samples::load(args.samples.as_deref(), &tokenize, &options);
    if let Some(Err(e)) = tokenizer.into_inner() {
        return Err(e.into());
    }
    let samples = loaded?;
    for note in samples.notes() {
        // What the built-in text leaves over is nobody's concern.
        if args.samples.is_some() {
            tracing::warn!("samples: {note}");
        } else {
            tracing::info!("samples: {note}");
        }
    }
    Ok(samples)
}

/// Parses `--pin`.
pub fn pins(list: &[String]) -> Result<Vec<Pin>, Failure> {
    list.iter()
        .map(|p| {
            Pin::parse(p).map_err(|e| Failure::usage(e, "--pin STRUCTURE=PLUGIN[:FORM][@DEVICE]"))
        })
        .collect()
}

/// A path relative to nothing, for tables.
pub fn show_path(path: &Path) -> String {
    path.display().to_string()
}
