//! CPU time of processes and threads, and other facts from /proc.

use std::fs;

use elfen_machine::process::{below, children, cpu_time_ns, stat, threads_of};

use super::os;

/// A thread's CPU time in nanoseconds; `None` if it has ended.
pub(super) fn thread_cpu_ns(process: u32, thread: u32) -> Option<u64> {
    let folder = format!("/proc/{process}/task/{thread}");
    if let Ok(text) = fs::read_to_string(format!("{folder}/schedstat"))
        && let Some(ns) = text.split_whitespace().next().and_then(|word| word.parse().ok())
    {
        return Some(ns);
    }
    // Kernels without scheduler statistics count in ticks of 10 ms.
    let stat = fs::read_to_string(format!("{folder}/stat")).ok()?;
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = |at: usize| fields.get(at).and_then(|field| field.parse::<u64>().ok());
    Some((ticks(11)? + ticks(12)?) * 10_000_000)
}

/// CPU time of all threads of a process that have not ended, in nanoseconds.
pub(crate) fn process_cpu_ns(process: u32) -> u64 {
    threads_of(process).into_iter().filter_map(|thread| thread_cpu_ns(process, thread)).sum()
}

/// CPU time of the main thread of a process, and of all others together.
pub(super) fn main_and_other_threads_ns(process: u32) -> (u64, u64) {
    let first = thread_cpu_ns(process, process).unwrap_or(0);
    (first, process_cpu_ns(process).saturating_sub(first))
}

/// CPU time of a process and its descendants in nanoseconds, including descendants that have ended
/// and were reaped by their parents.
pub(super) fn family_cpu_ns(process: u32) -> u64 {
    let all = below(process).into_iter().chain([process]);
    all.map(|pid| cpu_time_ns(pid).unwrap_or(0) + reaped_children_ns(pid)).sum()
}

/// CPU time of the program that an `elfen run` started: of its descendants, and of the children
/// that the supervisor has reaped. The launcher and the supervisor themselves do not count.
pub(super) fn batch_cpu_ns(launcher: u32) -> u64 {
    let supervisors = children(launcher);
    let programs = supervisors.iter().flat_map(|&supervisor| children(supervisor));
    programs.map(family_cpu_ns).chain(supervisors.iter().copied().map(reaped_children_ns)).sum()
}

/// CPU time of the children that a process has reaped, to a tick.
fn reaped_children_ns(process: u32) -> u64 {
    let ticks = stat(process).map_or(0, |stat| stat.waited_for_ticks);
    ticks * (1_000_000_000 / os::ticks_per_second())
}

/// Processes, identified by id and start time, so that a reused id is not mistaken for one of them.
#[derive(Debug)]
pub(crate) struct Descendants(Vec<(u32, u64)>);

impl Descendants {
    /// The current descendants of a process.
    pub(crate) fn of(process: u32) -> Self {
        let known = |pid: u32| Some((pid, stat(pid)?.began_ticks));
        Self(below(process).into_iter().filter_map(known).collect())
    }

    /// Kills all that still run. They are stopped first, so that none of them starts another
    /// process when a child that it waits for is killed.
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

/// The name of a process, cut to 15 bytes by the kernel.
pub(super) fn process_name(process: u32) -> Option<String> {
    let name = fs::read_to_string(format!("/proc/{process}/comm")).ok()?;
    Some(name.trim_end().to_owned())
}

/// Whether a process handles a signal. Before it does, the signal would end it without output.
pub(super) fn has_handler(process: u32, signal: i32) -> bool {
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

    /// Goal: a signal handler is recognised. Method: a shell with a trap, which prints a line once
    /// it is set; this process, where SIGUSR2 has no handler.
    #[test]
    fn handlers_are_recognised() {
        let mut command = Command::new("sh");
        command.args(["-c", "trap 'exit 0' TERM; echo; read x"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut shell = command.spawn().unwrap();
        let mut said = [0];
        shell.stdout.take().unwrap().read_exact(&mut said).unwrap();
        assert!(has_handler(shell.id(), libc::SIGTERM) && !has_handler(shell.id(), libc::SIGUSR2));
        assert!(!has_handler(u32::MAX, libc::SIGTERM));
        drop(shell.stdin.take());
        shell.wait().unwrap();
    }

    /// Goal: descendants are found, and CPU time is that of the kernel. Method: a shell with a
    /// child; the time of this process grows while it works.
    #[test]
    fn descendants_and_times_are_found() {
        let mut shell = Command::new("sh").args(["-c", "sleep 600 & wait"]).spawn().unwrap();
        let sleeps = |pid: &u32| process_name(*pid).as_deref() == Some("sleep");
        // Other tests of this process have children named sleep, too.
        let sleeper = loop {
            match below(shell.id()).into_iter().find(sleeps) {
                Some(sleeper) => break sleeper,
                None => std::thread::yield_now(),
            }
        };
        assert!(below(std::process::id()).contains(&sleeper));
        os::send(sleeper, libc::SIGKILL);
        shell.wait().unwrap();

        let before = process_cpu_ns(std::process::id());
        let mut x = 1_u64;
        // The time of threads that end, as those of other tests, is no longer counted.
        while process_cpu_ns(std::process::id()).saturating_sub(before) < 20_000_000 {
            x = std::hint::black_box(x.wrapping_mul(3));
        }
        assert!(process_cpu_ns(u32::MAX) == 0 && x != 0);
    }
}
