//! A child process that is waited for until a deadline, killed with its group, and reaped, whatever happens.
//!
//! The scan has its own use of the same watching ([`crate::scan`]); this is the door for the validator, whose every
//! check is a child. Both ends: the parent runs a command to its end, the child limits itself and gets a
//! [`Throwaway`], the proof that a crash here ends nothing but a check.

use std::fs::File;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::scan::Watched;
use crate::{supervisor, sys};

/// How a child ended.
#[derive(Debug)]
pub struct Ended {
    /// Its exit status, where it left by itself.
    pub code: Option<i32>,
    /// The signal that ended it, by number and name.
    pub signal: Option<(i32, String)>,
    /// It was killed at the deadline.
    pub timed_out: bool,
    /// What it wrote on stdout.
    pub answer: Vec<u8>,
    /// What it wrote on stderr, the first 64 KiB.
    pub messages: Vec<u8>,
    /// Processes that it left behind, out of its group or not, and that were ended; a [`Throwaway`] counts them.
    pub left_processes: usize,
    /// How long it lived.
    pub wall: Duration,
}

/// Runs a command in a process group of its own, with no input, in `/`, until it ends or the deadline passes. Then its
/// whole group is ended, and it is reaped. What a [`Throwaway`] started ends with it, out of its group or not.
///
/// # Errors
/// When the child cannot be started or watched.
pub fn run_to_end(command: &mut Command, deadline: Duration) -> std::io::Result<Ended> {
    let began = Instant::now();
    let child = command
        .env("RUST_BACKTRACE", "0")
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()?;
    let end = Watched::of(child).run(deadline)?;
    let status = end.status;
    Ok(Ended {
        code: status.and_then(|s| s.code()),
        signal: status
            .and_then(|s| s.signal())
            .map(|n| (n, sys::signal_name(n))),
        timed_out: end.timed_out,
        left_processes: end.left,
        answer: end.answer,
        messages: end.messages,
        wall: began.elapsed(),
    })
}

/// A process that exists for one check. Whoever holds it may call a plugin as no host would: what breaks is a row.
#[derive(Debug)]
pub struct Throwaway {
    _made_by_enter: (),
}

impl Throwaway {
    /// Turns this process into one: no core file, `cpu_seconds` of processor time, bounded memory, files and
    /// descriptors, gone with its parent; stdout is moved away and given to the caller.
    ///
    /// # Errors
    /// When stdout cannot be moved.
    pub fn enter(cpu_seconds: u64) -> std::io::Result<(Self, File)> {
        let out = sys::take_stdout()?;
        supervisor::split(&out);
        sys::limit_scan_process(cpu_seconds);
        Ok((Throwaway { _made_by_enter: () }, out))
    }

    /// Leaves at once: no destructor, no exit handler of a library has a say.
    pub fn leave(self, code: i32) -> ! {
        sys::exit_now(code)
    }

    /// Bytes that this process has allocated and not freed, where the C library tells.
    pub fn heap_bytes(&self) -> Option<u64> {
        sys::heap_bytes()
    }

    /// Whether a library that is not private to its opener already defines this symbol here.
    pub fn defines(&self, symbol: &str) -> bool {
        sys::defines(symbol)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, deadline: Duration) -> Ended {
        run_to_end(Command::new("/bin/sh").args(["-c", script]), deadline).expect("runs")
    }

    #[test]
    fn every_end_is_told() {
        let long = Duration::from_secs(20);
        let end = shell("echo out; echo err >&2; exit 7", long);
        assert_eq!((end.code, end.timed_out), (Some(7), false));
        assert_eq!(
            (&end.answer[..], &end.messages[..]),
            (&b"out\n"[..], &b"err\n"[..])
        );
        let end = shell("kill -SEGV $$", long);
        assert_eq!(end.signal.expect("a signal").1, "signal 11 (SIGSEGV)");
        let end = shell("echo begun; sleep 60", Duration::from_millis(300));
        assert!(end.timed_out && end.signal.is_none() && end.wall < Duration::from_secs(10));
        assert_eq!(end.answer, b"begun\n");
    }

    #[test]
    fn the_heap_is_counted_where_it_can_be() {
        let Some(before) = sys::heap_bytes() else {
            return;
        };
        let held = std::hint::black_box(vec![1_u8; 8 << 20]);
        let after = sys::heap_bytes().expect("still");
        assert!(after >= before + (7 << 20), "{before} {after}");
        drop(held);
    }
}
