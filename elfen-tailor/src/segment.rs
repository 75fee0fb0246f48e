//! A stretch of a request's time with one kind and one culprit; and causes, which are kinds with a
//! name.

use elfen_rt::signal::event::Stall;

use crate::calls;
use crate::runtime::{self, Operation};
use crate::stalls;
use crate::trace::{Tale, Who};

#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Kind {
    /// The service worked for this request.
    Work,
    /// It worked for other requests.
    Queue,
    /// It ran, and not for a request.
    Busy,
    /// It could have run, and this thread had its CPU.
    Preempted(Who),
    /// It could have run, on a CPU that idled: it was on its way to wake.
    Wake,
    /// It was taken off a CPU that idled from then on.
    Throttled,
    /// By a signal or a debugger.
    Stopped,
    /// For a disk: in this system call, or touching memory that had to be read; and in this
    /// function of the kernel, by its address, if it is known.
    Io(Option<u16>, u32),
    /// It touched memory that the kernel had to see to first.
    Fault,
    /// For a lock that this thread held.
    Lock(Who),
    /// For a lock whose holder is not known.
    LockOfUnknown,
    /// For the threads of a JVM to come to a halt and go on, for this operation.
    Pause(Operation),
    /// For a JVM to collect garbage.
    Gc,
    /// A JVM compiled, on the CPU or with a lock that it needed.
    Jit,
    /// A JVM loaded classes, or who held the lock that it waited for did.
    ClassLoad,
    /// For a time to pass.
    Sleep(u16),
    /// For input or anything else, in this system call.
    Wait(Option<u16>),
    /// For the kernel: one of its locks, or memory that it had to find first.
    Stall(Stall),
    Irq(u32),
    Softirq(u32),
    /// The hypervisor ran others.
    Steal,
    /// The answer was written and did not leave the machine.
    TcpOut,
    /// Nothing is known of the thread.
    Unknown,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Segment {
    pub from_ns: u64,
    pub to_ns: u64,
    pub kind: Kind,
    pub thread: u32,
    pub cpu: Option<u32>,
    /// Of queueing behind a request that the service gives a number: that.
    pub behind: Option<u64>,
}

impl Segment {
    pub fn ns(&self) -> u64 {
        self.to_ns.saturating_sub(self.from_ns)
    }

    /// How much of it lies in a span.
    pub fn within(&self, from_ns: u64, to_ns: u64) -> u64 {
        self.to_ns.min(to_ns).saturating_sub(self.from_ns.max(from_ns))
    }
}

/// A sum of times; what a damaged file holds may be beyond all reckoning.
pub fn total(times: impl Iterator<Item = u64>) -> u64 {
    times.fold(0, u64::saturating_add)
}

const VECTORS: [&str; 10] =
    ["HI", "TIMER", "NET_TX", "NET_RX", "BLOCK", "IRQ_POLL", "TASKLET", "SCHED", "HRTIMER", "RCU"];

pub const WORK: &str = "work";
pub const LONG: &str = "long";
pub const QUEUE: &str = "queue";
pub const BESIDE: &str = "beside";
pub const BURST: &str = "burst";
pub const TOGETHER: &str = "together";
/// The thread that records, by its name: it can be what requests wait for.
pub const RECORDER: &str = "elfen-tailor";

/// Whether a cause is the recording itself.
pub fn is_recording(cause: &str) -> bool {
    cause.strip_prefix("preempted:") == Some(RECORDER)
}

/// A cause's name, as scripts read it: `preempted:cc1`, `io:pread64`.
pub fn cause(kind: Kind, tale: &Tale) -> String {
    let call = |call: Option<u16>| call.map_or("page-fault".to_owned(), calls::name);
    match kind {
        Kind::Work => WORK.to_owned(),
        Kind::Queue => QUEUE.to_owned(),
        Kind::Busy => "busy".to_owned(),
        Kind::Preempted(who) => format!("preempted:{}", tale.name_of(who)),
        Kind::Wake => "wake".to_owned(),
        Kind::Throttled => "throttled".to_owned(),
        Kind::Stopped => "stopped".to_owned(),
        Kind::Io(of, within) => match tale.functions.get(&within) {
            Some(function) => format!("io:{}/{function}", call(of)),
            None => format!("io:{}", call(of)),
        },
        Kind::Fault => "fault".to_owned(),
        Kind::Lock(holder) => format!("lock:{}", tale.name_of(holder)),
        Kind::LockOfUnknown => "lock".to_owned(),
        Kind::Pause(operation) => match runtime::name(&operation) {
            name if name.is_empty() => "safepoint".to_owned(),
            name => format!("safepoint:{name}"),
        },
        Kind::Gc => "gc".to_owned(),
        Kind::Jit => "jit".to_owned(),
        Kind::ClassLoad => "classload".to_owned(),
        Kind::Sleep(of) => format!("sleep:{}", calls::name(of)),
        Kind::Wait(of) => format!("wait:{}", call(of)),
        Kind::Stall(Stall::Contention(bits)) => format!("contention:{}", stalls::sort(bits)),
        Kind::Stall(Stall::Reclaim) => "reclaim".to_owned(),
        Kind::Stall(Stall::Compaction) => "compaction".to_owned(),
        Kind::Irq(number) => format!("irq:{number}"),
        Kind::Softirq(vector) => {
            let name = VECTORS.get(vector as usize).copied().unwrap_or("unknown");
            format!("softirq:{name}")
        }
        Kind::Steal => "steal".to_owned(),
        Kind::TcpOut => "tcp-out".to_owned(),
        Kind::Unknown => "unknown".to_owned(),
    }
}

/// Whether a cause is the one that is named, or of that kind: `io:pread64/filemap_read` is one of
/// `io:pread64` and of `io`.
pub fn is_of(cause: &str, named: &str) -> bool {
    let rest = cause.strip_prefix(named);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with([':', '/']))
}

/// The cause in an operator's words, as the end of "they were slow because".
pub fn words(cause: &str) -> String {
    let (kind, name) = cause.split_once(':').unwrap_or((cause, ""));
    match kind {
        _ if is_recording(cause) => {
            "this recording itself ran on the CPU that they needed".to_owned()
        }
        "work" => "the service worked for them".to_owned(),
        LONG => "they were more work than others".to_owned(),
        QUEUE => "the service worked for other requests first".to_owned(),
        BURST => "more requests came at once than the service can work for".to_owned(),
        TOGETHER => "several causes came together".to_owned(),
        BESIDE => format!("{name} ran beside them, on another lane of their core"),
        "busy" => "the service was busy with something that is no request".to_owned(),
        "preempted" => format!("{name} ran on the CPU that they needed"),
        "wake" => "a sleeping CPU took its time to wake".to_owned(),
        "throttled" => {
            "the service was not allowed to run on an idle CPU: a CPU quota, most often".to_owned()
        }
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
        "fault" => "memory that they touched had to be found and filled first".to_owned(),
        "lock" if name.is_empty() => "they waited for a lock".to_owned(),
        "lock" => format!("they waited for a lock that thread {name} held"),
        "safepoint" if name.is_empty() => {
            "the JVM halted its threads: garbage collection, most often".to_owned()
        }
        "safepoint" => format!("the JVM halted its threads for {name}"),
        "gc" => "the JVM collected garbage".to_owned(),
        "jit" => "the JVM compiled, on the CPU or with a lock that they needed".to_owned(),
        "classload" => "the JVM loaded classes".to_owned(),
        "sleep" => format!("the service slept, in {name}"),
        "wait" => format!("the service waited in {name}, for input or another service"),
        "contention" => format!("the kernel waited for a lock of its own, a {name}"),
        "reclaim" => "memory was short: the kernel had to take some from others first".to_owned(),
        "compaction" => "the kernel moved memory together, for large pages most often".to_owned(),
        "irq" => format!("interrupt {name} was handled on their CPU"),
        "softirq" => format!("the kernel worked on their CPU, for others ({name})"),
        "steal" => "the hypervisor ran other machines on their CPU".to_owned(),
        "tcp-out" => {
            "the answer was written and held back by TCP: Nagle's algorithm or a slow client"
                .to_owned()
        }
        _ => "nothing is known of that time".to_owned(),
    }
}
