//! CPU time of processes and threads, from /proc.

use std::fs;

use elfen_machine::process::{below, children, cpu_time_ns, stat, threads_of};

use super::os;

/// A thread's CPU time in nanoseconds; `None` if it is gone.
pub(super) fn of_thread(process: u32, thread: u32) -> Option<u64> {
    let folder = format!("/proc/{process}/task/{thread}");
    if let Ok(text) = fs::read_to_string(format!("{folder}/schedstat"))
        && let Some(ns) = text.split_whitespace().next().and_then(|word| word.parse().ok())
    {
        return Some(ns);
    }
    // Kernels without scheduler statistics count in hundredths of a second.
    let stat = fs::read_to_string(format!("{folder}/stat")).ok()?;
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = |at: usize| fields.get(at).and_then(|field| field.parse::<u64>().ok());
    Some((ticks(11)? + ticks(12)?) * 10_000_000)
}

/// All threads of a process, in nanoseconds; without those that are gone.
pub(crate) fn of_process(process: u32) -> u64 {
    threads_of(process).into_iter().filter_map(|thread| of_thread(process, thread)).sum()
}

/// The first thread of a process, and all others together.
pub(super) fn first_and_others(process: u32) -> (u64, u64) {
    let first = of_thread(process, process).unwrap_or(0);
    (first, of_process(process).saturating_sub(first))
}

/// CPU time of a process and its descendants in nanoseconds, of those that have ended as well, if
/// their parents waited for them.
pub(super) fn of_family(process: u32) -> u64 {
    let all = below(process).into_iter().chain([process]);
    all.map(|pid| cpu_time_ns(pid).unwrap_or(0) + of_waited_for(pid)).sum()
}

/// The same of the program that an `elfen run` started: of its front nothing, and of its keeper
/// what it has waited for, which is the program's.
pub(super) fn of_batch(front: u32) -> u64 {
    let keepers = children(front);
    let members = keepers.iter().flat_map(|&keeper| children(keeper));
    members.map(of_family).chain(keepers.iter().map(|&keeper| of_waited_for(keeper))).sum()
}

/// Of the children that a process has waited for, to a hundredth of a second.
fn of_waited_for(process: u32) -> u64 {
    let ticks = stat(process).map_or(0, |stat| stat.waited_for_ticks);
    ticks * (1_000_000_000 / os::ticks_a_second())
}

/// Processes that are told from others of the same id by when they began.
#[derive(Debug)]
pub(crate) struct Members(Vec<(u32, u64)>);

impl Members {
    /// A process's descendants as they are now.
    pub(crate) fn of(process: u32) -> Self {
        let known = |pid: u32| Some((pid, stat(pid)?.began_ticks));
        Self(below(process).into_iter().filter_map(known).collect())
    }

    /// Ends those that live, by SIGKILL. They stand still before, so that none of them starts
    /// another because one that it waited for was killed.
    pub(crate) fn kill(&self) {
        let lives = |(pid, beginning): &&(u32, u64)| {
            stat(*pid).is_some_and(|stat| stat.began_ticks == *beginning)
        };
        let send = |signal| {
            self.0.iter().filter(lives).for_each(|(pid, _)| os::send(*pid, signal));
        };
        send(libc::SIGSTOP);
        send(libc::SIGKILL);
    }
}

/// The name of a process's program, cut to 15 bytes as the kernel does.
pub(super) fn name_of(process: u32) -> Option<String> {
    let name = fs::read_to_string(format!("/proc/{process}/comm")).ok()?;
    Some(name.trim_end().to_owned())
}

/// Whether a process has a handler for a signal: before that, the signal would end it without a
/// word.
pub(super) fn catches(process: u32, signal: i32) -> bool {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let mask = caught.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask >> (signal - 1) & 1 == 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::process::{Command, Stdio};

    /// Goal: a process that is ready for SIGTERM is told from one that is not. Method: a shell with
    /// a trap, which says when it is set; this process, where SIGUSR2 has no handler.
    #[test]
    fn handlers_are_seen() {
        let mut command = Command::new("sh");
        command.args(["-c", "trap 'exit 0' TERM; echo; read x"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut shell = command.spawn().unwrap();
        let mut said = [0];
        shell.stdout.take().unwrap().read_exact(&mut said).unwrap();
        assert!(catches(shell.id(), libc::SIGTERM) && !catches(shell.id(), libc::SIGUSR2));
        assert!(!catches(u32::MAX, libc::SIGTERM));
        drop(shell.stdin.take());
        shell.wait().unwrap();
    }

    /// Goal: descendants are found, and CPU time is the kernel's. Method: a shell that has a child;
    /// our own time grows by what we work, and by no more than passes on all CPUs.
    #[test]
    fn families_and_times_are_the_kernels() {
        let mut shell = Command::new("sh").args(["-c", "sleep 600 & wait"]).spawn().unwrap();
        let sleeps = |pid: &u32| name_of(*pid).as_deref() == Some("sleep");
        // Other tests of this process have sleepers too.
        let sleeper = loop {
            match below(shell.id()).into_iter().find(sleeps) {
                Some(sleeper) => break sleeper,
                None => std::thread::yield_now(),
            }
        };
        assert!(below(std::process::id()).contains(&sleeper));
        os::send(sleeper, libc::SIGKILL);
        shell.wait().unwrap();

        let before = of_process(std::process::id());
        let mut x = 1_u64;
        // The time of threads that end, as other tests' do, is no longer counted.
        while of_process(std::process::id()).saturating_sub(before) < 20_000_000 {
            x = std::hint::black_box(x.wrapping_mul(3));
        }
        assert!(of_process(u32::MAX) == 0 && x != 0);
    }
}
