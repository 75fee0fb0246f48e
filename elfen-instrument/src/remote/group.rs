//! All threads of one process, traced and stopped together, including threads that sleep in the
//! kernel.
//!
//! A thread that is stopped inside a system call continues with that call: the kernel restarts it
//! as after any stop. A few calls would return EINTR instead; these are made to restart. System
//! calls in the process's name are made by a thread without pending signals, with all signals
//! blocked meanwhile. That thread is then stopped once more and gets its own registers back. At
//! this stop the kernel has not decided yet whether to restart its own call.
//!
//! The process survives its tracer. If the tracer is killed during one of these calls, the calling
//! thread keeps our registers; this moment cannot be made safe. A child that was created and not
//! released yet is then killed.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

use super::calls::{
    AT_ENTRY, AT_EXIT, TouchError, find_syscall, ptrace, registers_of, restart_call, set_registers,
    set_signal_mask, signal_mask, signal_of_stop, stopped_at,
};
use super::memory::Memory;
use super::tracee::Tracee;

/// What happened to a traced thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// It created this thread or process, which is stopped before its first step. The creator is
    /// stopped too.
    Made(i32),
    /// It executed another program.
    Exec,
    /// It ended.
    Ended,
    /// A stop that needs no reaction.
    Other,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Runs,
    /// Must be resumed with this signal; 0 for none.
    Stopped(i32),
    /// Stopped inside fork(2), clone(2) or execve(2). The result of the call is yet to be written
    /// to the thread's registers, and would overwrite a register of ours.
    InCall,
    /// Its whole process is stopped by a signal.
    Listens,
    /// The same, and it was resumed: it waits for SIGCONT, and answers no request.
    ListensOn,
    /// Newly created, and not adopted yet.
    Held,
}

/// All traced threads of one process; the header of this file describes the mechanism.
#[derive(Debug)]
pub struct Group {
    pub process: u32,
    pub memory: Memory,
    syscall: u64,
    /// It has executed another program since memory and `syscall` were looked up.
    is_stale: bool,
    threads: BTreeMap<libc::pid_t, State>,
}

const WAIT: Duration = Duration::from_millis(200);
/// How often all threads are stopped until one of them can make system calls.
const TRIES: u32 = 5;
/// How often [`Group::run_out`] resumes a thread.
const RETURNS_MAX: u32 = 16;
const EVENT_STOP: i32 = 128;
const SYSCALL_STOP: i32 = libc::SIGTRAP | 0x80;

impl Group {
    /// Attaches to all threads of a process, and to threads that it creates later.
    pub fn seize(process: u32) -> Result<Self, TouchError> {
        let memory = Memory::open(process).map_err(TouchError::Refused)?;
        // Until it is traced, it can execute another program unseen.
        let mut group =
            Self { process, memory, syscall: 0, is_stale: true, threads: BTreeMap::new() };
        loop {
            let mut is_new = false;
            for thread in threads(process).map_err(TouchError::Refused)? {
                if group.threads.contains_key(&thread) {
                    continue;
                }
                match seize(thread) {
                    Ok(()) => is_new = group.threads.insert(thread, State::Runs).is_none(),
                    // The thread ended meanwhile.
                    Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
                    // A thread that a traced thread has just created is traced already, and reports
                    // its own stop.
                    Err(_) if !group.threads.is_empty() => {}
                    Err(error) => return Err(TouchError::Refused(error)),
                }
            }
            if !is_new {
                return Ok(group);
            }
        }
    }

    /// Stops all threads. Calls `made` for each process that they create meanwhile.
    pub fn stop(&mut self, mut made: impl FnMut(&mut Self, i32)) -> Result<(), TouchError> {
        let threads: Vec<libc::pid_t> = self.threads.keys().copied().collect();
        for thread in threads {
            // One that has stopped already would stop once more as soon as it is resumed, and not
            // execute a single instruction in between.
            if self.is_resumed(thread)
                && let Some(Event::Made(child)) = self.wait_for(thread)
            {
                made(self, child);
            }
            if self.is_resumed(thread) {
                // This fails for a thread that is about to stop anyway.
                let _stops = ptrace(libc::PTRACE_INTERRUPT, thread, 0, 0);
            }
        }
        self.await_stops(&mut made)?;
        if self.threads.is_empty() {
            return Err(TouchError::Busy);
        }
        if self.is_stale {
            self.memory = Memory::open(self.process).map_err(TouchError::Refused)?;
            self.syscall = find_syscall(self.process, &self.memory).ok_or(TouchError::NoVdso)?;
            self.is_stale = false;
        }
        Ok(())
    }

    fn await_stops(&mut self, mut made: impl FnMut(&mut Self, i32)) -> Result<(), TouchError> {
        let deadline = Instant::now() + WAIT;
        while let Some(thread) = self.running() {
            match self.wait_for(thread) {
                Some(Event::Made(child)) => made(self, child),
                Some(_) => {}
                None if Instant::now() > deadline => return Err(TouchError::Busy),
                None => std::thread::yield_now(),
            }
        }
        Ok(())
    }

    /// Moves threads that were stopped by a signal to the beginning of its handler, where they can
    /// make system calls.
    pub fn deliver_signals(&mut self, made: impl FnMut(&mut Self, i32)) -> Result<(), TouchError> {
        for (&thread, state) in &mut self.threads {
            if let State::Stopped(signal @ 1..) = *state {
                let signal = usize::try_from(signal).unwrap_or(0);
                // These fail for a thread that was killed.
                let _gone = ptrace(libc::PTRACE_INTERRUPT, thread, 0, 0);
                let _gone = ptrace(libc::PTRACE_CONT, thread, 0, signal);
                *state = State::Runs;
            }
        }
        self.await_stops(made)
    }

    /// Lets threads of a stopped process run on in code of ours, which ends with rt_sigreturn(2).
    /// They execute nothing of the program behind it.
    pub fn run_out(&mut self, is_ours: impl Fn(u64) -> bool) -> Result<(), TouchError> {
        let fail = |error| TouchError::Call { what: "leaving our code", error };
        for (&thread, state) in &mut self.threads {
            if *state != State::Listens {
                continue;
            }
            // A handler may lead to other code of ours. Each of the two has an entry and an exit.
            let (mut signal, mut is_moved) = (0, false);
            for _ in 0..RETURNS_MAX {
                if !is_ours(registers_of(thread).map_err(fail)?.rip) {
                    break;
                }
                ptrace(libc::PTRACE_SYSCALL, thread, 0, signal).map_err(fail)?;
                is_moved = true;
                signal = match wait_stopped_within(thread, WAIT).map_err(fail)? {
                    SYSCALL_STOP | libc::SIGTRAP | libc::SIGSTOP => 0,
                    other => usize::try_from(other).unwrap_or(0),
                };
            }
            if is_moved {
                // To where the whole process stands still.
                ptrace(libc::PTRACE_INTERRUPT, thread, 0, 0).map_err(fail)?;
                ptrace(libc::PTRACE_CONT, thread, 0, signal).map_err(fail)?;
                *state = State::Runs;
            }
        }
        self.await_stops(Self::keep_threads)
    }

    /// Stops all threads. Returns one that can make system calls.
    pub fn stop_all(&mut self, mut made: impl FnMut(&mut Self, i32)) -> Result<i32, TouchError> {
        for _ in 0..TRIES {
            self.stop(&mut made)?;
            if self.callable_thread().is_none() {
                self.deliver_signals(&mut made)?;
            }
            if let Some(thread) = self.callable_thread() {
                return Ok(thread);
            }
            self.go_on();
        }
        Err(TouchError::Busy)
    }

    /// Adopts a new thread, and lets a new process go on without us.
    pub fn keep_threads(&mut self, made: i32) {
        if !self.adopt(made) {
            self.release_child(made);
        }
    }

    fn is_resumed(&self, thread: libc::pid_t) -> bool {
        matches!(self.threads.get(&thread), Some(State::Runs | State::ListensOn))
    }

    fn running(&self) -> Option<libc::pid_t> {
        self.threads.keys().copied().find(|&thread| self.is_resumed(thread))
    }

    /// Resumes all stopped threads.
    pub fn go_on(&mut self) {
        for (&thread, state) in &mut self.threads {
            let request = match *state {
                State::Runs | State::ListensOn | State::Held => continue,
                State::Stopped(_) | State::InCall => libc::PTRACE_CONT,
                State::Listens => libc::PTRACE_LISTEN,
            };
            let signal = if let State::Stopped(signal) = *state { signal } else { 0 };
            // This fails for a thread that was killed, which needs no resuming.
            let _gone = ptrace(request, thread, 0, usize::try_from(signal).unwrap_or(0));
            *state = if *state == State::Listens { State::ListensOn } else { State::Runs };
        }
    }

    /// Detaches from all threads, which must be stopped.
    pub fn release(mut self) {
        for (thread, state) in std::mem::take(&mut self.threads) {
            let signal = if let State::Stopped(signal) = state { signal } else { 0 };
            let _gone =
                ptrace(libc::PTRACE_DETACH, thread, 0, usize::try_from(signal).unwrap_or(0));
        }
    }

    /// Address of a `syscall` instruction in the process, once it was stopped.
    pub fn syscall(&self) -> u64 {
        self.syscall
    }

    pub fn is_empty(&self) -> bool {
        self.threads.is_empty()
    }

    pub fn threads(&self) -> usize {
        self.threads.len()
    }

    /// The stack pointer and the thread pointer of each thread. All threads must be stopped.
    pub fn stacks(&self) -> Vec<(u64, u64)> {
        let registers = self.threads.keys().filter_map(|&thread| registers_of(thread).ok());
        registers.map(|registers| (registers.rsp, registers.fs_base)).collect()
    }

    /// The address that each thread continues at. All threads must be stopped.
    pub fn instructions(&self) -> Vec<u64> {
        let registers = self.threads.keys().filter_map(|&thread| registers_of(thread).ok());
        registers.map(|registers| registers.rip).collect()
    }

    /// The next event of any thread; `None` if there is none now.
    pub fn next_event(&mut self) -> Option<Event> {
        let mut status = 0;
        // Not those of other threads of this process, which may trace programs too.
        let options = libc::WNOHANG | libc::__WALL | libc::__WNOTHREAD;
        // SAFETY: `status` is a local variable.
        let thread = unsafe { libc::waitpid(-1, &mut status, options) };
        (thread > 0).then(|| self.record_status(thread, status))
    }

    fn wait_for(&mut self, thread: libc::pid_t) -> Option<Event> {
        let mut status = 0;
        // SAFETY: `status` is a local variable.
        let found = unsafe { libc::waitpid(thread, &mut status, libc::WNOHANG | libc::__WALL) };
        match found {
            0 => None,
            -1 => {
                self.threads.remove(&thread);
                Some(Event::Ended)
            }
            thread => Some(self.record_status(thread, status)),
        }
    }

    fn record_status(&mut self, thread: libc::pid_t, status: i32) -> Event {
        if !libc::WIFSTOPPED(status) {
            note_end(thread, status);
            self.threads.remove(&thread);
            return Event::Ended;
        }
        let (signal, event) = (libc::WSTOPSIG(status), status >> 16);
        let (state, event) = match event {
            libc::PTRACE_EVENT_FORK | libc::PTRACE_EVENT_VFORK | libc::PTRACE_EVENT_CLONE => {
                let made = message(thread).map_or(Event::Other, Event::Made);
                (State::InCall, made)
            }
            libc::PTRACE_EVENT_EXEC => {
                // execve(2) ended the other threads, and the remaining one has the id of the first.
                self.threads.clear();
                self.is_stale = true;
                self.threads.insert(thread, State::InCall);
                (State::InCall, Event::Exec)
            }
            EVENT_STOP if signal == libc::SIGTRAP => {
                restart_call(thread);
                (State::Stopped(0), Event::Other)
            }
            EVENT_STOP => (State::Listens, Event::Other),
            _ if signal == SYSCALL_STOP || signal == libc::SIGTRAP && is_ours(thread) => {
                (State::Stopped(0), Event::Other)
            }
            _ => (State::Stopped(signal), Event::Other),
        };
        let state = if self.threads.contains_key(&thread) { state } else { State::Held };
        self.threads.insert(thread, state);
        event
    }

    /// Waits for a thread or process that a traced thread created, and returns whether it belongs
    /// to the same process. A new process stays stopped until [`Group::release_child`]. It is
    /// killed if its tracer ends before that, because it has our registers or runs in its creator's
    /// memory.
    pub fn adopt(&mut self, made: i32) -> bool {
        let own = std::fs::metadata(format!("/proc/{}/task/{made}", self.process)).is_ok();
        let deadline = Instant::now() + WAIT;
        while self.threads.get(&made) != Some(&State::Held) {
            if self.wait_for(made) == Some(Event::Ended) || Instant::now() > deadline {
                return own;
            }
        }
        if own {
            self.threads.insert(made, State::Stopped(0));
        } else {
            let options = (libc::PTRACE_O_TRACESYSGOOD | libc::PTRACE_O_EXITKILL).unsigned_abs();
            // This fails for a process that was killed, which needs no options.
            let _gone = ptrace(libc::PTRACE_SETOPTIONS, made, 0, options as usize);
        }
        own
    }

    /// Detaches from a child process.
    pub fn release_child(&mut self, thread: i32) {
        if self.threads.remove(&thread).is_some() {
            let _gone = ptrace(libc::PTRACE_DETACH, thread, 0, 0);
        }
    }

    /// The process that a system call of [`Group::calls`] has created. It stays stopped, and is not
    /// part of this group. It is killed if its tracer ends.
    pub fn take_created(&mut self) -> Option<Tracee> {
        let deadline = Instant::now() + WAIT;
        loop {
            let held = self.threads.iter().find(|(_, state)| **state == State::Held);
            if let Some((&created, _)) = held {
                self.threads.remove(&created);
                return Some(Tracee(created)).filter(|created| created.set_options().is_ok());
            }
            if self.next_event().is_none() {
                if Instant::now() > deadline {
                    return None;
                }
                std::thread::yield_now();
            }
        }
    }

    /// A thread that can make system calls for us.
    pub fn callable_thread(&self) -> Option<i32> {
        let mut threads = self.threads.iter();
        threads.find(|(_, state)| **state == State::Stopped(0)).map(|(thread, _)| *thread)
    }

    /// The same, also of a process that a signal has stopped.
    pub fn any_stopped_thread(&self) -> Option<i32> {
        let listens = || self.threads.iter().find(|(_, state)| **state == State::Listens);
        self.callable_thread().or_else(|| listens().map(|(thread, _)| *thread))
    }

    /// Makes system calls in the name of a thread. A call can use the results of the calls before
    /// it.
    pub fn calls<T>(
        &self,
        thread: i32,
        make: impl FnOnce(&dyn Fn(&'static str, i64, [u64; 6]) -> Result<u64, TouchError>) -> T,
    ) -> Result<T, TouchError> {
        let fail = |error| TouchError::Call { what: "taking registers", error };
        let registers = registers_of(thread).map_err(fail)?;
        let signals = signal_mask(thread).map_err(fail)?;
        set_signal_mask(thread, u64::MAX).map_err(fail)?;
        let made = make(&|what, number, arguments| {
            self.call(thread, &registers, number, arguments)
                .map_err(|error| TouchError::Call { what, error })
        });
        // Stops the thread on its way back from the kernel, where its own call is restarted.
        let put_back = || {
            ptrace(libc::PTRACE_INTERRUPT, thread, 0, 0)?;
            ptrace(libc::PTRACE_CONT, thread, 0, 0)?;
            wait_stopped(thread)?;
            set_registers(thread, &registers)
        };
        put_back().map_err(fail)?;
        set_signal_mask(thread, signals).map_err(fail)?;
        Ok(made)
    }

    fn call(
        &self,
        thread: i32,
        registers: &libc::user_regs_struct,
        number: i64,
        arguments: [u64; 6],
    ) -> io::Result<u64> {
        let [rdi, rsi, rdx, r10, r8, r9] = arguments;
        let (rip, rax) = (self.syscall, number.cast_unsigned());
        let own = libc::user_regs_struct { rip, rax, orig_rax: u64::MAX, ..*registers };
        set_registers(thread, &libc::user_regs_struct { rdi, rsi, rdx, r10, r8, r9, ..own })?;
        // A stop at the exit of the thread's own call may still be pending; it is skipped.
        for end in [AT_ENTRY, AT_EXIT] {
            loop {
                ptrace(libc::PTRACE_SYSCALL, thread, 0, 0)?;
                match wait_stopped(thread)? {
                    SYSCALL_STOP if stopped_at(thread)? == end => break,
                    // The instruction is not there, and never will be.
                    libc::SIGSEGV | libc::SIGBUS | libc::SIGILL => {
                        return Err(io::Error::from_raw_os_error(libc::EFAULT));
                    }
                    _ => {}
                }
            }
        }
        match registers_of(thread)?.rax.cast_signed() {
            result @ -4095..=-1 => {
                Err(io::Error::from_raw_os_error(i32::try_from(-result).unwrap_or(libc::EIO)))
            }
            result => Ok(result.cast_unsigned()),
        }
    }
}

/// The same, and interrupts a thread that does not stop in time.
fn wait_stopped_within(thread: libc::pid_t, time: Duration) -> io::Result<i32> {
    let deadline = Instant::now() + time;
    while registers_of(thread).is_err() {
        if Instant::now() > deadline {
            ptrace(libc::PTRACE_INTERRUPT, thread, 0, 0)?;
            break;
        }
        std::thread::yield_now();
    }
    wait_stopped(thread)
}

/// Waits for a stop and returns its signal.
fn wait_stopped(thread: libc::pid_t) -> io::Result<i32> {
    let mut status = 0;
    // SAFETY: `status` is a local variable.
    let found = unsafe { libc::waitpid(thread, &mut status, libc::__WALL) };
    match found {
        -1 => Err(io::Error::last_os_error()),
        _ if libc::WIFSTOPPED(status) => Ok(libc::WSTOPSIG(status)),
        _ => {
            note_end(thread, status);
            Err(io::ErrorKind::NotFound.into())
        }
    }
}

thread_local! {
    /// The last traced thread that ended, and its status.
    static END: Cell<Option<(libc::pid_t, i32)>> = const { Cell::new(None) };
}

fn note_end(thread: libc::pid_t, status: i32) {
    END.set(Some((thread, status)));
}

/// The status of a process, as waitpid(2) returns it, if it ended while the calling thread had
/// seized it. Its parent cannot wait for it any more if that is the tracer.
fn take_end(process: u32) -> Option<i32> {
    let (thread, status) = END.get()?;
    (thread == libc::pid_t::try_from(process).ok()?).then_some(status)
}

/// How a child has ended; `None` if it has not. [`Child::try_wait`] would take a stop of a child
/// that the calling thread traces for its end.
pub fn ended(child: &mut Child) -> io::Result<Option<ExitStatus>> {
    let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
    let options = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: the kernel writes a siginfo_t.
    let waited = unsafe { libc::waitid(libc::P_PID, child.id(), info.as_mut_ptr(), options) };
    // SAFETY: the value was zeroed, and the kernel may have written it.
    let info = unsafe { info.assume_init() };
    if waited == 0
        && !matches!(info.si_code, libc::CLD_EXITED | libc::CLD_KILLED | libc::CLD_DUMPED)
    {
        return Ok(None);
    }
    match child.try_wait() {
        // It ended while its threads were stopped.
        Err(error) if error.raw_os_error() == Some(libc::ECHILD) => {
            take_end(child.id()).map(ExitStatus::from_raw).map(Some).ok_or(error)
        }
        other => other,
    }
}

fn seize(thread: libc::pid_t) -> io::Result<()> {
    let options = libc::PTRACE_O_TRACESYSGOOD
        | libc::PTRACE_O_TRACEFORK
        | libc::PTRACE_O_TRACEVFORK
        | libc::PTRACE_O_TRACECLONE
        | libc::PTRACE_O_TRACEEXEC;
    ptrace(libc::PTRACE_SEIZE, thread, 0, options.unsigned_abs() as usize)
}

fn threads(process: u32) -> io::Result<Vec<libc::pid_t>> {
    let entries = std::fs::read_dir(format!("/proc/{process}/task"))?;
    Ok(entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect())
}

fn message(thread: libc::pid_t) -> Option<i32> {
    let mut message = 0_u64;
    let at = std::ptr::from_mut(&mut message).expose_provenance();
    ptrace(libc::PTRACE_GETEVENTMSG, thread, 0, at).ok()?;
    i32::try_from(message).ok()
}

fn is_ours(thread: libc::pid_t) -> bool {
    signal_of_stop(thread) == Some(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, Write};
    use std::process::{Command, Stdio};

    /// Goal: a child that is held while its tracer is killed ends, and its parent continues.
    /// Method: a shell waits for a child whose tracer, a thread, ends.
    #[test]
    fn a_held_child_ends_with_its_tracer() {
        let mut shell = Command::new("sh");
        let shell = shell.args(["-c", "echo up; read line; (exit 3); echo $?"]);
        let mut shell = shell.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(shell.stdout.take().unwrap()).lines();
        assert_eq!(lines.next().unwrap().unwrap(), "up");
        let (process, mut input) = (shell.id(), shell.stdin.take().unwrap());
        let tracer = std::thread::spawn(move || {
            let mut group = Group::seize(process)?;
            input.write_all(b"\n").unwrap();
            loop {
                match group.next_event() {
                    Some(Event::Made(child)) => return Ok(group.adopt(child)),
                    Some(_) => group.go_on(),
                    None => std::thread::yield_now(),
                }
            }
        });
        let own: Result<bool, TouchError> = tracer.join().unwrap();
        assert!(!own.unwrap(), "it is a process of its own");
        assert_eq!(lines.next().unwrap().unwrap(), "137", "ended by SIGKILL");
        assert!(shell.wait().unwrap().success(), "the shell itself goes on");
    }
}
