//! Reads the CPU time of processes and threads, and lists the descendants of a process.

use std::collections::BTreeSet;
use std::fs;

use elfen_machine::process::{below, children, cpu_time_ns, stat, status_field, thread_stat};

use super::os;

/// The length of the ticks that /proc counts. It does not depend on the kernel's own tick.
const TICK_NS: u64 = 10_000_000;

/// Returns a thread's CPU time in nanoseconds, or `None` if it has ended.
pub(super) fn thread_cpu_ns(thread: u32) -> Option<u64> {
    let file = format!("/proc/{thread}/task/{thread}/schedstat");
    let counted = fs::read_to_string(file).ok().and_then(|text| {
        let word = text.split_whitespace().next()?;
        word.parse().ok()
    });
    // Kernels without scheduler statistics count in ticks.
    let ticks = || thread_stat(thread).map(|stat| stat.user_ticks + stat.system_ticks);
    counted.or_else(|| Some(ticks()? * TICK_NS))
}

/// Returns the time of these CPUs that the hypervisor gave to other machines, in nanoseconds. It is
/// 0 on hardware.
pub(super) fn steal_ns(cpus: &BTreeSet<u32>) -> u64 {
    let text = fs::read_to_string("/proc/stat").unwrap_or_default();
    text.lines().filter_map(|line| steal_ticks(line, cpus)).sum::<u64>() * TICK_NS
}

fn steal_ticks(line: &str, cpus: &BTreeSet<u32>) -> Option<u64> {
    let mut words = line.strip_prefix("cpu")?.split_ascii_whitespace();
    let cpu = words.next()?.parse().ok()?;
    let steal = words.nth(7)?.parse().ok()?;
    cpus.contains(&cpu).then_some(steal)
}

/// Returns the CPU time of a process in nanoseconds, or 0 if it has ended.
pub(crate) fn process_cpu_ns(process: u32) -> u64 {
    cpu_time_ns(process).unwrap_or(0)
}

/// Returns the CPU time of a process and its descendants in nanoseconds. It includes descendants
/// that have ended and were reaped by their parents.
pub(super) fn family_cpu_ns(process: u32) -> u64 {
    let all = below(process).into_iter().chain([process]);
    all.map(|pid| process_cpu_ns(pid) + reaped_children_ns(pid)).sum()
}

/// Returns the CPU time of the program that `elfen run` started. It is the time of its descendants
/// and of the children that the supervisor has reaped. The launcher and the supervisor themselves
/// do not count.
pub(super) fn batch_cpu_ns(launcher: u32) -> u64 {
    let supervisors = children(launcher);
    let programs = supervisors.iter().flat_map(|&supervisor| children(supervisor));
    programs.map(family_cpu_ns).chain(supervisors.iter().copied().map(reaped_children_ns)).sum()
}

/// Returns the CPU time of the children that a process has reaped, to a tick.
fn reaped_children_ns(process: u32) -> u64 {
    stat(process).map_or(0, |stat| stat.waited_for_ticks) * TICK_NS
}

/// A set of processes. Each has its id and its start time, so that a reused id is not mistaken for
/// it.
#[derive(Debug)]
pub(crate) struct Descendants(Vec<(u32, u64)>);

impl Descendants {
    /// Returns the current descendants of a process.
    pub(crate) fn of(process: u32) -> Self {
        let known = |pid: u32| Some((pid, stat(pid)?.began_ticks));
        Self(below(process).into_iter().filter_map(known).collect())
    }

    /// Kills all processes that still run. All are stopped before any is killed. Otherwise, a
    /// process might start another one when the child that it waits for is killed.
    pub(crate) fn kill(&self) {
        let lives = |(pid, beginning): &&(u32, u64)| {
            stat(*pid).is_some_and(|stat| stat.began_ticks == *beginning)
        };
        for signal in [libc::SIGSTOP, libc::SIGKILL] {
            self.0.iter().filter(lives).for_each(|(pid, _)| os::send(*pid, signal));
        }
    }
}

/// Whether a process handles a signal. Without a handler, the signal would end the process before
/// it writes its output.
pub(super) fn has_handler(process: u32, signal: i32) -> bool {
    let caught = status_field(process, "SigCgt");
    let mask = caught.and_then(|mask| u64::from_str_radix(&mask, 16).ok()).unwrap_or(0);
    mask >> (signal - 1) & 1 == 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::process::{Command, Stdio};

    #[test]
    fn steal_is_the_eighth_column_of_a_cpu() {
        let cpus = [1].into_iter().collect();
        let ticks = |line| steal_ticks(line, &cpus);
        assert_eq!(ticks("cpu1 11 22 33 44 55 66 77 88 99 0"), Some(88));
        for other in ["cpu  1 2 3 4 5 6 7 8", "cpu0 1 2 3 4 5 6 7 8", "cpu1 1 2", "intr 5 1"] {
            assert_eq!(ticks(other), None, "{other}");
        }
    }

    /// Goal: a signal handler is recognised. Method: a shell that sets a trap and then prints a
    /// line.
    #[test]
    fn handlers_are_recognised() {
        let mut command = Command::new("sh");
        command.args(["-c", "trap 'exit 0' TERM; echo; read x"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut shell = command.spawn().unwrap();
        shell.stdout.take().unwrap().read_exact(&mut [0]).unwrap();
        assert!(has_handler(shell.id(), libc::SIGTERM) && !has_handler(shell.id(), libc::SIGUSR2));
        assert!(!has_handler(u32::MAX, libc::SIGTERM));
        drop(shell.stdin.take());
        shell.wait().unwrap();
    }
}
