//! Facts that only an attempt can show, such as whether this user may attach an eBPF program.
//!
//! Each attempt tries an operation once and undoes it: before it returns, the program is detached,
//! the segment removed and the counter closed. Its result is a fact: a word, and often the error as
//! a detail. Recordings hold these results next to the files that were read.

use std::collections::BTreeSet;
use std::{fs, io};

use elfen_instrument::remote::mappings;
use elfen_kernel::counters;
use elfen_kernel::events::{self, Needs};
use elfen_kernel::preempted::Notes;
use elfen_kernel::task_map::{self, Loaded, TasksError};
use elfen_rt::memory::{Memory, MemoryError};
use elfen_rt::nanonap::DeviceError;
use elfen_rt::nap::device::Device;
use elfen_rt::nap::{Nap, NapKind};
use elfen_rt::signal::page::Page;
use elfen_rt::signal::service::ServiceSlot;

use super::check::Machine;
use crate::fence::status::{self, Answer, Request};
use crate::placement::may_take_guard_rank;
use crate::process::{name_of, numbers_in};
use crate::{hsperf, mapped, systemd};

type Attempt = fn(&Machine<'_>) -> String;

/// All attempts, by the name of the fact.
pub(super) const ATTEMPTS: [(&str, Attempt); 26] = [
    ("capabilities", |_| capabilities()),
    ("kernel-types", |_| kernel_types()),
    ("attach", |_| attach()),
    ("filter-notes", |_| filter_notes()),
    ("elfend", |_| elfend_task_map()),
    ("segment", |machine| segment(segment_bytes(machine))),
    ("segment-bytes", |machine| segment_bytes(machine).to_string()),
    ("counters", counters),
    ("nanonap", |_| nanonap()),
    ("monitor", |_| monitor().map_or("unknown", yes_or_no).to_owned()),
    ("umwait", |_| done_or_refused(Nap::open(NapKind::Umwait))),
    ("mwaitx", |_| done_or_refused(Nap::open(NapKind::Mwaitx))),
    ("idle-class", |_| done_or_refused(idle_class())),
    ("guard-rank", |_| done_or_refused(may_take_guard_rank())),
    ("preload-library", |_| preload_library()),
    ("core-scheduling", |_| core_scheduling()),
    ("idle-poll", |_| idle_poll().map_or("unknown", yes_or_no).to_owned()),
    ("systemd", |_| systemd_version()),
    ("map-files", |_| done_or_refused(open_own_mapping())),
    ("trace-any", |_| yes_or_no(has_capability(CAP_SYS_PTRACE) == Some(true)).to_owned()),
    ("debug-symbols", |_| yes_or_no(has_debug_symbols()).to_owned()),
    ("sched-tracepoints", |_| tracepoints(Needs::Sched)),
    ("socket-tracepoints", |_| tracepoints(Needs::Sockets)),
    ("full-tracepoints", |_| tracepoints(Needs::Full)),
    ("uprobes", |_| yes_or_no(fs::exists(UPROBES).unwrap_or(false)).to_owned()),
    ("running-jvms", |_| running_jvms()),
];

/// Whether the kernel reports at once that a thread began to filter its system calls (seccomp).
/// `unknown` if no eBPF program can be attached.
fn filter_notes() -> String {
    match Notes::attach() {
        Ok(notes) => done_or_refused(notes.filters()),
        Err(_) => "unknown".to_owned(),
    }
}

const UPROBES: &str = "/sys/bus/event_source/devices/uprobe";

fn yes_or_no(yes: bool) -> &'static str {
    if yes { "yes" } else { "no" }
}

fn done_or_refused<T, E: ToString>(result: Result<T, E>) -> String {
    result.map_or_else(|error| refused(&error), |_| "done".to_owned())
}

/// How much of an error is kept: a message of the eBPF verifier can be pages long.
const MAX_WORDS: usize = 60;

fn refused(error: &impl ToString) -> String {
    let text = error.to_string();
    let words: Vec<&str> = text.split_whitespace().take(MAX_WORDS).collect();
    format!("refused: {}", words.join(" "))
}

/// Numbers of capabilities. CAP_SYS_ADMIN includes CAP_PERFMON and CAP_BPF.
const CAP_SYS_PTRACE: u32 = 19;
const CAP_SYS_ADMIN: u32 = 21;
const CAP_PERFMON: u32 = 38;
const CAP_BPF: u32 = 39;

/// Whether this process has a capability; `None` if /proc does not report it.
fn has_capability(capability: u32) -> Option<bool> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let mask = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    let mask = u64::from_str_radix(mask.trim(), 16).ok()?;
    Some(mask & 1 << capability != 0)
}

fn capabilities() -> String {
    let has = |capability| Some(has_capability(capability)? || has_capability(CAP_SYS_ADMIN)?);
    match (has(CAP_BPF), has(CAP_PERFMON)) {
        (Some(true), Some(true)) => "all",
        (Some(false), Some(true)) => "lacks: CAP_BPF",
        (Some(true), Some(false)) => "lacks: CAP_PERFMON",
        (Some(false), Some(false)) => "lacks: CAP_BPF and CAP_PERFMON",
        _ => "unknown",
    }
    .to_owned()
}

/// The types of the running kernel (BTF).
const TYPES: &str = "/sys/kernel/btf/vmlinux";

/// The name of the BTF type that the verifier needs for a tp_btf program at this tracepoint. The
/// BTF file ends with the names of its types, each terminated by NUL.
fn type_of(tracepoint: &str) -> Vec<u8> {
    format!("btf_trace_{tracepoint}").into_bytes()
}

fn kernel_types() -> String {
    match fs::read(TYPES) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => "absent".to_owned(),
        Err(error) => format!("unreadable: {error}"),
        Ok(types) if types.split(|&byte| byte == 0).any(|name| name == type_of("sched_switch")) => {
            "with-sched-switch".to_owned()
        }
        Ok(_) => "without-sched-switch".to_owned(),
    }
}

/// The tracepoints that an option of `elfen tailor` needs and the kernel lacks. If the BTF file is
/// missing, the check of `kernel-types` gives the reason.
fn tracepoints(option: Needs) -> String {
    let types = fs::read(TYPES).unwrap_or_default();
    let names: BTreeSet<&[u8]> = types.split(|&byte| byte == 0).collect();
    let is_missing =
        |(name, needs): &(&str, Needs)| *needs == option && !names.contains(&*type_of(name));
    let missing: Vec<&str> =
        events::tracepoints().filter(is_missing).map(|(name, _)| name).collect();
    if missing.is_empty() { "all".to_owned() } else { format!("lacks: {}", missing.join(", ")) }
}

fn attach() -> String {
    match Loaded::load().and_then(|loaded| loaded.map()) {
        Ok(_map) => "attached".to_owned(),
        Err(task_map::Error::NotPermitted) => "not-permitted".to_owned(),
        Err(task_map::Error::NoKernelTypes) => "no-kernel-types".to_owned(),
        Err(error) => refused(&error),
    }
}

/// Tries to map elfend's task map, which elfend gives only to trusted users.
fn elfend_task_map() -> String {
    match task_map::request_from_elfend() {
        Ok(_map) => "mapped".to_owned(),
        Err(TasksError::Absent) => "absent".to_owned(),
        Err(TasksError::Map(error)) => format!("unusable: {error}"),
        // Sends the request again, to get elfend's reason.
        Err(TasksError::Refused) => {
            match status::ask(&task_map::elfend_socket(), &Request::Tasks) {
                Ok(Answer::Refused { why, fix }) => format!("{}\n> {fix}", refused(&why)),
                Ok(_) => "unusable: elfend gives no task map".to_owned(),
                Err(error) => format!("unusable: elfend: {error}"),
            }
        }
    }
}

/// The size of a service page for all request lanes of this machine.
fn segment_bytes(machine: &Machine<'_>) -> usize {
    let request_lanes = u32::try_from(machine.lanes.pairs.len()).unwrap_or(u32::MAX);
    Page::<ServiceSlot>::bytes(request_lanes.max(1))
}

fn segment(bytes: usize) -> String {
    let made = Memory::create_segment(libc::IPC_PRIVATE, bytes, 0o600);
    match made.and_then(|memory| memory.remove_name()) {
        Ok(()) => "made".to_owned(),
        Err(MemoryError::Size) => "too-large".to_owned(),
        Err(MemoryError::Exhausted) => "exhausted".to_owned(),
        Err(MemoryError::Other(errno)) => refused(&io::Error::from_raw_os_error(errno)),
        Err(error) => refused(&error),
    }
}

/// Tries to count the cycles of a whole CPU, then those of this thread only. The CPU is a request
/// lane, or any usable CPU on a machine without pairs.
fn counters(machine: &Machine<'_>) -> String {
    let lane = machine.request_lanes().iter().next();
    let cpu = lane.or_else(|| machine.topology.usable.iter().next()).unwrap_or(0);
    let Err(of_lane) = counters::try_cycles(Some(cpu)) else { return "of-lanes".to_owned() };
    let is_forbidden =
        |error: &io::Error| matches!(error.raw_os_error(), Some(libc::EPERM | libc::EACCES));
    let error = match counters::try_cycles(None) {
        Ok(()) if is_forbidden(&of_lane) => return "of-own-threads".to_owned(),
        Ok(()) => of_lane,
        Err(of_thread) => of_thread,
    };
    match error.raw_os_error() {
        _ if is_forbidden(&error) => "not-permitted".to_owned(),
        Some(libc::ENOSYS) => "no-call".to_owned(),
        _ => format!("no-counter: {error}"),
    }
}

/// Whether the nanonap device can be used. The detail is the number of lanes that can wake another
/// lane.
fn nanonap() -> String {
    match Device::open() {
        Ok(device) => {
            let ties = device.module().ties();
            let word = match (device.can_wait(), ties) {
                (false, _) => "without-monitor",
                (true, 0) => "without-siblings",
                _ => "opened",
            };
            format!("{word}: {ties}")
        }
        Err(DeviceError::Open(MemoryError::Absent)) => "absent".to_owned(),
        Err(DeviceError::Open(MemoryError::Denied)) => "not-permitted".to_owned(),
        Err(error) => refused(&error),
    }
}

/// Whether /proc/cpuinfo lists the flag of MONITOR; `None` if it lists no flags.
fn monitor() -> Option<bool> {
    let cpu = fs::read_to_string("/proc/cpuinfo").ok()?;
    let flags = cpu.lines().find(|line| line.starts_with("flags"))?;
    Some(flags.split_whitespace().any(|flag| flag == "monitor"))
}

/// Tries SCHED_IDLE in a new thread that then ends, because some kernels do not let a thread leave
/// SCHED_IDLE.
fn idle_class() -> io::Result<()> {
    let ask = || {
        let none = libc::sched_param { sched_priority: 0 };
        // SAFETY: `none` is a live sched_param; 0 is the calling thread.
        let result = unsafe {
            libc::syscall(libc::SYS_sched_setscheduler, 0, libc::SCHED_IDLE, &raw const none)
        };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    };
    let thread = std::thread::Builder::new().spawn(ask)?;
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn preload_library() -> String {
    match elfen_instrument::find_library() {
        Ok(path) => format!("found: {}", path.display()),
        Err(error) => refused(&error),
    }
}

fn idle_poll() -> Option<bool> {
    let line = fs::read_to_string("/proc/cmdline").ok()?;
    Some(line.split_whitespace().any(|word| word == "idle=poll"))
}

/// The first version of systemd with CPUWeight=idle.
const OLDEST_SYSTEMD: u32 = 252;

fn systemd_version() -> String {
    if !systemd::is_running() {
        return "absent".to_owned();
    }
    match systemd::version() {
        Ok(version) if version >= OLDEST_SYSTEMD => format!("new: {version}"),
        Ok(version) => format!("old: {version}"),
        Err(why) => refused(&why),
    }
}

/// Opens a mapping of this process, which requires the same right as a mapping of another process.
fn open_own_mapping() -> io::Result<fs::File> {
    let entry = fs::read_dir("/proc/self/map_files")?.next().transpose()?;
    fs::File::open(entry.ok_or(io::ErrorKind::NotFound)?.path())
}

/// Whether debug symbols, by build id, are installed.
fn has_debug_symbols() -> bool {
    fs::read_dir("/usr/lib/debug/.build-id").is_ok_and(|mut folders| folders.next().is_some())
}

/// The most JVMs that are examined, so that a machine with many does not slow down the report.
const MOST_JVMS: usize = 16;
/// The limit for reading a JVM's library. The libraries of OpenJDK 8 to 21 have 13 to 25 MB.
const LIBRARY_BYTES_MAX: u64 = 64 << 20;
/// A probe that every JVM library with probes has.
const PROBE: &[u8] = b"safepoint__begin";

/// The running JVMs, each with the sources that report its pauses: `811 probes counters, 902
/// counters, 903`.
fn running_jvms() -> String {
    let jvm = |process: u32| {
        let all = mappings(process).ok()?;
        let library = all.iter().find(|mapping| mapping.name.ends_with("/libjvm.so"))?;
        let library = mapped::open(process, library);
        let library = library.and_then(|file| mapped::read(&file, LIBRARY_BYTES_MAX));
        let library = library.unwrap_or_default();
        let has_probes = library.windows(PROBE.len()).any(|bytes| bytes == PROBE);
        let counters = hsperf::counters(process);
        let has_counters = counters.is_ok_and(|(_, counters)| !counters.is_empty());
        let mut jvm = process.to_string();
        jvm += if has_probes { " probes" } else { "" };
        jvm += if has_counters { " counters" } else { "" };
        Some(jvm)
    };
    let jvms = numbers_in("/proc").into_iter().filter_map(jvm).take(MOST_JVMS);
    jvms.collect::<Vec<_>>().join(", ")
}

/// The most names of processes with cookies that are printed.
const COOKIES_SHOWN: usize = 3;

/// Whether any process has a core-scheduling cookie. Counts processes instead of threads: cookies
/// are usually set on processes, and threads inherit them.
fn core_scheduling() -> String {
    // Process 0 means the calling process.
    if let Err(error) = cookie(0) {
        return match error.raw_os_error() {
            Some(libc::EINVAL) => "absent".to_owned(),
            Some(libc::ENODEV) => "no-smt".to_owned(),
            _ => refused(&error),
        };
    }
    let (mut processes, mut with_cookie, mut hidden) = (0, 0, 0);
    let mut names = BTreeSet::new();
    for pid in numbers_in("/proc") {
        match cookie(pid) {
            Ok(cookie) => {
                processes += 1;
                if cookie != 0 {
                    with_cookie += 1;
                    names.insert(name_of(pid).unwrap_or_else(|| format!("process {pid}")));
                }
            }
            // The process has ended meanwhile.
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
            Err(_) => hidden += 1,
        }
    }
    let unseen = match hidden {
        0 => String::new(),
        hidden => format!("; {hidden} more are not visible to this user"),
    };
    let names = names.into_iter().take(COOKIES_SHOWN).collect::<Vec<_>>().join(", ");
    match with_cookie {
        0 => format!("unused: none of {processes} processes has a cookie{unseen}"),
        _ => format!(
            "used: {with_cookie} of {processes} processes have core-scheduling cookies \
             ({names}){unseen}"
        ),
    }
}

const PR_SCHED_CORE_GET: libc::c_ulong = 0;
const ONE_THREAD: libc::c_ulong = 0;

fn cookie(pid: u32) -> io::Result<u64> {
    let mut cookie = 0_u64;
    // SAFETY: PR_SCHED_CORE_GET writes eight bytes to the address, and `cookie` has eight bytes.
    let result = unsafe {
        libc::prctl(
            libc::PR_SCHED_CORE,
            PR_SCHED_CORE_GET,
            libc::c_ulong::from(pid),
            ONE_THREAD,
            &raw mut cookie,
        )
    };
    if result == 0 { Ok(cookie) } else { Err(io::Error::last_os_error()) }
}
