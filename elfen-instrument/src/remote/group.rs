//! All threads of a process, traced and stopped together, also those that sleep in the kernel.
//!
//! A thread that is stopped in a system call goes on with it: the kernel begins it again where it
//! would after a stop, and the few calls that would return EINTR instead are told to. System calls
//! in the process's name are made by a thread that had no signal on its way, with all signals held
//! back meanwhile; then it is stopped once more, so that its own registers are put back where the
//! kernel still looks at whether to begin a call again.
//!
//! The process is not ended when its tracer is killed. If that happens within a call of ours, a
//! thread has registers of ours: it is the one moment that cannot be made safe. A child that it has
//! just made, and that is not let go yet, is ended then.

use std::collections::BTreeMap;
use std::io;
use std::time::{Duration, Instant};

use super::calls::{
    AT_ENTRY, AT_EXIT, TouchError, ask, find_syscall, get, get_signals, set, set_signals,
    signal_of_stop, stopped_at,
};
use super::memory::Memory;

/// What is heard of a traced thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// It has made this thread or process, which is stopped before its first step; it waits itself.
    Made(i32),
    /// It runs another program now.
    Exec,
    /// It has ended.
    Ended,
    /// A stop that is none of ours to ask about.
    Other,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Runs,
    /// To be let go with this signal; 0 for none.
    Stopped(i32),
    /// Stopped in the middle of a call that makes a process or becomes another: its result is
    /// yet to be written to the thread's registers, over whatever we would put there.
    InCall,
    /// Stopped with its whole process, by a signal.
    Listens,
    /// Just made, and nobody has asked for it yet.
    Held,
}

/// See the head of this file.
#[derive(Debug)]
pub struct Group {
    pub process: u32,
    pub memory: Memory,
    syscall: u64,
    threads: BTreeMap<libc::pid_t, State>,
}

const WAIT: Duration = Duration::from_millis(200);
const EVENT_STOP: i32 = 128;
const SYSCALL_STOP: i32 = libc::SIGTRAP | 0x80;
/// Of the kernel alone: begin the call again unless a handler runs.
const ERESTARTNOHAND: i64 = 514;
/// Calls that return EINTR after a stop, though nobody has handled a signal.
const NOT_BEGUN_AGAIN: [libc::c_long; 7] = [
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_semop,
    libc::SYS_semtimedop,
    libc::SYS_io_getevents,
];

impl Group {
    /// Traces all threads of a process, and those that it will make.
    pub fn seize(process: u32) -> Result<Self, TouchError> {
        let memory = Memory::open(process).map_err(TouchError::Refused)?;
        let syscall = find_syscall(process, &memory).ok_or(TouchError::NoVdso)?;
        let mut group = Self { process, memory, syscall, threads: BTreeMap::new() };
        loop {
            let mut is_new = false;
            for thread in threads(process).map_err(TouchError::Refused)? {
                if group.threads.contains_key(&thread) {
                    continue;
                }
                match seize(thread) {
                    Ok(()) => is_new = group.threads.insert(thread, State::Runs).is_none(),
                    // It has ended meanwhile.
                    Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
                    // A thread that one of ours has just made is traced already, and tells so.
                    Err(_) if !group.threads.is_empty() => {}
                    Err(error) => return Err(TouchError::Refused(error)),
                }
            }
            if !is_new {
                return Ok(group);
            }
        }
    }

    /// Stops them all. `made` is told of processes that were made meanwhile.
    pub fn stop(&mut self, mut made: impl FnMut(&mut Self, i32)) -> Result<(), TouchError> {
        for &thread in self.threads.keys() {
            // One that stops already says no.
            let _stops = ask(libc::PTRACE_INTERRUPT, thread, 0, 0);
        }
        let deadline = Instant::now() + WAIT;
        while let Some(thread) = self.running() {
            match self.wait_for(thread) {
                Some(Event::Made(child)) => made(self, child),
                Some(_) => {}
                None if Instant::now() > deadline => return Err(TouchError::Busy),
                None => std::thread::yield_now(),
            }
        }
        if self.threads.is_empty() { Err(TouchError::Busy) } else { Ok(()) }
    }

    fn running(&self) -> Option<libc::pid_t> {
        self.threads.iter().find(|(_, state)| **state == State::Runs).map(|(thread, _)| *thread)
    }

    /// Lets all go on that are stopped.
    pub fn go_on(&mut self) {
        for (&thread, state) in &mut self.threads {
            let request = match *state {
                State::Runs | State::Held => continue,
                State::Stopped(_) | State::InCall => libc::PTRACE_CONT,
                State::Listens => libc::PTRACE_LISTEN,
            };
            let signal = if let State::Stopped(signal) = *state { signal } else { 0 };
            // One that was killed needs it no more.
            let _gone = ask(request, thread, 0, usize::try_from(signal).unwrap_or(0));
            if *state != State::Listens {
                *state = State::Runs;
            }
        }
    }

    /// Lets all go for good, which are stopped.
    pub fn release(mut self) {
        for (thread, state) in std::mem::take(&mut self.threads) {
            let signal = if let State::Stopped(signal) = state { signal } else { 0 };
            let _gone = ask(libc::PTRACE_DETACH, thread, 0, usize::try_from(signal).unwrap_or(0));
        }
    }

    pub fn is_empty(&self) -> bool {
        self.threads.is_empty()
    }

    pub fn threads(&self) -> usize {
        self.threads.len()
    }

    /// Stack pointers and thread pointers of all, which are stopped.
    pub fn stacks(&self) -> Vec<(u64, u64)> {
        let registers = self.threads.keys().filter_map(|&thread| get(thread).ok());
        registers.map(|registers| (registers.rsp, registers.fs_base)).collect()
    }

    /// Whatever is next to be heard of, of any thread; `None` if that is nothing now.
    pub fn hear(&mut self) -> Option<Event> {
        let mut status = 0;
        // SAFETY: the status is ours.
        let thread = unsafe { libc::waitpid(-1, &mut status, libc::WNOHANG | libc::__WALL) };
        (thread > 0).then(|| self.take(thread, status))
    }

    fn wait_for(&mut self, thread: libc::pid_t) -> Option<Event> {
        let mut status = 0;
        // SAFETY: the status is ours.
        let heard = unsafe { libc::waitpid(thread, &mut status, libc::WNOHANG | libc::__WALL) };
        match heard {
            0 => None,
            -1 => {
                self.threads.remove(&thread);
                Some(Event::Ended)
            }
            thread => Some(self.take(thread, status)),
        }
    }

    fn take(&mut self, thread: libc::pid_t, status: i32) -> Event {
        if !libc::WIFSTOPPED(status) {
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
                // The threads that it had are gone, and it has the first one's number.
                self.threads.clear();
                self.threads.insert(thread, State::InCall);
                (State::InCall, Event::Exec)
            }
            EVENT_STOP if signal == libc::SIGTRAP => {
                begin_again(thread);
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

    /// Waits for what one of ours has made; whether it is a thread of the same process. Another
    /// process is held until it is dismissed, and ends with its tracer until then: it could only go
    /// on with registers of ours, or in its maker's memory.
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
            // One that was killed needs it no more.
            let _gone = ask(libc::PTRACE_SETOPTIONS, made, 0, options as usize);
        }
        own
    }

    /// Lets one go for good that is none of the process.
    pub fn dismiss(&mut self, thread: i32) {
        if self.threads.remove(&thread).is_some() {
            let _gone = ask(libc::PTRACE_DETACH, thread, 0, 0);
        }
    }

    /// A thread that calls can be made in.
    pub fn able(&self) -> Option<i32> {
        let mut threads = self.threads.iter();
        threads.find(|(_, state)| **state == State::Stopped(0)).map(|(thread, _)| *thread)
    }

    /// Makes system calls in the name of a thread: each gives its result to the next.
    pub fn calls<T>(
        &self,
        thread: i32,
        make: impl FnOnce(&dyn Fn(&'static str, i64, [u64; 6]) -> Result<u64, TouchError>) -> T,
    ) -> Result<T, TouchError> {
        let fail = |error| TouchError::Call { what: "taking registers", error };
        let registers = get(thread).map_err(fail)?;
        let signals = get_signals(thread).map_err(fail)?;
        set_signals(thread, u64::MAX).map_err(fail)?;
        let made = make(&|what, number, arguments| {
            self.call(thread, &registers, number, arguments)
                .map_err(|error| TouchError::Call { what, error })
        });
        // To a stop on the way back from the kernel, where its own call is begun again.
        let put_back = || {
            ask(libc::PTRACE_INTERRUPT, thread, 0, 0)?;
            ask(libc::PTRACE_CONT, thread, 0, 0)?;
            wait_stopped(thread)?;
            set(thread, &registers)
        };
        put_back().map_err(fail)?;
        set_signals(thread, signals).map_err(fail)?;
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
        set(thread, &libc::user_regs_struct { rdi, rsi, rdx, r10, r8, r9, ..own })?;
        // The end of a call of its own may still be on the way to be told of.
        for end in [AT_ENTRY, AT_EXIT] {
            loop {
                ask(libc::PTRACE_SYSCALL, thread, 0, 0)?;
                if wait_stopped(thread)? == SYSCALL_STOP && stopped_at(thread)? == end {
                    break;
                }
            }
        }
        match get(thread)?.rax.cast_signed() {
            result @ -4095..=-1 => {
                Err(io::Error::from_raw_os_error(i32::try_from(-result).unwrap_or(libc::EIO)))
            }
            result => Ok(result.cast_unsigned()),
        }
    }
}

/// Waits for a stop, and gives its signal.
fn wait_stopped(thread: libc::pid_t) -> io::Result<i32> {
    let mut status = 0;
    // SAFETY: the status is ours.
    let heard = unsafe { libc::waitpid(thread, &mut status, libc::__WALL) };
    match heard {
        -1 => Err(io::Error::last_os_error()),
        _ if libc::WIFSTOPPED(status) => Ok(libc::WSTOPSIG(status)),
        _ => Err(io::ErrorKind::NotFound.into()),
    }
}

fn seize(thread: libc::pid_t) -> io::Result<()> {
    let options = libc::PTRACE_O_TRACESYSGOOD
        | libc::PTRACE_O_TRACEFORK
        | libc::PTRACE_O_TRACEVFORK
        | libc::PTRACE_O_TRACECLONE
        | libc::PTRACE_O_TRACEEXEC;
    ask(libc::PTRACE_SEIZE, thread, 0, options.unsigned_abs() as usize)
}

fn threads(process: u32) -> io::Result<Vec<libc::pid_t>> {
    let entries = std::fs::read_dir(format!("/proc/{process}/task"))?;
    Ok(entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect())
}

fn message(thread: libc::pid_t) -> Option<i32> {
    let mut message = 0_u64;
    let at = std::ptr::from_mut(&mut message).expose_provenance();
    ask(libc::PTRACE_GETEVENTMSG, thread, 0, at).ok()?;
    i32::try_from(message).ok()
}

fn is_ours(thread: libc::pid_t) -> bool {
    signal_of_stop(thread) == Some(0)
}

/// See [`NOT_BEGUN_AGAIN`].
fn begin_again(thread: libc::pid_t) {
    let Ok(mut registers) = get(thread) else { return };
    let (call, result) = (registers.orig_rax.cast_signed(), registers.rax.cast_signed());
    if NOT_BEGUN_AGAIN.contains(&call) && result == -i64::from(libc::EINTR) {
        registers.rax = (-ERESTARTNOHAND).cast_unsigned();
        // One that was killed meanwhile needs it no more.
        let _gone = set(thread, &registers);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, Write};
    use std::process::{Command, Stdio};

    /// Goal: a child that is held when its tracer is killed ends, and its parent goes on.
    /// Method: a shell waits for one, whose tracer is a thread that ends then.
    #[test]
    fn a_child_that_is_held_ends_with_its_tracer() {
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
                match group.hear() {
                    Some(Event::Made(child)) => return Ok(group.adopt(child)),
                    Some(_) => group.go_on(),
                    None => std::thread::yield_now(),
                }
            }
        });
        match tracer.join().unwrap() {
            Ok(own) => assert!(!own, "it is a process of its own"),
            Err(TouchError::Refused(error)) => {
                writeln!(io::stderr(), "skipped: a child that is held: {error}").unwrap();
                shell.kill().unwrap();
                shell.wait().unwrap();
                return;
            }
            Err(error) => panic!("{error:?}"),
        }
        assert_eq!(lines.next().unwrap().unwrap(), "137", "ended by SIGKILL");
        assert!(shell.wait().unwrap().success(), "the shell itself goes on");
    }
}
