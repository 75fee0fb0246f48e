//! Queries the kernel: tries each operation once, undoes it, and returns the kernel's answers.
//!
//! It does not judge the answers, and leaves nothing behind: before it returns, the program is
//! detached, the segment removed and the counters closed.

use std::collections::BTreeSet;
use std::{fs, io};

use elfen_instrument::remote::mappings;
use elfen_kernel::counters;
use elfen_kernel::events::{self, Needs};
use elfen_kernel::preempted::Notes;
use elfen_kernel::task_map::{self, Loaded, TasksError};
use elfen_rt::memory::{Memory, MemoryError};
use elfen_rt::nanonap::DeviceError;
use elfen_rt::nap::Kind;
use elfen_rt::nap::device::Device;
use elfen_rt::signal::page::Page;
use elfen_rt::signal::service::ServiceSlot;

use crate::fence::status::{self, Answer, Request};
use crate::hsperf;
use crate::mapped;
use crate::placement::may_take_guard_rank;
use crate::process::{name_of, numbers_in, status_field};

use super::answers::{
    Answers, Attach, Capabilities, CoreScheduling, Counting, Cycles, Handed, Jvm, KernelTypes,
    Library, Nanonap, Nap, Rank, Segment, SegmentOutcome, ShimAccess, Systemd, Tracepoints,
};

/// What to try the operations with.
#[derive(Clone, Copy, Debug)]
pub struct Trial {
    /// The CPU whose cycles are counted.
    pub cpu: u32,
    /// The number of slots in the page of a service, one for each request lane.
    pub request_lanes: u32,
}

pub fn query_kernel(trial: Trial) -> Answers {
    Answers {
        capabilities: capabilities(),
        kernel_types: kernel_types(),
        attach: attach(),
        handed: handed(),
        segment: segment(trial.request_lanes),
        cycles: Cycles { of_this_thread: cycles(None), of_a_lane: cycles(Some(trial.cpu)) },
        nanonap: nanonap(),
        monitor: monitor(),
        umwait: nap(Kind::Umwait),
        mwaitx: nap(Kind::Mwaitx),
        idle_class: rank(idle_class()),
        guard_rank: rank(may_take_guard_rank()),
        preload_library: match elfen_instrument::find_library() {
            Ok(path) => Library::Found(path.display().to_string()),
            Err(error) => Library::Missing(error.to_string()),
        },
        core_scheduling: core_scheduling(),
        idle_poll: fs::read_to_string("/proc/cmdline")
            .ok()
            .map(|line| line.split_whitespace().any(|word| word == "idle=poll")),
        systemd: systemd(),
        looks: Some(shim_access()),
        tracepoints: Some(tracepoints()),
        filters: filters(),
    }
}

/// What `elfen tailor` needs from the kernel's types and from running JVMs.
fn tracepoints() -> Tracepoints {
    // Without types nothing is found; another check says why.
    let types = fs::read("/sys/kernel/btf/vmlinux").unwrap_or_default();
    let names: BTreeSet<&[u8]> = types.split(|&byte| byte == 0).collect();
    let lacks = |needs: Needs| {
        let all = events::tracepoints().filter(|(_, of)| *of == needs);
        let lacking =
            all.filter(|(name, _)| !names.contains(format!("btf_trace_{name}").as_bytes()));
        lacking.map(|(name, _)| name.to_owned()).collect()
    };
    Tracepoints {
        sched_lacks: lacks(Needs::Sched),
        sockets_lack: lacks(Needs::Sockets),
        full_lacks: lacks(Needs::Full),
        uprobes: fs::exists("/sys/bus/event_source/devices/uprobe").unwrap_or(false),
        jvms: jvms(),
    }
}

/// How many JVMs are examined: a machine may have any number.
const MOST_JVMS: usize = 16;
/// The limit for reading a JVM's library: those of OpenJDK 8 to 21 have 13 to 25 MB.
const LIBRARY_BYTES_MAX: u64 = 64 << 20;
/// The name of a probe that every JVM with probes has.
const PROBE: &[u8] = b"safepoint__begin";

fn jvms() -> Vec<Jvm> {
    let jvm = |process: u32| {
        let all = mappings(process).ok()?;
        let library = all.iter().find(|mapping| mapping.name.ends_with("/libjvm.so"))?;
        let library = mapped::open(process, library);
        let library = library.and_then(|file| mapped::read(&file, LIBRARY_BYTES_MAX));
        let library = library.unwrap_or_default();
        let has_probes = library.windows(PROBE.len()).any(|bytes| bytes == PROBE);
        let counters = hsperf::counters(process);
        let has_counters = counters.is_ok_and(|(_, counters)| !counters.is_empty());
        Some(Jvm { process, has_probes, has_counters })
    };
    numbers_in("/proc").into_iter().filter_map(jvm).take(MOST_JVMS).collect()
}

/// Opens a mapping of this process, which requires the same right as a mapping of another process.
fn shim_access() -> ShimAccess {
    let own = || {
        let entry = fs::read_dir("/proc/self/map_files")?.next().transpose()?;
        fs::File::open(entry.ok_or(io::ErrorKind::NotFound)?.path())
    };
    let symbols = fs::read_dir("/usr/lib/debug/.build-id");
    ShimAccess {
        map_files_refused: own().err().map(|error| error.to_string()),
        trace_any: effective_capabilities().is_some_and(|mask| mask & 1 << CAP_SYS_PTRACE != 0),
        debug_symbols: symbols.map_or(0, Iterator::count),
    }
}

fn systemd() -> Systemd {
    if !crate::systemd::is_running() {
        return Systemd::Elsewhere;
    }
    match crate::systemd::version() {
        Ok(version) => Systemd::Version(version),
        Err(why) => Systemd::Silent(why),
    }
}

fn rank(result: io::Result<()>) -> Rank {
    result.map_or_else(|error| Rank::Refused(error.to_string()), |()| Rank::Granted)
}

const CAP_SYS_PTRACE: u32 = 19;
const CAP_SYS_ADMIN: u32 = 21;
const CAP_PERFMON: u32 = 38;
const CAP_BPF: u32 = 39;

fn capabilities() -> Option<Capabilities> {
    let mask = effective_capabilities()?;
    let has = |capability: u32| mask & (1 << capability | 1 << CAP_SYS_ADMIN) != 0;
    Some(Capabilities { bpf: has(CAP_BPF), perfmon: has(CAP_PERFMON) })
}

fn effective_capabilities() -> Option<u64> {
    u64::from_str_radix(&status_field("self", "CapEff")?, 16).ok()
}

/// The name of the type against which a tp_btf program of this tracepoint is checked.
const SCHED_SWITCH: &[u8] = b"btf_trace_sched_switch";

fn kernel_types() -> KernelTypes {
    match fs::read("/sys/kernel/btf/vmlinux") {
        Err(error) if error.kind() == io::ErrorKind::NotFound => KernelTypes::Absent,
        Err(error) => KernelTypes::Unreadable(error.to_string()),
        // The names are NUL-terminated strings at the end of the file.
        Ok(types) if types.split(|&byte| byte == 0).any(|name| name == SCHED_SWITCH) => {
            KernelTypes::WithSchedSwitch
        }
        Ok(_) => KernelTypes::WithoutSchedSwitch,
    }
}

fn filters() -> Option<bool> {
    Notes::attach().ok().map(|notes| notes.filters().is_some())
}

fn attach() -> Attach {
    match Loaded::load().and_then(|loaded| loaded.map()) {
        Ok(map) => {
            drop(map);
            Attach::Attached
        }
        Err(task_map::Error::NotPermitted) => Attach::NotPermitted,
        Err(task_map::Error::NoKernelTypes) => Attach::NoKernelTypes,
        Err(error) => Attach::Refused(beginning(&error.to_string())),
    }
}

/// The verifier's message can be pages long.
const MAX_WORDS: usize = 60;

fn beginning(text: &str) -> String {
    let words: Vec<&str> = text.split_whitespace().take(MAX_WORDS).collect();
    words.join(" ")
}

fn handed() -> Handed {
    match task_map::request_from_elfend() {
        Ok(map) => {
            drop(map);
            Handed::Mapped
        }
        Err(TasksError::Absent) => Handed::NotUp,
        Err(TasksError::Map(error)) => Handed::Unusable(error.to_string()),
        // Sends the request again, to get elfend's reason.
        Err(TasksError::Refused) => {
            match status::ask(&task_map::elfend_socket(), &Request::Tasks) {
                Ok(Answer::Refused { why, fix }) => Handed::Refused { why, fix },
                Ok(_) => Handed::Unusable("elfend gives no task map".to_owned()),
                Err(error) => Handed::Unusable(format!("elfend: {error}")),
            }
        }
    }
}

fn segment(request_lanes: u32) -> Segment {
    let bytes = Page::<ServiceSlot>::bytes(request_lanes);
    let made = Memory::create_segment(libc::IPC_PRIVATE, bytes, 0o600);
    let outcome = match made.and_then(|memory| memory.remove_name()) {
        Ok(()) => SegmentOutcome::Made,
        Err(MemoryError::Size) => SegmentOutcome::TooLarge,
        Err(MemoryError::Exhausted) => SegmentOutcome::Exhausted,
        Err(MemoryError::Other(errno)) => {
            SegmentOutcome::Refused(io::Error::from_raw_os_error(errno).to_string())
        }
        Err(error) => SegmentOutcome::Refused(error.to_string()),
    };
    Segment { bytes, outcome }
}

/// Counts the cycles of this thread, or of a whole CPU, for a moment.
fn cycles(cpu: Option<u32>) -> Counting {
    match counters::try_cycles(cpu) {
        Ok(()) => Counting::Counts,
        Err(error) => match error.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => Counting::NotPermitted,
            Some(libc::ENOSYS) => Counting::NoCall,
            _ => Counting::NoCounter(error.to_string()),
        },
    }
}

fn nanonap() -> Nanonap {
    match Device::open() {
        Ok(device) => Nanonap::Opened { waits: device.can_wait(), ties: device.module().ties() },
        Err(DeviceError::Open(MemoryError::Absent)) => Nanonap::Absent,
        Err(DeviceError::Open(MemoryError::Denied)) => Nanonap::NotPermitted,
        Err(error) => Nanonap::Refused(error.to_string()),
    }
}

fn nap(kind: Kind) -> Nap {
    match elfen_rt::nap::Nap::open(kind) {
        Ok(_) => Nap::Works,
        Err(missing) => Nap::Missing(missing.to_string()),
    }
}

/// From the kernel's list, which leaves out CPUs whose MONITOR does not work.
fn monitor() -> Option<bool> {
    let cpu = fs::read_to_string("/proc/cpuinfo").ok()?;
    let flags = cpu.lines().find(|line| line.starts_with("flags"))?;
    Some(flags.split_whitespace().any(|flag| flag == "monitor"))
}

/// Tries it in a new thread that then ends: not every kernel lets a thread leave SCHED_IDLE.
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

const PR_SCHED_CORE_GET: libc::c_ulong = 0;
const ONE_THREAD: libc::c_ulong = 0;

/// Counts processes instead of threads: cookies are given to processes, and threads inherit them.
fn core_scheduling() -> CoreScheduling {
    // 0 is the caller itself.
    if let Err(error) = cookie(0) {
        return match error.raw_os_error() {
            Some(libc::EINVAL) => CoreScheduling::Absent,
            Some(libc::ENODEV) => CoreScheduling::NoSmt,
            _ => CoreScheduling::Refused(error.to_string()),
        };
    }
    let mut processes = 0;
    let mut hidden = 0;
    let mut with_cookie = Vec::new();
    for process in numbers_in("/proc") {
        let pid = process.cast_signed();
        match cookie(pid) {
            Ok(cookie) => {
                processes += 1;
                if cookie != 0 {
                    let name = name_of(process).unwrap_or_else(|| format!("process {process}"));
                    with_cookie.push(name);
                }
            }
            // The process has ended meanwhile.
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
            Err(_) => hidden += 1,
        }
    }
    CoreScheduling::Looked { processes, hidden, with_cookie }
}

fn cookie(pid: libc::pid_t) -> io::Result<u64> {
    let mut cookie = 0_u64;
    // SAFETY: PR_SCHED_CORE_GET writes eight bytes to the address, which is that of `cookie`.
    let result = unsafe {
        libc::prctl(
            libc::PR_SCHED_CORE,
            PR_SCHED_CORE_GET,
            libc::c_long::from(pid),
            ONE_THREAD,
            &raw mut cookie,
        )
    };
    if result == 0 { Ok(cookie) } else { Err(io::Error::last_os_error()) }
}
