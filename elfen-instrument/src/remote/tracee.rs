//! Requests of ptrace(2) for one stopped thread, for a caller that waits for all stops itself.

use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::time::{Duration, Instant};

use super::calls::{
    ptrace, registers_of, restart_call, set_registers, set_signal_mask, signal_mask,
};

/// A traced thread. All methods but [`Tracee::seize`] and [`Tracee::interrupt`] need it stopped;
/// otherwise they fail with ESRCH.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Tracee(pub libc::pid_t);

/// How a thread goes on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Resume {
    Run,
    /// Until after the next instruction.
    Step,
}

/// A change of a thread's state, as waitpid(2) reports it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    Exited(i32),
    Killed(i32),
    /// It is about to receive this signal.
    Signal(i32),
    /// It is stopped by its process's stop signal.
    GroupStop,
    /// PTRACE_INTERRUPT has stopped it, or its process goes on after a stop.
    Stopped,
    /// It has created this thread or process.
    Created(libc::pid_t),
    /// It has executed a program; before, it had this id.
    Executed(libc::pid_t),
}

const EVENT_STOP: i32 = 128;
const OPTIONS: i32 = libc::PTRACE_O_TRACEFORK
    | libc::PTRACE_O_TRACEVFORK
    | libc::PTRACE_O_TRACECLONE
    | libc::PTRACE_O_TRACEEXEC
    | libc::PTRACE_O_EXITKILL;
/// Another thread of this process may receive the signal of a change.
const SLICE_NS: libc::c_long = 1_000_000;
const NT_X86_XSTATE: usize = 0x202;
/// More than the registers of any processor, with 8 KB of matrices.
const VECTORS_BYTES_MAX: usize = 1 << 14;

impl Tracee {
    /// Attaches to a thread that runs. It is killed if its tracer ends.
    pub fn seize(self) -> io::Result<()> {
        ptrace(libc::PTRACE_SEIZE, self.0, 0, OPTIONS.unsigned_abs() as usize)
    }

    /// Sets the options of [`Tracee::seize`] for a thread that is traced already.
    pub fn set_options(self) -> io::Result<()> {
        ptrace(libc::PTRACE_SETOPTIONS, self.0, 0, OPTIONS.unsigned_abs() as usize)
    }

    /// The floating-point and vector registers, as the processor saves them.
    pub fn vectors(self) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; VECTORS_BYTES_MAX];
        let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        let at = ptr::from_mut(&mut part).expose_provenance();
        ptrace(libc::PTRACE_GETREGSET, self.0, NT_X86_XSTATE, at)?;
        bytes.truncate(part.iov_len);
        Ok(bytes)
    }

    pub fn set_vectors(self, bytes: &[u8]) -> io::Result<()> {
        let base = bytes.as_ptr().cast_mut().cast();
        let part = libc::iovec { iov_base: base, iov_len: bytes.len() };
        let at = ptr::from_ref(&part).expose_provenance();
        ptrace(libc::PTRACE_SETREGSET, self.0, NT_X86_XSTATE, at)
    }

    pub fn registers(self) -> io::Result<libc::user_regs_struct> {
        registers_of(self.0)
    }

    pub fn set_registers(self, registers: &libc::user_regs_struct) -> io::Result<()> {
        set_registers(self.0, registers)
    }

    /// The blocked signals, one bit each.
    pub fn signal_mask(self) -> io::Result<u64> {
        signal_mask(self.0)
    }

    pub fn set_signal_mask(self, mask: u64) -> io::Result<()> {
        set_signal_mask(self.0, mask)
    }

    /// What the thread was stopped with.
    pub fn signal_info(self) -> io::Result<libc::siginfo_t> {
        let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
        let at = info.as_mut_ptr().expose_provenance();
        ptrace(libc::PTRACE_GETSIGINFO, self.0, 0, at)?;
        // SAFETY: the value was zeroed and then written by the kernel.
        Ok(unsafe { info.assume_init() })
    }

    /// Sets what the thread receives with the signal that it goes on with.
    pub fn set_signal_info(self, info: &libc::siginfo_t) -> io::Result<()> {
        ptrace(libc::PTRACE_SETSIGINFO, self.0, 0, ptr::from_ref(info).expose_provenance())
    }

    /// Lets the thread go on with a signal; 0 for none.
    pub fn resume(self, how: Resume, signal: i32) -> io::Result<()> {
        let request = match how {
            Resume::Run => libc::PTRACE_CONT,
            Resume::Step => libc::PTRACE_SINGLESTEP,
        };
        ptrace(request, self.0, 0, usize::try_from(signal).unwrap_or(0))
    }

    /// Makes the kernel restart the system call of a thread, if only the stop would end the call
    /// with EINTR.
    pub fn restart_call(self) {
        restart_call(self.0);
    }

    /// Leaves a thread in its group stop, of which SIGCONT ends it.
    pub fn listen(self) -> io::Result<()> {
        ptrace(libc::PTRACE_LISTEN, self.0, 0, 0)
    }

    pub fn interrupt(self) -> io::Result<()> {
        ptrace(libc::PTRACE_INTERRUPT, self.0, 0, 0)
    }

    pub fn detach(self, signal: i32) -> io::Result<()> {
        ptrace(libc::PTRACE_DETACH, self.0, 0, usize::try_from(signal).unwrap_or(0))
    }

    fn message(self) -> io::Result<libc::pid_t> {
        let mut message = 0_u64;
        let at = ptr::from_mut(&mut message).expose_provenance();
        ptrace(libc::PTRACE_GETEVENTMSG, self.0, 0, at)?;
        libc::pid_t::try_from(message).map_err(|_| io::ErrorKind::InvalidData.into())
    }

    /// Waits for the next change of any thread that the calling thread traces.
    pub fn wait_any() -> io::Result<(Self, Change)> {
        Self::wait_for(-1)
    }

    /// Waits for the next change of this thread.
    pub fn wait(self) -> io::Result<Change> {
        Self::wait_for(self.0).map(|(_, change)| change)
    }

    /// Waits for the next change of this thread, at most for `time`.
    pub fn wait_within(self, time: Duration) -> io::Result<Option<Change>> {
        // Each change of a traced thread sends this signal. Blocked, it waits for its receiver.
        let signals = signal_of_changes();
        let mut before = MaybeUninit::zeroed();
        // SAFETY: both are local variables.
        unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &signals, before.as_mut_ptr()) };
        let deadline = Instant::now() + time;
        let change = loop {
            match Self::change_of(self.0, libc::WNOHANG) {
                Ok(None) if Instant::now() > deadline => break Ok(None),
                Ok(None) => {
                    let slice = libc::timespec { tv_sec: 0, tv_nsec: SLICE_NS };
                    // SAFETY: both arguments are local variables; no information is asked for.
                    unsafe { libc::sigtimedwait(&signals, ptr::null_mut(), &slice) };
                }
                Ok(Some((_, change))) => break Ok(Some(change)),
                Err(error) => break Err(error),
            }
        };
        // SAFETY: the kernel has written `before`.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), ptr::null_mut()) };
        change
    }

    fn wait_for(thread: libc::pid_t) -> io::Result<(Self, Change)> {
        Self::change_of(thread, 0)?.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn change_of(thread: libc::pid_t, options: i32) -> io::Result<Option<(Self, Change)>> {
        let mut status = 0;
        // Not those of other threads of this process, which may trace programs too.
        let options = options | libc::__WALL | libc::__WNOTHREAD;
        // SAFETY: `status` is a local variable.
        match unsafe { libc::waitpid(thread, &mut status, options) } {
            -1 => Err(io::Error::last_os_error()),
            0 => Ok(None),
            found => Ok(Some((Self(found), Self(found).change(status)))),
        }
    }

    fn change(self, status: i32) -> Change {
        if libc::WIFEXITED(status) {
            return Change::Exited(libc::WEXITSTATUS(status));
        }
        if libc::WIFSIGNALED(status) {
            return Change::Killed(libc::WTERMSIG(status));
        }
        let signal = libc::WSTOPSIG(status);
        match status >> 16 {
            0 => Change::Signal(signal),
            libc::PTRACE_EVENT_FORK | libc::PTRACE_EVENT_VFORK | libc::PTRACE_EVENT_CLONE => {
                self.message().map_or(Change::Stopped, Change::Created)
            }
            libc::PTRACE_EVENT_EXEC => Change::Executed(self.message().unwrap_or(self.0)),
            EVENT_STOP if signal != libc::SIGTRAP => Change::GroupStop,
            _ => Change::Stopped,
        }
    }
}

fn signal_of_changes() -> libc::sigset_t {
    let mut signals = MaybeUninit::zeroed();
    // SAFETY: the set is a local variable, which this call initialises.
    unsafe { libc::sigemptyset(signals.as_mut_ptr()) };
    // SAFETY: the set is initialised.
    unsafe { libc::sigaddset(signals.as_mut_ptr(), libc::SIGCHLD) };
    // SAFETY: as above.
    unsafe { signals.assume_init() }
}
