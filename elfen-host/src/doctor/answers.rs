//! What the kernel answers when it is asked and not read: the program attached, a segment made, a
//! counter opened.
//!
//! Data alone, so that a recording can hold it: `probe` asks, the checks judge. In a recording it
//! is JSON under the name `answers`, beside the files that were read.

use serde::{Deserialize, Serialize};

use crate::source::{Source, SourceError};

const NAME: &str = "answers";

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Answers {
    /// `None` if /proc does not say.
    pub capabilities: Option<Capabilities>,
    pub(crate) kernel_types: KernelTypes,
    pub attach: Attach,
    pub handed: Handed,
    pub segment: Segment,
    pub cycles: Cycles,
    pub nanonap: Nanonap,
    /// Whether the kernel lists MONITOR among the CPU's flags; `None` if /proc does not say.
    pub(crate) monitor: Option<bool>,
    pub umwait: Nap,
    pub mwaitx: Nap,
    pub(crate) idle_class: Rank,
    pub(crate) guard_rank: Rank,
    pub(crate) preload_library: Library,
    pub core_scheduling: CoreScheduling,
    /// Whether the kernel was booted with idle=poll; `None` if /proc does not say.
    pub(crate) idle_poll: Option<bool>,
    #[serde(default)]
    pub(crate) systemd: Systemd,
    /// `None` in recordings that are older than the question.
    #[serde(default)]
    pub(crate) looks: Option<Looks>,
    /// The same.
    #[serde(default)]
    pub(crate) tracepoints: Option<Tracepoints>,
    /// Whether the kernel notes at once when a thread begins to filter its calls; `None` also where
    /// it was not permitted to ask.
    #[serde(default)]
    pub(crate) filters: Option<bool>,
}

/// What this process may do, as far as Elfen needs it. CAP_SYS_ADMIN stands for both.
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

/// How it went to load the sched_switch program, attach it, and detach it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Attach {
    Attached,
    NotPermitted,
    NoKernelTypes,
    Refused(String),
}

/// How it went to map what elfend hands over to those whom it trusts.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Handed {
    /// No elfend answers.
    NotUp,
    Mapped,
    /// In elfend's words.
    Refused {
        why: String,
        fix: String,
    },
    /// It was handed over, and is none that we know.
    Unusable(String),
}

/// How it went to make a segment of System V shared memory, and remove it.
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

/// How it went to open the nanonap module's device.
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

/// Whether the preload library is where `elfen run` looks for it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Library {
    Found(String),
    Missing(String),
}

/// What the kernel said to a thread that asked for a rank: a batch's, SCHED_IDLE, or a guard's,
/// which is nice 0 and SCHED_OTHER.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Rank {
    Granted,
    Refused(String),
}

/// What runs the machine's units.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Systemd {
    /// It is not the first process.
    #[default]
    Elsewhere,
    Version(u32),
    /// It is, and does not say which.
    Silent(String),
}

/// What `elfen shim` may look at.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct Looks {
    pub(crate) map_files_refused: Option<String>,
    /// CAP_SYS_PTRACE.
    pub(crate) trace_any: bool,
    /// Folders of symbols by build id, below /usr/lib/debug.
    pub(crate) debug_symbols: usize,
}

/// What `elfen tailor` would attach to, by what it needs it for: those that the kernel lacks.
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
    /// It keeps counters, and we may read them.
    pub(crate) has_counters: bool,
}

/// Which processes have core-scheduling cookies.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CoreScheduling {
    /// The kernel has none.
    Absent,
    /// The machine has no SMT: then the kernel does not do it.
    NoSmt,
    /// The kernel does not answer for this process itself.
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
    /// The answers that a recording holds.
    pub fn recorded(source: &Source) -> Result<Self, AnswersError> {
        let text = source.text(NAME)?.ok_or(AnswersError::Missing)?;
        Ok(serde_json::from_str(&text)?)
    }

    /// As lines of a recording.
    pub fn recording(&self) -> Result<String, serde_json::Error> {
        let json = serde_json::to_string_pretty(self)?;
        Ok(json.lines().map(|line| format!("{NAME}: {line}\n")).collect())
    }
}
