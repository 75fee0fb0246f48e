//! Identities of processes, and whether a process still lives; and the calling thread's id.
//!
//! Process ids are reused, so an identity is the id together with the start time of the process.
//! Both fit into one word, which a compare-and-swap can claim. They come from `/proc/PID/stat`,
//! which is read into the stack, because this code runs in other people's processes.
//!
//! Ids are valid in one pid namespace only. Pages name the namespace that they were made in, and a
//! reader in another namespace gets [`Liveness::Unknown`].

use core::arch::{asm, global_asm};
use core::ffi::{CStr, c_int};
use core::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// Linux process ids have at most 22 bits (PID_MAX_LIMIT).
const PID_BITS: u32 = 22;
const START_BITS: u32 = 64 - PID_BITS;

/// A process id and a start time in one word; never 0, so that 0 can mean no process.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Identity(u64);

/// Whether the process behind an [`Identity`] still runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Liveness {
    Alive,
    /// The process has ended or waits to be reaped, or its id belongs to another process now.
    Dead,
    /// `/proc` or the pid namespace hides the process. It is treated as alive, because every wait
    /// has a bound.
    Unknown,
}

impl Identity {
    /// The identity of the calling process; `None` where `/proc` cannot be read.
    pub fn own() -> Option<Self> {
        // SAFETY: getpid takes nothing and cannot fail.
        Self::of(unsafe { libc::getpid() })
    }

    /// The identity of a running process; `None` if `/proc` does not show it.
    pub fn of(pid: c_int) -> Option<Self> {
        match read_stat(pid) {
            Stat::Running { start_ticks } => Some(Self::pack(pid, start_ticks)),
            Stat::Ended | Stat::Unreadable => None,
        }
    }

    /// The identity in a word that another process stored; `None` for 0, which means no process.
    pub fn from_word(word: u64) -> Option<Self> {
        (word >> START_BITS != 0).then_some(Self(word))
    }

    pub fn word(self) -> u64 {
        self.0
    }

    pub fn pid(self) -> c_int {
        // 22 bits always fit.
        c_int::try_from(self.0 >> START_BITS).unwrap_or(c_int::MAX)
    }

    /// Whether this process still runs, as seen from the pid namespace of the caller. Makes a few
    /// system calls, so it belongs in slow paths.
    pub fn liveness(self) -> Liveness {
        if !exists(self.pid()) {
            return Liveness::Dead;
        }
        match read_stat(self.pid()) {
            Stat::Running { start_ticks } if Self::pack(self.pid(), start_ticks) == self => {
                Liveness::Alive
            }
            Stat::Running { .. } | Stat::Ended => Liveness::Dead,
            Stat::Unreadable => Liveness::Unknown,
        }
    }

    fn pack(pid: c_int, start_ticks: u64) -> Self {
        let start = start_ticks & ((1 << START_BITS) - 1);
        Self(u64::from(pid.unsigned_abs()) << START_BITS | start)
    }
}

/// Whether any process has this id. EPERM means that a process has it but belongs to another user.
fn exists(pid: c_int) -> bool {
    // SAFETY: signal 0 sends nothing; kill only looks the id up.
    let found = unsafe { libc::kill(pid, 0) } == 0;
    found || errno() == libc::EPERM
}

pub(crate) fn errno() -> c_int {
    // SAFETY: glibc and musl return the address of this thread's errno, which lives as long as the
    // thread.
    let at = unsafe { libc::__errno_location() };
    // SAFETY: as above, and only this thread writes it.
    unsafe { *at }
}

pub(crate) fn set_errno(value: c_int) {
    // SAFETY: see `errno`.
    let at = unsafe { libc::__errno_location() };
    // SAFETY: see `errno`.
    unsafe { *at = value };
}

/// The inode of the caller's pid namespace, which identifies the namespace until reboot; 0 where
/// `/proc` hides it.
pub fn pid_namespace() -> u32 {
    // SAFETY: an all-zero stat is a valid value of that plain C structure.
    let mut stat: libc::stat = unsafe { core::mem::zeroed() };
    // SAFETY: the path is a NUL-terminated literal and `stat` is ours.
    let failed = unsafe { libc::stat(c"/proc/self/ns/pid".as_ptr(), &mut stat) } != 0;
    // Namespace inodes are 32 bits wide in the kernel (`ns_common.inum`).
    if failed { 0 } else { u32::try_from(stat.st_ino).unwrap_or(0) }
}

#[derive(PartialEq, Debug)]
enum Stat {
    Running { start_ticks: u64 },
    Ended,
    Unreadable,
}

fn read_stat(pid: c_int) -> Stat {
    let path = NumberedPath::of(b"/proc/", pid, b"/stat");
    // Up to the start time, the line has 20 numbers of at most 20 digits and a 16-byte name.
    let mut line = [0u8; 640];
    match read_file(path.as_c_str(), &mut line) {
        Some(text) => parse_stat(text),
        None => Stat::Unreadable,
    }
}

/// Parses `/proc/PID/stat`. Fields are counted after the last `)`, because the name before it may
/// hold spaces and parentheses.
fn parse_stat(line: &[u8]) -> Stat {
    let Some(name_end) = line.iter().rposition(|&b| b == b')') else { return Stat::Unreadable };
    // `get`, as everywhere in this crate: code in other people's processes must not panic.
    let Some(fields) = line.get(name_end + 1..) else { return Stat::Unreadable };
    let mut fields = fields.split(|&b| b == b' ').filter(|f| !f.is_empty());
    match fields.next() {
        Some(b"Z" | b"X" | b"x") => return Stat::Ended,
        Some(_) => {}
        None => return Stat::Unreadable,
    }
    // state is field 3 of proc(5); the start time is field 22.
    match fields.nth(18).and_then(parse_u64) {
        Some(start_ticks) => Stat::Running { start_ticks },
        None => Stat::Unreadable,
    }
}

/// Parses decimal digits. `None` for an empty text, a number that is too large, and any other
/// character.
pub(crate) fn parse_u64(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() {
        return None;
    }
    digits.iter().try_fold(0u64, |value, &digit| {
        let digit = digit.checked_sub(b'0').filter(|&d| d < 10)?;
        value.checked_mul(10)?.checked_add(u64::from(digit))
    })
}

/// Reads the start of a file without an allocation. One `read` suffices, because it returns the
/// whole first page of a `/proc` file.
///
/// Makes the system calls by number. The C library's wrappers are cancellation points, where a
/// cancelled thread could end although its program has no cancellation point there.
pub(crate) fn read_file<'a>(path: &CStr, buffer: &'a mut [u8]) -> Option<&'a [u8]> {
    let flags = libc::O_RDONLY | libc::O_CLOEXEC;
    // SAFETY: `path` is NUL-terminated.
    let fd = unsafe { libc::syscall(libc::SYS_openat, libc::AT_FDCWD, path.as_ptr(), flags) };
    if fd < 0 {
        return None;
    }
    // SAFETY: the kernel writes at most `buffer.len()` bytes into `buffer`.
    let count = unsafe { libc::syscall(libc::SYS_read, fd, buffer.as_mut_ptr(), buffer.len()) };
    // SAFETY: `fd` was opened above, and no other code knows it.
    unsafe { libc::syscall(libc::SYS_close, fd) };
    usize::try_from(count).ok().and_then(|n| buffer.get(..n))
}

/// A path that contains a number, built without an allocation.
pub(crate) struct NumberedPath {
    bytes: [u8; 40],
}

impl NumberedPath {
    /// Joins the parts. `before` and `after` must leave room for ten digits and the NUL.
    pub(crate) fn of(before: &[u8], number: c_int, after: &[u8]) -> Self {
        let mut digits = [0u8; 10];
        let mut rest = number.unsigned_abs();
        let mut first = digits.len();
        loop {
            first -= 1;
            digits[first] = b'0' + u8::try_from(rest % 10).unwrap_or(0);
            rest /= 10;
            if rest == 0 {
                break;
            }
        }
        let digits = digits.get(first..).unwrap_or_default();
        let mut bytes = [0u8; 40];
        let text = before.iter().chain(digits).chain(after);
        // The last byte stays NUL.
        bytes.iter_mut().take(39).zip(text).for_each(|(to, from)| *to = *from);
        Self { bytes }
    }

    pub(crate) fn as_c_str(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.bytes).unwrap_or(c"")
    }
}

// A cache for `own_thread`, defined in assembly as in `check::thread`: stable Rust has no
// thread-locals without std.
global_asm!(
    ".pushsection .tbss,\"awT\",@nobits",
    ".balign 4",
    ".globl elfen_own_thread_rt",
    ".hidden elfen_own_thread_rt",
    ".type elfen_own_thread_rt, @object",
    ".size elfen_own_thread_rt, 4",
    "elfen_own_thread_rt:",
    ".zero 4",
    ".popsection",
);

/// Calls `with` with the thread's cached id, which is 0 before the first request.
#[inline(always)]
fn with_word<R>(with: impl FnOnce(&AtomicU32) -> R) -> R {
    let word: *const AtomicU32;
    // SAFETY: reads the thread pointer, which every thread has at %fs:0, and the word's distance
    // from it, which the loader has filled in.
    unsafe {
        asm!(
            "mov {word}, qword ptr fs:[0]",
            "add {word}, qword ptr [rip + elfen_own_thread_rt@GOTTPOFF]",
            word = out(reg) word,
            options(pure, nomem, nostack),
        );
    }
    // SAFETY: the word lives as long as its thread, which is in this function, and it is atomic.
    with(unsafe { &*word })
}

/// The calling thread's id, in the thread's own pid namespace.
#[inline]
pub(crate) fn own_thread() -> u32 {
    match with_word(|word| word.load(Relaxed)) {
        0 => request_own_thread(),
        thread => thread,
    }
}

#[cold]
fn request_own_thread() -> u32 {
    // SAFETY: gettid takes nothing and cannot fail.
    let thread = unsafe { libc::gettid() }.unsigned_abs();
    with_word(|word| word.store(thread, Relaxed));
    thread
}

/// Clears the cached id. A forked child calls this, because its thread has another id.
pub(crate) fn forget_own_thread() {
    with_word(|word| word.store(0, Relaxed));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn own_identity_is_stable_and_alive() {
        let own = Identity::own().expect("/proc is mounted");
        assert_eq!(Some(own), Identity::own());
        assert_eq!(own.pid().unsigned_abs(), std::process::id());
        assert_eq!(own.liveness(), Liveness::Alive);
        assert_eq!(Identity::from_word(own.word()), Some(own));
    }

    #[test]
    fn same_id_with_another_start_time_is_dead() {
        let own = Identity::own().expect("/proc is mounted");
        let reused = Identity::from_word(own.word() ^ 1).expect("has a pid");
        assert_eq!(reused.liveness(), Liveness::Dead);
    }

    #[test]
    fn a_killed_child_is_dead_even_before_it_is_reaped() {
        let mut child = Command::new("sleep").arg("600").stdin(Stdio::null()).spawn().unwrap();
        let pid = c_int::try_from(child.id()).unwrap();
        let Stat::Running { start_ticks } = read_stat(pid) else { panic!("child has a stat") };
        let identity = Identity::pack(pid, start_ticks);
        assert_eq!(identity.liveness(), Liveness::Alive);
        child.kill().unwrap();
        while identity.liveness() != Liveness::Dead {
            std::thread::yield_now(); // The zombie stays until `wait`.
        }
        child.wait().unwrap();
        assert_eq!(identity.liveness(), Liveness::Dead);
    }

    #[test]
    fn a_word_without_a_process_is_no_identity() {
        assert_eq!(Identity::from_word(0), None);
        assert_eq!(Identity::from_word(12345), None); // a start time without a pid
    }

    #[test]
    fn each_thread_has_its_own() {
        let ids = || {
            // SAFETY: gettid takes nothing and cannot fail.
            let asked = unsafe { libc::gettid() }.unsigned_abs();
            (own_thread(), own_thread(), asked)
        };
        let (first, again, asked) = ids();
        assert_eq!((first, again), (asked, asked));
        let other = std::thread::spawn(ids).join().unwrap();
        assert!(other.0 == other.2 && other.0 != first);
        forget_own_thread();
        assert_eq!(own_thread(), asked);
    }

    #[test]
    fn stat_lines_with_hostile_names_are_parsed() {
        let tail = " S 1 1 1 0 -1 4194560 0 0 0 0 0 0 0 0 20 0 1 0 777 0 0";
        for name in ["(sh)", "(a b)", "(a) R (b)", "())", "(\n)"] {
            let line = std::format!("42 {name}{tail}");
            assert_eq!(parse_stat(line.as_bytes()), Stat::Running { start_ticks: 777 }, "{name}");
        }
        assert_eq!(parse_stat(b"42 (z) Z 1 1"), Stat::Ended);
        for broken in [
            "",
            "42",
            "42 (sh",
            "42 (sh)",
            "42 (sh) S 1 2",
            "42 (sh) S 1 1 1 0 -1 4 0 0 0 0 0 0 0 0 20 0 1 0 x",
        ] {
            assert_eq!(parse_stat(broken.as_bytes()), Stat::Unreadable, "{broken:?}");
        }
    }

    #[test]
    fn paths_contain_short_and_long_ids() {
        for pid in [1, 9, 10, 4_194_304, c_int::MAX] {
            let path = NumberedPath::of(b"/proc/", pid, b"/stat");
            assert_eq!(path.as_c_str().to_str().unwrap(), std::format!("/proc/{}/stat", pid));
        }
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_parse_without_panic(line: std::vec::Vec<u8>) {
            let _stat = parse_stat(&line);
        }
    }
}
