//! The tracer: reacts to every stop of every thread of the program and its descendants.

use std::collections::{HashMap, HashSet};
use std::ffi::{CStr, OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};

use elfen_core_model::trace::Trace;
use elfen_instrument::process::{plain_text, status_mask};
use elfen_instrument::remote::{Change, Memory, Resume, Tracee};
use elfen_stream::{BlockId, Cache, Exit, Indirect, Stop, Translated, Trap, layout};
use nix::sys::wait::{Id, WaitPidFlag, waitid};

use super::start::{StartError, loses_rights, start};
use crate::engine::space::{RANGE_CALLS, Space};
use crate::engine::thread::{step, take_ended};
use crate::engine::trace_recorder::TraceLimits;
use crate::profile::{Profile, What};

/// More steps than the way between two instructions of the program has in the cache.
const STEPS_TO_ORIGINAL: u32 = 200;
/// Instructions in memory that belongs to no file, after which a process goes on without us.
const GENERATED_MAX: u64 = 2_000;
/// Code segment of 64-bit programs.
const CS_64: u64 = 0x33;
/// `si_code` of an `int3`.
const SI_KERNEL: i32 = 0x80;
const PUSHF: u8 = 0x9c;
const TRAP_FLAG: u64 = 1 << 8;
const MAP_FIXED: u64 = libc::MAP_FIXED.unsigned_abs() as u64;

#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    #[error(transparent)]
    Start(#[from] StartError),
    #[error("waiting for the program: {0}")]
    Wait(io::Error),
}

/// How the program ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ended {
    Exited(i32),
    Killed(i32),
}

/// A profile, and how the program ended.
#[derive(Debug)]
pub struct Recorded {
    pub profile: Profile,
    pub ended: Ended,
}

/// A trace of some of a program's instructions, and how the program ended.
#[derive(Debug)]
pub struct RecordedTrace {
    pub trace: Trace,
    pub ended: Ended,
    /// Stretches that are missing in the trace, and processes that were left, with reasons.
    pub lost: u64,
    pub left: Vec<String>,
}

/// Runs a program to its end, and counts everything that it does. Calls `running` with the id of
/// its process, and with 0 before that process can be gone.
pub fn record(
    words: &[OsString],
    what: What,
    running: impl Fn(i32),
) -> Result<Recorded, TraceError> {
    let tracer = Tracer { what, ..Tracer::default() };
    let (tracer, ended) = run(words, tracer, running)?;
    Ok(Recorded { profile: tracer.profile, ended })
}

/// Runs a program to its end, and records the instructions of its first thread. It goes on without
/// us as soon as enough are recorded. `running` is called as by [`record`].
pub fn record_trace(
    words: &[OsString],
    limits: TraceLimits,
    running: impl Fn(i32),
) -> Result<RecordedTrace, TraceError> {
    let program = words.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    let tracer = Tracer { limits: Some(limits), program, ..Tracer::default() };
    let (tracer, ended) = run(words, tracer, running)?;
    let (trace, lost) = tracer.recorded.unwrap_or_default();
    Ok(RecordedTrace { trace, ended, lost, left: tracer.profile.left })
}

fn run(
    words: &[OsString],
    mut tracer: Tracer,
    running: impl Fn(i32),
) -> Result<(Tracer, Ended), TraceError> {
    let mut child = start(words)?;
    let root = Tracee(child.id().cast_signed());
    running(root.0);
    tracer.root = Some(root);
    tracer.threads.insert(root, Thread::new(root.0));
    let mut is_told = false;
    loop {
        let (thread, change) = match take_ended() {
            Some(found) => found,
            None => match Tracee::wait_any() {
                Ok(found) => found,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                // No traced thread is left.
                Err(error) if error.raw_os_error() == Some(libc::ECHILD) => break,
                Err(error) => return Err(TraceError::Wait(error)),
            },
        };
        match tracer.react(thread, change) {
            // The thread was killed: its end is the next change.
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
            Err(error) => tracer.give_up(thread, &error),
            Ok(()) => {}
        }
        if tracer.ended.is_some() && !is_told {
            running(0);
            is_told = true;
        }
        if (tracer.ended.is_some() || tracer.is_recorded()) && !tracer.releases {
            tracer.release_all();
        }
    }
    let ended = match tracer.ended {
        Some(ended) => ended,
        // It has gone on without us.
        None => {
            let id = nix::unistd::Pid::from_raw(root.0);
            let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT;
            while waitid(Id::Pid(id), flags) == Err(nix::errno::Errno::EINTR) {}
            running(0);
            let status = child.wait().map_err(TraceError::Wait)?;
            let signal = || Ended::Killed(status.signal().unwrap_or(0));
            status.code().map_or_else(signal, Ended::Exited)
        }
    };
    Ok((tracer, ended))
}

#[derive(Debug)]
struct Thread {
    process: libc::pid_t,
    /// Index of its address space; `None` until it has one.
    space: Option<usize>,
    context: u32,
    /// The base of `%gs` as the program has set it.
    gs_base: u64,
    /// It executes one instruction where it is, outside the cache.
    steps: bool,
    /// It executes `pushf`, which pushes the trap flag of the step too.
    pushes_flags: bool,
    /// Mappings that this system call may change.
    changes: Option<std::ops::Range<u64>>,
}

impl Thread {
    fn new(process: libc::pid_t) -> Self {
        let (steps, pushes_flags) = (false, false);
        Self { process, space: None, context: 0, gs_base: 0, steps, pushes_flags, changes: None }
    }
}

/// A thread or process that a traced thread has created.
#[derive(Clone, Copy, Debug)]
struct Created {
    parent: Tracee,
    shares_memory: bool,
    is_thread: bool,
}

#[derive(Debug, Default)]
struct Tracer {
    root: Option<Tracee>,
    what: What,
    threads: HashMap<Tracee, Thread>,
    spaces: Vec<Option<Space>>,
    /// Created, and not stopped yet for the first time.
    created: HashMap<Tracee, Created>,
    /// Stopped for the first time before its creator reported it.
    early: HashSet<Tracee>,
    ended: Option<Ended>,
    /// The program has ended; what it has left behind goes on without us.
    releases: bool,
    profile: Profile,
    /// Record instructions instead of counting.
    limits: Option<TraceLimits>,
    program: Vec<String>,
    /// The trace of the last program that the first process has executed, and what it lacks.
    recorded: Option<(Trace, u64)>,
}

impl Tracer {
    fn react(&mut self, thread: Tracee, change: Change) -> io::Result<()> {
        match change {
            Change::Exited(_) | Change::Killed(_) => {
                self.end(thread, change);
                Ok(())
            }
            Change::Executed(former) => self.executed(thread, former),
            Change::Created(new) => self.created(thread, new),
            _ if !self.threads.contains_key(&thread) => self.first_stop(thread),
            _ if self.releases => self.release(thread, change),
            Change::Stopped => {
                let steps = self.threads.get(&thread).is_some_and(|known| known.steps);
                thread.resume(if steps { Resume::Step } else { Resume::Run }, 0)
            }
            Change::GroupStop => thread.listen(),
            Change::Signal(libc::SIGTRAP) => self.trapped(thread),
            Change::Signal(signal) => self.signalled(thread, signal),
        }
    }

    /// Whether enough instructions are recorded.
    fn is_recorded(&self) -> bool {
        let root = self.root.and_then(|root| self.threads.get(&root));
        let space = root.and_then(|root| self.spaces.get(root.space?)?.as_ref());
        let trace = space.and_then(|space| space.trace.as_ref());
        trace.is_some_and(|trace| trace.is_recorded())
    }

    fn space_of(&mut self, thread: Tracee) -> Option<(&mut Space, &mut Thread)> {
        let known = self.threads.get_mut(&thread)?;
        let space = self.spaces.get_mut(known.space?)?.as_mut()?;
        Some((space, known))
    }

    // Beginnings and ends.

    fn executed(&mut self, thread: Tracee, former: libc::pid_t) -> io::Result<()> {
        let process = self.threads.get(&Tracee(former)).map_or(thread.0, |known| known.process);
        // The other threads of the process are gone.
        let gone: Vec<Tracee> = self
            .threads
            .iter()
            .filter(|(_, known)| known.process == process)
            .map(|(&gone, _)| gone)
            .collect();
        for gone in gone {
            self.forget(gone);
        }
        self.threads.insert(thread, Thread::new(process));
        // Out of the system call, whose result would overwrite a register.
        step(thread)?;
        if thread.registers()?.cs != CS_64 {
            self.profile.note_left(process, "it is a 32-bit program");
            return self.detach(thread, 0);
        }
        match Space::begin(thread, process.unsigned_abs(), self.what, self.limits) {
            Ok(space) => {
                self.spaces.push(Some(space));
                self.join(thread, self.spaces.len() - 1)?;
                let at = thread.registers()?.rip;
                let is_root = self.root == Some(thread);
                let records = self.limits.is_some();
                if let Some((space, known)) = self.space_of(thread)
                    && let Some(trace) = &mut space.trace
                    && (is_root || !records)
                {
                    trace.begin(known.context, at);
                }
                self.enter(thread, true)
            }
            Err(error) => {
                self.profile.note_left(process, &format!("memory for it: {error}"));
                self.detach(thread, 0)
            }
        }
    }

    /// Gives a thread its words.
    fn join(&mut self, thread: Tracee, index: usize) -> io::Result<()> {
        let space = self.spaces.get_mut(index).and_then(Option::as_mut);
        let context = space.and_then(Space::take_context);
        let known = self.threads.get_mut(&thread);
        match (context, known) {
            (Some(context), Some(known)) => {
                known.space = Some(index);
                known.context = context;
                Ok(())
            }
            _ => Err(io::ErrorKind::StorageFull.into()),
        }
    }

    /// A traced thread has created another. It is in its system call, and goes on stepping.
    fn created(&mut self, thread: Tracee, new: libc::pid_t) -> io::Result<()> {
        let registers = thread.registers()?;
        let flags = match registers.orig_rax.cast_signed() {
            libc::SYS_clone => registers.rdi,
            libc::SYS_vfork => u64::from(libc::CLONE_VM.unsigned_abs()),
            libc::SYS_clone3 => {
                let space = self.space_of(thread).map(|(space, _)| space);
                let mut flags = [0; 8];
                let read =
                    space.map(|space| space.objects.memory().read(registers.rdi, &mut flags));
                read.map_or(0, |_| u64::from_le_bytes(flags))
            }
            _ => 0,
        };
        let has = |flag: i32| flags & u64::from(flag.unsigned_abs()) != 0;
        let created = Created {
            parent: thread,
            shares_memory: has(libc::CLONE_VM),
            is_thread: has(libc::CLONE_THREAD),
        };
        let new = Tracee(new);
        let begun = if self.early.remove(&new) {
            self.begin(new, created)
        } else {
            self.created.insert(new, created);
            Ok(())
        };
        let resumed = thread.resume(Resume::Step, 0);
        begun.and(resumed)
    }

    fn first_stop(&mut self, thread: Tracee) -> io::Result<()> {
        match self.created.remove(&thread) {
            Some(created) => self.begin(thread, created),
            None => {
                self.early.insert(thread);
                Ok(())
            }
        }
    }

    /// Lets a new thread or process begin. It is stopped where the program has created it.
    fn begin(&mut self, thread: Tracee, created: Created) -> io::Result<()> {
        let parent = self.threads.get(&created.parent);
        let Some((process, index, gs_base)) =
            parent.and_then(|parent| Some((parent.process, parent.space?, parent.gs_base)))
        else {
            return self.detach(thread, 0);
        };
        let process = if created.is_thread { process } else { thread.0 };
        self.threads.insert(thread, Thread { gs_base, ..Thread::new(process) });
        let index = if created.shares_memory {
            index
        } else {
            let Some(space) = self.spaces.get(index).and_then(Option::as_ref) else {
                return self.detach(thread, 0);
            };
            match space.fork(thread, process.unsigned_abs()) {
                Ok(space) => {
                    self.spaces.push(Some(space));
                    self.spaces.len() - 1
                }
                Err(error) => {
                    self.profile.note_left(process, &format!("memory for it: {error}"));
                    return self.detach(thread, 0);
                }
            }
        };
        if self.join(thread, index).is_err() {
            self.profile.note_left(process, "it has too many threads");
            return self.detach(thread, 0);
        }
        self.enter(thread, true)
    }

    fn end(&mut self, thread: Tracee, change: Change) {
        self.early.remove(&thread);
        self.created.remove(&thread);
        self.forget(thread);
        if self.root == Some(thread) {
            self.ended = Some(match change {
                Change::Exited(status) => Ended::Exited(status),
                Change::Killed(signal) => Ended::Killed(signal),
                _ => return,
            });
        }
    }

    /// Removes a thread that is gone, and counts its address space if it was the last one.
    fn forget(&mut self, thread: Tracee) {
        let Some(known) = self.threads.remove(&thread) else { return };
        let Some(index) = known.space else { return };
        let Some(slot) = self.spaces.get_mut(index) else { return };
        let Some(space) = slot else { return };
        space.give_context_back(known.context);
        let recorder = space.trace.as_mut().filter(|_| self.root == Some(thread));
        if let Some(recorder) = recorder.and_then(|trace| trace.take_recorder()) {
            let lost = recorder.lost;
            let trace = recorder.finish(&space.cache, &space.objects, self.program.clone());
            self.recorded = Some((trace, lost));
        }
        if space.threads == 0 {
            self.profile.add_space(space);
            *slot = None;
        }
    }

    /// Lets a thread go on without us, from where it is.
    fn detach(&mut self, thread: Tracee, signal: i32) -> io::Result<()> {
        self.forget(thread);
        thread.detach(signal)
    }

    /// Lets a thread go on without us after a failure of ours.
    fn give_up(&mut self, thread: Tracee, error: &io::Error) {
        let process = self.threads.get(&thread).map_or(thread.0, |known| known.process);
        self.profile.note_left(process, &format!("tracing it: {error}"));
        // Both fail only for a thread that is gone.
        let _gone = self.put_back(thread).and_then(|()| self.detach(thread, 0));
    }

    /// Stops all threads, to release them.
    fn release_all(&mut self) {
        self.releases = true;
        for thread in self.threads.keys() {
            // This fails for a thread that was killed.
            let _gone = thread.interrupt();
        }
    }

    /// Lets a stopped thread go on in the program itself.
    fn release(&mut self, thread: Tracee, change: Change) -> io::Result<()> {
        let signal = match change {
            Change::Signal(libc::SIGTRAP) => {
                let trapped = self.trap_of(thread)?;
                if let Some((trap, registers)) = trapped {
                    // The trap is passed, and the thread stops again after its next instruction.
                    thread.interrupt()?;
                    return self.trap(thread, trap, registers);
                }
                0
            }
            // The trap of its step may be pending, and would end the program.
            _ if self.threads.get(&thread).is_some_and(|known| known.steps) => {
                let signal = if let Change::Signal(signal) = change { signal } else { 0 };
                return thread.resume(Resume::Step, signal);
            }
            Change::Signal(signal) => signal,
            _ => 0,
        };
        self.put_back(thread)?;
        thread.restart_call();
        self.detach(thread, signal)
    }

    /// The trap that a thread has run into, and its registers.
    fn trap_of(&mut self, thread: Tracee) -> io::Result<Option<(Trap, libc::user_regs_struct)>> {
        let registers = thread.registers()?;
        let space = self.space_of(thread).map(|(space, _)| space);
        let trap = space.and_then(|space| space.cache.trap(registers.rip.wrapping_sub(1)));
        Ok(trap.map(|trap| (trap, registers)))
    }

    /// Lets a thread at an original address go on outside the cache for good.
    fn abandon(
        &mut self,
        thread: Tracee,
        mut registers: libc::user_regs_struct,
        why: &str,
    ) -> io::Result<()> {
        if let Some(known) = self.threads.get(&thread) {
            self.profile.note_left(known.process, why);
            registers.gs_base = known.gs_base;
        }
        registers.eflags &= !TRAP_FLAG;
        thread.set_registers(&registers)?;
        self.detach(thread, 0)
    }

    // In and out of the cache.

    /// Lets a thread that is at an original address go on in the cache. `counts` says whether no
    /// edge of the cache has led there.
    fn enter(&mut self, thread: Tracee, counts: bool) -> io::Result<()> {
        let registers = thread.registers()?;
        self.enter_with(thread, registers, counts)
    }

    /// The same, with registers that the thread may not have yet.
    fn enter_with(
        &mut self,
        thread: Tracee,
        mut registers: libc::user_regs_struct,
        counts: bool,
    ) -> io::Result<()> {
        let Some((space, known)) = self.space_of(thread) else {
            return thread.resume(Resume::Run, 0);
        };
        match space.code(thread, registers.rip) {
            Ok(code) => {
                space.note_entry(known.context, &registers, counts);
                registers.rip = code;
                registers.gs_base = space.base(known.context);
                // The thread is not in a system call any more that would have to be restarted.
                registers.orig_rax = u64::MAX;
                // After a step of `popf`, the kernel takes the flag of our steps for the program's.
                registers.eflags &= !TRAP_FLAG;
                known.steps = false;
                thread.set_registers(&registers)?;
                thread.resume(Resume::Run, 0)
            }
            Err(stop) => {
                space.steps += 1;
                space.generated += u64::from(stop == Stop::NoCode);
                if stop == Stop::Full {
                    return self.abandon(thread, registers, "its code fills the cache");
                }
                if space.generated > GENERATED_MAX {
                    return self.abandon(thread, registers, "it runs code that belongs to no file");
                }
                self.step_outside(thread, registers)
            }
        }
    }

    /// Lets a thread execute the instruction at its original address.
    fn step_outside(
        &mut self,
        thread: Tracee,
        mut registers: libc::user_regs_struct,
    ) -> io::Result<()> {
        let Some((space, known)) = self.space_of(thread) else { return Err(lost()) };
        let mut opcode = [0];
        let read = space.objects.memory().read(registers.rip, &mut opcode);
        known.pushes_flags = read.is_ok() && opcode == [PUSHF];
        registers.gs_base = known.gs_base;
        registers.orig_rax = u64::MAX;
        registers.eflags &= !TRAP_FLAG;
        known.steps = true;
        thread.set_registers(&registers)?;
        thread.resume(Resume::Step, 0)
    }

    /// A thread stopped with SIGTRAP: after a step, at a trap of ours, or by a signal.
    fn trapped(&mut self, thread: Tracee) -> io::Result<()> {
        let registers = thread.registers()?;
        let Some((space, known)) = self.space_of(thread) else {
            return thread.resume(Resume::Run, libc::SIGTRAP);
        };
        if let Some(trap) = space.cache.trap(registers.rip.wrapping_sub(1)) {
            return self.trap(thread, trap, registers);
        }
        let info = thread.signal_info()?;
        // Neither a signal that a process sent, nor a trap of the program's own.
        let is_step = info.si_code > 0 && info.si_code != SI_KERNEL;
        if !known.steps || !is_step {
            return self.signalled(thread, libc::SIGTRAP);
        }
        if is_to_be_restarted(&registers) {
            // A signal interrupted the system call. The kernel restarts it after the signal.
            return thread.resume(Resume::Step, 0);
        }
        known.steps = false;
        known.gs_base = registers.gs_base;
        if std::mem::take(&mut known.pushes_flags) {
            clear_trap_flag(space.objects.memory(), registers.rsp)?;
        }
        if let Some(range) = known.changes.take() {
            space.retire(&range);
        }
        self.enter_with(thread, registers, true)
    }

    fn trap(
        &mut self,
        thread: Tracee,
        trap: Trap,
        mut registers: libc::user_regs_struct,
    ) -> io::Result<()> {
        let Some((space, known)) = self.space_of(thread) else { return Err(lost()) };
        match trap {
            Trap::LogFull => {
                space.drain_log(known.context);
                thread.resume(Resume::Run, 0)
            }
            Trap::AddressesFull => {
                space.take_addresses(known.context);
                thread.resume(Resume::Run, 0)
            }
            Trap::Enter { target } => {
                space.note_left_at(known.context, target);
                registers.rip = target;
                self.enter_with(thread, registers, false)
            }
            Trap::EventsFull => {
                registers.rip = registers.rcx;
                registers.rcx = space.word(known.context, layout::SAVED_RCX);
                space.note_left_at(known.context, registers.rip);
                self.enter_with(thread, registers, false)
            }
            Trap::Unknown => {
                let (site, target) = (registers.rdx, registers.rcx);
                registers.rcx = space.word(known.context, layout::SAVED_RCX);
                registers.rdx = space.word(known.context, layout::SAVED_RDX);
                if !is_canonical(target) {
                    return self.branch_nowhere(thread, site, registers);
                }
                registers.rip = target;
                if space.code(thread, target).is_ok() {
                    space.cache.enter_table(target, &mut space.region);
                }
                space.note_computed(known.context, site, target);
                self.enter_with(thread, registers, false)
            }
            Trap::HostCall { at, block } => {
                space.note_left(known.context, block, at);
                // With events, the call belongs to its block.
                space.steps += u64::from(space.trace.is_none());
                registers.rip = at;
                let call = registers.rax.cast_signed();
                if call == libc::SYS_execve
                    && let Some(file) = file_of(thread, space.objects.memory(), registers.rdi)
                    && loses_rights(&file)
                {
                    return self.leave_alone(thread, registers, &file);
                }
                // Without MAP_FIXED, the kernel takes an address that is free.
                let is_new = call == libc::SYS_mmap && registers.r10 & MAP_FIXED == 0;
                if RANGE_CALLS.contains(&call) && !is_new {
                    let end = registers.rdi.saturating_add(registers.rsi);
                    known.changes = Some(registers.rdi..end);
                }
                self.step_outside(thread, registers)
            }
        }
    }

    /// Detaches from a thread that executes a program which a tracer would take the rights from.
    fn leave_alone(
        &mut self,
        thread: Tracee,
        registers: libc::user_regs_struct,
        file: &Path,
    ) -> io::Result<()> {
        let known = self.threads.get(&thread).ok_or_else(lost)?;
        let (gs_base, process) = (known.gs_base, known.process);
        thread.set_registers(&libc::user_regs_struct { gs_base, ..registers })?;
        let name = plain_text(file.file_name().unwrap_or_default().as_bytes());
        let why = format!("it executes {name}, which would not get its rights if it were traced");
        self.profile.note_left(process, &why);
        self.detach(thread, 0)
    }

    /// A branch to an address that no code can have faults at the branch itself.
    fn branch_nowhere(
        &mut self,
        thread: Tracee,
        site: u64,
        mut registers: libc::user_regs_struct,
    ) -> io::Result<()> {
        let Some((space, known)) = self.space_of(thread) else { return Err(lost()) };
        // Which return it was is not known: all of them fault alike.
        let is_return = |one: &Translated| {
            !one.is_retired && one.exit == Exit::Indirect(Indirect::Return { pops: 0 })
        };
        let blocks = space.cache.blocks();
        let number = match space.cache.block_of_site(site) {
            Some(block) => usize::try_from(block).ok(),
            None => blocks.iter().position(is_return),
        };
        let found = number.and_then(|number| {
            let one = blocks.get(number)?;
            let at = one.start + u64::from(*one.offsets.last()?);
            Some((BlockId::try_from(number).ok()?, one.exit, at))
        });
        let Some((block, exit, at)) = found else {
            return thread.resume(Resume::Run, libc::SIGSEGV);
        };
        match exit {
            Exit::Indirect(Indirect::Return { pops }) => registers.rsp -= 8 + u64::from(pops),
            Exit::Indirect(Indirect::Call) => registers.rsp += 8,
            _ => {}
        }
        if space.trace.is_some() || !Cache::is_return(site) {
            space.note_left(known.context, block, at);
        }
        registers.rip = at;
        self.step_outside(thread, registers)
    }

    // Signals.

    fn signalled(&mut self, thread: Tracee, signal: i32) -> io::Result<()> {
        let Some(known) = self.threads.get(&thread) else {
            return thread.resume(Resume::Run, signal);
        };
        if known.space.is_none() {
            return thread.resume(Resume::Run, signal);
        }
        let reaction = reaction(thread, signal);
        if known.steps {
            return thread.resume(Resume::Step, signal);
        }
        if reaction == Reaction::None {
            thread.restart_call();
            return thread.resume(Resume::Run, signal);
        }
        let info = thread.signal_info()?;
        let is_own = self.is_own_fault(thread, signal)?;
        self.put_back(thread)?;
        if is_own {
            // The original instruction decides whether there is a fault.
            let registers = thread.registers()?;
            return self.step_outside(thread, registers);
        }
        thread.set_signal_info(&info)?;
        if let Some(known) = self.threads.get_mut(&thread) {
            known.steps = true;
        }
        thread.resume(Resume::Step, signal)
    }

    /// Whether a thread has faulted where the original would perhaps not have.
    fn is_own_fault(&mut self, thread: Tracee, signal: i32) -> io::Result<bool> {
        let at = thread.registers()?.rip;
        let Some((space, _)) = self.space_of(thread) else { return Ok(false) };
        let original = space.cache.original(at);
        Ok(signal == libc::SIGSEGV && original.is_some_and(|original| original.own_fault))
    }

    /// Puts a thread in the cache back to where it is in the program.
    fn put_back(&mut self, thread: Tracee) -> io::Result<()> {
        let mut mask = None;
        for _ in 0..STEPS_TO_ORIGINAL {
            let mut registers = thread.registers()?;
            let Some((space, known)) = self.space_of(thread) else { break };
            if !space.cache.holds(registers.rip) {
                break;
            }
            if let Some(original) = space.cache.original(registers.rip) {
                space.note_left(known.context, original.block, original.at);
                registers.rip = original.at;
                if original.in_call {
                    registers.rcx = original.at;
                }
                if original.rcx_saved {
                    registers.rcx = space.word(known.context, layout::SAVED_RCX);
                }
                registers.gs_base = known.gs_base;
                thread.set_registers(&registers)?;
                break;
            }
            match space.cache.trap(registers.rip) {
                Some(Trap::Enter { target }) => {
                    space.note_left_at(known.context, target);
                    registers.rip = target;
                    registers.gs_base = known.gs_base;
                    thread.set_registers(&registers)?;
                    break;
                }
                Some(Trap::Unknown) => {
                    space.note_computed(known.context, registers.rdx, registers.rcx);
                    registers.rip = registers.rcx;
                    registers.rcx = space.word(known.context, layout::SAVED_RCX);
                    registers.rdx = space.word(known.context, layout::SAVED_RDX);
                    registers.gs_base = known.gs_base;
                    thread.set_registers(&registers)?;
                    break;
                }
                Some(Trap::EventsFull) => {
                    registers.rip = registers.rcx;
                    registers.rcx = space.word(known.context, layout::SAVED_RCX);
                    space.note_left_at(known.context, registers.rip);
                    registers.gs_base = known.gs_base;
                    thread.set_registers(&registers)?;
                    break;
                }
                Some(Trap::LogFull) => {
                    space.drain_log(known.context);
                    registers.rip += 1;
                    thread.set_registers(&registers)?;
                }
                Some(Trap::AddressesFull) => {
                    space.take_addresses(known.context);
                    registers.rip += 1;
                    thread.set_registers(&registers)?;
                }
                Some(Trap::HostCall { at, block }) => {
                    space.note_left(known.context, block, at);
                    registers.rip = at;
                    registers.gs_base = known.gs_base;
                    thread.set_registers(&registers)?;
                    break;
                }
                None => {
                    if mask.is_none() {
                        mask = Some(thread.signal_mask()?);
                        thread.set_signal_mask(u64::MAX)?;
                    }
                    step(thread)?;
                }
            }
        }
        mask.map_or(Ok(()), |mask| thread.set_signal_mask(mask))
    }
}

/// The file that a thread executes, as this process sees it.
fn file_of(thread: Tracee, memory: &Memory, at: u64) -> Option<PathBuf> {
    let path = memory.read_up_to(at, libc::PATH_MAX.unsigned_abs() as usize).ok()?;
    let path = Path::new(OsStr::from_bytes(CStr::from_bytes_until_nul(&path).ok()?.to_bytes()));
    let from = if path.is_absolute() { "root" } else { "cwd" };
    let path = path.strip_prefix("/").unwrap_or(path);
    Some(Path::new(&format!("/proc/{}/{from}", thread.0)).join(path))
}

/// What a signal does to a program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Reaction {
    /// A handler runs, or the program ends.
    Visible,
    /// Nothing, or the whole process stops or goes on.
    None,
}

fn reaction(thread: Tracee, signal: i32) -> Reaction {
    let has = |field: &str| status_mask(thread.0, field) & 1 << (signal - 1) != 0;
    let is_quiet = matches!(
        signal,
        libc::SIGCHLD
            | libc::SIGCONT
            | libc::SIGURG
            | libc::SIGWINCH
            | libc::SIGSTOP
            | libc::SIGTSTP
            | libc::SIGTTIN
            | libc::SIGTTOU
    );
    match has("SigCgt") {
        true => Reaction::Visible,
        false if is_quiet || has("SigIgn") => Reaction::None,
        false => Reaction::Visible,
    }
}

/// Removes the trap flag from a word of flags in the program's memory.
fn clear_trap_flag(memory: &Memory, at: u64) -> io::Result<()> {
    let mut word = [0; 8];
    memory.read(at, &mut word)?;
    let flags = u64::from_le_bytes(word) & !TRAP_FLAG;
    memory.write(at, &flags.to_le_bytes())
}

/// The failure of a thread without an address space, which has none of our code to run.
fn lost() -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, "its address space is not known")
}

/// Whether the kernel is about to restart a thread's system call. The errors are internal to it.
fn is_to_be_restarted(registers: &libc::user_regs_struct) -> bool {
    const ERESTARTSYS: i64 = 512;
    const ERESTART_RESTARTBLOCK: i64 = 516;
    let error = registers.rax.cast_signed().checked_neg().unwrap_or(0);
    registers.orig_rax.cast_signed() >= 0 && (ERESTARTSYS..=ERESTART_RESTARTBLOCK).contains(&error)
}

/// Whether an address has the form of one in the lower half of the address space.
fn is_canonical(at: u64) -> bool {
    at < 1 << 47
}
