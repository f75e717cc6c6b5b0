//! The few system calls that std does not offer, each behind a safe function.
//!
//! Owns: secure-execution test, process limits, group kill, readiness of pipes, moving stdout away. Knows nothing
//! of plugins.

use std::ffi::{CStr, OsStr};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::Duration;

/// Whether this process runs with raised rights (set-uid and the like), so that its environment belongs to
/// somebody else.
pub fn secure_execution() -> bool {
    // SAFETY: getauxval reads a value the kernel placed at start; any key is allowed.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}

/// What a program relies on whoever started it: that children can be waited for, and that a file that grows too long
/// is an error of the write. Called once, before anything runs.
pub fn process_defaults() {
    // SAFETY: both are plain dispositions without a handler; no thread of this process depends on others.
    unsafe {
        libc::signal(libc::SIGCHLD, libc::SIG_DFL);
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
    }
}

/// Lets this thread, and those it starts from now on, run on these CPUs only.
///
/// # Errors
/// The kernel's: a CPU that is not there or not allowed.
pub fn run_on(cpus: &[usize]) -> io::Result<()> {
    // SAFETY: an all-zero set is a valid, empty one.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    for cpu in cpus {
        if *cpu >= 8 * size_of::<libc::cpu_set_t>() {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        // SAFETY: the index is inside the set.
        unsafe { libc::CPU_SET(*cpu, &mut set) };
    }
    // SAFETY: the set lives for the call; 0 is the calling thread.
    match unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Gives memory that was freed back to the system, where the allocator keeps it for later.
pub fn give_memory_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: malloc_trim touches free memory only and takes the allocator's own locks.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Kills one process, which is this user's or stays as it is.
pub fn end_process(pid: u32) {
    if let Some(pid) = i32::try_from(pid).ok().filter(|pid| *pid > 1) {
        // SAFETY: kill has no memory effects here.
        unsafe { libc::kill(pid, libc::SIGKILL) };
    }
}

/// Effective group of the process.
pub fn effective_group() -> u32 {
    // SAFETY: getegid has no precondition and cannot fail.
    unsafe { libc::getegid() }
}

/// Effective user of the process.
pub fn effective_user() -> u32 {
    // SAFETY: geteuid has no precondition and cannot fail.
    unsafe { libc::geteuid() }
}

/// Home directory of the effective user, from the user database, without looking at the environment.
pub fn home_from_user_database() -> Option<PathBuf> {
    let mut buffer = vec![0_u8; 16 * 1024];
    // SAFETY: an all-zero passwd is a valid value (null pointers and zeros).
    let mut entry: libc::passwd = unsafe { std::mem::zeroed() };
    let mut found: *mut libc::passwd = std::ptr::null_mut();
    // SAFETY: every pointer refers to a live local of the stated size; the result points into `buffer`.
    let status = unsafe {
        libc::getpwuid_r(
            libc::geteuid(),
            &mut entry,
            buffer.as_mut_ptr().cast(),
            buffer.len(),
            &mut found,
        )
    };
    if status != 0 || found.is_null() || entry.pw_dir.is_null() {
        return None;
    }
    // SAFETY: pw_dir is a NUL-terminated string inside `buffer`, which is still alive.
    let dir = unsafe { CStr::from_ptr(entry.pw_dir) };
    let path = PathBuf::from(OsStr::from_bytes(dir.to_bytes()));
    path.is_absolute().then_some(path)
}

/// Kills the whole process group `group` (made by `process_group(0)`).
pub fn kill_group(group: u32) {
    let Ok(group) = i32::try_from(group) else {
        return;
    };
    if group > 1 {
        // SAFETY: kill has no memory effects here; a negative id names a group.
        unsafe { libc::kill(-group, libc::SIGKILL) };
    }
}

/// Asks the whole process group `group` to end.
pub fn ask_group_to_end(group: u32) {
    let Ok(group) = i32::try_from(group) else {
        return;
    };
    if group > 1 {
        // SAFETY: kill has no memory effects here; a negative id names a group.
        unsafe { libc::kill(-group, libc::SIGTERM) };
    }
}

/// How a child is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChildState {
    /// It runs.
    Running,
    /// It has ended and was not reaped, so its id stays its own.
    Ended,
    /// It is gone and nobody knows how it ended: this process ignores `SIGCHLD`, or reaped it elsewhere.
    Gone,
}

/// How the child `pid` is. Does not reap it.
pub fn child_state(pid: u32) -> io::Result<ChildState> {
    // SAFETY: an all-zero siginfo is a valid value.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let options = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: `info` is live and writable.
    match check(unsafe { libc::waitid(libc::P_PID, pid, &mut info, options) }) {
        Ok(_) => {}
        Err(e) if e.raw_os_error() == Some(libc::ECHILD) => return Ok(ChildState::Gone),
        Err(e) => return Err(e),
    }
    // SAFETY: waitid filled the struct, or left the zero that means "still running".
    Ok(match unsafe { info.si_pid() } {
        0 => ChildState::Running,
        _ => ChildState::Ended,
    })
}

/// Name of a signal.
pub fn signal_name(signal: i32) -> String {
    let name = match signal {
        libc::SIGABRT => "SIGABRT",
        libc::SIGBUS => "SIGBUS",
        libc::SIGFPE => "SIGFPE",
        libc::SIGILL => "SIGILL",
        libc::SIGKILL => "SIGKILL",
        libc::SIGSEGV => "SIGSEGV",
        libc::SIGTERM => "SIGTERM",
        libc::SIGTRAP => "SIGTRAP",
        libc::SIGXCPU => "SIGXCPU",
        _ => return format!("signal {signal}"),
    };
    format!("signal {signal} ({name})")
}

/// Makes reads of `fd` return instead of waiting.
pub fn set_nonblocking(fd: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: `fd` is open for the length of the call; F_GETFL takes no pointer.
    let flags = check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) })?;
    // SAFETY: as above; F_SETFL takes an integer.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK) })?;
    Ok(())
}

/// Waits until one of `fds` can be read or is closed on the other side, or `timeout` passed.
pub fn wait_readable(fds: &[BorrowedFd<'_>], timeout: Duration) -> io::Result<()> {
    let mut polled: Vec<libc::pollfd> = fds
        .iter()
        .map(|fd| libc::pollfd {
            fd: fd.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        })
        .collect();
    let millis = timeout.as_millis().clamp(1, i32::MAX as u128) as libc::c_int;
    // SAFETY: the pointer and the count describe the live vector.
    let n = unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, millis) };
    match check(n) {
        Err(e) if e.kind() != io::ErrorKind::Interrupted => Err(e),
        _ => Ok(()),
    }
}

/// Most bytes of private memory of a scan; address space is not limited, drivers reserve terabytes of it.
/// A build under a sanitizer reserves them as data: `cargo xtask sanitize` says that it is one.
const SCAN_DATA: u64 = match option_env!("STRUCTURES_SANITIZE") {
    Some(_) => libc::RLIM_INFINITY,
    None => 4 << 30,
};
/// Longest file that a scan may write.
const SCAN_FILE: u64 = 64 << 20;
/// Most descriptors of a scan.
const SCAN_FILES: u64 = 256;

/// Limits this process for the short life of a scan: no core file, `cpu_seconds` of processor time, bounded memory,
/// files and descriptors, and it dies with its parent.
pub fn limit_scan_process(cpu_seconds: u64) {
    for (resource, value) in [
        (libc::RLIMIT_CORE, 0),
        (libc::RLIMIT_CPU, cpu_seconds),
        (libc::RLIMIT_DATA, SCAN_DATA),
        (libc::RLIMIT_FSIZE, SCAN_FILE),
        (libc::RLIMIT_NOFILE, SCAN_FILES),
    ] {
        let limit = libc::rlimit {
            rlim_cur: value,
            rlim_max: value,
        };
        // SAFETY: `limit` is a live, initialised struct. A failure leaves the old limit, which is harmless.
        unsafe { libc::setrlimit(resource, &limit) };
    }
    // SAFETY: PR_SET_PDEATHSIG takes an integer and only concerns this process.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
}

/// Gives the process's real stdout to the caller and points descriptor 1 at stderr.
///
/// After it nothing that prints on "stdout" (a library's constructor, a stray `println!`) can mix with what the
/// caller writes to the returned file. A program whose stdout is a document does this before it opens a plugin.
pub fn take_stdout() -> io::Result<File> {
    // SAFETY: F_DUPFD_CLOEXEC makes a new descriptor owned by nobody else.
    let kept = check(unsafe { libc::fcntl(libc::STDOUT_FILENO, libc::F_DUPFD_CLOEXEC, 10) })?;
    // SAFETY: `kept` was just created and is not owned elsewhere.
    let kept = unsafe { OwnedFd::from_raw_fd(kept) };
    // SAFETY: dup2 replaces descriptor 1, which std treats as a process global that is never closed.
    check(unsafe { libc::dup2(libc::STDERR_FILENO, libc::STDOUT_FILENO) })?;
    Ok(File::from(kept))
}

/// Bytes that this process got from `malloc` and not gave back, in all arenas; `None` where the C library has no count.
pub fn heap_bytes() -> Option<u64> {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        // SAFETY: mallinfo2 takes nothing and only reads the allocator's own counters under its own locks.
        let info = unsafe { libc::mallinfo2() };
        Some((info.uordblks + info.hblkhd) as u64)
    }
    #[cfg(not(all(target_os = "linux", target_env = "gnu")))]
    None
}

/// Whether the program or a library in the global scope defines this symbol.
pub fn defines(symbol: &str) -> bool {
    let Ok(name) = std::ffi::CString::new(symbol) else {
        return false;
    };
    // SAFETY: the name is NUL-terminated; only whether there is an address is looked at.
    !unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) }.is_null()
}

/// Ends the process at once: no destructors, no exit handlers, so that a library cannot spoil the exit.
pub fn exit_now(code: i32) -> ! {
    // SAFETY: _exit does not return and runs no code of this process.
    unsafe { libc::_exit(code) }
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_user_database_knows_a_home() {
        assert!(!secure_execution(), "tests do not run set-uid");
        if let Some(home) = home_from_user_database() {
            assert!(home.is_absolute());
        }
    }

    #[test]
    fn signals_have_names() {
        assert_eq!(signal_name(libc::SIGABRT), "signal 6 (SIGABRT)");
        assert_eq!(signal_name(50), "signal 50");
    }
}
