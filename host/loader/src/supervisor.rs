//! The first half of a throw-away process: it ends when the second half does, and takes every descendant with it.
//!
//! What a plugin forks may leave its process group and its session, and is then out of the reach of whoever watches
//! the group. So the throw-away process splits before it opens anything. The first half adopts orphans
//! (`PR_SET_CHILD_SUBREAPER`), waits, ends what is left and tells how many that were in one line on the stdout it
//! shares with the second half; then it ends as the second half did. It does the same early when it is asked to end
//! (`SIGTERM`, or the end of its parent). It opens nothing and calls nothing of a plugin.

use std::fs::File;
use std::io::Write;
use std::time::{Duration, Instant};

/// Begins the line that tells what was left.
pub(crate) const LEFT: &str = "structures_left_processes=";
/// Processes that are about to end anyway are not left ones.
const GRACE: Duration = Duration::from_millis(100);
/// How long descendants that fork on are chased.
const CHASE: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(2);

/// Splits this process; returns in the second half. `out` is where the count is written. A process that has threads
/// already, or that cannot be split, stays whole: its group is watched then, as always.
pub(crate) fn split(out: &File) {
    // SAFETY: the disposition is the default one; no handler is installed.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
    let threads = std::fs::read_dir("/proc/self/task").map_or(0, Iterator::count);
    if threads != 1 {
        return;
    }
    // SAFETY: all-zero is a valid set, filled by the calls below.
    let (mut wanted, mut before): (libc::sigset_t, libc::sigset_t) =
        unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
    // SAFETY: both sets are live; only this thread's mask is changed, and it is the only one.
    unsafe {
        libc::sigemptyset(&mut wanted);
        libc::sigaddset(&mut wanted, libc::SIGCHLD);
        libc::sigaddset(&mut wanted, libc::SIGTERM);
        libc::sigprocmask(libc::SIG_BLOCK, &wanted, &mut before);
    }
    let first = std::process::id();
    // SAFETY: this process has one thread, so the copy is whole.
    let second = unsafe { libc::fork() };
    match second {
        0 => {
            // SAFETY: the set is live; PR_SET_PDEATHSIG takes an integer.
            unsafe {
                libc::sigprocmask(libc::SIG_SETMASK, &before, std::ptr::null_mut());
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            }
            if std::os::unix::process::parent_id() != first {
                crate::sys::exit_now(1);
            }
        }
        second if second > 0 => supervise(second, &wanted, out),
        // SAFETY: the set is live.
        _ => unsafe {
            libc::sigprocmask(libc::SIG_SETMASK, &before, std::ptr::null_mut());
        },
    }
}

fn supervise(second: libc::pid_t, wanted: &libc::sigset_t, mut out: &File) -> ! {
    // SAFETY: both options take integers and concern this process only.
    unsafe {
        libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1);
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM);
    }
    let mut status = None;
    let mut asked = false;
    while status.is_none() && !asked {
        while let Some((pid, how)) = reap() {
            if pid == second {
                status = Some(how);
            }
        }
        if status.is_none() {
            let second_long = libc::timespec {
                tv_sec: 1,
                tv_nsec: 0,
            };
            // SAFETY: set and time are live; no information is asked for.
            let signal = unsafe { libc::sigtimedwait(wanted, std::ptr::null_mut(), &second_long) };
            asked = signal == libc::SIGTERM;
        }
    }
    let left = end_the_rest(second, asked);
    if left > 0 {
        // A line of its own, also behind half a one. Nobody is left to tell when it cannot be written.
        let _ = out.write_all(format!("\n{LEFT}{left}\n").as_bytes());
    }
    end_as(status.unwrap_or(libc::SIGKILL))
}

/// Ends and reaps every child, adopted ones too; how many still lived when the second half was gone.
fn end_the_rest(second: libc::pid_t, asked: bool) -> usize {
    let begun = Instant::now();
    let mut ended = std::collections::BTreeSet::new();
    if asked {
        kill(second);
    }
    loop {
        while reap().is_some() {}
        let there = children();
        // Without a list, the answer of `wait` says whether somebody is left.
        if there.is_empty() || begun.elapsed() > CHASE {
            return ended.len();
        }
        if asked || begun.elapsed() > GRACE {
            for pid in there {
                kill(pid);
                if pid != second {
                    ended.insert(pid);
                }
            }
        }
        std::thread::sleep(PAUSE);
    }
}

/// A child that has ended, if there is one.
fn reap() -> Option<(libc::pid_t, libc::c_int)> {
    let mut status = 0;
    // SAFETY: `status` is live and writable.
    let pid = unsafe { libc::waitpid(-1, &mut status, libc::WNOHANG) };
    (pid > 0).then_some((pid, status))
}

fn children() -> Vec<libc::pid_t> {
    let pid = std::process::id();
    if let Ok(text) = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")) {
        return text.split_whitespace().flat_map(str::parse).collect();
    }
    // A kernel without that file: every process says who its parent is.
    let mine = format!("\nPPid:\t{pid}\n");
    std::fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let other = entry.file_name().to_str()?.parse().ok()?;
            let status = std::fs::read_to_string(entry.path().join("status")).ok()?;
            status.contains(&mine).then_some(other)
        })
        .collect()
}

fn kill(pid: libc::pid_t) {
    // SAFETY: kill has no memory effects here; the id is a child's that was not reaped, so it is its own.
    unsafe { libc::kill(pid, libc::SIGKILL) };
}

fn end_as(status: libc::c_int) -> ! {
    if libc::WIFSIGNALED(status) {
        let signal = libc::WTERMSIG(status);
        let none = libc::rlimit {
            rlim_cur: 0,
            rlim_max: 0,
        };
        // SAFETY: the limit and the set are live; the default action of the signal ends this process, without a core.
        unsafe {
            libc::setrlimit(libc::RLIMIT_CORE, &none);
            libc::signal(signal, libc::SIG_DFL);
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&mut set);
            libc::sigprocmask(libc::SIG_SETMASK, &set, std::ptr::null_mut());
            libc::raise(signal);
        }
        crate::sys::exit_now(128 + signal);
    }
    crate::sys::exit_now(libc::WEXITSTATUS(status))
}
