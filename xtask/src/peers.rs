//! `cargo xtask peers`: tokens a second beside llama.cpp's and torch's on the same model, alternating.
//!
//! Each row of the table has two programs that are loaded and wait. In a round either runs once, and the order turns with
//! the round, so that what the machine does meanwhile meets both; the ratio is the median of the rounds' ratios. The
//! peers come from a Python: the one that is named, else a virtual environment below `target/` into which pip builds
//! `llama-cpp-python` for this machine. A peer that is not there leaves its rows out, and that is said.
//!
//! Our side is the shipped file in every scheme; the peer's other types are made of it by llama.cpp, so they are rounded
//! twice. Speed does not see that; quality is `quality`'s.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde_json::{json, Value};

use crate::run::{cargo, release_dir, root, step};

const DRIVER: &str = include_str!("peers.py");
pub(crate) const MODEL: &str = "models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";
const USAGE: &str = "peers [--python PATH] [--model FILE.gguf] [--rounds N] [--threads N] [--only TEXT] [--out FILE.json]";

/// A comparison.
struct Row {
    name: &'static str,
    /// Phases with their numbers of tokens.
    phases: &'static [&'static str],
    /// Switches of `structures bench`.
    ours: &'static [&'static str],
    /// Whether ours reads the peer's file instead of the shipped one.
    their_file: bool,
    /// `llama` or `torch`, and the type of its file; `as shipped` is the file itself.
    peer: (&'static str, &'static str),
    must: f64,
    goal: f64,
}

const SHIPPED: &str = "as shipped";

const ROWS: &[Row] = &[
    Row {
        name: "decode, 8 bit",
        phases: &["decode 128"],
        ours: &["--scheme", "w8a16_decode"],
        their_file: false,
        peer: ("llama", "Q8_0"),
        must: 1.25,
        goal: 1.5,
    },
    Row {
        name: "decode, 4 bit (w4a16_full)",
        phases: &["decode 128"],
        ours: &["--scheme", "w4a16_full"],
        their_file: false,
        peer: ("llama", "Q4_0"),
        must: 1.05,
        goal: 1.3,
    },
    Row {
        name: "decode, 4 bit (Q4_0 adopted)",
        phases: &["decode 128"],
        ours: &["--scheme", "none", "--adopt"],
        their_file: true,
        peer: ("llama", "Q4_0"),
        must: 1.05,
        goal: 1.3,
    },
    Row {
        name: "decode, bf16",
        phases: &["decode 128"],
        ours: &["--scheme", "bf16_dense"],
        their_file: false,
        peer: ("llama", "BF16"),
        must: 1.1,
        goal: 1.25,
    },
    Row {
        name: "shipped file adopted, prefill",
        phases: &["prefill 512"],
        ours: &["--scheme", "none", "--adopt"],
        their_file: true,
        peer: ("llama", SHIPPED),
        must: 2.5,
        goal: 4.0,
    },
    Row {
        name: "shipped file adopted, decode",
        phases: &["decode 128"],
        ours: &["--scheme", "none", "--adopt"],
        their_file: true,
        peer: ("llama", SHIPPED),
        must: 1.4,
        goal: 1.8,
    },
    Row {
        name: "prefill, w8a8_static / BF16",
        phases: &["prefill 128", "prefill 512"],
        ours: &["--scheme", "w8a8_static"],
        their_file: false,
        peer: ("llama", "BF16"),
        must: 1.6,
        goal: 2.2,
    },
    Row {
        name: "prefill, w8a8_static / Q4_0",
        phases: &["prefill 128", "prefill 512"],
        ours: &["--scheme", "w8a8_static"],
        their_file: false,
        peer: ("llama", "Q4_0"),
        must: 1.6,
        goal: 2.2,
    },
    Row {
        name: "prefill, bf16_dense / BF16",
        phases: &["prefill 128", "prefill 512"],
        ours: &["--scheme", "bf16_dense"],
        their_file: false,
        peer: ("llama", "BF16"),
        must: 1.2,
        goal: 1.4,
    },
    Row {
        name: "prefill, bf16_dense / torch bf16",
        phases: &["prefill 128", "prefill 512"],
        ours: &["--scheme", "bf16_dense"],
        their_file: false,
        peer: ("torch", SHIPPED),
        must: 1.05,
        goal: 1.2,
    },
    Row {
        name: "4 and 8 rows, 8 bit / Q8_0",
        phases: &["prefill 4", "prefill 8"],
        ours: &["--scheme", "w8a8_static"],
        their_file: false,
        peer: ("llama", "Q8_0"),
        must: 1.8,
        goal: 3.0,
    },
];

/// What was asked for.
struct Wish {
    python: Option<PathBuf>,
    model: PathBuf,
    rounds: usize,
    threads: usize,
    only: Option<String>,
    out: Option<PathBuf>,
}

impl Wish {
    fn parse(args: &[String]) -> Result<Self, String> {
        let mut wish = Wish {
            python: None,
            model: root().join(MODEL),
            rounds: 7,
            threads: 2,
            only: None,
            out: None,
        };
        let mut args = args.iter();
        while let Some(name) = args.next() {
            let value = args.next().ok_or_else(|| format!("usage: {USAGE}"))?;
            let number = || {
                let n = value.parse::<usize>().ok().filter(|n| *n > 0);
                n.ok_or_else(|| format!("{name} {value}: expected a number above 0"))
            };
            match name.as_str() {
                "--python" => wish.python = Some(value.into()),
                "--model" => wish.model = value.into(),
                "--rounds" => wish.rounds = number()?,
                "--threads" => wish.threads = number()?,
                "--only" => wish.only = Some(value.clone()),
                "--out" => wish.out = Some(value.into()),
                _ => return Err(format!("unknown switch `{name}`; usage: {USAGE}")),
            }
        }
        if !wish.model.is_file() {
            let path = wish.model.display();
            return Err(format!(
                "{path}: no such file; `cargo xtask fetch-model smollm2` gets it, --model names another"
            ));
        }
        Ok(wish)
    }
}

/// See the module.
pub fn run(args: &[String]) -> Result<(), String> {
    let wish = Wish::parse(args)?;
    let (work, python) = tools(wish.python.as_deref())?;
    let driver = driver(&work)?;
    let version = answer(Command::new(&python).arg(&driver).arg("version"))?;
    println!("llama-cpp-python {}", version.trim().replace('\n', ": "));
    let mut found = Vec::new();
    for row in ROWS {
        if wish
            .only
            .as_ref()
            .is_some_and(|o| !row.name.contains(o.as_str()))
        {
            continue;
        }
        match measure(row, &wish, &python, &driver, &work) {
            Ok(rows) => {
                for row in &rows {
                    println!("{}", line(row));
                }
                found.extend(rows);
            }
            Err(e) => {
                println!("{}: left out: {e}", row.name);
                found.push(json!({"row": row.name, "left_out": e}));
            }
        }
    }
    let document = json!({
        "schema": 1, "peers": version.trim(), "threads": wish.threads, "rounds": wish.rounds,
        "model": wish.model.file_name().map(|n| n.to_string_lossy()), "rows": found,
    });
    match &wish.out {
        Some(out) => write_json(out, &document),
        None => Ok(()),
    }
}

/// Our programs built, a directory to work in, and a Python that has the peers.
pub(crate) fn tools(python: Option<&Path>) -> Result<(PathBuf, PathBuf), String> {
    let work = release_dir().with_file_name("peers");
    std::fs::create_dir_all(&work).map_err(|e| format!("{}: {e}", work.display()))?;
    let packages = ["structures-cli", "structures-plugin-x86"].map(|p| ["-p", p]);
    step(
        "build",
        cargo()
            .args(["build", "--release"])
            .args(packages.as_flattened()),
    )?;
    let python = match python {
        Some(python) => python.to_path_buf(),
        None => own_python(&work)?,
    };
    Ok((work, python))
}

/// The peers' program, laid into the directory.
pub(crate) fn driver(work: &Path) -> Result<PathBuf, String> {
    let driver = work.join("peers.py");
    std::fs::write(&driver, DRIVER).map_err(|e| format!("{}: {e}", driver.display()))?;
    Ok(driver)
}

pub(crate) fn write_json(out: &Path, document: &Value) -> Result<(), String> {
    let text = serde_json::to_string_pretty(document).map_err(|e| e.to_string())?;
    let beside = out.with_extension("tmp");
    let written = std::fs::write(&beside, text + "\n").and_then(|()| std::fs::rename(&beside, out));
    written.map_err(|e| format!("{}: {e}", out.display()))
}

fn line(row: &Value) -> String {
    let n = |key: &str| row[key].as_f64().unwrap_or(f64::NAN);
    format!(
        "{:<34} {:<12} {:>8.1} / {:>7.1} = {:>5.2} (spread {:>3.0} % and {:>3.0} %; must {:.2}, goal {:.2}; load {:.1})",
        row["row"].as_str().unwrap_or(""),
        row["phase"].as_str().unwrap_or(""),
        n("ours"),
        n("peer"),
        n("ratio"),
        n("ours_spread") * 100.0,
        n("peer_spread") * 100.0,
        n("must"),
        n("goal"),
        n("load")
    )
}

/// A virtual environment with the package that pip builds for this machine.
fn own_python(work: &Path) -> Result<PathBuf, String> {
    let python = work.join("venv").join("bin").join("python");
    if !python.is_file() {
        let venv = work.join("venv");
        step(
            "venv",
            Command::new("python3").args(["-m", "venv"]).arg(&venv),
        )?;
    }
    let has = Command::new(&python)
        .args(["-c", "import llama_cpp"])
        .stderr(Stdio::null())
        .status();
    if !has.is_ok_and(|s| s.success()) {
        step(
            "llama-cpp-python",
            Command::new(&python).args(["-m", "pip", "install", "llama-cpp-python"]),
        )?;
    }
    Ok(python)
}

pub(crate) fn answer(command: &mut Command) -> Result<String, String> {
    let out = command.stderr(Stdio::null()).output();
    let out = out.map_err(|e| format!("cannot start {:?}: {e}", command.get_program()))?;
    match out.status.success() {
        true => Ok(String::from_utf8_lossy(&out.stdout).into_owned()),
        false => Err(format!("{command:?} failed ({})", out.status)),
    }
}

fn measure(
    row: &Row,
    wish: &Wish,
    python: &Path,
    driver: &Path,
    work: &Path,
) -> Result<Vec<Value>, String> {
    let (peer, kind) = row.peer;
    let theirs = match kind {
        SHIPPED => wish.model.clone(),
        kind => quantised(&wish.model, kind, python, driver, work)?,
    };
    let own = if row.their_file { &theirs } else { &wish.model };
    let threads = wish.threads.to_string();
    let mut ours = Arm::start(
        Command::new(release_dir().join("structures"))
            .args(["--threads", &threads, "-q", "bench"])
            .arg(own)
            .args(["--paced", "--arm", "attached"])
            .args(row.ours),
    )?;
    let mut peer = Arm::start(
        Command::new(python)
            .arg(driver)
            .arg(peer)
            .arg(&theirs)
            .arg(&threads),
    )?;
    let mut found = Vec::new();
    for phase in row.phases {
        let (mut a, mut b) = (Vec::new(), Vec::new());
        ours.run(phase)?;
        peer.run(phase)?;
        for round in 0..wish.rounds {
            for turn in 0..2 {
                match (round + turn) % 2 {
                    0 => a.push(ours.run(phase)?),
                    _ => b.push(peer.run(phase)?),
                }
            }
        }
        let ratios: Vec<f64> = a.iter().zip(&b).map(|(a, b)| a / b).collect();
        let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
        let load = load.split(' ').next().and_then(|l| l.parse::<f64>().ok());
        found.push(json!({
            "row": row.name, "phase": phase, "ours": median(&a), "peer": median(&b), "ratio": median(&ratios),
            "ours_spread": spread(&a), "peer_spread": spread(&b), "must": row.must, "goal": row.goal, "load": load,
            "switches": row.ours, "peer_is": format!("{} {}", row.peer.0, row.peer.1),
        }));
    }
    Ok(found)
}

/// The file in another type, made once.
pub(crate) fn quantised(
    model: &Path,
    kind: &str,
    python: &Path,
    driver: &Path,
    work: &Path,
) -> Result<PathBuf, String> {
    let stem = model.file_stem().unwrap_or_default().to_string_lossy();
    let target = work.join(format!("{stem}.{kind}.gguf"));
    if !target.is_file() {
        let beside = target.with_extension("tmp");
        let made = Command::new(python)
            .arg(driver)
            .arg("quantise")
            .args([model, &beside])
            .arg(kind)
            .stderr(Stdio::null())
            .status();
        if !made.is_ok_and(|s| s.success()) {
            return Err(format!("llama.cpp made no {kind} of {}", model.display()));
        }
        std::fs::rename(&beside, &target).map_err(|e| format!("{}: {e}", target.display()))?;
    }
    Ok(target)
}

/// A program that runs when it gets a line, and answers with a number.
struct Arm {
    child: Child,
    tell: ChildStdin,
    hear: BufReader<ChildStdout>,
}

impl Arm {
    fn start(command: &mut Command) -> Result<Self, String> {
        let started = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn();
        let mut child =
            started.map_err(|e| format!("cannot start {:?}: {e}", command.get_program()))?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        let (tell, hear) = pipes.ok_or("a program without pipes")?;
        let hear = BufReader::new(hear);
        let mut arm = Arm { child, tell, hear };
        match arm.line()?.as_str() {
            "ready" => Ok(arm),
            other => Err(format!("{command:?}: expected `ready`, found `{other}`")),
        }
    }

    fn line(&mut self) -> Result<String, String> {
        let mut line = String::new();
        let read = self.hear.read_line(&mut line);
        match read {
            Ok(n) if n > 0 => Ok(line.trim().to_string()),
            _ => Err("the program ended".into()),
        }
    }

    fn run(&mut self, phase: &str) -> Result<f64, String> {
        writeln!(self.tell, "{phase}").map_err(|e| format!("it ended: {e}"))?;
        let line = self.line()?;
        line.parse()
            .map_err(|_| format!("expected tokens a second, found `{line}`"))
    }
}

impl Drop for Arm {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match (sorted.len() / 2, sorted.len() % 2) {
        (_, _) if sorted.is_empty() => f64::NAN,
        (half, 0) => (sorted[half - 1] + sorted[half]) / 2.0,
        (half, _) => sorted[half],
    }
}

/// (fastest - slowest) by the median.
fn spread(values: &[f64]) -> f64 {
    let most = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    (most - least) / median(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_median_is_in_the_middle_and_a_spread_by_it() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0]), 2.5);
        assert_eq!(spread(&[2.0, 1.0, 3.0]), 1.0);
    }

    #[test]
    fn an_arm_answers_line_by_line_and_a_broken_one_says_so() {
        let script = "echo ready; read a; echo 12.5; read b; echo what";
        let mut arm = Arm::start(Command::new("sh").args(["-c", script])).unwrap();
        assert_eq!(arm.run("decode 1"), Ok(12.5));
        assert!(arm.run("decode 1").unwrap_err().contains("`what`"));
        assert!(arm.run("decode 1").unwrap_err().contains("ended"));
        let not_ready = Arm::start(Command::new("sh").args(["-c", "echo no"]));
        assert!(not_ready.err().unwrap().contains("`no`"));
    }
}
