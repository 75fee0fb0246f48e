//! System calls of a stopped, traced thread in our name.

use std::cell::RefCell;
use std::io;
use std::thread::sleep;
use std::time::{Duration, Instant};

use elfen_instrument::remote::{Change, Group, Resume, TouchError, Tracee};

/// Runs `make` with the thread's signals blocked, and restores its registers afterwards. The thread
/// must not be inside a system call.
pub(crate) fn borrow_thread<T>(
    thread: Tracee,
    make: impl FnOnce(&Borrowed) -> io::Result<T>,
) -> io::Result<T> {
    let registers = thread.registers()?;
    let mask = thread.signal_mask()?;
    thread.set_signal_mask(u64::MAX)?;
    let made = make(&Borrowed { thread, registers });
    thread.set_registers(&registers)?;
    thread.set_signal_mask(mask)?;
    made
}

/// Another recording, and live checks, trace a process for some milliseconds.
const TRACED_WITHIN: Duration = Duration::from_millis(300);

/// Attaches to a process, which others may be tracing for a moment.
pub(crate) fn seize(process: u32) -> Result<Group, TouchError> {
    let start = Instant::now();
    loop {
        match Group::seize(process) {
            Err(TouchError::Refused(error))
                if error.raw_os_error() == Some(libc::EPERM) && start.elapsed() < TRACED_WITHIN =>
            {
                sleep(Duration::from_millis(5));
            }
            seized => return seized,
        }
    }
}

#[derive(Debug)]
pub(crate) struct Borrowed {
    thread: Tracee,
    registers: libc::user_regs_struct,
}

/// More stops than a thread can have at one instruction with all signals blocked.
const STOPS_MAX: u32 = 16;

impl Borrowed {
    /// The thread's stack pointer.
    pub(crate) fn stack(&self) -> u64 {
        self.registers.rsp
    }

    /// Makes a system call by the `syscall` instruction at an address.
    pub(crate) fn call(
        &self,
        syscall: u64,
        number: libc::c_long,
        arguments: [u64; 6],
    ) -> io::Result<u64> {
        let [rdi, rsi, rdx, r10, r8, r9] = arguments;
        let (rip, rax, orig_rax) = (syscall, number.cast_unsigned(), u64::MAX);
        let own = libc::user_regs_struct { rip, rax, orig_rax, ..self.registers };
        let own = libc::user_regs_struct { rdi, rsi, rdx, r10, r8, r9, ..own };
        self.thread.set_registers(&own)?;
        for _ in 0..STOPS_MAX {
            step(self.thread)?;
            let now = self.thread.registers()?;
            if now.rip == syscall {
                continue;
            }
            return match now.rax.cast_signed() {
                result @ -4095..=-1 => {
                    let errno = i32::try_from(-result).unwrap_or(libc::EIO);
                    Err(io::Error::from_raw_os_error(errno))
                }
                result => Ok(result.cast_unsigned()),
            };
        }
        Err(io::ErrorKind::Interrupted.into())
    }
}

thread_local! {
    /// Threads that ended while this module waited for them.
    static ENDED: RefCell<Vec<(Tracee, Change)>> = const { RefCell::new(Vec::new()) };
}

/// A thread that ended while it was stepped, and how.
pub(crate) fn take_ended() -> Option<(Tracee, Change)> {
    ENDED.with_borrow_mut(Vec::pop)
}

/// Steps a thread by one instruction, and waits for it.
pub(crate) fn step(thread: Tracee) -> io::Result<()> {
    thread.resume(Resume::Step, 0)?;
    match thread.wait()? {
        end @ (Change::Exited(_) | Change::Killed(_)) => {
            ENDED.with_borrow_mut(|ended| ended.push((thread, end)));
            Err(io::Error::from_raw_os_error(libc::ESRCH))
        }
        _ => Ok(()),
    }
}
