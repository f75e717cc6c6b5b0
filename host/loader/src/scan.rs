//! Describing a plugin and opening it once in a throw-away process: both ends.
//!
//! Opening a library runs its initialisers, and a stranger's initialisers may crash, hang, print or exit. So the
//! first opening happens in a child: `<scanner> scan-plugin <library>`, which answers one JSON line with a magic
//! field. So may its `open`: where the document says that this host would go on, the child does what the host will
//! do next (make the instance, ask for devices, close it) and answers a second line. The child moves its real stdout to a private descriptor before it opens anything, writes no core file, has
//! limited processor time, dies with its parent and leaves by `_exit`. The parent waits until a deadline, then kills
//! the child's whole process group, and reaps it in every case.
//!
//! Not here: what is remembered of an answer ([`crate::cache`]) and of a crash ([`crate::quarantine`]).

use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use structures_plugin_api::describe::Description;

use crate::arch::{self, Device};
use crate::code::{Code, Refusal};
use crate::document;
use crate::open::{one_line, Doorway, LONGEST_DOCUMENT};
use crate::plugin::Plugin;
use crate::search::Environment;
use crate::services::NO_HOST;
use crate::store::Object;
use crate::supervisor::{self, LEFT};
use crate::sys::{self, ChildState};

/// Sub-command of the scanner program.
pub const SUBCOMMAND: &str = "scan-plugin";
/// How long describing one plugin may take.
pub const DEADLINE: Duration = Duration::from_secs(10);

/// Value of the answer's magic field.
const MAGIC: u32 = 1;
/// Processor seconds of a child: above the deadline, so that it only catches a child whose parent is gone.
const CPU_SECONDS: u64 = 15;
/// Longest answer that is read: a document, escaped.
const LONGEST_ANSWER: usize = 2 * LONGEST_DOCUMENT;
/// How much of a child's messages is kept for the log.
const LONGEST_MESSAGES: usize = 64 * 1024;
/// How long a child that was asked to end may take for it.
const PATIENCE: Duration = Duration::from_millis(500);
/// How often the parent looks whether the child is gone while a grandchild holds its pipes open.
const TICK: Duration = Duration::from_millis(20);

/// Where plugins are described.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ScanMode {
    /// In a child of this program; `None` takes `STRUCTURES_SCANNER`, else `<exe dir>/structures`.
    Child(Option<PathBuf>),
    /// In this process. Only for a library caller who trusts every file of the search path.
    InProcess,
}

impl Default for ScanMode {
    fn default() -> Self {
        ScanMode::Child(None)
    }
}

/// A [`ScanMode`] with its program found.
#[derive(Clone, Debug)]
pub(crate) enum Scanner {
    Program(PathBuf),
    InProcess,
    Missing(Refusal),
}

impl Scanner {
    pub(crate) fn find(mode: &ScanMode, environment: &Environment) -> Self {
        let named = match mode {
            ScanMode::InProcess => return Scanner::InProcess,
            ScanMode::Child(program) => program.as_ref().or(environment.scanner.as_ref()),
        };
        let beside = environment
            .exe_dir
            .as_ref()
            .map(|dir| dir.join("structures"));
        let Some(wanted) = named.or(beside.as_ref()) else {
            return Scanner::Missing(
                Code::ScannerMissing.because(
                    "expected STRUCTURES_SCANNER, found neither it nor a program directory",
                ),
            );
        };
        if wanted.is_relative() && matches!(mode, ScanMode::Child(None)) {
            return Scanner::Missing(Code::ScannerMissing.because(format!(
                "expected an absolute path in STRUCTURES_SCANNER, found {}",
                wanted.display()
            )));
        }
        // Absolute, because the child starts in another directory.
        match wanted.canonicalize() {
            Ok(program) if program.is_file() => Scanner::Program(program),
            found => {
                let why = found.map_or_else(|e| e.to_string(), |_| "not a file".into());
                Scanner::Missing(Code::ScannerMissing.because(format!(
                    "expected the scanner program at {}, found: {why}",
                    wanted.display()
                )))
            }
        }
    }

    /// The `describe` document of the library at `object`, and how it went when it was opened.
    pub(crate) fn describe(&self, object: &Path, deadline: Duration) -> Result<Described, Failed> {
        match self {
            // This process opens it next; nothing is gained by doing it twice.
            Scanner::InProcess => describe_here(object)
                .map(|(_, text)| Described {
                    text,
                    opened: Ok(false),
                })
                .map_err(Failed::from),
            Scanner::Missing(refusal) => Err(refusal.clone().into()),
            Scanner::Program(program) => describe_in_child(program, object, deadline),
        }
    }

    /// What answers depend on beside the bytes: another program may open other doors.
    pub(crate) fn stamp(&self) -> String {
        match self {
            Scanner::InProcess => "in process".into(),
            Scanner::Missing(_) => "no scanner".into(),
            Scanner::Program(program) => match program.metadata() {
                Ok(m) => format!(
                    "{} {} {}.{}",
                    program.display(),
                    m.len(),
                    m.ctime(),
                    m.ctime_nsec()
                ),
                Err(_) => program.display().to_string(),
            },
        }
    }
}

/// What a library said of itself.
#[derive(Debug)]
pub(crate) struct Described {
    /// The document's text.
    pub(crate) text: String,
    /// Whether it was opened and closed, or what became of that; `false` where nobody tried.
    pub(crate) opened: Result<bool, Failed>,
}

/// Why there is no document, and the signal that ended the child if one did.
#[derive(Debug)]
pub(crate) struct Failed {
    pub(crate) refusal: Refusal,
    pub(crate) signal: Option<i32>,
    /// The child ran the library and ended without a word.
    pub(crate) silent: bool,
}

impl Failed {
    /// The plugin's own answer, as opposed to the end of the child.
    pub(crate) fn is_answer(&self) -> bool {
        use Code::{ScanCrashed, ScanFailed, ScanTimeout};
        !matches!(self.refusal.code, ScanCrashed | ScanFailed | ScanTimeout)
    }
}

impl From<Refusal> for Failed {
    fn from(refusal: Refusal) -> Self {
        Failed {
            refusal,
            signal: None,
            silent: false,
        }
    }
}

/// A line that the child prints: the document or why there is none, then how opening went.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Answer {
    structures_scan: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    description: Option<String>,
    /// It is opened next, and a second line says how that went.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    opens: bool,
    /// It was opened and closed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    opened: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    detail: Option<String>,
}

impl Answer {
    fn new() -> Self {
        Answer {
            structures_scan: MAGIC,
            ..Answer::default()
        }
    }

    fn refused(refusal: Refusal) -> Self {
        Answer {
            code: Some(refusal.code.name().into()),
            reason: Some(refusal.reason),
            detail: refusal.detail,
            ..Answer::new()
        }
    }

    /// The refusal that the line tells, if it does.
    fn refusal(self) -> Option<Refusal> {
        let (code, reason) = (self.code?, self.reason.unwrap_or_default());
        Some(match Code::from_name(&code) {
            Some(code) => Refusal {
                detail: self.detail,
                ..code.because(reason)
            },
            None => Code::ScanFailed.because(format!("{code}: {reason}")),
        })
    }
}

/// The child's end: describes the library at `path` and prints the answer. What a program does for
/// `scan-plugin PATH`, before anything else; it returns the exit status, but normally ends the process itself.
pub fn scan_main(path: &Path) -> i32 {
    let mut out = match sys::take_stdout() {
        Ok(out) => out,
        Err(e) => {
            eprintln!("scan-plugin: stdout cannot be moved away: {e}");
            return 1;
        }
    };
    supervisor::split(&out);
    sys::limit_scan_process(CPU_SECONDS);
    let mut send = |answer: &Answer| {
        let sent = serde_json::to_string(answer)
            .map_err(std::io::Error::from)
            .and_then(|line| out.write_all(format!("{line}\n").as_bytes()));
        if let Err(e) = sent {
            eprintln!("scan-plugin: the answer cannot be written: {e}");
            sys::exit_now(1);
        }
    };
    match describe_here(path) {
        Err(refusal) => send(&Answer::refused(refusal)),
        Ok((description, text)) => {
            let wanted = description.filter(would_open);
            send(&Answer {
                description: Some(text),
                opens: wanted.is_some(),
                ..Answer::new()
            });
            if let Some(description) = wanted {
                send(&match rehearse(path, &description) {
                    Ok(()) => Answer {
                        opened: true,
                        ..Answer::new()
                    },
                    Err(refusal) => Answer::refused(refusal),
                });
            }
        }
    }
    // Not a normal exit: the library's exit handlers have no say.
    sys::exit_now(0)
}

/// The document, read where it can be, and its text.
fn describe_here(path: &Path) -> Result<(Option<Description>, String), Refusal> {
    let doorway = Doorway::open(path)?;
    // SAFETY: null is allowed.
    let text = unsafe { doorway.exchange(NO_HOST) }?.describe()?;
    Ok((document::parse(&text).ok(), text))
}

/// Whether a host on this machine would go on with it; the host judges again, for itself.
fn would_open(description: &Description) -> bool {
    document::handshake(description).is_ok()
        && arch::admit_at_load(&description.id, &description.archs, &Device::host_cpu()).is_ok()
}

/// What the host does next, once, where it can do no harm.
fn rehearse(path: &Path, description: &Description) -> Result<(), Refusal> {
    let object = Object {
        path: path.to_path_buf(),
        sha256: String::new(),
    };
    let plugin = Plugin::load(path, &object, description)?;
    // A plugin that cannot say is one with none.
    if let Err(e) = plugin.devices() {
        eprintln!("{e}");
    }
    Ok(())
}

fn describe_in_child(
    program: &Path,
    object: &Path,
    deadline: Duration,
) -> Result<Described, Failed> {
    let failed = |what: String| Failed::from(Code::ScanFailed.because(what));
    let child = Command::new(program)
        .arg(SUBCOMMAND)
        .arg(object)
        .env("RUST_BACKTRACE", "0")
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .map_err(|e| failed(format!("{} cannot be started: {e}", program.display())))?;
    let end = Watched::of(child)
        .run(deadline)
        .map_err(|e| failed(format!("the scan child cannot be watched: {e}")))?;
    let messages = String::from_utf8_lossy(&end.messages);
    if !messages.trim().is_empty() {
        tracing::debug!("scan of {}: {}", object.display(), messages.trim());
    }
    let mut answers = end
        .answer
        .split(|b| *b == b'\n')
        .filter_map(|line| serde_json::from_slice::<Answer>(line).ok())
        .filter(|answer| answer.structures_scan == MAGIC);
    let (first, second) = (answers.next(), answers.next());
    let opening = first.as_ref().is_some_and(|answer| answer.opens);
    let ended = ended(&end, opening, deadline, &messages).or_else(|| left(end.left));
    match first {
        Some(Answer {
            description: Some(text),
            ..
        }) => Ok(Described {
            text,
            opened: match (opening, second) {
                (_, Some(second)) if second.code.is_some() => {
                    second.refusal().map_or(Ok(false), |r| Err(r.into()))
                }
                // A scanner of another make may only describe.
                (false, _) => ended.map_or(Ok(false), Err),
                (true, Some(second)) if second.opened => ended.map_or(Ok(true), Err),
                (true, _) => Err(ended.unwrap_or_else(|| silent(end.status, opening, &messages))),
            },
        }),
        first => Err(match (ended, first.and_then(Answer::refusal)) {
            (Some(ended), _) => ended,
            (None, Some(refusal)) => refusal.into(),
            (None, None) => silent(end.status, opening, &messages),
        }),
    }
}

/// A child that was killed, or that died by a signal.
fn ended(end: &End, opening: bool, deadline: Duration, messages: &str) -> Option<Failed> {
    let at = if opening { " while it was opened" } else { "" };
    if end.timed_out {
        let text = format!(
            "no answer within {:.1} s{at}, killed",
            deadline.as_secs_f64()
        );
        return Some(Code::ScanTimeout.because(text).into());
    }
    let signal = end.status?.signal()?;
    Some(Failed {
        refusal: Code::ScanCrashed.because(format!(
            "the scan child was ended by {}{at}{}",
            sys::signal_name(signal),
            last_words(messages)
        )),
        signal: Some(signal),
        silent: false,
    })
}

/// A child that ended well and left others behind.
fn left(processes: usize) -> Option<Failed> {
    (processes > 0).then(|| {
        let text = format!("expected no process to be left, found {processes}, ended them");
        Code::ScanLeftProcesses.because(text).into()
    })
}

/// A child that ended as if all were well and did not say what it should have.
fn silent(status: Option<ExitStatus>, opening: bool, messages: &str) -> Failed {
    let wanted = match opening {
        true => "an answer after it was opened",
        false => "an answer with `structures_scan`",
    };
    let text = format!(
        "expected {wanted}, found none; exit status {}{}",
        status.and_then(|s| s.code()).unwrap_or(-1),
        last_words(messages)
    );
    Failed {
        silent: true,
        ..Failed::from(Code::ScanFailed.because(text))
    }
}

fn last_words(messages: &str) -> String {
    let lines: Vec<&str> = messages.lines().filter(|l| !l.trim().is_empty()).collect();
    if lines.is_empty() {
        return String::new();
    }
    let text = one_line(&lines[lines.len().saturating_sub(2)..].join(" "));
    format!(
        "; its last words: {}",
        text.chars().take(300).collect::<String>()
    )
}

pub(crate) struct End {
    /// `None`: the deadline passed, or nobody knows.
    pub(crate) status: Option<ExitStatus>,
    pub(crate) timed_out: bool,
    pub(crate) answer: Vec<u8>,
    pub(crate) messages: Vec<u8>,
    /// Processes that its supervisor found and ended.
    pub(crate) left: usize,
}

/// Takes the supervisor's line out of an answer.
fn without_left(answer: Vec<u8>) -> (Vec<u8>, usize) {
    let count = |line: &[u8]| {
        let text = std::str::from_utf8(line).ok()?.strip_prefix(LEFT)?;
        text.trim().parse::<usize>().ok()
    };
    let left: usize = answer
        .split(|b| *b == b'\n')
        .filter_map(count)
        .max()
        .unwrap_or(0);
    if left == 0 {
        return (answer, 0);
    }
    let mut rest = Vec::with_capacity(answer.len());
    for line in answer.split_inclusive(|b| *b == b'\n') {
        if count(line).is_none() {
            rest.extend_from_slice(line);
        }
    }
    (rest, left)
}

/// A child that is killed with its group, and reaped, whatever happens.
pub(crate) struct Watched {
    child: Child,
    reaped: bool,
}

impl Watched {
    /// The leader of its own process group, stdout and stderr piped.
    pub(crate) fn of(child: Child) -> Self {
        Watched {
            child,
            reaped: false,
        }
    }

    pub(crate) fn run(mut self, deadline: Duration) -> std::io::Result<End> {
        let end = Instant::now() + deadline;
        let (mut stdout, mut stderr) = (self.child.stdout.take(), self.child.stderr.take());
        let (mut answer, mut messages) = (Vec::new(), Vec::new());
        if let (Some(out), Some(err)) = (&stdout, &stderr) {
            sys::set_nonblocking(out.as_fd())?;
            sys::set_nonblocking(err.as_fd())?;
        }
        loop {
            drain(&mut stdout, &mut answer, LONGEST_ANSWER)?;
            drain(&mut stderr, &mut messages, LONGEST_MESSAGES)?;
            let state = sys::child_state(self.child.id())?;
            if state != ChildState::Running {
                // Its group first: until it is reaped its id belongs to nobody else.
                sys::kill_group(self.child.id());
                let status = match state {
                    ChildState::Gone => None,
                    _ => Some(self.child.wait()?),
                };
                self.reaped = true;
                // What it wrote last is still in the pipes.
                drain(&mut stdout, &mut answer, LONGEST_ANSWER)?;
                drain(&mut stderr, &mut messages, LONGEST_MESSAGES)?;
                let (answer, left) = without_left(answer);
                return Ok(End {
                    status,
                    timed_out: false,
                    answer,
                    messages,
                    left,
                });
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                self.ask_to_end();
                drain(&mut stdout, &mut answer, LONGEST_ANSWER)?;
                let (answer, left) = without_left(answer);
                return Ok(End {
                    status: None,
                    timed_out: true,
                    answer,
                    messages,
                    left,
                });
            }
            let open: Vec<_> = stdout
                .iter()
                .map(AsFd::as_fd)
                .chain(stderr.iter().map(AsFd::as_fd))
                .collect();
            if open.is_empty() {
                // Pipes close when the child exits; only one that closed them itself is waited for.
                std::thread::sleep(Duration::from_micros(200).min(left));
            } else {
                sys::wait_readable(&open, TICK.min(left))?;
            }
        }
    }
}

impl Watched {
    /// Lets a supervisor end what left the group; whoever does not listen is killed by `drop`.
    fn ask_to_end(&self) {
        sys::ask_group_to_end(self.child.id());
        let end = Instant::now() + PATIENCE;
        while Instant::now() < end
            && matches!(sys::child_state(self.child.id()), Ok(ChildState::Running))
        {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        if !self.reaped {
            sys::kill_group(self.child.id());
            // Fails only when the child is gone already.
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// Reads what is there; a stream that ended is closed. Beyond `most` bytes it is read and dropped, so that the child
/// does not wait for room.
fn drain<R: Read>(stream: &mut Option<R>, into: &mut Vec<u8>, most: usize) -> std::io::Result<()> {
    let mut block = [0_u8; 16 * 1024];
    while let Some(open) = stream {
        match open.read(&mut block) {
            Ok(0) => *stream = None,
            Ok(n) => {
                let room = most.saturating_sub(into.len());
                into.extend_from_slice(&block[..n.min(room)]);
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(()),
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// A scanner made of shell, to see what the parent does with any child.
    fn with_script(body: &str, deadline: Duration) -> Result<String, Refusal> {
        let dir = tempfile::tempdir().expect("temporary directory");
        let program = dir.path().join("scanner");
        std::fs::write(&program, format!("#!/bin/sh\n{body}\n")).expect("write");
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).expect("chmod");
        describe_in_child(&program, Path::new("/x.so"), deadline)
            .and_then(|described| described.opened.map(|_| described.text))
            .map_err(|f| f.refusal)
    }

    const SHORT: Duration = Duration::from_millis(300);

    #[test]
    fn an_answer_is_found_among_noise() {
        let body = "echo noise; echo '{\"structures_scan\":1,\"description\":\"text\"}'; echo more";
        assert_eq!(with_script(body, DEADLINE).as_deref(), Ok("text"));
        let body = "echo '{\"structures_scan\":1,\"code\":\"not_a_plugin\",\"reason\":\"r\"}'";
        assert_eq!(
            with_script(body, DEADLINE),
            Err(Code::NotAPlugin.because("r"))
        );
    }

    #[test]
    fn every_other_end_is_a_refusal() {
        let code = |body| with_script(body, SHORT).expect_err(body);
        assert_eq!(code("exit 0").code, Code::ScanFailed);
        let refusal = code("echo broken >&2; exit 7");
        assert!(
            refusal.reason.contains('7') && refusal.reason.contains("broken"),
            "{refusal}"
        );
        assert_eq!(
            code("echo '{\"structures_scan\":2,\"description\":\"x\"}'").code,
            Code::ScanFailed
        );
        let refusal = code("kill -ABRT $$");
        assert_eq!(refusal.code, Code::ScanCrashed);
        assert!(refusal.reason.contains("SIGABRT"), "{refusal}");
        assert_eq!(
            code("echo '{\"structures_scan\":1,\"description\":\"x\"}'; kill -SEGV $$").code,
            { Code::ScanCrashed }
        );
    }

    #[test]
    fn an_end_while_it_was_opened_says_so() {
        const OPENS: &str =
            "echo '{\"structures_scan\":1,\"description\":\"text\",\"opens\":true}'";
        let with = |rest: &str, deadline| with_script(&format!("{OPENS}; {rest}"), deadline);
        let opened = "echo '{\"structures_scan\":1,\"opened\":true}'";
        assert_eq!(with(opened, DEADLINE).as_deref(), Ok("text"));
        let refused =
            "echo '{\"structures_scan\":1,\"code\":\"plugin_open_failed\",\"reason\":\"r\"}'";
        assert_eq!(
            with(refused, DEADLINE),
            Err(Code::PluginOpenFailed.because("r"))
        );
        for (rest, deadline, code) in [
            ("exit 0", DEADLINE, Code::ScanFailed),
            ("kill -ABRT $$", DEADLINE, Code::ScanCrashed),
            ("sleep 100", SHORT, Code::ScanTimeout),
        ] {
            let refusal = with(rest, deadline).expect_err(rest);
            assert_eq!(refusal.code, code, "{rest}: {refusal}");
            assert!(refusal.reason.contains("opened"), "{refusal}");
        }
        // It was opened, and then it died: closing it is part of what a host does.
        let refusal = with(&format!("{opened}; kill -SEGV $$"), DEADLINE).expect_err("dies");
        assert_eq!(refusal.code, Code::ScanCrashed);
    }

    #[test]
    fn a_child_that_hangs_is_killed_with_its_children_and_reaped() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let pids = dir.path().join("pids");
        let start = Instant::now();
        let body = format!(
            "sleep 100 & echo $! $$ > {}; exec >&- 2>&-; sleep 100",
            pids.display()
        );
        assert_eq!(
            with_script(&body, SHORT).expect_err("hangs").code,
            Code::ScanTimeout
        );
        assert!(start.elapsed() < Duration::from_secs(5));
        let text = std::fs::read_to_string(pids).expect("pids");
        for pid in text.split_whitespace() {
            // A killed process takes a moment to be gone, and an orphan may wait for init to reap it; alive it is not.
            let gone = || {
                let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
                stat.is_empty() || stat.contains(") Z ")
            };
            let since = Instant::now();
            while !gone() {
                assert!(since.elapsed() < Duration::from_secs(5), "{pid} lives");
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }

    #[test]
    fn a_grandchild_that_keeps_the_pipes_does_not_delay_the_answer() {
        let start = Instant::now();
        let body = "sleep 100 & echo '{\"structures_scan\":1,\"description\":\"text\"}'";
        assert_eq!(with_script(body, DEADLINE).as_deref(), Ok("text"));
        assert!(start.elapsed() < Duration::from_secs(5));
    }

    #[test]
    fn the_supervisor_s_line_is_taken_out() {
        let body = "echo '{\"structures_scan\":1,\"description\":\"text\"}'; echo structures_left_processes=2";
        let refusal = with_script(body, DEADLINE).expect_err("left");
        assert_eq!(refusal.code, Code::ScanLeftProcesses);
        let (rest, left) = without_left(b"a\n\nstructures_left_processes=3\nb".to_vec());
        assert_eq!((&rest[..], left), (&b"a\n\nb"[..], 3));
    }

    #[test]
    fn a_flood_is_read_and_dropped() {
        let body =
            "yes noise | head -c 300000 >&2; echo '{\"structures_scan\":1,\"description\":\"t\"}'";
        assert_eq!(with_script(body, DEADLINE).as_deref(), Ok("t"));
    }

    #[test]
    fn the_program_is_named_or_beside_this_one() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let mut environment = Environment {
            exe_dir: Some(dir.path().to_path_buf()),
            ..Environment::default()
        };
        let missing = |e: &Environment| match Scanner::find(&ScanMode::Child(None), e) {
            Scanner::Missing(refusal) => refusal.reason,
            other => panic!("{other:?}"),
        };
        assert!(missing(&environment).contains("structures"));
        environment.scanner = Some(dir.path().join("named"));
        assert!(missing(&environment).contains("named"));
        std::fs::write(dir.path().join("named"), "").expect("write");
        let found = Scanner::find(&ScanMode::Child(None), &environment);
        assert!(matches!(found, Scanner::Program(p) if p.ends_with("named")));
        assert!(missing(&Environment::default()).contains("STRUCTURES_SCANNER"));
        environment.scanner = Some("structures".into());
        assert!(missing(&environment).contains("absolute"));
    }
}
