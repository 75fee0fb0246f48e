//! What `/proc` says of processes and threads.
//!
//! A thread chooses its own name, of any bytes, and the kernel cuts a name after 15 bytes, also in
//! the middle of a character. So every file with a name in it is read as bytes.
//!
//! The files are parsed here instead of by the procfs crate. Its parser of `/proc/PID/maps` panics
//! on names that any user can give to a file. Its other readers of a process take two to eight
//! times as long.

use std::fmt::Display;
use std::fs;
use std::io;

/// The fields of /proc/PID/stat that are needed here.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Stat {
    /// As `ps` prints it: `R` is runnable, `S` sleeps, `T` is stopped.
    pub state: char,
    pub parent: u32,
    /// It runs none of its program any more: it exits, or has a signal that it cannot catch.
    pub dying: bool,
    /// Page faults that needed no input.
    pub faults: u64,
    pub user_ticks: u64,
    pub system_ticks: u64,
    /// CPU time of the children that it has waited for, and of their own such children.
    pub waited_for_ticks: u64,
    /// The part of that in user mode.
    pub waited_for_user_ticks: u64,
    /// When it started, which distinguishes it from other processes with the same id.
    pub began_ticks: u64,
    /// The start of its stack; 0 if this user may not know.
    pub stack: u64,
}

/// In the flags of a task: it exits.
const PF_EXITING: u64 = 4;
/// In the pending signals of a thread. The kernel sets it for any signal that ends the process
/// without a handler.
const KILL_PENDING: u64 = 1 << (libc::SIGKILL - 1);

/// `None` if the process does not exist. The CPU times are those of all its threads.
pub fn stat(process: u32) -> Option<Stat> {
    parse_stat(&read_text(&format!("/proc/{process}/stat")).ok()?)
}

/// `None` if the thread does not exist. The CPU times are its own, even for the first thread.
pub fn thread_stat(thread: u32) -> Option<Stat> {
    parse_stat(&read_text(&format!("/proc/{thread}/task/{thread}/stat")).ok()?)
}

/// Parses the line. The name in parentheses may contain anything, even parentheses and spaces.
fn parse_stat(line: &str) -> Option<Stat> {
    let (_, after_name) = line.rsplit_once(')')?;
    let fields: Vec<&str> = after_name.split_whitespace().collect();
    let number = |field: usize| fields.get(field)?.parse::<u64>().ok();
    Some(Stat {
        state: fields.first()?.chars().next()?,
        parent: u32::try_from(number(1)?).ok()?,
        dying: number(6)? & PF_EXITING != 0 || number(28)? & KILL_PENDING != 0,
        faults: number(7)?,
        user_ticks: number(11)?,
        system_ticks: number(12)?,
        waited_for_ticks: number(13)?.checked_add(number(14)?)?,
        waited_for_user_ticks: number(13)?,
        began_ticks: number(19)?,
        stack: number(25)?,
    })
}

/// Identifies the program that a process runs: an execve(2) gives it another stack.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ProgramId {
    stack: u64,
}

impl ProgramId {
    /// `None` if the process has ended.
    pub fn of(process: u32) -> Option<Self> {
        stat(process).map(|Stat { stack, .. }| Self { stack })
    }
}

/// The fields of `/proc/PID/status` that decide which changes a process allows.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Status {
    pub(crate) traced: bool,
    /// Its system calls are filtered, so the doorbell's calls may be forbidden.
    pub(crate) filtered: bool,
    /// It has a handler for faults, which may look at the faulting address.
    pub(crate) catches_faults: bool,
    /// It has a handler for at least one signal.
    pub(crate) catches: bool,
    pub(crate) threads: u32,
}

impl Status {
    pub(crate) fn of(process: u32) -> Option<Self> {
        Self::parse(&read_text(&format!("/proc/{process}/status")).ok()?)
    }

    /// Whether a thread filters its system calls; false if the thread has ended.
    pub(crate) fn is_filtered(thread: u32) -> bool {
        Self::of(thread).is_some_and(|status| status.filtered)
    }

    fn parse(text: &str) -> Option<Self> {
        let caught = u64::from_str_radix(field(text, "SigCgt")?, 16).ok()?;
        let bit = |signal: i32| 1_u64 << (signal - 1);
        let faults = bit(libc::SIGSEGV) | bit(libc::SIGBUS) | bit(libc::SIGFPE);
        Some(Self {
            traced: field(text, "TracerPid")? != "0",
            // The field is absent if the kernel has no such filters.
            filtered: !matches!(field(text, "Seccomp"), None | Some("0")),
            catches_faults: caught & faults != 0,
            catches: caught != 0,
            threads: field(text, "Threads")?.parse().ok()?,
        })
    }
}

/// Whether any thread of a process filters its system calls.
pub fn is_filtered(process: u32) -> bool {
    threads_of(process).into_iter().any(Status::is_filtered)
}

/// A field of `/proc/TASK/status`, where the task is an id or `self`.
pub fn status_field(task: impl Display, name: &str) -> Option<String> {
    let text = read_text(&format!("/proc/{task}/status")).ok()?;
    field(&text, name).map(str::to_owned)
}

/// A mask of signals in `/proc/TASK/status`; 0 if the task is gone.
pub fn status_mask(task: impl Display, name: &str) -> u64 {
    let text = status_field(task, name).unwrap_or_default();
    u64::from_str_radix(&text, 16).unwrap_or(0)
}

fn field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    let of_line = |line: &'a str| line.strip_prefix(name)?.strip_prefix(':');
    status.lines().find_map(of_line).map(str::trim)
}

/// The current name of a process or thread, as [`plain_text`].
pub fn name_of(thread: u32) -> Option<String> {
    let name = fs::read(format!("/proc/{thread}/comm")).ok()?;
    Some(plain_text(name.trim_ascii_end()))
}

/// The text of untrusted bytes, without any character that could control a terminal.
pub fn plain_text(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

/// The threads of a process; empty if the process does not exist.
pub fn threads_of(process: u32) -> Vec<u32> {
    numbers_in(&format!("/proc/{process}/task"))
}

/// The entries of a folder whose names are numbers.
pub fn numbers_in(folder: &str) -> Vec<u32> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// The text of a file in which names may hold bytes that are not UTF-8.
pub fn read_text(path: &str) -> io::Result<String> {
    let bytes = fs::read(path)?;
    // Copies the bytes only if some are not UTF-8.
    let lossy =
        |error: std::string::FromUtf8Error| String::from_utf8_lossy(error.as_bytes()).into_owned();
    Ok(String::from_utf8(bytes).unwrap_or_else(lossy))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::process::CommandExt;

    /// Goal: every field is the right one, whatever the name. Method: the fields in proc(5)'s order
    /// with their numbers as values, and a confusing name.
    #[test]
    fn fields_are_counted_from_the_name() {
        let numbers: Vec<String> = (4..=52).map(|field| field.to_string()).collect();
        let line = format!("77 (a) R (b c) S {}", numbers.join(" "));
        let stat = Stat {
            state: 'S',
            parent: 4,
            dying: false,
            faults: 10,
            user_ticks: 14,
            system_ticks: 15,
            waited_for_ticks: 16 + 17,
            waited_for_user_ticks: 16,
            began_ticks: 22,
            stack: 28,
        };
        assert_eq!(parse_stat(&line), Some(stat));
        let dying = |from, to| parse_stat(&line.replace(from, to)).is_some_and(|stat| stat.dying);
        assert!(dying(" 9 ", " 4228364 ") && dying(" 31 ", " 256 "), "PF_EXITING; SIGKILL");
        assert_eq!(parse_stat("77 (cut) S 4 5"), None);
    }

    /// Goal: a process is found whatever its name is. Method: a program whose file name is not
    /// UTF-8 and controls the terminal.
    #[test]
    fn a_process_with_any_name_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join(std::ffi::OsStr::from_bytes(b"\xff) R\x1b"));
        std::os::unix::fs::symlink("/bin/sleep", &program).unwrap();
        let mut sleep = std::process::Command::new(program);
        let mut child = sleep.arg0("sleep").arg("600").spawn().unwrap();
        let found = stat(child.id()).map(|stat| (stat.parent, stat.dying));
        let name = name_of(child.id());
        let threads = Status::of(child.id()).map(|status| status.threads);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(found, Some((std::process::id(), false)));
        assert_eq!(name.as_deref(), Some("\u{fffd}) R\u{fffd}"));
        assert_eq!(threads, Some(1));
    }

    #[test]
    fn the_cpu_time_of_a_thread_is_read() {
        // SAFETY: takes nothing and cannot fail.
        let thread = unsafe { libc::gettid() }.unsigned_abs();
        let before = thread_stat(thread).expect("it runs");
        let busy =
            || thread_stat(thread).is_some_and(|now| now.user_ticks >= before.user_ticks + 3);
        while !busy() {
            (0..1_000_000).for_each(|n| {
                std::hint::black_box(n);
            });
        }
        assert_eq!(before.state, 'R', "it reads this");
        assert_eq!(thread_stat(u32::MAX), None);
    }

    #[test]
    fn fields_are_read_by_their_names() {
        let plain = "Name:\tSeccomp\nTracerPid:\t0\nThreads:\t3\nSigCgt:\t0000000000000002\n\
                     Seccomp:\t0\nSeccomp_filters:\t0\n";
        let expected = Status { catches: true, threads: 3, ..Status::default() };
        assert_eq!(Status::parse(plain), Some(expected));
        assert!(!Status::parse(&plain.replace("0002", "0000")).unwrap().catches);
        let of = |from: &str, to: &str| Status::parse(&plain.replace(from, to)).unwrap();
        assert!(of("Pid:\t0", "Pid:\t7").traced);
        assert!(of("Seccomp:\t0", "Seccomp:\t2").filtered);
        for fault in ["400", "40", "80"] {
            assert!(of("0000000000000002", fault).catches_faults, "{fault}");
        }
        assert_eq!(Status::parse("TracerPid:\t0\n"), None);
    }
}
