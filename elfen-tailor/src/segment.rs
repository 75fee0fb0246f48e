//! Segments, which are parts of a request's time with one kind each; requests explained by
//! segments; and causes, which are the names of kinds.

use std::sync::Arc;

use elfen_rt::signal::event::Stall;

use crate::calls;
use crate::runtime::{self, Operation};
use crate::stalls;
use crate::trace::{ThreadIdentity, Trace};

#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum SegmentKind {
    /// The service worked for this request.
    Work,
    /// The service worked for other requests.
    Queue,
    /// The service ran, but not for a request.
    Busy,
    /// The service was runnable, but this thread had its CPU.
    Preempted(ThreadIdentity),
    /// The service was runnable on an idle CPU, which was waking up.
    Wake,
    /// The service was taken off a CPU that idled from then on.
    Throttled,
    /// The service was stopped by a signal or a debugger.
    Stopped,
    /// The service waited for a disk: in this system call or in a page fault, and in the kernel
    /// function at this address. The address is 0 if the function is unknown.
    Io(Option<u16>, u32),
    /// The service touched memory that the kernel had to provide first.
    Fault,
    /// The service waited for a lock that this thread held.
    Lock(ThreadIdentity),
    /// The service waited for a lock with an unknown holder.
    LockOfUnknown,
    /// The service waited while the threads of a JVM were halted for this operation.
    Pause(Operation),
    /// The service waited for a JVM to collect garbage.
    Gc,
    /// A JVM compiled, on the CPU of the request or with a lock that the request needed.
    Jit,
    /// A JVM loaded classes, in the request's thread or in the holder of a lock that it waited for.
    ClassLoad,
    /// The service slept for a time, in this system call.
    Sleep(u16),
    /// The service waited for input or anything else, in this system call.
    Wait(Option<u16>),
    /// The service waited for a kernel lock, or for memory that the kernel had to free first.
    Stall(Stall),
    Irq(u32),
    Softirq(u32),
    /// The hypervisor ran other virtual machines.
    Steal,
    /// The answer was written but had not left the machine yet.
    TcpOut,
    /// The state of the thread is unknown.
    Unknown,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Segment {
    pub from_ns: u64,
    pub to_ns: u64,
    pub kind: SegmentKind,
    pub thread: u32,
    pub cpu: Option<u32>,
    /// For queueing: the number of the request for which the service worked meanwhile, if the
    /// service numbers its requests.
    pub behind: Option<u64>,
}

impl Segment {
    pub fn ns(&self) -> u64 {
        self.to_ns.saturating_sub(self.from_ns)
    }

    /// How much of the segment lies within a span of time.
    pub fn within(&self, from_ns: u64, to_ns: u64) -> u64 {
        self.to_ns.min(to_ns).saturating_sub(self.from_ns.max(from_ns))
    }
}

/// A request, explained by segments.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExplainedRequest {
    pub connection: u64,
    pub arrived_ns: u64,
    pub ended_ns: u64,
    /// The thread that did most of the work, in whose queue the request waited.
    pub server: u32,
    /// The class of the request, as the service reports it; 0 if the service reports none.
    pub class: u64,
    /// How long each stage of the service took.
    pub stages: Vec<(u16, u64)>,
    pub segments: Vec<Segment>,
    /// Page faults of the threads that worked for the request, during that work; only with `full`
    /// detail.
    pub faults: u64,
    /// What ran on the other lanes of the core during the request's work.
    pub neighbour_spans: Vec<NeighbourSpan>,
}

/// A span of a request's work during which a thread ran on another lane of the same core.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NeighbourSpan {
    pub from_ns: u64,
    pub to_ns: u64,
    /// The name of the thread, or the program of its batch if the thread belongs to `elfen run`.
    pub name: Arc<str>,
}

impl NeighbourSpan {
    /// How much of the neighbour's time lies within a span of time.
    pub fn within(&self, from_ns: u64, to_ns: u64) -> u64 {
        self.to_ns.min(to_ns).saturating_sub(self.from_ns.max(from_ns))
    }
}

impl ExplainedRequest {
    pub fn latency_ns(&self) -> u64 {
        self.ended_ns - self.arrived_ns
    }

    pub fn work_ns(&self) -> u64 {
        saturating_sum(
            self.segments.iter().filter(|s| s.kind == SegmentKind::Work).map(Segment::ns),
        )
    }

    /// How long each neighbour ran next to the request, the longest first.
    pub fn neighbours(&self) -> Vec<(&str, u64)> {
        let mut sums: Vec<(&str, u64)> = Vec::new();
        for stretch in &self.neighbour_spans {
            let ns = stretch.within(0, u64::MAX);
            match sums.iter_mut().find(|(name, _)| *name == &*stretch.name) {
                Some((_, sum)) => *sum = sum.saturating_add(ns),
                None => sums.push((&stretch.name, ns)),
            }
        }
        sums.sort_by_key(|(_, ns)| std::cmp::Reverse(*ns));
        sums
    }
}

/// Sums times without overflow: a damaged file may hold any numbers.
pub fn saturating_sum(times: impl Iterator<Item = u64>) -> u64 {
    times.fold(0, u64::saturating_add)
}

const VECTORS: [&str; 10] =
    ["HI", "TIMER", "NET_TX", "NET_RX", "BLOCK", "IRQ_POLL", "TASKLET", "SCHED", "HRTIMER", "RCU"];

pub const WORK: &str = "work";
pub const LONG: &str = "long";
pub const QUEUE: &str = "queue";
pub const NEIGHBOUR: &str = "beside";
pub const BURST: &str = "burst";
pub const COMBINED: &str = "together";
/// The name of the recorder's thread, which may delay requests.
pub const RECORDER: &str = "elfen-tailor";

/// Whether the recording itself is the cause.
pub fn is_recording(cause: &str) -> bool {
    cause.strip_prefix("preempted:") == Some(RECORDER)
}

/// The name of a cause for scripts: `preempted:cc1`, `io:pread64`.
pub fn cause_name(kind: SegmentKind, trace: &Trace) -> String {
    let call = |call: Option<u16>| call.map_or("page-fault".to_owned(), calls::name);
    match kind {
        SegmentKind::Work => WORK.to_owned(),
        SegmentKind::Queue => QUEUE.to_owned(),
        SegmentKind::Busy => "busy".to_owned(),
        SegmentKind::Preempted(other) => format!("preempted:{}", trace.name_of(other)),
        SegmentKind::Wake => "wake".to_owned(),
        SegmentKind::Throttled => "throttled".to_owned(),
        SegmentKind::Stopped => "stopped".to_owned(),
        SegmentKind::Io(of, within) => match trace.functions.get(&within) {
            Some(function) => format!("io:{}/{function}", call(of)),
            None => format!("io:{}", call(of)),
        },
        SegmentKind::Fault => "fault".to_owned(),
        SegmentKind::Lock(holder) => format!("lock:{}", trace.name_of(holder)),
        SegmentKind::LockOfUnknown => "lock".to_owned(),
        SegmentKind::Pause(operation) => match runtime::operation_name(&operation) {
            name if name.is_empty() => "safepoint".to_owned(),
            name => format!("safepoint:{name}"),
        },
        SegmentKind::Gc => "gc".to_owned(),
        SegmentKind::Jit => "jit".to_owned(),
        SegmentKind::ClassLoad => "classload".to_owned(),
        SegmentKind::Sleep(of) => format!("sleep:{}", calls::name(of)),
        SegmentKind::Wait(of) => format!("wait:{}", call(of)),
        SegmentKind::Stall(Stall::Contention(bits)) => {
            format!("contention:{}", stalls::lock_kind(bits))
        }
        SegmentKind::Stall(Stall::Reclaim) => "reclaim".to_owned(),
        SegmentKind::Stall(Stall::Compaction) => "compaction".to_owned(),
        SegmentKind::Irq(number) => format!("irq:{number}"),
        SegmentKind::Softirq(vector) => {
            let name = VECTORS.get(vector as usize).copied().unwrap_or("unknown");
            format!("softirq:{name}")
        }
        SegmentKind::Steal => "steal".to_owned(),
        SegmentKind::TcpOut => "tcp-out".to_owned(),
        SegmentKind::Unknown => "unknown".to_owned(),
    }
}

/// Whether `named` is the cause or a kind of it. For example, `io` and `io:pread64` both name
/// `io:pread64/filemap_read`.
pub fn is_named_by(cause: &str, named: &str) -> bool {
    let rest = cause.strip_prefix(named);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with([':', '/']))
}

/// Describes a cause for an operator. The text continues "they were slow because".
pub fn describe_cause(cause: &str) -> String {
    let (kind, name) = cause.split_once(':').unwrap_or((cause, ""));
    match kind {
        _ if is_recording(cause) => {
            "this recording itself ran on the CPU that they needed".to_owned()
        }
        "work" => "the service worked for them".to_owned(),
        LONG => "they required more work than others".to_owned(),
        QUEUE => "the service worked for other requests first".to_owned(),
        BURST => "more requests arrived at once than the service can handle".to_owned(),
        COMBINED => "several causes coincided".to_owned(),
        NEIGHBOUR => format!("{name} ran next to them, on another lane of their core"),
        "busy" => "the service was busy with something other than requests".to_owned(),
        "preempted" => format!("{name} ran on the CPU that they needed"),
        "wake" => "a sleeping CPU took long to wake".to_owned(),
        "throttled" => "the service was kept from an idle CPU, usually by a CPU quota".to_owned(),
        "stopped" => "the service was stopped by a signal or a debugger".to_owned(),
        "io" => {
            let (call, within) = name.split_once('/').unwrap_or((name, ""));
            let within =
                if within.is_empty() { String::new() } else { format!(" (the kernel: {within})") };
            match call {
                "page-fault" => {
                    format!("memory that they touched had to be read from disk{within}")
                }
                call => format!("the service waited for storage in {call}{within}"),
            }
        }
        "fault" => "the kernel had to provide memory that they touched".to_owned(),
        "lock" if name.is_empty() => "they waited for a lock".to_owned(),
        "lock" => format!("they waited for a lock that thread {name} held"),
        "safepoint" if name.is_empty() => {
            "the JVM halted its threads, usually for garbage collection".to_owned()
        }
        "safepoint" => format!("the JVM halted its threads for {name}"),
        "gc" => "the JVM collected garbage".to_owned(),
        "jit" => "the JVM compiled on the CPU, or with a lock, that they needed".to_owned(),
        "classload" => "the JVM loaded classes".to_owned(),
        "sleep" => format!("the service slept, in {name}"),
        "wait" => format!("the service waited in {name}, for input or another service"),
        "contention" => format!("the kernel waited for one of its own locks, a {name}"),
        "reclaim" => "memory was short: the kernel had to reclaim some first".to_owned(),
        "compaction" => "the kernel compacted memory, usually for large pages".to_owned(),
        "irq" => format!("interrupt {name} was handled on their CPU"),
        "softirq" => format!("the kernel handled softirq {name} on their CPU"),
        "steal" => "the hypervisor ran other machines on their CPU".to_owned(),
        "tcp-out" => {
            "the answer was written and held back by TCP: Nagle's algorithm or a slow client"
                .to_owned()
        }
        "unknown" => "no event explains that time".to_owned(),
        other => format!("{other} took that time"),
    }
}
