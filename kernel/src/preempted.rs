//! Where batch tasks were preempted, and on which CPUs batch tasks have seccomp filters, recorded
//! by `kernel/bpf/preempted.bpf.c`.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::bpf_call;
use crate::error::Error;
use crate::object::Object;
use crate::task_map::possible_cpus;

static OBJECT: &[u8] = aya::include_bytes_aligned!("../bpf/preempted.bpf.o");

const PREEMPTED: &str = "elfen_preempted";
const FILTERS: &str = "elfen_filters";
const CPUS_IN_PAGE: u32 = 512;
const PAGE_BYTES: u64 = 4096;
/// The programs for the two system calls by which a task installs a seccomp filter.
const ENTRIES: [(&str, &str); 2] =
    [("elfen_prctl", "__x64_sys_prctl"), ("elfen_seccomp", "__x64_sys_seccomp")];

/// A batch task that was preempted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Preempted {
    pub process: u32,
    pub thread: u32,
    /// The instruction at which the task continues.
    pub ip: u64,
    /// The task's stack pointer at that instruction.
    pub sp: u64,
    /// Whether the task was in a system call.
    pub in_kernel: bool,
    /// When the task was switched in.
    pub since_ns: u64,
    /// When the task was preempted.
    pub until_ns: u64,
}

/// The recording programs. They are attached as long as this value exists.
#[derive(Debug)]
pub struct Notes {
    preempted: OwnedFd,
    filters: Result<(OwnedFd, u64), Error>,
    _links: Vec<OwnedFd>,
}

impl Notes {
    pub fn attach() -> Result<Self, Error> {
        let cpus = possible_cpus()?;
        let pages = cpus.div_ceil(CPUS_IN_PAGE);
        let mut object = Object::load(OBJECT, &[(PREEMPTED, cpus), (FILTERS, pages)])?;
        let attach =
            |program: &OwnedFd| bpf_call::attach(program.as_fd()).map_err(Error::call("attaching"));
        let mut links = vec![attach(&object.program("elfen_preempt", "sched_switch")?)?];
        let preempted = object.map(PREEMPTED)?;
        let mut entries = || {
            let filters = object.map(FILTERS)?;
            bpf_call::freeze(filters.as_fd()).map_err(Error::call("freezing a map"))?;
            for (name, function) in ENTRIES {
                links.push(attach(&object.exit_program(name, function)?)?);
            }
            Ok::<_, Error>((filters, u64::from(pages) * PAGE_BYTES))
        };
        // Some kernels do not support tracing their functions: `filters` keeps the reason.
        let filters = entries();
        Ok(Self { preempted, filters, _links: links })
    }

    /// The map that batch processes read, and its length. For each CPU it has a word that is not 0
    /// while the batch task there has a seccomp filter. The error says why the kernel cannot report
    /// this in time.
    pub fn filters(&self) -> Result<(BorrowedFd<'_>, u64), &Error> {
        self.filters.as_ref().map(|(map, bytes)| (map.as_fd(), *bytes))
    }

    /// The batch task that the calling thread preempted on `cpu`; `None` if another task, or the
    /// idle task, ran in between. Only for threads on that CPU; otherwise the record may change
    /// meanwhile.
    pub fn preempted_by(&self, cpu: u32, caller: u64) -> Option<Preempted> {
        let mut words = [0; 8];
        bpf_call::look_up_element(self.preempted.as_fd(), cpu, &mut words).ok()?;
        let [next, task, ip, sp, orig_ax, since_ns, until_ns, _] = words;
        let half = |word: u64| u32::try_from(word & u64::from(u32::MAX)).unwrap_or(0);
        let [process, thread] = [task >> 32, task].map(half);
        let in_kernel = orig_ax.cast_signed() >= 0;
        let noted = Preempted { process, thread, ip, sp, in_kernel, since_ns, until_ns };
        (next == caller && task != 0).then_some(noted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    fn own_task() -> u64 {
        // SAFETY: gettid takes nothing and cannot fail.
        let thread = unsafe { libc::gettid() };
        u64::from(std::process::id()) << 32 | u64::from(thread.unsigned_abs())
    }

    /// Goal: the record names the task that the caller preempted, and where. Method: a shell loops
    /// at SCHED_IDLE on the CPU of a thread that sleeps repeatedly.
    #[test]
    #[ignore = "needs root and eBPF"]
    fn a_preempted_batch_task_is_recorded_with_its_address() {
        let notes = Notes::attach().unwrap_or_else(|error| panic!("needs root and eBPF: {error}"));
        let mut batch = Command::new("taskset")
            .args(["-c", "0", "chrt", "-i", "0", "sh", "-c", "while :; do :; done"])
            .spawn()
            .unwrap();
        let id = core_affinity::CoreId { id: 0 };
        assert!(core_affinity::set_for_current(id));
        let found = (0..60_000).find_map(|_| {
            std::thread::sleep(std::time::Duration::from_millis(1));
            let noted = notes.preempted_by(0, own_task())?;
            (noted.process == batch.id() && !noted.in_kernel).then_some(noted)
        });
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", batch.id())).unwrap();
        batch.kill().unwrap();
        batch.wait().unwrap();
        let found = found.expect("the shell was preempted in its loop");
        assert_eq!(found.thread, found.process);
        assert!(found.since_ns < found.until_ns);
        let lies_in = |line: &&str| {
            let (from, to) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
            let number = |text| u64::from_str_radix(text, 16).unwrap();
            (number(from)..number(to)).contains(&found.ip)
        };
        let line = maps.lines().find(lies_in).expect("the address lies in the shell's program");
        assert!(line.contains("r-xp"), "{line}");
    }
}
