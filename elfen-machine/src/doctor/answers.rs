//! What the kernel answers to questions that no file answers: may a program be attached, a segment
//! be made, a counter be opened?
//!
//! `query_kernel` tries each operation once and undoes it: before it returns, the program is
//! detached, the segment removed and the counters closed. The checks judge the answers. In a
//! recording, the answers are JSON under the name `answers`, next to the files that were read.

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
use elfen_rt::nap::{Kind, Nap};
use elfen_rt::signal::page::Page;
use elfen_rt::signal::service::ServiceSlot;
use serde::{Deserialize, Serialize};

use crate::fence::status::{self, Answer, Request};
use crate::placement::may_take_guard_rank;
use crate::process::numbers_in;
use crate::source::{Source, SourceError};
use crate::{hsperf, mapped};

const NAME: &str = "answers";

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Answers {
    /// `None` if /proc does not show them.
    pub capabilities: Option<Capabilities>,
    pub kernel_types: KernelTypes,
    pub attach: Attach,
    pub handed: Handed,
    pub segment: Segment,
    pub cycles: Cycles,
    pub nanonap: Nanonap,
    /// Whether the kernel lists MONITOR among the CPU's flags; `None` if /proc does not show them.
    pub monitor: Option<bool>,
    pub umwait: Result<(), String>,
    pub mwaitx: Result<(), String>,
    /// Whether a thread may have SCHED_IDLE, as batches do.
    pub idle_class: Result<(), String>,
    /// Whether a thread may have nice 0 and SCHED_OTHER, as guards do.
    pub guard_rank: Result<(), String>,
    /// Where the preload library is.
    pub preload_library: Result<String, String>,
    pub core_scheduling: CoreScheduling,
    /// Whether the kernel was booted with idle=poll; `None` if /proc does not show it.
    pub idle_poll: Option<bool>,
    /// The version of systemd, or why it reports none; `None` if it is not the first process.
    pub systemd: Option<Result<u32, String>>,
    /// Whether the mappings of processes can be opened.
    pub map_files: Result<(), String>,
    /// CAP_SYS_PTRACE.
    pub trace_any: bool,
    /// The number of folders with symbols by build id, below /usr/lib/debug.
    pub debug_symbols: usize,
    pub tracepoints: Tracepoints,
    /// Why the kernel does not note at once when a thread begins to filter its system calls; `None`
    /// if it does, and if the process may not find out.
    #[serde(default)]
    pub filters_refused: Option<String>,
}

/// The capabilities of this process that Elfen needs. CAP_SYS_ADMIN includes both.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Capabilities {
    pub bpf: bool,
    pub perfmon: bool,
}

/// The kernel's description of itself, /sys/kernel/btf/vmlinux.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum KernelTypes {
    Absent,
    Unreadable(String),
    WithoutSchedSwitch,
    WithSchedSwitch,
}

/// The result of loading, attaching and detaching the sched_switch program.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Attach {
    Attached,
    NotPermitted,
    NoKernelTypes,
    Refused(String),
}

/// The result of mapping the task map of elfend, which gives it only to trusted users.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Handed {
    /// No elfend answers.
    NotUp,
    Mapped,
    /// With elfend's reason.
    Refused {
        why: String,
        fix: String,
    },
    /// The map was received, but this version cannot use it.
    Unusable(String),
}

/// The result of making and removing a segment of System V shared memory.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Segment {
    pub bytes: usize,
    pub outcome: SegmentOutcome,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SegmentOutcome {
    Made,
    TooLarge,
    Exhausted,
    Refused(String),
}

/// Whether cycles can be counted.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Cycles {
    pub of_this_thread: Counting,
    pub of_a_lane: Counting,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Counting {
    Counts,
    NotPermitted,
    /// The kernel has no perf_event_open(2).
    NoCall,
    NoCounter(String),
}

/// The result of opening the nanonap module's device.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Nanonap {
    Absent,
    NotPermitted,
    Refused(String),
    /// `ties`: how many lanes can wake another.
    Opened {
        waits: bool,
        ties: u32,
    },
}

/// Tracepoints for `elfen tailor` that the kernel lacks, by the option that needs them.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Tracepoints {
    pub sched_lacks: Vec<String>,
    pub sockets_lack: Vec<String>,
    pub full_lacks: Vec<String>,
    pub uprobes: bool,
    pub jvms: Vec<Jvm>,
}

/// A Java virtual machine that runs.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Jvm {
    pub process: u32,
    pub has_probes: bool,
    /// It keeps counters that this process may read.
    pub has_counters: bool,
}

/// Which processes have core-scheduling cookies.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CoreScheduling {
    /// The kernel was built without core scheduling.
    Absent,
    /// The machine has no SMT, so the kernel does no core scheduling.
    NoSmt,
    /// The kernel does not answer even for this process.
    Refused(String),
    #[serde(rename_all = "kebab-case")]
    Looked { processes: usize, hidden: usize, with_cookie: Vec<String> },
}

#[derive(Debug, thiserror::Error)]
pub enum AnswersError {
    #[error(transparent)]
    Source(#[from] SourceError),
    #[error("the recording has no line {NAME}: JSON")]
    Missing,
    #[error("{NAME}: {0}")]
    Malformed(#[from] serde_json::Error),
}

impl Answers {
    /// The answers in a recording.
    pub fn recorded(source: &Source) -> Result<Self, AnswersError> {
        let text = source.text(NAME)?.ok_or(AnswersError::Missing)?;
        Ok(serde_json::from_str(&text)?)
    }

    /// The lines of a recording with these answers.
    pub fn recording(&self) -> Result<String, serde_json::Error> {
        let json = serde_json::to_string_pretty(self)?;
        Ok(json.lines().map(|line| format!("{NAME}: {line}\n")).collect())
    }
}

/// What to try the operations with.
#[derive(Clone, Copy, Debug)]
pub struct Trial {
    /// The CPU whose cycles are counted.
    pub cpu: u32,
    /// The number of slots in the page of a service, one for each request lane.
    pub request_lanes: u32,
}

/// Whether an operation worked, or the error in words.
fn told<T, E: ToString>(result: Result<T, E>) -> Result<(), String> {
    result.map(drop).map_err(|error| error.to_string())
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
        umwait: told(Nap::open(Kind::Umwait)),
        mwaitx: told(Nap::open(Kind::Mwaitx)),
        idle_class: told(idle_class()),
        guard_rank: told(may_take_guard_rank()),
        preload_library: elfen_instrument::find_library()
            .map(|path| path.display().to_string())
            .map_err(|error| error.to_string()),
        core_scheduling: core_scheduling(),
        idle_poll: fs::read_to_string("/proc/cmdline")
            .ok()
            .map(|line| line.split_whitespace().any(|word| word == "idle=poll")),
        systemd: crate::systemd::is_running().then(crate::systemd::version),
        map_files: told(open_own_mapping()),
        trace_any: effective_capabilities().is_some_and(|mask| mask & 1 << CAP_SYS_PTRACE != 0),
        debug_symbols: fs::read_dir("/usr/lib/debug/.build-id").map_or(0, Iterator::count),
        tracepoints: tracepoints(),
        filters_refused: Notes::attach()
            .ok()
            .and_then(|notes| Some(beginning(notes.filters().err()?))),
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
fn open_own_mapping() -> io::Result<fs::File> {
    let entry = fs::read_dir("/proc/self/map_files")?.next().transpose()?;
    fs::File::open(entry.ok_or(io::ErrorKind::NotFound)?.path())
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
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let mask = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    u64::from_str_radix(mask.trim(), 16).ok()
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

fn attach() -> Attach {
    match Loaded::load().and_then(|loaded| loaded.map()) {
        Ok(map) => {
            drop(map);
            Attach::Attached
        }
        Err(task_map::Error::NotPermitted) => Attach::NotPermitted,
        Err(task_map::Error::NoKernelTypes) => Attach::NoKernelTypes,
        Err(error) => Attach::Refused(beginning(&error)),
    }
}

/// The verifier's message can be pages long.
const MAX_WORDS: usize = 60;

fn beginning(error: &impl ToString) -> String {
    let text = error.to_string();
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
    for pid in numbers_in("/proc") {
        match cookie(pid) {
            Ok(cookie) => {
                processes += 1;
                if cookie != 0 {
                    with_cookie.push(command_of(pid));
                }
            }
            // The process has ended meanwhile.
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
            Err(_) => hidden += 1,
        }
    }
    CoreScheduling::Looked { processes, hidden, with_cookie }
}

fn cookie(pid: u32) -> io::Result<u64> {
    let mut cookie = 0_u64;
    // SAFETY: PR_SCHED_CORE_GET writes eight bytes to the address, which is that of `cookie`.
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

fn command_of(pid: u32) -> String {
    let name = fs::read_to_string(format!("/proc/{pid}/comm"));
    name.map_or_else(|_| format!("process {pid}"), |name| name.trim_end().to_owned())
}
