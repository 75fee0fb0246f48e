//! Requests of ptrace(2) for one stopped thread, for a caller that waits for all stops itself.

use std::io;
use std::mem::MaybeUninit;
use std::ptr;

use super::calls::{ptrace, registers_of, set_registers, set_signal_mask, signal_mask};
use super::group::restart_call;

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

impl Tracee {
    /// Attaches to a thread that runs. It is killed if its tracer ends.
    pub fn seize(self) -> io::Result<()> {
        let options = libc::PTRACE_O_TRACEFORK
            | libc::PTRACE_O_TRACEVFORK
            | libc::PTRACE_O_TRACECLONE
            | libc::PTRACE_O_TRACEEXEC
            | libc::PTRACE_O_EXITKILL;
        let options = usize::try_from(options).map_err(|_| io::ErrorKind::InvalidInput)?;
        ptrace(libc::PTRACE_SEIZE, self.0, 0, options)
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

    fn wait_for(thread: libc::pid_t) -> io::Result<(Self, Change)> {
        let mut status = 0;
        // Not those of other threads of this process, which may trace programs too.
        let options = libc::__WALL | libc::__WNOTHREAD;
        // SAFETY: `status` is a local variable.
        let found = unsafe { libc::waitpid(thread, &mut status, options) };
        if found == -1 {
            return Err(io::Error::last_os_error());
        }
        Ok((Self(found), Self(found).change(status)))
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
