//! The kernel's answers to questions that cannot be read from files: whether a program can be
//! attached, a segment be made, a counter be opened.
//!
//! Only data, so that a recording can contain it: `probe` collects the answers, and the checks
//! judge them. In a recording they are JSON under the name `answers`, next to the files that were
//! read.

use serde::{Deserialize, Serialize};

use crate::source::{Source, SourceError};

const NAME: &str = "answers";

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Answers {
    /// `None` if /proc does not show them.
    pub capabilities: Option<Capabilities>,
    pub(crate) kernel_types: KernelTypes,
    pub attach: Attach,
    pub handed: Handed,
    pub segment: Segment,
    pub cycles: Cycles,
    pub nanonap: Nanonap,
    /// Whether the kernel lists MONITOR among the CPU's flags; `None` if /proc does not show them.
    pub(crate) monitor: Option<bool>,
    pub umwait: Nap,
    pub mwaitx: Nap,
    pub(crate) idle_class: Rank,
    pub(crate) guard_rank: Rank,
    pub(crate) preload_library: Library,
    pub core_scheduling: CoreScheduling,
    /// Whether the kernel was booted with idle=poll; `None` if /proc does not show it.
    pub(crate) idle_poll: Option<bool>,
    #[serde(default)]
    pub(crate) systemd: Systemd,
    /// `None` in older recordings.
    #[serde(default)]
    pub(crate) looks: Option<ShimAccess>,
    /// `None` in older recordings.
    #[serde(default)]
    pub(crate) tracepoints: Option<Tracepoints>,
    /// Whether the kernel notes at once when a thread begins to filter its system calls. `None`
    /// also if the process may not find out.
    #[serde(default)]
    pub(crate) filters: Option<bool>,
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
pub(crate) enum KernelTypes {
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
    pub(crate) of_this_thread: Counting,
    pub(crate) of_a_lane: Counting,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Counting {
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

/// A nap without the module.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Nap {
    Works,
    Missing(String),
}

/// Whether the preload library is where `elfen run` searches for it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Library {
    Found(String),
    Missing(String),
}

/// The kernel's answer to a thread that requests a rank: SCHED_IDLE for a batch, or nice 0 and
/// SCHED_OTHER for a guard.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Rank {
    Granted,
    Refused(String),
}

/// The service manager of the machine.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Systemd {
    /// systemd is not the first process.
    #[default]
    Elsewhere,
    Version(u32),
    /// systemd is the first process, but does not report its version.
    Silent(String),
}

/// What `elfen shim` may access.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct ShimAccess {
    pub(crate) map_files_refused: Option<String>,
    /// CAP_SYS_PTRACE.
    pub(crate) trace_any: bool,
    /// The number of folders with symbols by build id, below /usr/lib/debug.
    pub(crate) debug_symbols: usize,
}

/// Tracepoints for `elfen tailor` that the kernel lacks, by the option that needs them.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct Tracepoints {
    pub(crate) sched_lacks: Vec<String>,
    pub(crate) sockets_lack: Vec<String>,
    pub(crate) full_lacks: Vec<String>,
    pub(crate) uprobes: bool,
    pub(crate) jvms: Vec<Jvm>,
}

/// A Java virtual machine that runs.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct Jvm {
    pub(crate) process: u32,
    pub(crate) has_probes: bool,
    /// It keeps counters that this process may read.
    pub(crate) has_counters: bool,
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
