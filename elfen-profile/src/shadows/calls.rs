//! What happens at a system call of a shadow: it is executed, answered without being executed, or
//! the end of the shadow.

use std::ops::Range;

use elfen_instrument::remote::Memory;

use super::files::{Files, Whence};
use super::filter::EXECUTED;

/// Kinds of system calls, as the paper on Shadow Profiling counts them, in the order of [`KINDS`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum CallKind {
    /// Executed, or answered with what the program would get.
    Benign,
    /// Answered as if it were done.
    Output,
    /// Read from files that were opened again.
    Input,
    /// Answered in another way.
    Other,
    /// The shadow ends.
    Ends,
}

/// All kinds, in the order of their numbers.
pub const KINDS: [&str; 5] = ["harmless", "output", "input", "other", "ends"];

/// What to do about a system call.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Answer {
    Execute,
    /// Its result.
    Result(i64),
    /// The shadow ends, and why.
    End(String),
}

/// A system call that a shadow is about to make.
#[derive(Clone, Copy, Debug)]
pub(super) struct Call {
    pub(super) number: i64,
    pub(super) arguments: [u64; 6],
}

/// Ids of the thread that a shadow is a copy of, as that thread sees them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ids {
    pub(super) process: i64,
    pub(super) thread: i64,
    pub(super) parent: i64,
}

/// What a shadow has besides its memory.
#[derive(Debug)]
pub(super) struct World {
    pub(super) id: u32,
    pub(super) ids: Ids,
    pub(super) files: Files,
    /// Memory that others see. It is read-only in the shadow, and stays so.
    pub(super) shared: Vec<Range<u64>>,
    /// Code that the cache has copied.
    pub(super) code: Vec<Range<u64>>,
}

/// Parts of a vector, and descriptors to wait for.
const PARTS_MAX: u64 = 1024;
const ENOTTY: i64 = 25;
const EMPTY_PATH: u64 = libc::AT_EMPTY_PATH.unsigned_abs() as u64;
/// Why the shadows of services mostly end.
pub const INPUT: &str = "it waits for input";
const FILES: &str = "it opens or changes files";
const TASKS: &str = "it creates a thread, a process or a program";
const THREADS: &str = "it waits for another thread";
const MEMORY: &str = "it changes shared memory or code";
const WRONG: &str = "a system call has wrong arguments";

/// An argument that the kernel takes as 32 bits.
fn low(word: u64) -> i32 {
    let [a, b, c, d, ..] = word.to_le_bytes();
    i32::from_le_bytes([a, b, c, d])
}

fn end(why: &str) -> (CallKind, Answer) {
    (CallKind::Ends, Answer::End(why.to_owned()))
}

fn result<T: TryInto<i64>>(kind: CallKind, value: Option<T>) -> (CallKind, Answer) {
    match value.and_then(|value| value.try_into().ok()) {
        Some(value) => (kind, Answer::Result(value)),
        None => end(WRONG),
    }
}

const OUTPUT_DONE: (CallKind, Answer) = (CallKind::Output, Answer::Result(0));
const OTHER_DONE: (CallKind, Answer) = (CallKind::Other, Answer::Result(0));
const EXECUTE: (CallKind, Answer) = (CallKind::Benign, Answer::Execute);

/// What to do about a call. `memory` is that of the shadow.
pub(super) fn answer(call: Call, world: &mut World, memory: &Memory) -> (CallKind, Answer) {
    let [first, second, third, fourth, ..] = call.arguments;
    let fd = low(first);
    let benign = |value: i64| (CallKind::Benign, Answer::Result(value));
    match call.number {
        libc::SYS_getpid => benign(world.ids.process),
        libc::SYS_gettid => benign(world.ids.thread),
        libc::SYS_getppid => benign(world.ids.parent),
        libc::SYS_nanosleep | libc::SYS_clock_nanosleep => benign(0),
        libc::SYS_mmap
        | libc::SYS_munmap
        | libc::SYS_mprotect
        | libc::SYS_mremap
        | libc::SYS_madvise
        | libc::SYS_pkey_mprotect
        | libc::SYS_remap_file_pages
        | libc::SYS_shmat
        | libc::SYS_shmdt => change_of_memory(call, world),
        libc::SYS_prctl => match low(first) {
            libc::PR_SET_NAME | libc::PR_GET_NAME => EXECUTE,
            _ => end("it calls prctl"),
        },
        libc::SYS_prlimit64 if first != 0 || third != 0 => end("it changes limits"),
        libc::SYS_newfstatat if has_empty_path(second, fourth, memory) => stat(fd, third, world),
        libc::SYS_fstat => stat(fd, second, world),
        libc::SYS_newfstatat | libc::SYS_statx | libc::SYS_faccessat | libc::SYS_readlinkat
            if fd != libc::AT_FDCWD =>
        {
            end(FILES)
        }
        number if EXECUTED.contains(&number) => EXECUTE,

        libc::SYS_write => write(fd, &[(second, third)], None, world, memory),
        libc::SYS_pwrite64 => write(fd, &[(second, third)], Some(fourth), world, memory),
        libc::SYS_sendto => result(CallKind::Output, Some(third)),
        libc::SYS_writev => match parts(second, third, memory) {
            Some(parts) => write(fd, &parts, None, world, memory),
            None => end(WRONG),
        },
        libc::SYS_sendmsg => {
            let message = words::<4>(second, memory);
            let parts = message.and_then(|[_, _, at, count]| parts(at, count, memory));
            result(CallKind::Output, parts.and_then(|parts| total(&parts)))
        }
        libc::SYS_fsync
        | libc::SYS_fdatasync
        | libc::SYS_sync_file_range
        | libc::SYS_fadvise64
        | libc::SYS_shutdown
        | libc::SYS_setsockopt
        | libc::SYS_close => {
            if call.number == libc::SYS_close {
                world.files.close(fd);
            }
            OUTPUT_DONE
        }

        libc::SYS_read => read(fd, &[(second, third)], None, world),
        libc::SYS_pread64 => read(fd, &[(second, third)], Some(fourth), world),
        libc::SYS_readv => match parts(second, third, memory) {
            Some(parts) => read(fd, &parts, None, world),
            None => end(WRONG),
        },
        libc::SYS_lseek => {
            let from = match low(third) {
                libc::SEEK_SET => Some(Whence::Start),
                libc::SEEK_CUR => Some(Whence::Here),
                libc::SEEK_END => Some(Whence::End),
                _ => None,
            };
            let at = from.and_then(|from| world.files.seek(fd, second.cast_signed(), from));
            at.map_or_else(|| end(INPUT), |at| result(CallKind::Input, Some(at)))
        }

        libc::SYS_flock
        | libc::SYS_alarm
        | libc::SYS_setitimer
        | libc::SYS_timer_settime
        | libc::SYS_sched_setaffinity
        | libc::SYS_sched_setscheduler
        | libc::SYS_setpriority => OTHER_DONE,
        libc::SYS_fcntl => control(fd, second, third, world),
        libc::SYS_ioctl if world.files.is_regular(fd) => (CallKind::Other, Answer::Result(-ENOTTY)),
        libc::SYS_futex => match low(second) & libc::FUTEX_CMD_MASK {
            libc::FUTEX_WAKE | libc::FUTEX_WAKE_BITSET => OTHER_DONE,
            _ => end(THREADS),
        },
        libc::SYS_epoll_wait | libc::SYS_epoll_pwait if low(fourth) == 0 => OTHER_DONE,
        libc::SYS_poll if low(third) == 0 => poll_nothing(first, second, world),

        libc::SYS_recvfrom
        | libc::SYS_recvmsg
        | libc::SYS_poll
        | libc::SYS_ppoll
        | libc::SYS_select
        | libc::SYS_pselect6
        | libc::SYS_epoll_wait
        | libc::SYS_epoll_pwait
        | libc::SYS_epoll_pwait2
        | libc::SYS_accept
        | libc::SYS_accept4
        | libc::SYS_pause
        | libc::SYS_rt_sigsuspend
        | libc::SYS_rt_sigtimedwait => end(INPUT),
        libc::SYS_open
        | libc::SYS_openat
        | libc::SYS_creat
        | libc::SYS_unlink
        | libc::SYS_unlinkat
        | libc::SYS_rename
        | libc::SYS_renameat2
        | libc::SYS_mkdir
        | libc::SYS_ftruncate
        | libc::SYS_truncate
        | libc::SYS_fallocate
        | libc::SYS_getdents64
        | libc::SYS_ioctl => end(FILES),
        libc::SYS_clone
        | libc::SYS_clone3
        | libc::SYS_fork
        | libc::SYS_vfork
        | libc::SYS_execve
        | libc::SYS_execveat
        | libc::SYS_wait4
        | libc::SYS_waitid => end(TASKS),
        libc::SYS_exit | libc::SYS_exit_group => end("it ends"),
        number => end(&format!("system call {number}")),
    }
}

/// Changes of mappings are executed unless others could see them, or they concern code.
fn change_of_memory(call: Call, world: &World) -> (CallKind, Answer) {
    const HARMLESS: [i32; 10] = [
        libc::MADV_NORMAL,
        libc::MADV_RANDOM,
        libc::MADV_SEQUENTIAL,
        libc::MADV_WILLNEED,
        libc::MADV_DONTNEED,
        libc::MADV_FREE,
        libc::MADV_HUGEPAGE,
        libc::MADV_NOHUGEPAGE,
        libc::MADV_DONTDUMP,
        libc::MADV_DODUMP,
    ];
    let [first, length, third, flags, fifth, _] = call.arguments;
    let overlaps = |start: u64, length: u64| {
        // Lengths are rounded up to whole pages.
        let end = start.saturating_add(length).saturating_add(4095);
        world.shared.iter().chain(&world.code).any(|one| one.start < end && start < one.end)
    };
    let is_code = |rights: u64| rights & u64::from(libc::PROT_EXEC.unsigned_abs()) != 0;
    let has = |flag: i32| flags & u64::from(flag.unsigned_abs()) != 0;
    let is_harmless = match call.number {
        libc::SYS_madvise => {
            return match HARMLESS.contains(&low(third)) {
                true if overlaps(first, length) => (CallKind::Benign, Answer::Result(0)),
                true => EXECUTE,
                false => end(MEMORY),
            };
        }
        libc::SYS_mmap => {
            let is_own = has(libc::MAP_ANONYMOUS) && has(libc::MAP_PRIVATE);
            let replaces = has(libc::MAP_FIXED) && overlaps(first, length);
            is_own && !is_code(third) && !replaces
        }
        libc::SYS_munmap => !overlaps(first, length),
        libc::SYS_mprotect => !overlaps(first, length) && !is_code(third),
        libc::SYS_mremap => {
            let replaces = has(libc::MREMAP_FIXED) && overlaps(fifth, third);
            !overlaps(first, length) && !replaces
        }
        _ => false,
    };
    if is_harmless { EXECUTE } else { end(MEMORY) }
}

fn has_empty_path(path: u64, flags: u64, memory: &Memory) -> bool {
    flags & EMPTY_PATH != 0 && memory.read_vec(path, 1).is_ok_and(|byte| byte == [0])
}

fn stat(fd: i32, to: u64, world: &mut World) -> (CallKind, Answer) {
    match world.files.stat(fd) {
        Some(bytes) if store(world.id, to, &bytes) => (CallKind::Benign, Answer::Result(0)),
        _ => end(FILES),
    }
}

/// The result of a call that would write. What goes to a regular file can be read again.
fn write(
    fd: i32,
    parts: &[(u64, u64)],
    at: Option<u64>,
    world: &mut World,
    memory: &Memory,
) -> (CallKind, Answer) {
    if let Some(bytes) = total(parts)
        && world.files.is_regular(fd)
    {
        let mut all = Vec::new();
        for &(from, length) in parts {
            let length = usize::try_from(length).unwrap_or(usize::MAX);
            // Not more than the shadow may write in all.
            match memory.read_up_to(from, length.min(super::files::BYTES_MAX)) {
                Ok(part) if part.len() == length => all.extend(part),
                _ => return end(WRONG),
            }
        }
        if world.files.write(fd, &all, at).is_none() {
            return end("it writes too much");
        }
        return result(CallKind::Output, Some(bytes));
    }
    result(CallKind::Output, total(parts))
}

/// Reads from a regular file into the shadow.
fn read(fd: i32, parts: &[(u64, u64)], at: Option<u64>, world: &mut World) -> (CallKind, Answer) {
    let Some(bytes) = total(parts).and_then(|bytes| usize::try_from(bytes).ok()) else {
        return end(WRONG);
    };
    let Some(found) = world.files.read(fd, bytes, at) else { return end(INPUT) };
    let mut rest = &found[..];
    for &(to, length) in parts {
        let length = usize::try_from(length).unwrap_or(usize::MAX).min(rest.len());
        let (part, after) = rest.split_at(length);
        if !store(world.id, to, part) {
            return end(WRONG);
        }
        rest = after;
    }
    result(CallKind::Input, Some(found.len()))
}

fn control(fd: i32, what: u64, argument: u64, world: &World) -> (CallKind, Answer) {
    let close_on_exec = i64::from(libc::O_CLOEXEC);
    let other = |value: i64| (CallKind::Other, Answer::Result(value));
    match low(what) {
        libc::F_GETFL => result(CallKind::Other, world.files.flags(fd)),
        libc::F_GETFD => match world.files.flags(fd) {
            Some(flags) => other(i64::from(flags & close_on_exec != 0)),
            None => end(WRONG),
        },
        libc::F_SETFD | libc::F_SETFL => other(0),
        libc::F_SETLK | libc::F_SETLKW | libc::F_OFD_SETLK | libc::F_OFD_SETLKW => other(0),
        // The lock is free: the type is the first field of `struct flock`.
        libc::F_GETLK => {
            let unlocked = i16::try_from(libc::F_UNLCK).unwrap_or(0).to_ne_bytes();
            if store(world.id, argument, &unlocked) { other(0) } else { end(WRONG) }
        }
        _ => end(FILES),
    }
}

/// Says that none of some descriptors is ready.
fn poll_nothing(at: u64, count: u64, world: &World) -> (CallKind, Answer) {
    const POLL_BYTES: u64 = 8;
    const READY_AT: u64 = 6;
    let all = (0..count.min(PARTS_MAX)).map(|number| at + number * POLL_BYTES + READY_AT);
    let mut stored = all.map(|at| store(world.id, at, &[0, 0]));
    if count > PARTS_MAX || !stored.all(|stored| stored) { end(WRONG) } else { OTHER_DONE }
}

/// The parts of a vector of `struct iovec`.
fn parts(at: u64, count: u64, memory: &Memory) -> Option<Vec<(u64, u64)>> {
    let count = usize::try_from(count).ok().filter(|_| count <= PARTS_MAX)?;
    let bytes = memory.read_vec(at, count * 16).ok()?;
    let word = |bytes: &[u8]| bytes.try_into().ok().map(u64::from_ne_bytes);
    bytes.chunks_exact(16).map(|one| Some((word(&one[..8])?, word(&one[8..])?))).collect()
}

fn total(parts: &[(u64, u64)]) -> Option<u64> {
    let sum = parts.iter().try_fold(0_u64, |sum, (_, length)| sum.checked_add(*length))?;
    i64::try_from(sum).is_ok().then_some(sum)
}

fn words<const COUNT: usize>(at: u64, memory: &Memory) -> Option<[u64; COUNT]> {
    let bytes = memory.read_vec(at, COUNT * 8).ok()?;
    let mut words = [0; COUNT];
    for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = u64::from_ne_bytes(bytes.try_into().ok()?);
    }
    Some(words)
}

/// Writes to memory that the shadow itself may write.
fn store(process: u32, at: u64, bytes: &[u8]) -> bool {
    if bytes.is_empty() {
        return true;
    }
    let Ok(to) = usize::try_from(at) else { return false };
    let from = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let to = libc::iovec { iov_base: std::ptr::without_provenance_mut(to), iov_len: bytes.len() };
    // SAFETY: the local part is `bytes`, which is only read. The kernel checks the remote part.
    let done = unsafe { libc::process_vm_writev(process.cast_signed(), &from, 1, &to, 1, 0) };
    usize::try_from(done) == Ok(bytes.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::fs::File;
    use std::io::Write;
    use std::os::fd::AsRawFd;

    fn world() -> World {
        let id = std::process::id();
        World {
            id,
            ids: Ids { process: 7, thread: 8, parent: 1 },
            files: Files::of(id, &BTreeSet::new()),
            shared: std::iter::once(0x7000_0000..0x7000_2000).collect(),
            code: std::iter::once(0x5000_0000..0x5001_0000).collect(),
        }
    }

    fn asked(world: &mut World, number: i64, arguments: [u64; 6]) -> (CallKind, Answer) {
        let memory = Memory::open(std::process::id()).unwrap();
        answer(Call { number, arguments }, world, &memory)
    }

    fn address<T: ?Sized>(of: &T) -> u64 {
        std::ptr::from_ref(of).expose_provenance() as u64
    }

    #[test]
    fn memory_that_others_see_and_code_stay_as_they_are() {
        let mut world = world();
        let rights = u64::from((libc::PROT_READ | libc::PROT_WRITE).unsigned_abs());
        let own = u64::from((libc::MAP_PRIVATE | libc::MAP_ANONYMOUS).unsigned_abs());
        let fixed = own | u64::from(libc::MAP_FIXED.unsigned_abs());
        let code = u64::from(libc::PROT_EXEC.unsigned_abs());
        let advice = u64::from(libc::MADV_REMOVE.unsigned_abs());
        let anywhere = u64::MAX;
        let forbidden: [(i64, [u64; 6]); 9] = [
            (libc::SYS_mprotect, [0x7000_1000, 4096, rights, 0, 0, 0]),
            (libc::SYS_mprotect, [0x6fff_f001, 1, rights, 0, 0, 0]),
            (libc::SYS_mprotect, [0x1000, 4096, code, 0, 0, 0]),
            (libc::SYS_munmap, [0x5000_f000, 1, 0, 0, 0, 0]),
            (libc::SYS_mremap, [0x7000_0000, 4096, 8192, 1, 0, 0]),
            (libc::SYS_mmap, [0x7000_0000, 4096, rights, fixed, anywhere, 0]),
            (libc::SYS_mmap, [0, 4096, rights, 1, 3, 0]),
            (libc::SYS_madvise, [0x7000_0000, 4096, advice, 0, 0, 0]),
            (libc::SYS_shmat, [1, 0, 0, 0, 0, 0]),
        ];
        for (number, arguments) in forbidden {
            let (kind, answer) = asked(&mut world, number, arguments);
            assert_eq!((kind, answer), end(MEMORY), "{number} {arguments:x?}");
        }
        let allowed: [(i64, [u64; 6]); 4] = [
            (libc::SYS_mprotect, [0x1000, 4096, rights, 0, 0, 0]),
            (libc::SYS_munmap, [0x7000_2000, 4096, 0, 0, 0, 0]),
            (libc::SYS_mmap, [0, 4096, rights, own, anywhere, 0]),
            (libc::SYS_brk, [0; 6]),
        ];
        for (number, arguments) in allowed {
            let (kind, answer) = asked(&mut world, number, arguments);
            assert_eq!((kind, answer), EXECUTE, "{number} {arguments:x?}");
            assert!(EXECUTED.contains(&number));
        }
    }

    /// Goal: whatever is executed passes the filter, and everything else ends the shadow or is
    /// answered. Method: all numbers.
    #[test]
    fn only_calls_of_the_list_are_executed() {
        let mut world = world();
        for number in -1..1024 {
            let (_, answer) = asked(&mut world, number, [u64::MAX; 6]);
            assert!(answer != Answer::Execute || EXECUTED.contains(&number), "{number}");
        }
        for number in [libc::SYS_kill, libc::SYS_ptrace, libc::SYS_socket, libc::SYS_io_uring_enter]
        {
            let (kind, _) = asked(&mut world, number, [0; 6]);
            assert_eq!(kind, CallKind::Ends, "{number}");
        }
    }

    #[test]
    fn files_are_read_and_nothing_is_written() {
        let mut world = world();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"0123456789").unwrap();
        let fd = file.as_raw_fd().unsigned_abs().into();
        let memory = Memory::open(world.id).unwrap();
        // Written by the kernel, behind the compiler's back.
        let buffer = std::hint::black_box(Box::new([0_u8; 16]));
        let found = asked(&mut world, libc::SYS_pread64, [fd, address(&*buffer), 4, 3, 0, 0]);
        assert_eq!(found, (CallKind::Input, Answer::Result(4)));
        assert_eq!(memory.read_vec(address(&*buffer), 4).unwrap(), b"3456");
        let text = *b"abc";
        let found = asked(&mut world, libc::SYS_pwrite64, [fd, address(&text), 3, 0, 0, 0]);
        assert_eq!(found, (CallKind::Output, Answer::Result(3)));
        assert_eq!(file.metadata().unwrap().len(), 10);
        let end = u64::from(libc::SEEK_END.unsigned_abs());
        let found = asked(&mut world, libc::SYS_lseek, [fd, 0, end, 0, 0, 0]);
        assert_eq!(found, (CallKind::Input, Answer::Result(10)));
        // A pipe is written to as if it took everything, and not read from.
        let (reader, writer) = std::io::pipe().unwrap();
        let [reader, writer] =
            [reader.as_raw_fd(), writer.as_raw_fd()].map(|fd| u64::from(fd.unsigned_abs()));
        let parts = [address(&text), 3, address(&text), 2];
        let found = asked(&mut world, libc::SYS_writev, [writer, address(&parts), 2, 0, 0, 0]);
        assert_eq!(found, (CallKind::Output, Answer::Result(5)));
        let found = asked(&mut world, libc::SYS_read, [reader, address(&*buffer), 1, 0, 0, 0]);
        assert_eq!(found, super::end(INPUT));
        // Closed descriptors are those of the shadow only.
        asked(&mut world, libc::SYS_close, [fd, 0, 0, 0, 0, 0]);
        let found = asked(&mut world, libc::SYS_read, [fd, address(&*buffer), 1, 0, 0, 0]);
        assert_eq!(found, super::end(INPUT));
        let _open: &File = &file;
    }

    #[test]
    fn wrong_pointers_end_a_shadow() {
        let mut world = world();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"0123456789").unwrap();
        let fd = file.as_raw_fd().unsigned_abs().into();
        for (number, arguments) in [
            (libc::SYS_pread64, [fd, 16, 4, 3, 0, 0]),
            (libc::SYS_pwrite64, [fd, 16, 4, 3, 0, 0]),
            (libc::SYS_writev, [fd, 16, 2, 0, 0, 0]),
            (libc::SYS_writev, [fd, 16, u64::MAX, 0, 0, 0]),
            (libc::SYS_fstat, [fd, 16, 0, 0, 0, 0]),
            (libc::SYS_poll, [16, 3, 0, 0, 0, 0]),
        ] {
            let (kind, _) = asked(&mut world, number, arguments);
            assert_eq!(kind, CallKind::Ends, "{number}");
        }
    }
}
