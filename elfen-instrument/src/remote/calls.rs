//! System calls in the name of a thread of another process, by ptrace(2).
//!
//! A [`Seized`] thread was interrupted in its own code. It is stopped, executes the `syscall`
//! instruction of its vDSO with our registers, and then continues with its own registers. A thread
//! inside a system call is left alone: only the kernel knows how to restart that call.
//!
//! Stops are detected by reading the registers, which fails while the thread runs, and not by
//! waitpid(2). With waitpid(2), other threads of this process that wait for children would consume
//! the stops. This code in turn could consume an exit status that they wait for.

use std::cell::RefCell;
use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::time::{Duration, Instant};

use super::memory::{Memory, mappings};
use crate::process::{stat, status_field};

/// Why a process was left untouched.
#[derive(Debug, thiserror::Error)]
pub enum TouchError {
    #[error("it is already traced, or may not be traced: {0}")]
    Refused(io::Error),
    #[error("it did not stop in its own code")]
    Busy,
    #[error("it has no vDSO to make system calls with")]
    NoVdso,
    #[error("{what}: {error}")]
    Call { what: &'static str, error: io::Error },
}

const SYSCALL: [u8; 2] = [0x0f, 0x05];
const POLL_INTERVAL: Duration = Duration::from_micros(50);
/// A thread that does not stop within this time is left alone. It may sleep without a wake-up, as
/// in vfork(2) or on a disk that does not answer, or it may get no CPU.
const STOPS_WITHIN: Duration = Duration::from_millis(50);
/// A thread that runs stops within this time, mostly.
const STOPS_SOON: Duration = Duration::from_micros(200);
/// Values of `op`, the first byte of `struct ptrace_syscall_info`.
pub(super) const AT_ENTRY: u8 = 1;
pub(super) const AT_EXIT: u8 = 2;
const SYSCALL_INFO_WORDS: usize = 11;
/// From linux/ptrace.h, since Linux 5.13. The kernel fills in address, size and signature.
const PTRACE_GET_RSEQ_CONFIGURATION: libc::c_uint = 0x420f;
const RSEQ_WORDS: usize = 3;
/// A thread that stops more often than this before one end of a call is given up.
const STOPS_MAX: u32 = 8;
/// PTRACE_INTERRUPT puts this into `si_code`, above SIGTRAP.
const EVENT_STOP: i32 = 128;

/// Internal to the kernel: restart the call unless a signal handler runs.
const ERESTARTNOHAND: i64 = 514;
/// Calls that return EINTR after a stop although no signal was handled. Those of sockets do so if
/// they have a timeout, which begins again.
const NOT_RESTARTED: [libc::c_long; 20] = [
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_recvmmsg,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_sendmmsg,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_connect,
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_semop,
    libc::SYS_semtimedop,
    libc::SYS_io_getevents,
];

thread_local! {
    /// Threads that the calling thread interrupted and that did not stop within [`STOPS_WITHIN`].
    /// When the calling thread ends, the kernel detaches them.
    static LATE: RefCell<Vec<libc::pid_t>> = const { RefCell::new(Vec::new()) };
}

/// Detaches threads that stopped too late for [`Seized::attach`]. They stand still until then, so a
/// caller of `attach` must call this function often.
pub fn release_late_threads() {
    LATE.with_borrow_mut(|late| {
        late.retain(|&thread| {
            if registers_of(thread).is_ok() {
                let signal = signal_of_stop(thread).unwrap_or(0);
                if ptrace(libc::PTRACE_DETACH, thread, 0, signal).is_ok() {
                    return false;
                }
            }
            match parent_if_dead(thread) {
                Some(parent) => {
                    reap(thread, parent);
                    false
                }
                None => true,
            }
        });
    });
}

/// A thread stopped in its own code. Dropping this value restores its registers and resumes it.
#[derive(Debug)]
pub struct Seized {
    thread: libc::pid_t,
    /// Address of a `syscall` instruction in the process.
    syscall: u64,
    registers: libc::user_regs_struct,
    signals: u64,
}

impl Seized {
    /// Attaches to a thread of `process` and stops it.
    pub fn attach(process: u32, thread: u32) -> Result<Self, TouchError> {
        let thread = thread.cast_signed();
        let (registers, signals) = attach(thread, stop)?;
        let mut seized = Self { thread, syscall: 0, registers, signals };
        // Before it stopped, the process may have executed another program.
        let memory = Memory::open(process).map_err(TouchError::Refused)?;
        seized.syscall = find_syscall(process, &memory).ok_or(TouchError::NoVdso)?;
        Ok(seized)
    }

    /// Makes a system call in the thread's name.
    pub fn call(
        &self,
        what: &'static str,
        number: i64,
        arguments: [u64; 6],
    ) -> Result<u64, TouchError> {
        let fail = |error| TouchError::Call { what, error };
        let [rdi, rsi, rdx, r10, r8, r9] = arguments;
        let rax = number.cast_unsigned();
        let own = libc::user_regs_struct { rip: self.syscall, rax, ..self.registers };
        let own = libc::user_regs_struct { rdi, rsi, rdx, r10, r8, r9, ..own };
        set_registers(self.thread, &own).map_err(fail)?;
        self.resume_until(AT_ENTRY).map_err(fail)?;
        self.resume_until(AT_EXIT).map_err(fail)?;
        let result = registers_of(self.thread).map_err(fail)?.rax.cast_signed();
        match result {
            -4095..=-1 => {
                let errno = i32::try_from(-result).unwrap_or(libc::EIO);
                Err(fail(io::Error::from_raw_os_error(errno)))
            }
            _ => Ok(result.cast_unsigned()),
        }
    }
}

impl Seized {
    /// Where the kernel stores the CPU number of the thread, as a distance from the thread pointer.
    /// `None` if the thread did not register with rseq(2); the GNU C library registers every
    /// thread.
    pub fn cpu_at(&self) -> Option<i32> {
        let mut words = [0_u64; RSEQ_WORDS];
        let at = words.as_mut_ptr().expose_provenance();
        ptrace(PTRACE_GET_RSEQ_CONFIGURATION, self.thread, size_of_val(&words), at).ok()?;
        let [area, ..] = words;
        let has_both = area != 0 && self.registers.fs_base != 0;
        let distance = area.wrapping_sub(self.registers.fs_base).cast_signed();
        i32::try_from(distance).ok().filter(|_| has_both)
    }

    /// Resumes the thread until it stops at one end of a system call. Group stops and SIGCONT
    /// cannot be blocked, so it may stop for these in between.
    fn resume_until(&self, at: u8) -> io::Result<()> {
        let mut signal = 0;
        for _ in 0..STOPS_MAX {
            ptrace(libc::PTRACE_SYSCALL, self.thread, 0, signal)?;
            wait(self.thread).ok_or(io::ErrorKind::NotFound)?;
            if stopped_at(self.thread)? == at {
                return Ok(());
            }
            signal = signal_of_stop(self.thread).unwrap_or(0);
        }
        Err(io::ErrorKind::Interrupted.into())
    }
}

impl Drop for Seized {
    fn drop(&mut self) {
        // Both fail if the thread was killed meanwhile, and then neither is needed.
        let _set = set_registers(self.thread, &self.registers);
        let _unmasked = set_signal_mask(self.thread, self.signals);
        detach(self.thread, 0);
    }
}

/// Why a thread cannot make a call.
pub(super) enum NotTaken {
    /// It must be detached with this signal; 0 for none.
    Stopped(usize),
    /// It did not stop in time.
    Late,
}

/// Stops a thread that is attached already, in its own code.
pub(super) fn stop_in_code(thread: libc::pid_t) -> Result<libc::user_regs_struct, NotTaken> {
    const NO_SIGNAL: NotTaken = NotTaken::Stopped(0);
    ptrace(libc::PTRACE_INTERRUPT, thread, 0, 0).map_err(|_| NO_SIGNAL)?;
    let began = Instant::now();
    let registers = loop {
        match registers_if_stopped(thread) {
            Ok(registers) => break registers,
            Err(NotStopped::Ended) => return Err(NO_SIGNAL),
            Err(NotStopped::Runs) if began.elapsed() < STOPS_SOON => std::thread::yield_now(),
            Err(NotStopped::Runs) if began.elapsed() > STOPS_WITHIN => return Err(NotTaken::Late),
            Err(NotStopped::Runs) => std::thread::sleep(POLL_INTERVAL),
        }
    };
    match signal_of_stop(thread) {
        Some(0) => {}
        // A stop of the whole process has no signal to deliver.
        other => return Err(NotTaken::Stopped(other.unwrap_or(0))),
    }
    if registers.orig_rax.cast_signed() >= 0 {
        restart_call(thread);
        return Err(NO_SIGNAL);
    }
    Ok(registers)
}

/// Stops a thread that is attached already, and blocks its signals.
fn stop(thread: libc::pid_t) -> Result<(libc::user_regs_struct, u64), NotTaken> {
    const NO_SIGNAL: NotTaken = NotTaken::Stopped(0);
    let registers = stop_in_code(thread)?;
    let signals = signal_mask(thread).map_err(|_| NO_SIGNAL)?;
    // From here on the thread may hold our registers, so it is killed if this process is.
    let options = (libc::PTRACE_O_EXITKILL | libc::PTRACE_O_TRACESYSGOOD).unsigned_abs();
    ptrace(libc::PTRACE_SETOPTIONS, thread, 0, options as usize).map_err(|_| NO_SIGNAL)?;
    set_signal_mask(thread, u64::MAX).map_err(|_| NO_SIGNAL)?;
    Ok((registers, signals))
}

/// Attaches to a thread and stops it with `stop`.
pub(super) fn attach<T>(
    thread: libc::pid_t,
    stop: impl FnOnce(libc::pid_t) -> Result<T, NotTaken>,
) -> Result<T, TouchError> {
    release_late_threads();
    if LATE.with_borrow(|late| late.contains(&thread)) {
        return Err(TouchError::Busy);
    }
    ptrace(libc::PTRACE_SEIZE, thread, 0, 0).map_err(TouchError::Refused)?;
    match stop(thread) {
        Ok(stopped) => Ok(stopped),
        Err(NotTaken::Stopped(signal)) => {
            detach(thread, signal);
            Err(TouchError::Busy)
        }
        Err(NotTaken::Late) => {
            LATE.with_borrow_mut(|late| late.push(thread));
            Err(TouchError::Busy)
        }
    }
}

/// The signal that a stopped thread is about to receive. 0 if our PTRACE_INTERRUPT stopped it,
/// `None` if its whole process is stopped.
pub(super) fn signal_of_stop(thread: libc::pid_t) -> Option<usize> {
    let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
    ptrace(libc::PTRACE_GETSIGINFO, thread, 0, info.as_mut_ptr().expose_provenance()).ok()?;
    // SAFETY: the value was zeroed and then written by the kernel.
    let info = unsafe { info.assume_init() };
    let is_ours = info.si_code >> 8 == EVENT_STOP;
    usize::try_from(info.si_signo).ok().map(|signal| if is_ours { 0 } else { signal })
}

/// Whether a stopped thread is at the entry or the exit of a system call; 0 for neither.
pub(super) fn stopped_at(thread: libc::pid_t) -> io::Result<u8> {
    let mut info = [0_u64; SYSCALL_INFO_WORDS];
    let at = info.as_mut_ptr().expose_provenance();
    ptrace(libc::PTRACE_GET_SYSCALL_INFO, thread, size_of_val(&info), at)?;
    let [op, ..] = info[0].to_le_bytes();
    Ok(op)
}

/// Detaches from a stopped thread and delivers `signal` if it is not 0. A thread that was killed
/// ends.
pub(super) fn detach(thread: libc::pid_t, signal: usize) {
    if ptrace(libc::PTRACE_DETACH, thread, 0, signal).is_err() {
        wait(thread);
    }
}

/// Why the registers of an interrupted thread cannot be read.
enum NotStopped {
    Runs,
    Ended,
}

fn registers_if_stopped(thread: libc::pid_t) -> Result<libc::user_regs_struct, NotStopped> {
    registers_of(thread).map_err(|_| match parent_if_dead(thread) {
        Some(parent) => {
            reap(thread, parent);
            NotStopped::Ended
        }
        None => NotStopped::Runs,
    })
}

/// Waits until an interrupted thread has stopped; `None` if it ended instead. Has no timeout,
/// because the thread holds our registers.
fn wait(thread: libc::pid_t) -> Option<libc::user_regs_struct> {
    loop {
        match registers_if_stopped(thread) {
            Ok(registers) => return Some(registers),
            Err(NotStopped::Ended) => return None,
            Err(NotStopped::Runs) => std::thread::sleep(POLL_INTERVAL),
        }
    }
}

/// The parent of a dead thread; 0 if nothing of the thread is left.
fn parent_if_dead(thread: libc::pid_t) -> Option<libc::pid_t> {
    let Some(stat) = stat(thread.unsigned_abs()) else { return Some(0) };
    matches!(stat.state, 'Z' | 'X').then(|| stat.parent.cast_signed())
}

/// Reaps a dead thread, because its parent is notified only after its tracer has reaped it. A child
/// of this process stays for the thread of ours that waits for it; but it cannot be waited for
/// before its other threads were reaped.
fn reap(thread: libc::pid_t, parent: libc::pid_t) {
    let is_first = status_field(thread, "Tgid").is_some_and(|first| first == thread.to_string());
    if u32::try_from(parent) != Ok(std::process::id()) || !is_first {
        // SAFETY: a null status pointer is allowed.
        unsafe { libc::waitpid(thread, ptr::null_mut(), libc::WNOHANG | libc::__WALL) };
    }
}

/// Makes the kernel restart a call of [`NOT_RESTARTED`], unless a signal handler runs.
pub(super) fn restart_call(thread: libc::pid_t) {
    let Ok(mut registers) = registers_of(thread) else { return };
    let (call, result) = (registers.orig_rax.cast_signed(), registers.rax.cast_signed());
    if NOT_RESTARTED.contains(&call) && result == -i64::from(libc::EINTR) {
        registers.rax = (-ERESTARTNOHAND).cast_unsigned();
        // This fails for a thread that was killed, which needs no registers.
        let _gone = set_registers(thread, &registers);
    }
}

pub(super) fn registers_of(thread: libc::pid_t) -> io::Result<libc::user_regs_struct> {
    let mut registers = MaybeUninit::<libc::user_regs_struct>::zeroed();
    ptrace(libc::PTRACE_GETREGS, thread, 0, registers.as_mut_ptr().expose_provenance())?;
    // SAFETY: plain numbers, written by the kernel; any bits are valid.
    Ok(unsafe { registers.assume_init() })
}

pub(super) fn set_registers(
    thread: libc::pid_t,
    registers: &libc::user_regs_struct,
) -> io::Result<()> {
    ptrace(libc::PTRACE_SETREGS, thread, 0, ptr::from_ref(registers).expose_provenance())
}

pub(super) fn signal_mask(thread: libc::pid_t) -> io::Result<u64> {
    let mut mask = 0_u64;
    ptrace(libc::PTRACE_GETSIGMASK, thread, 8, ptr::from_mut(&mut mask).expose_provenance())?;
    Ok(mask)
}

pub(super) fn set_signal_mask(thread: libc::pid_t, mask: u64) -> io::Result<()> {
    ptrace(libc::PTRACE_SETSIGMASK, thread, 8, ptr::from_ref(&mask).expose_provenance())
}

/// One request of ptrace(2). `data` is a number, or the address of memory that the request reads or
/// writes. The caller keeps that memory alive.
pub(super) fn ptrace(
    request: libc::c_uint,
    thread: libc::pid_t,
    address: usize,
    data: usize,
) -> io::Result<()> {
    // SAFETY: the caller guarantees that `data` fits the request; the other arguments are numbers.
    // None of the requests that we make returns data.
    let done = unsafe { libc::ptrace(request, thread, address, data) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Address of a `syscall` instruction in the vDSO, which the kernel maps into every process.
pub fn find_syscall(process: u32, memory: &Memory) -> Option<u64> {
    let mapped = mappings(process).ok()?;
    let vdso = mapped.into_iter().find(|mapping| mapping.name == "[vdso]")?;
    let length = usize::try_from(vdso.range.end.checked_sub(vdso.range.start)?).ok()?;
    let code = memory.read_vec(vdso.range.start, length.min(1 << 20)).ok()?;
    let at = code.windows(SYSCALL.len()).position(|bytes| bytes == SYSCALL)?;
    vdso.range.start.checked_add(u64::try_from(at).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::remote::ended;
    use std::process::{Child, Command};

    fn start_loop() -> Child {
        let child = Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap();
        // Waits until the child has executed `sh`.
        while !std::fs::read_link(format!("/proc/{}/exe", child.id()))
            .is_ok_and(|exe| exe.file_name().is_some_and(|name| name != "elfen_instrument"))
        {
            std::thread::yield_now();
        }
        std::thread::sleep(Duration::from_millis(50));
        child
    }

    /// Goal: a process maps memory without knowing of it, and continues undisturbed. Method: a
    /// shell that loops.
    #[test]
    fn a_process_maps_memory_on_request() {
        let mut child = start_loop();
        let memory = Memory::open(child.id()).unwrap();
        let mut address = Err(TouchError::Busy);
        for _ in 0..1000 {
            address = Seized::attach(child.id(), child.id()).and_then(|seized| {
                let anonymous = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;
                let rights = (libc::PROT_READ | libc::PROT_EXEC) as u64;
                let none = u64::MAX;
                seized.call("mmap", libc::SYS_mmap, [0, 4096, rights, anonymous, none, 0])
            });
            if !matches!(address, Err(TouchError::Busy)) {
                break;
            }
        }
        let address = address.unwrap();
        memory.write(address, b"elfen").unwrap();
        let mapped = mappings(child.id()).unwrap();
        let arena = mapped.iter().find(|mapping| mapping.range.contains(&address)).unwrap();
        assert!(arena.executable && !arena.writable && arena.file.is_none());
        assert_eq!(memory.read_vec(address, 5).unwrap(), b"elfen");
        assert_eq!(ended(&mut child).unwrap(), None, "it goes on");
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Goal: the parent of a process that is killed during a call still gets its exit status.
    /// Method: a shell waits for a loop, which is killed while it is stopped by us.
    #[test]
    fn a_parent_is_notified_of_a_child_killed_while_stopped() {
        let script = "sh -c 'while :; do :; done' & echo $!; wait $!; exit 5";
        let mut parent = Command::new("sh");
        let mut parent =
            parent.args(["-c", script]).stdout(std::process::Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        let mut output = io::BufReader::new(parent.stdout.take().unwrap());
        io::BufRead::read_line(&mut output, &mut line).unwrap();
        let child: u32 = line.trim().parse().unwrap();
        std::thread::sleep(Duration::from_millis(50));
        let seized = (0..1000).find_map(|_| match Seized::attach(child, child) {
            Err(TouchError::Busy) => None,
            other => Some(other),
        });
        // SAFETY: takes numbers. The parent has not reaped the child yet, so the id is still its
        // own.
        unsafe { libc::kill(child.cast_signed(), libc::SIGKILL) };
        if let Some(Ok(seized)) = seized {
            let result = seized.call("getpid", libc::SYS_getpid, [0; 6]);
            assert!(matches!(result, Err(TouchError::Call { what: "getpid", .. })), "{result:?}");
        }
        assert_eq!(parent.wait().unwrap().code(), Some(5));
    }

    /// Goal: a thread that does not stop delays its tracer only briefly, and continues afterwards.
    /// Method: a parent in vfork(2) whose child sleeps.
    #[test]
    fn a_thread_that_does_not_stop_is_left_alone() {
        const PROGRAM: &str = "#include <unistd.h>\n#include <stdio.h>\n\
            int main(void) { if (!vfork()) { write(1, \"x\", 1); usleep(700000); _exit(0); }\n\
            return 7; }";
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().join("vfork.c");
        std::fs::write(&source, PROGRAM).unwrap();
        let program = folder.path().join("vfork");
        let built = Command::new("cc").arg("-o").arg(&program).arg(&source).status().unwrap();
        assert!(built.success());
        let mut parent =
            Command::new(&program).stdout(std::process::Stdio::piped()).spawn().unwrap();
        io::Read::read_exact(&mut parent.stdout.take().unwrap(), &mut [0]).unwrap();
        let began = Instant::now();
        for _ in 0..2 {
            let taken = Seized::attach(parent.id(), parent.id());
            assert!(matches!(taken, Err(TouchError::Busy | TouchError::Refused(_))), "{taken:?}");
        }
        assert!(began.elapsed() < Duration::from_millis(500), "{:?}", began.elapsed());
        let status = loop {
            release_late_threads();
            match ended(&mut parent).unwrap() {
                Some(status) => break status,
                None => std::thread::sleep(POLL_INTERVAL),
            }
        };
        assert_eq!(status.code(), Some(7));
    }

    #[test]
    fn a_failed_call_returns_its_error_and_a_sleeping_thread_is_left_alone() {
        let mut child = start_loop();
        let result = Seized::attach(child.id(), child.id())
            .map(|seized| seized.call("close", libc::SYS_close, [999, 0, 0, 0, 0, 0]));
        match result {
            Ok(Err(TouchError::Call { what: "close", error })) => {
                assert_eq!(error.raw_os_error(), Some(libc::EBADF));
            }
            Err(TouchError::Busy | TouchError::Refused(_)) => {}
            other => panic!("{other:?}"),
        }
        child.kill().unwrap();
        child.wait().unwrap();
        let mut sleeper = Command::new("sleep").arg("600").spawn().unwrap();
        std::thread::sleep(Duration::from_millis(50));
        let taken = Seized::attach(sleeper.id(), sleeper.id());
        assert!(matches!(taken, Err(TouchError::Busy | TouchError::Refused(_))), "{taken:?}");
        assert_eq!(ended(&mut sleeper).unwrap(), None);
        sleeper.kill().unwrap();
        sleeper.wait().unwrap();
    }
}
