//! Asks the kernel: tries each thing once, undoes it, and keeps what the kernel said.
//!
//! Nothing is judged here, and nothing is left behind: the program is detached, the segment
//! removed, the counters closed before the answers are returned.

use std::ffi::c_int;
use std::fs;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

use elfen_kernel::task_map::{self, Loaded};
use elfen_rt::memory::{Memory, MemoryError};
use elfen_rt::nap::Kind;
use elfen_rt::nap::device::{Device, DeviceError};
use elfen_rt::signal::page::Page;
use elfen_rt::signal::service::ServiceSlot;
use elfen_rt::signal::task::{PIN_DIR, TaskMap, TaskMapError};
use nix::unistd::{Gid, Group};

use super::answers::{
    Answers, Attach, Capabilities, CoreScheduling, Counting, Cycles, IdleClass, KernelTypes,
    Library, Nanonap, Nap, Pinned, Segment, SegmentOutcome,
};

/// What to try it with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Trial {
    /// Whose cycles to count.
    pub(crate) cpu: u32,
    /// Slots of a service's page: one a request lane.
    pub(crate) request_lanes: u32,
}

pub(crate) fn ask(trial: Trial) -> Answers {
    Answers {
        capabilities: capabilities(),
        kernel_types: kernel_types(),
        attach: attach(),
        pinned: pinned(),
        segment: segment(trial.request_lanes),
        cycles: Cycles {
            of_this_thread: cycles(0, -1),
            of_a_lane: cycles(-1, c_int::try_from(trial.cpu).unwrap_or(0)),
        },
        nanonap: nanonap(),
        monitor: monitor(),
        umwait: nap(Kind::Umwait),
        mwaitx: nap(Kind::Mwaitx),
        idle_class: match idle_class() {
            Ok(()) => IdleClass::Granted,
            Err(error) => IdleClass::Refused(error.to_string()),
        },
        preload_library: match elfen_instrument::find_library() {
            Ok(path) => Library::Found(path.display().to_string()),
            Err(error) => Library::Missing(error.to_string()),
        },
        core_scheduling: core_scheduling(),
        idle_poll: fs::read_to_string("/proc/cmdline")
            .ok()
            .map(|line| line.split_whitespace().any(|word| word == "idle=poll")),
    }
}

const CAP_SYS_ADMIN: u32 = 21;
const CAP_PERFMON: u32 = 38;
const CAP_BPF: u32 = 39;

fn capabilities() -> Option<Capabilities> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let mask = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    let mask = u64::from_str_radix(mask.trim(), 16).ok()?;
    let has = |capability: u32| mask & (1 << capability | 1 << CAP_SYS_ADMIN) != 0;
    Some(Capabilities { bpf: has(CAP_BPF), perfmon: has(CAP_PERFMON) })
}

/// The name of the type that a tp_btf program of this tracepoint is checked against.
const SCHED_SWITCH: &[u8] = b"btf_trace_sched_switch";

fn kernel_types() -> KernelTypes {
    match fs::read("/sys/kernel/btf/vmlinux") {
        Err(error) if error.kind() == io::ErrorKind::NotFound => KernelTypes::Absent,
        Err(error) => KernelTypes::Unreadable(error.to_string()),
        // Names are NUL-terminated strings at the end of the file.
        Ok(types) if types.split(|&byte| byte == 0).any(|name| name == SCHED_SWITCH) => {
            KernelTypes::WithSchedSwitch
        }
        Ok(_) => KernelTypes::WithoutSchedSwitch,
    }
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

/// The verifier can write pages.
const MAX_WORDS: usize = 60;

fn beginning(text: &str) -> String {
    let words: Vec<&str> = text.split_whitespace().take(MAX_WORDS).collect();
    words.join(" ")
}

fn pinned() -> Pinned {
    let Ok(folder) = fs::metadata(PIN_DIR) else { return Pinned::NotUp };
    let group = group_name(std::os::unix::fs::MetadataExt::gid(&folder));
    match TaskMap::open_pinned() {
        Ok(map) => {
            drop(map);
            Pinned::Mapped { group }
        }
        Err(TaskMapError::Open(MemoryError::Absent)) => Pinned::NotUp,
        // Who may read the folder is in the group: then it was the call that was refused.
        Err(TaskMapError::Open(MemoryError::Denied)) if fs::read_dir(PIN_DIR).is_ok() => {
            Pinned::NotPermitted { group }
        }
        Err(TaskMapError::Open(MemoryError::Denied)) => Pinned::NotInGroup { group },
        Err(error) => Pinned::Refused(error.to_string()),
    }
}

fn group_name(gid: u32) -> String {
    match Group::from_gid(Gid::from_raw(gid)) {
        Ok(Some(group)) => group.name,
        Ok(None) | Err(_) => gid.to_string(),
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

/// `struct perf_event_attr` as it was in its first version; the kernel takes the rest as zeroes.
#[repr(C)]
#[derive(Default)]
struct EventAttribute {
    kind: u32,
    size: u32,
    config: u64,
    sample_period: u64,
    sample_kind: u64,
    read_format: u64,
    flags: u64,
    wakeup_events: u32,
    breakpoint_kind: u32,
    breakpoint_address: u64,
}

const ATTRIBUTE_BYTES: u32 = 64;
const _: () = assert!(size_of::<EventAttribute>() == ATTRIBUTE_BYTES as usize);

const PERF_TYPE_HARDWARE: u32 = 0;
const PERF_COUNT_HW_CPU_CYCLES: u64 = 0;
const EXCLUDE_KERNEL: u64 = 1 << 5;
const EXCLUDE_HYPERVISOR: u64 = 1 << 6;
const PERF_FLAG_FD_CLOEXEC: libc::c_ulong = 8;

/// Counts the cycles of a thread (0: this one) or of all that a CPU runs (`pid` -1), for a moment.
fn cycles(pid: c_int, cpu: c_int) -> Counting {
    let attribute = EventAttribute {
        kind: PERF_TYPE_HARDWARE,
        size: ATTRIBUTE_BYTES,
        config: PERF_COUNT_HW_CPU_CYCLES,
        flags: EXCLUDE_KERNEL | EXCLUDE_HYPERVISOR,
        ..EventAttribute::default()
    };
    let no_group: c_int = -1;
    // SAFETY: the kernel reads `size` bytes of `attribute`, which is ours and that long; the rest
    // are plain numbers.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_perf_event_open,
            &raw const attribute,
            pid,
            cpu,
            no_group,
            PERF_FLAG_FD_CLOEXEC,
        )
    };
    let Some(fd) = c_int::try_from(fd).ok().filter(|&fd| fd >= 0) else {
        let error = io::Error::last_os_error();
        return match error.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => Counting::NotPermitted,
            Some(libc::ENOSYS) => Counting::NoCall,
            _ => Counting::NoCounter(error.to_string()),
        };
    };
    // SAFETY: the kernel has just given us this descriptor, and nobody else knows it.
    drop(unsafe { OwnedFd::from_raw_fd(fd) });
    Counting::Counts
}

fn nanonap() -> Nanonap {
    match Device::open() {
        Ok(device) => Nanonap::Opened { waits: device.can_wait(), ties: device.ties() },
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

/// As the kernel sees it: CPUs that show MONITOR and do not keep to it are not on its list.
fn monitor() -> Option<bool> {
    let cpu = fs::read_to_string("/proc/cpuinfo").ok()?;
    let flags = cpu.lines().find(|line| line.starts_with("flags"))?;
    Some(flags.split_whitespace().any(|flag| flag == "monitor"))
}

/// Asks in a thread that ends with it: who has SCHED_IDLE may not leave it on every kernel.
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

/// Processes stand for their threads here: a cookie is given to a process, and threads inherit it.
fn core_scheduling() -> CoreScheduling {
    // 0 is the caller itself.
    if let Err(error) = cookie(0) {
        return match error.raw_os_error() {
            Some(libc::EINVAL) => CoreScheduling::Absent,
            Some(libc::ENODEV) => CoreScheduling::NoSmt,
            _ => CoreScheduling::Refused(error.to_string()),
        };
    }
    let (mut processes, mut hidden, mut with_cookie) = (0, 0, Vec::new());
    for pid in pids() {
        match cookie(pid) {
            Ok(cookie) => {
                processes += 1;
                if cookie != 0 {
                    with_cookie.push(command_of(pid));
                }
            }
            // It ended meanwhile.
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

fn pids() -> Vec<libc::pid_t> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

fn command_of(pid: libc::pid_t) -> String {
    let name = fs::read_to_string(format!("/proc/{pid}/comm"));
    name.map_or_else(|_| format!("process {pid}"), |name| name.trim_end().to_owned())
}
