//! The command line as data: clap's types, nothing else.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;

/// Plugin host for model kernels: finds structures, binds backends, keeps what was measured to be worth it.
#[derive(Parser, Debug)]
#[command(name = "structures", version, propagate_version = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
    /// Switches every command takes.
    #[command(flatten)]
    pub global: Global,
}

/// Switches every command takes.
#[derive(Args, Debug, Clone)]
pub struct Global {
    /// One JSON document on stdout and nothing else there.
    #[arg(long, global = true)]
    pub json: bool,
    /// More log lines (repeatable).
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub verbose: u8,
    /// Errors only.
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub quiet: bool,
    /// Colour of messages.
    #[arg(long, global = true, value_enum, default_value_t = Color::Auto)]
    pub color: Color,
    /// Directory with plugins, searched first (repeatable).
    #[arg(long, global = true, value_name = "DIR")]
    pub plugins: Vec<PathBuf>,
    /// Use only plugin files that the lock lists, as they are.
    #[arg(long, global = true)]
    pub locked: bool,
    /// The lock; default: `plugins.lock` in the working directory.
    #[arg(long, global = true, value_name = "FILE")]
    pub lock_file: Option<PathBuf>,
    /// Use only plugin files with a signature of a trusted key.
    #[arg(long, global = true)]
    pub require_signed: bool,
    /// Directory with more structures (repeatable).
    #[arg(long, global = true, value_name = "DIR")]
    pub catalog: Vec<PathBuf>,
    /// Directory with more binding files (repeatable).
    #[arg(long, global = true, value_name = "DIR")]
    pub bindings: Vec<PathBuf>,
    /// Recorded decisions; default: `decisions.json` in the user's data directory.
    #[arg(long, global = true, value_name = "FILE")]
    pub decisions: Option<PathBuf>,
    /// Threads of both arms; default: the cores this process may use.
    #[arg(long, global = true, value_name = "N", env = "STRUCTURES_THREADS")]
    pub threads: Option<usize>,
    /// Run on these CPUs only, such as `0,2-3`; with as many threads unless --threads says otherwise.
    #[arg(long, global = true, value_name = "LIST")]
    pub affinity: Option<String>,
}

/// When to colour.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub enum Color {
    /// On a terminal.
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

/// The commands.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Every candidate library and what became of it.
    Plugins {
        /// Default: list.
        #[command(subcommand)]
        action: Option<PluginsAction>,
    },
    /// Devices, with arch names and the plugins that serve them.
    Devices {
        /// Also judge the plugins against a device you do not have (repeatable), `sm_120`, `x86_64+avx2`.
        #[arg(long, value_name = "ARCH")]
        simulate: Vec<String>,
    },
    /// Run capability probes: declared, probed and launched as three facts.
    Probe(ProbeArgs),
    /// Structures, one spec, or a check of every entry.
    Catalog {
        /// Default: list.
        #[command(subcommand)]
        action: Option<CatalogAction>,
    },
    /// Binding files, the manifest of one, or a check of some.
    Bindings {
        /// Default: list.
        #[command(subcommand)]
        action: Option<BindingsAction>,
    },
    /// Seams and refusals of a model; reads headers only.
    Discover(DiscoverArgs),
    /// Measure the scales a scheme asks for and write the precision spec.
    Calibrate(CalibrateArgs),
    /// Discover, calibrate, bind, gate, activate; print the table and write the receipt.
    Attach(AttachArgs),
    /// The coverage table of a receipt: what was done, and why not more.
    Explain {
        /// A receipt file.
        receipt: PathBuf,
    },
    /// Receipts: whether they still hold, and what is different here.
    Receipts {
        /// What to do.
        #[command(subcommand)]
        action: ReceiptsAction,
    },
    /// Recorded decisions: which form won where.
    Decisions {
        /// Default: list.
        #[command(subcommand)]
        action: Option<DecisionsAction>,
    },
    /// Generate text: greedily, or drawn with --temperature.
    Generate(GenerateArgs),
    /// What a scheme costs in quality on text, beside the host's own.
    Perplexity(PerplexityArgs),
    /// Tokens a second: host against attached, alternating.
    Bench(BenchArgs),
    /// Write a backend to start from: it builds, has its own tests, and does what it declares.
    NewPlugin(NewPluginArgs),
    /// Validate a plugin, for its author: every check in a process of its own.
    Conform(ConformArgs),
    /// Print shell completions.
    Completions {
        /// Which shell.
        shell: Shell,
    },
    /// One check of `conform`, in a process that exists for it.
    #[command(hide = true, name = "__conform-check")]
    ConformCheck {
        /// What to do, as JSON.
        task: String,
    },
    /// Describe one library on stdout; what the scan runs in a child process.
    #[command(hide = true)]
    ScanPlugin {
        /// The library.
        path: PathBuf,
    },
}

/// `plugins ...`
#[derive(Subcommand, Debug)]
pub enum PluginsAction {
    /// Every candidate library and what became of it.
    List,
    /// One plugin in full.
    Show {
        /// Its id, or the name of its file.
        id: String,
    },
    /// Write the lock: the plugins that load here, by digest.
    Lock,
    /// Forget the cache of scans and the quarantine, and look again.
    Rescan,
}

/// `receipts ...`
#[derive(Subcommand, Debug)]
pub enum ReceiptsAction {
    /// Check digest and fields, and name every difference between the record and here.
    Verify {
        /// Receipt files.
        #[arg(required = true)]
        files: Vec<PathBuf>,
        /// Refuse a receipt that was made under other conditions.
        #[arg(long)]
        strict: bool,
    },
}

/// `decisions ...`
#[derive(Subcommand, Debug)]
pub enum DecisionsAction {
    /// Every recorded decision, those of other devices included.
    List,
    /// Take over what is not decided here yet; the local entry wins.
    Import {
        /// A file of decisions.
        file: PathBuf,
    },
    /// Race the forms of a model's structures and record the winners, or record one by hand.
    Record(RecordArgs),
}

/// `decisions record`
#[derive(Args, Debug)]
pub struct RecordArgs {
    /// Race on this model: a checkpoint directory, a .gguf file, or `demo`.
    #[arg(required_unless_present = "winner", conflicts_with = "winner")]
    pub model: Option<String>,
    /// Structures to race; all when left out. With --winner: the one it is about.
    #[arg(long, value_delimiter = ',')]
    pub structures: Vec<String>,
    /// Record this by hand: PLUGIN:FORM, or `host`.
    #[arg(long, value_name = "PLUGIN:FORM", requires = "structures")]
    pub winner: Option<String>,
    /// Rows the decision by hand is about, `1` or `1..16`.
    #[arg(long, value_name = "ROWS", default_value = "1", value_parser = rows)]
    pub rows: [u64; 2],
    /// Scheme whose statistics the forms may use.
    #[arg(long, default_value = "auto")]
    pub scheme: String,
    /// Default: decode for models that give a distribution, else prefill.
    #[arg(long, value_enum)]
    pub workload: Option<WorkloadArg>,
    /// Which samples.
    #[command(flatten)]
    pub samples: SampleArgs,
    /// Race only this form of a structure (repeatable), `STRUCTURE=PLUGIN[:FORM][@DEVICE]`.
    #[arg(long, value_name = "STRUCTURE=PLUGIN[:FORM][@DEVICE]")]
    pub pin: Vec<String>,
}

/// `8`, or `1..16` with both ends in it.
fn rows(text: &str) -> Result<[u64; 2], String> {
    let number = |t: &str| -> Result<u64, String> {
        match t.trim().trim_start_matches('=').parse() {
            Ok(0) => Err("rows start at 1".into()),
            Ok(n) => Ok(n),
            Err(e) => Err(format!("expected ROWS or FIRST..LAST: {e}")),
        }
    };
    let (lo, hi) = match text.split_once("..") {
        Some((lo, hi)) => (number(lo)?, number(hi)?),
        None => (number(text)?, number(text)?),
    };
    if lo > hi {
        return Err(format!("expected the smaller number first, found {text}"));
    }
    Ok([lo, hi])
}

/// `catalog ...`
#[derive(Subcommand, Debug)]
pub enum CatalogAction {
    /// All structures.
    List,
    /// One structure in full.
    Show {
        /// `NAME` or `NAME@VERSION`.
        name: String,
    },
    /// Check every entry: it loads, and its dataflow equals its reference.
    Verify {
        /// A directory of structures to check beside the built-in ones.
        dir: Option<PathBuf>,
    },
}

/// `bindings ...`
#[derive(Subcommand, Debug)]
pub enum BindingsAction {
    /// All bindings.
    List {
        /// Only those about this structure.
        #[arg(long, value_name = "NAME")]
        structure: Option<String>,
    },
    /// The manifest of one binding.
    Show {
        /// Its name.
        name: String,
        /// Refuse a pipeline binding without a coverage contract.
        #[arg(long)]
        require_coverage: bool,
    },
    /// Check binding files: every one is reported.
    Validate {
        /// Files, or directories of *.yaml files.
        #[arg(required = true)]
        paths: Vec<PathBuf>,
        /// Refuse pipeline bindings without a coverage contract.
        #[arg(long)]
        require_coverage: bool,
    },
}

/// `probe`
#[derive(Args, Debug)]
pub struct ProbeArgs {
    /// Only this plugin.
    #[arg(long)]
    pub plugin: Option<String>,
    /// Only this structure.
    #[arg(long)]
    pub structure: Option<String>,
    /// Only this form.
    #[arg(long)]
    pub form: Option<String>,
    /// Device, 0 is the CPU; where it is not given, the one each plugin's form is made for.
    #[arg(long)]
    pub device: Option<u32>,
    /// Rows to launch at.
    #[arg(long, value_delimiter = ',', default_value = "1")]
    pub rows: Vec<u64>,
    /// Sizes of symbols, `D=576,F=1536`; what is not given takes a size the form admits.
    #[arg(long, value_delimiter = ',', value_name = "SYMBOL=SIZE")]
    pub dims: Vec<String>,
}

/// Language of a new plugin.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lang {
    /// A crate of its own.
    Rust,
    /// Sources and a Makefile.
    C,
}

/// `new-plugin`
#[derive(Args, Debug)]
pub struct NewPluginArgs {
    /// Its id: `[a-z0-9][a-z0-9_-]*`.
    pub name: String,
    /// Language.
    #[arg(long, value_enum, default_value_t = Lang::Rust)]
    pub lang: Lang,
    /// The directory to write, new or empty; default: NAME in the working directory.
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Where Cargo finds structures-plugin-api: a directory, or a version of the registry; default: the one this
    /// program was built beside, else its version.
    #[arg(long, value_name = "PATH|VERSION")]
    pub api: Option<String>,
}

/// `discover`
#[derive(Args, Debug)]
pub struct DiscoverArgs {
    /// A checkpoint directory, a .gguf file, or `demo`.
    #[arg(required_unless_present = "tree", conflicts_with = "tree")]
    pub model: Option<String>,
    /// A module tree as JSON (plain or .gz) instead of a model.
    #[arg(long, value_name = "FILE")]
    pub tree: Option<PathBuf>,
    /// Only these structures.
    #[arg(long, value_delimiter = ',')]
    pub structures: Vec<String>,
}

/// Sample switches.
#[derive(Args, Debug, Clone, PartialEq)]
pub struct SampleArgs {
    /// Samples: .txt, cut into chunks of 128 tokens, or .jsonl; default: a built-in text.
    #[arg(long, value_name = "FILE")]
    pub samples: Option<PathBuf>,
    /// Percentile across samples.
    #[arg(long, default_value_t = structures::stats::DEFAULT_PERCENTILE, allow_negative_numbers = true)]
    pub percentile: f64,
    /// Use only the first N samples.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub max_samples: Option<usize>,
}

impl Default for SampleArgs {
    fn default() -> Self {
        SampleArgs {
            samples: None,
            percentile: structures::stats::DEFAULT_PERCENTILE,
            max_samples: None,
        }
    }
}

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("expected at least 1, found 0".into()),
        Ok(n) => Ok(n),
        Err(e) => Err(format!("expected a whole number of at least 1: {e}")),
    }
}

/// `calibrate`
#[derive(Args, Debug)]
pub struct CalibrateArgs {
    /// A checkpoint directory, a .gguf file, or `demo`.
    pub model: String,
    /// Which samples.
    #[command(flatten)]
    pub samples: SampleArgs,
    /// Scheme whose statistics are measured.
    #[arg(long, default_value = "fp8_static")]
    pub scheme: String,
    /// Measure again, even where a stored calibration of the same model, samples and scheme exists.
    #[arg(long)]
    pub recompute: bool,
    /// Where the precision spec goes.
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
}

/// `conform`
#[derive(Args, Debug)]
pub struct ConformArgs {
    /// The library.
    #[arg(value_name = "PLUGIN.so")]
    pub plugin: PathBuf,
    /// Only these forms, `STRUCTURE` or `STRUCTURE/FORM`.
    #[arg(long, value_delimiter = ',', value_name = "STRUCTURE[/FORM]")]
    pub forms: Vec<String>,
    /// First seed of everything that is generated.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Most generated cases of one check of one form; default: each check's own number.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub cases: Option<usize>,
    /// Longest time of one check, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub timeout: u64,
    /// Only this check, and of what it generates only this seed; what a failure says to repeat it.
    #[arg(long, value_name = "CHECK:SEED")]
    pub replay: Option<String>,
}

/// More rounds or iterations than anybody waits for.
const MOST: i64 = 1_000_000;

/// What is judged.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkloadArg {
    /// Teacher-forced steps after a prompt.
    Decode,
    /// Whole prompts.
    Prefill,
}

/// What a contract miss does.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub enum GuardArg {
    /// The host serves the call, counted.
    Fallback,
    /// An error.
    Raise,
}

/// `attach`
#[derive(Args, Debug)]
pub struct AttachArgs {
    /// A checkpoint directory, a .gguf file, or `demo`.
    pub model: String,
    /// Judge decode steps eagerly, not in the captured form they are served in.
    #[arg(long)]
    pub eager: bool,
    /// Precision scheme.
    #[arg(long, default_value = "auto")]
    pub scheme: String,
    /// Default: decode for models that give a distribution, else prefill.
    #[arg(long, value_enum)]
    pub workload: Option<WorkloadArg>,
    /// Which samples.
    #[command(flatten)]
    pub samples: SampleArgs,
    /// Only these structures.
    #[arg(long, value_delimiter = ',')]
    pub structures: Vec<String>,
    /// Refuse a unit whose metric misses this (repeatable), `top1_agreement=0.9`.
    #[arg(long, value_name = "METRIC=VALUE")]
    pub floor: Vec<String>,
    /// Smallest speed-up a unit must show.
    #[arg(long, default_value_t = 1.02, allow_negative_numbers = true)]
    pub min_speedup: f64,
    /// Rounds of paired timing.
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(0..=MOST))]
    pub rounds: u32,
    /// Iterations a round.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(0..=MOST))]
    pub iters: u32,
    /// What a contract miss does; default: fallback, and raise with --strict.
    #[arg(long, value_enum)]
    pub on_guard_fail: Option<GuardArg>,
    /// Take only this form for a structure (repeatable), `STRUCTURE=PLUGIN[:FORM][@DEVICE]`.
    #[arg(long, value_name = "STRUCTURE=PLUGIN[:FORM][@DEVICE]")]
    pub pin: Vec<String>,
    /// The first fallback is an error.
    #[arg(long)]
    pub strict: bool,
    /// Score every position instead of the last 32 of each sample.
    #[arg(long)]
    pub all_positions: bool,
    /// Take packed weights over as the checkpoint stores them, before anything else; of these formats, or all.
    #[arg(long, value_name = "FORMAT,...", num_args = 0..=1, require_equals = true,
        default_missing_value = "all", value_delimiter = ',')]
    pub adopt: Option<Vec<String>>,
    /// Let go of the host's own weights of the seats that stay; a call that falls back reads them from the checkpoint again.
    #[arg(long)]
    pub release_host: bool,
    /// Where the receipt goes; default: `receipts` in the user's data directory.
    #[arg(long, value_name = "DIR")]
    pub receipt_dir: Option<PathBuf>,
}

/// `generate`
#[derive(Args, Debug)]
pub struct GenerateArgs {
    /// A checkpoint directory, a .gguf file, or `demo`.
    pub model: String,
    /// The prompt.
    #[arg(long)]
    pub prompt: String,
    /// Most tokens to add.
    #[arg(long, default_value_t = 64)]
    pub max_new_tokens: usize,
    /// Bind by this scheme without a gate.
    #[arg(long, conflicts_with = "receipt")]
    pub scheme: Option<String>,
    /// Which samples scales are fitted on, with --scheme or --adopt.
    #[command(flatten)]
    pub samples: SampleArgs,
    /// Bind exactly what this receipt activated.
    #[arg(long, value_name = "FILE")]
    pub receipt: Option<PathBuf>,
    /// Take only this form for a structure (repeatable), `STRUCTURE=PLUGIN[:FORM][@DEVICE]`.
    #[arg(
        long,
        value_name = "STRUCTURE=PLUGIN[:FORM][@DEVICE]",
        requires = "scheme"
    )]
    pub pin: Vec<String>,
    /// Take packed weights over as the checkpoint stores them, before anything else; of these formats, or all.
    #[arg(long, value_name = "FORMAT,...", num_args = 0..=1, require_equals = true,
        default_missing_value = "all", value_delimiter = ',', conflicts_with = "receipt")]
    pub adopt: Option<Vec<String>>,
    /// Let go of the host's own weights of the seats that stay; a call that falls back reads them from the checkpoint again.
    #[arg(long)]
    pub release_host: bool,
    /// The first fallback is an error.
    #[arg(long)]
    pub strict: bool,
    /// Run the model eagerly: no captured step.
    #[arg(long)]
    pub eager: bool,
    /// Choose by chance at this temperature; 0 takes the most likely token.
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    pub temperature: f64,
    /// Draw from the most likely tokens that together hold this much.
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    pub top_p: f64,
    /// Seed of the choice by chance.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// End where this text appears; it is not printed (repeatable).
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
}

/// `bench`
#[derive(Args, Debug)]
pub struct BenchArgs {
    /// A checkpoint directory, a .gguf file, or `demo`.
    pub model: String,
    /// Scheme of the attached arm; nothing is gated.
    #[arg(long, default_value = "auto")]
    pub scheme: String,
    /// Take only this form for a structure (repeatable), `STRUCTURE=PLUGIN[:FORM]`.
    #[arg(long, value_name = "STRUCTURE=PLUGIN[:FORM]")]
    pub pin: Vec<String>,
    /// Prompt lengths; 0 leaves prefill out.
    #[arg(
        long,
        value_name = "N,...",
        value_delimiter = ',',
        default_value = "128,512"
    )]
    pub prefill: Vec<usize>,
    /// Tokens decoded after a prompt of 32; 0 leaves decode out.
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub decode: usize,
    /// Which arms run.
    #[arg(long, value_enum, default_value_t = Arm::Both)]
    pub arm: Arm,
    /// Rounds; in each every arm runs once, in turn.
    #[arg(long, default_value_t = 7)]
    pub rounds: usize,
    /// Run the attached arm eagerly: no captured step.
    #[arg(long)]
    pub eager: bool,
    /// Take packed weights over as the checkpoint stores them, before anything else; of these formats, or all.
    #[arg(long, value_name = "FORMAT,...", num_args = 0..=1, require_equals = true,
        default_missing_value = "all", value_delimiter = ',')]
    pub adopt: Option<Vec<String>>,
    /// One run for each line of standard input, `prefill N` or `decode N`, instead of rounds: for who alternates with
    /// another program. The tokens a second come on a line of their own.
    #[arg(long)]
    pub paced: bool,
}

/// Arms of `bench`.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arm {
    /// The unmodified host.
    Host,
    /// With seats.
    Attached,
    /// Both, alternating.
    Both,
    /// Both, and the attached one in its eager form beside them.
    All,
}

/// `perplexity`
#[derive(Args, Debug)]
pub struct PerplexityArgs {
    /// A checkpoint directory, a .gguf file, or `demo`.
    pub model: String,
    /// Which samples.
    #[command(flatten)]
    pub samples: SampleArgs,
    /// Bind by this scheme without a gate; without one the host alone is measured.
    #[arg(long)]
    pub scheme: Option<String>,
    /// Each sample in one call, or token by token; default: prefill.
    #[arg(long, value_enum)]
    pub workload: Option<WorkloadArg>,
    /// Take only this form for a structure (repeatable), `STRUCTURE=PLUGIN[:FORM][@DEVICE]`.
    #[arg(
        long,
        value_name = "STRUCTURE=PLUGIN[:FORM][@DEVICE]",
        requires = "scheme"
    )]
    pub pin: Vec<String>,
    /// Take packed weights over as the checkpoint stores them, before anything else; of these formats, or all.
    #[arg(long, value_name = "FORMAT,...", num_args = 0..=1, require_equals = true,
        default_missing_value = "all", value_delimiter = ',')]
    pub adopt: Option<Vec<String>>,
}
