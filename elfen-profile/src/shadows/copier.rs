//! The copier in a program: a process that shares its memory and makes copies of it.
//!
//! It stays stopped, and executes nothing but system calls of ours. Copies are its children, so the
//! program cannot wait for them by mistake. It has no descriptors: a copy with those of the program
//! would keep its pipes and locks open.
//!
//! If the program is not a child of ours, it has to wait for a child in the end, whose CPU time and
//! that of all its descendants count for it. So this child is another process, the keeper. The
//! copier is the keeper's child, for which nothing waits.

use std::io;
use std::time::Duration;

use elfen_instrument::process::{is_filtered, status_field};
use elfen_instrument::remote::{Change, Group, Resume, TouchError, Tracee};

use crate::engine::thread::{borrow_thread, seize, step};

/// Why no shadows run of a process.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refusal {
    #[error("{0}")]
    Touch(#[from] TouchError),
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("{0}")]
    Unfit(&'static str),
    #[error("copying its {megabytes} MB would stop it for {} ms, and --max-stall is {} ms",
            stall.as_millis(), most.as_millis())]
    Stall { megabytes: u64, stall: Duration, most: Duration },
}

/// The process that makes the copies of one program.
#[derive(Debug)]
pub(super) struct Copier {
    process: u32,
    thread: Tracee,
    keeper: Option<Keeper>,
    syscall: u64,
}

/// The copier's parent, and its id as the program sees it.
#[derive(Debug)]
struct Keeper {
    thread: Tracee,
    own_id: u64,
}

const WAIT_OPTIONS: u64 = (libc::__WALL | libc::WNOHANG) as u64;
/// For rt_sigaction(2).
const IGNORE: [u64; 4] = [libc::SIG_IGN as u64, 0, 0, 0];

impl Copier {
    /// Creates a copier in a process, whose threads are stopped meanwhile. `is_child` says whether
    /// the process is a child of this one; otherwise it will have to wait for a keeper.
    pub(super) fn create(process: u32, is_child: bool) -> Result<Self, Refusal> {
        check(process)?;
        let mut group = seize(process)?;
        let created = Self::create_in(&mut group, process, is_child);
        group.release();
        created
    }

    fn create_in(group: &mut Group, process: u32, is_child: bool) -> Result<Self, Refusal> {
        let thread = group.stop_all(Group::keep_threads)?;
        // No signal is sent when it ends, and a plain wait(2) does not find it.
        let parent = if is_child { libc::CLONE_PARENT } else { 0 };
        let flags = u64::from((libc::CLONE_VM | libc::CLONE_FILES | parent).unsigned_abs());
        let own_id = group
            .calls(thread, |call| call("clone", libc::SYS_clone, [flags, 0, 0, 0, 0, 0]))??;
        let created = group.take_created();
        let created = created.ok_or(Refusal::Unfit("a process created in it did not stop"))?;
        let mut first = Self { process, thread: created, keeper: None, syscall: group.syscall() };
        // Neither its descriptors nor its terminal are those of the program any more.
        let unshare = u64::from(libc::CLOSE_RANGE_UNSHARE);
        let made = first
            .call(libc::SYS_close_range, [0, u32::MAX.into(), unshare, 0])
            .and_then(|_| first.call(libc::SYS_setsid, [0; 4]))
            .and_then(|_| if is_child { Ok(None) } else { first.child(group, thread).map(Some) });
        match made {
            Ok(None) => {}
            Ok(Some(copier)) => {
                first.keeper = Some(Keeper { thread: created, own_id });
                first.thread = copier;
            }
            Err(error) => {
                first.kill();
                if !is_child {
                    wait_for(own_id, group, thread)?;
                }
                return Err(error.into());
            }
        }
        Ok(first)
    }

    /// Makes a child, for which its parent does not have to wait. The program is stopped.
    fn child(&self, group: &Group, thread: i32) -> io::Result<Tracee> {
        let flags = libc::CLONE_VM | libc::CLONE_FILES | libc::SIGCHLD;
        let made = self.clone_by(&self.thread.registers()?, flags.unsigned_abs().into(), || ())?;
        self.ignore_children(group, thread).map(|()| made).inspect_err(|_| kill(made))
    }

    /// Ignores SIGCHLD, for which some memory of the stopped program is borrowed. Children that
    /// were made before keep the program's action.
    fn ignore_children(&self, group: &Group, thread: i32) -> io::Result<()> {
        let used = Tracee(thread).registers()?.rsp & !31;
        let before = group.memory.read_vec(used, size_of_val(&IGNORE))?;
        group.memory.write(used, IGNORE.map(u64::to_le_bytes).as_flattened())?;
        let number = libc::SIGCHLD.unsigned_abs().into();
        let ignored = self.call(libc::SYS_rt_sigaction, [number, used, 0, 8]);
        group.memory.write(used, &before)?;
        ignored.map(drop)
    }

    /// Makes a system call in the name of the copier.
    fn call(&self, number: libc::c_long, arguments: [u64; 4]) -> io::Result<u64> {
        let [first, second, third, fourth] = arguments;
        let arguments = [first, second, third, fourth, 0, 0];
        borrow_thread(self.thread, |borrowed| borrowed.call(self.syscall, number, arguments))
    }

    /// Makes a copy of the program's memory, for a thread with these registers. Calls `made` once
    /// the program may change its memory again.
    pub(super) fn copy(
        &self,
        registers: &libc::user_regs_struct,
        made: impl FnOnce(),
    ) -> io::Result<Tracee> {
        self.clone_by(registers, 0, made)
    }

    fn clone_by(
        &self,
        registers: &libc::user_regs_struct,
        flags: u64,
        made: impl FnOnce(),
    ) -> io::Result<Tracee> {
        let (rip, rax, orig_rax) = (self.syscall, libc::SYS_clone.cast_unsigned(), u64::MAX);
        let own = libc::user_regs_struct { rip, rax, orig_rax, ..*registers };
        let own = libc::user_regs_struct { rdi: flags, rsi: 0, rdx: 0, r10: 0, r8: 0, ..own };
        self.thread.set_registers(&own)?;
        self.thread.set_signal_mask(u64::MAX)?;
        self.thread.resume(Resume::Step, 0)?;
        let created = match self.thread.wait()? {
            Change::Created(created) => Tracee(created),
            Change::Exited(_) | Change::Killed(_) => return Err(io::ErrorKind::NotFound.into()),
            _ => {
                // The call has failed; its result tells why.
                made();
                let result = self.thread.registers()?.rax.cast_signed();
                let error = i32::try_from(-result).unwrap_or(libc::EAGAIN);
                return Err(io::Error::from_raw_os_error(error));
            }
        };
        made();
        // The end of the call; then the first stop of the copy.
        step(self.thread)?;
        match created.wait()? {
            Change::Exited(_) | Change::Killed(_) => Err(io::ErrorKind::NotFound.into()),
            _ => Ok(created),
        }
    }

    /// Kills a copy and waits for it.
    pub(super) fn end(&self, copy: Tracee) {
        kill(copy);
        // Its parent, the copier, has to wait for it too. Fails only if the copier is gone.
        let any = i64::from(-1_i32).cast_unsigned();
        let _gone = self.call(libc::SYS_wait4, [any, 0, WAIT_OPTIONS, 0]);
    }

    fn kill(&self) {
        kill(self.thread);
        if let Some(keeper) = &self.keeper {
            kill(keeper.thread);
        }
    }

    /// Takes the copier out of a process.
    pub(super) fn remove(self) -> Result<(), Refusal> {
        self.kill();
        let Some(Keeper { own_id, .. }) = self.keeper else { return Ok(()) };
        if status_field(self.process, "Pid").is_none() {
            return Ok(());
        }
        if is_filtered(self.process) {
            const WHY: &str = "it filters its system calls since then, so a dead process of ours \
                               stays with it until it ends";
            return Err(Refusal::Unfit(WHY));
        }
        let mut group = seize(self.process)?;
        // It has ended already: the program must not wait for anything else.
        let waited =
            group.stop_all(Group::keep_threads).and_then(|thread| wait_for(own_id, &group, thread));
        group.release();
        Ok(waited?)
    }
}

/// Waits in the program for a child of ours that has ended.
fn wait_for(own_id: u64, group: &Group, thread: i32) -> Result<(), TouchError> {
    let arguments = [own_id, 0, WAIT_OPTIONS, 0, 0, 0];
    group.calls(thread, |call| call("wait4", libc::SYS_wait4, arguments))??;
    Ok(())
}

/// Whether the calling thread traces a process.
pub(super) fn is_traced_here(process: u32) -> bool {
    // SAFETY: takes nothing.
    let own = unsafe { libc::gettid() }.to_string();
    status_field(process, "TracerPid").is_some_and(|tracer| tracer == own)
}

/// Kills a process with one thread that is still traced, and waits for it as its tracer.
fn kill(thread: Tracee) {
    // If it was killed, and waited for, its id may be that of another process.
    if !is_traced_here(thread.0.unsigned_abs()) {
        return;
    }
    // SAFETY: takes numbers. Only its tracer can wait for the process, so the id is its own.
    unsafe { libc::kill(thread.0, libc::SIGKILL) };
    loop {
        match thread.wait() {
            Ok(Change::Exited(_) | Change::Killed(_)) => break,
            Err(error) if error.kind() != io::ErrorKind::Interrupted => break,
            _ => {}
        }
    }
}

/// Whether shadows can run of a process at all.
fn check(process: u32) -> Result<(), Refusal> {
    if is_filtered(process) {
        return Err(Refusal::Unfit("it filters its system calls (seccomp)"));
    }
    let shadow_stack = status_field(process, "x86_Thread_features");
    if shadow_stack.is_some_and(|text| text.contains("shstk")) {
        return Err(Refusal::Unfit("it has a shadow stack"));
    }
    // SAFETY: takes a number.
    let has_gs = unsafe { libc::getauxval(libc::AT_HWCAP2) } & 2 != 0;
    if !has_gs {
        return Err(Refusal::Unfit("the kernel does not enable FSGSBASE; Linux 5.9 does"));
    }
    Ok(())
}
