//! Kernel events around the requests of a service: 32 bytes each, in a ring for each CPU.
//! `kernel/bpf/events.bpf.c` writes them.
//!
//! An event is four words. The last word is stored last and holds the lap of the ring. By the lap a
//! reader recognizes whether a place in the ring is filled and not yet overwritten.

/// The encoding of an event in memory and in files.
pub type Words = [u64; 4];

/// One event on one CPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Event {
    pub at_ns: u64,
    /// The thread that ran on the CPU. For a switch, the thread that runs from now on; for a
    /// wake-up, the woken thread.
    pub thread: u32,
    pub kind: EventKind,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EventKind {
    Switch(Switch),
    /// `waker` woke the thread.
    Waking {
        waker: u32,
        waker_process: u32,
        process: u32,
    },
    /// The thread ends; `name` is its name.
    Exit {
        name: [u8; 16],
    },
    /// Data from a client arrived, and `bytes` wait to be read.
    Ready {
        connection: u64,
        bytes: u64,
    },
    Received {
        connection: u64,
        bytes: u64,
        /// The thread only peeked at the bytes; they can still be read.
        peek: bool,
    },
    /// Bytes were written to a connection; `end` is their end in the connection's stream.
    Sent {
        connection: u64,
        end: u32,
    },
    Transmitted {
        connection: u64,
        end: u32,
    },
    /// An interrupt handler returns that began at `since_ns`.
    Irq {
        since_ns: u64,
        number: u32,
    },
    Softirq {
        since_ns: u64,
        vector: u32,
    },
    /// The thread passed a probe of its language's runtime.
    Runtime(Runtime),
    /// The thread has waited since `since_ns` for the kernel itself.
    Stall {
        since_ns: u64,
        what: Stall,
    },
    /// The thread had a page fault at `since_ns`, which is resolved now.
    Fault {
        since_ns: u64,
        address: u64,
    },
    /// The thread runs again after it slept for a disk in these kernel functions: the lower halves
    /// of their addresses, the innermost first. The second part continues the first.
    Blocked {
        second: bool,
        frames: [u32; 4],
    },
    /// A clock found the thread there in its own code, or in the kernel, called from there.
    Sample {
        process: u32,
        address: u64,
        in_kernel: bool,
    },
}

/// Why a thread waited for the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Stall {
    /// A kernel lock was contended. The kind of lock: flags of the kernel's `contention_begin`.
    Contention(u8),
    /// The kernel reclaimed memory.
    Reclaim,
    /// The kernel compacted memory.
    Compaction,
}

/// A probe of a JVM.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Runtime {
    /// The JVM begins to stop its threads.
    SafepointBegin,
    /// The JVM lets its threads run again.
    SafepointEnd,
    GcBegin,
    GcEnd,
    /// The operation that the threads are stopped for: the first bytes of its name.
    Operation([u8; 16]),
    ClassLoaded,
}

impl Runtime {
    pub const COUNT: u8 = 6;

    /// The probe's number, as the eBPF program reports it.
    pub const fn number(self) -> u8 {
        match self {
            Self::SafepointBegin => 1,
            Self::SafepointEnd => 2,
            Self::GcBegin => 3,
            Self::GcEnd => 4,
            Self::Operation(_) => 5,
            Self::ClassLoaded => 6,
        }
    }

    const fn of(number: u8, name: [u8; 16]) -> Option<Self> {
        Some(match number {
            1 => Self::SafepointBegin,
            2 => Self::SafepointEnd,
            3 => Self::GcBegin,
            4 => Self::GcEnd,
            5 => Self::Operation(name),
            6 => Self::ClassLoaded,
            _ => return None,
        })
    }
}

/// A context switch from one thread to another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Switch {
    pub previous: u32,
    /// The process of the thread that runs now.
    pub process: u32,
    /// Whether the previous thread was still runnable.
    pub preempted: bool,
    /// Whether the previous thread waits for a disk, as far as the kernel reports it.
    pub iowait: bool,
    /// The previous thread's state; 0 if it was still runnable.
    pub state: u8,
    /// The system call that the previous thread sleeps in. `None` outside of a system call, and for
    /// threads that are not recorded.
    pub call: Option<u16>,
    /// How long the hypervisor has taken this CPU away, in total.
    pub stolen_ns: u64,
}

pub const STATE_STOPPED: u8 = 4;
pub const STATE_TRACED: u8 = 8;

const SWITCH: u64 = 1;
const WAKING: u64 = 2;
const EXIT: u64 = 3;
const READY: u64 = 4;
const RECEIVED: u64 = 5;
const SENT: u64 = 6;
const TRANSMITTED: u64 = 7;
const IRQ: u64 = 8;
const SOFTIRQ: u64 = 9;
const RUNTIME: u64 = 10;
const CONTENTION: u64 = 11;
const RECLAIM: u64 = 12;
const COMPACTION: u64 = 13;
const FAULT: u64 = 14;
const BLOCKED: u64 = 15;
const SAMPLE: u64 = 16;

const NO_CALL: u16 = 0xffff;

/// The low half of a word.
#[expect(clippy::cast_possible_truncation, reason = "only the low half is wanted")]
const fn low(word: u64) -> u32 {
    word as u32
}

pub(super) const fn high(word: u64) -> u32 {
    low(word >> 32)
}

/// The lap of the ring in which an event was written.
pub const fn lap(words: &Words) -> u16 {
    let [low, high, ..] = (words[3] >> 16).to_le_bytes();
    u16::from_le_bytes([low, high])
}

/// The lap of the `index`th event of a ring of `events`.
pub const fn lap_of(index: u64, events: u64) -> u16 {
    let [low, high, ..] = (index / events + 1).to_le_bytes();
    u16::from_le_bytes([low, high])
}

impl Event {
    /// `None` for a kind that this version does not know.
    pub fn decode(words: &Words) -> Option<Self> {
        let [at_ns, a, b, word] = *words;
        let (kind, flag) = (word >> 8 & 0xff, word & 1 != 0);
        let kind = match kind {
            SWITCH => {
                let [call_low, call_high, state, ..] = b.to_le_bytes();
                let call = u16::from_le_bytes([call_low, call_high]);
                EventKind::Switch(Switch {
                    previous: high(a),
                    process: low(a),
                    // A thread that is preempted on its way to sleep does not sleep yet.
                    preempted: state == 0 || flag,
                    iowait: word & 2 != 0,
                    state,
                    call: (call != NO_CALL).then_some(call),
                    stolen_ns: (b >> 24) << 10,
                })
            }
            WAKING => EventKind::Waking { waker: low(a), waker_process: high(a), process: low(b) },
            EXIT => EventKind::Exit { name: sixteen(a, b) },
            READY => EventKind::Ready { connection: a, bytes: b },
            RECEIVED => EventKind::Received { connection: a, bytes: b, peek: flag },
            SENT => EventKind::Sent { connection: a, end: high(b) },
            TRANSMITTED => EventKind::Transmitted { connection: a, end: high(b) },
            IRQ => EventKind::Irq { since_ns: a, number: low(b) },
            SOFTIRQ => EventKind::Softirq { since_ns: a, vector: low(b) },
            CONTENTION => {
                let [sort, ..] = b.to_le_bytes();
                EventKind::Stall { since_ns: a, what: Stall::Contention(sort) }
            }
            RECLAIM => EventKind::Stall { since_ns: a, what: Stall::Reclaim },
            COMPACTION => EventKind::Stall { since_ns: a, what: Stall::Compaction },
            FAULT => EventKind::Fault { since_ns: a, address: b },
            BLOCKED => {
                let frames = [low(a), high(a), low(b), high(b)];
                EventKind::Blocked { second: flag, frames }
            }
            SAMPLE => EventKind::Sample { process: low(b), address: a, in_kernel: flag },
            RUNTIME => {
                let [number, ..] = word.to_le_bytes();
                let step = Runtime::of(number, sixteen(a, b))?;
                EventKind::Runtime(step)
            }
            _ => return None,
        };
        Some(Self { at_ns, thread: high(word), kind })
    }

    /// The words of an event in lap 1, for tests of readers.
    pub fn encode(&self) -> Words {
        let pair = |high: u32, low: u32| u64::from(high) << 32 | u64::from(low);
        let (kind, flags, a, b) = match self.kind {
            EventKind::Switch(s) => {
                let call = u64::from(s.call.unwrap_or(NO_CALL));
                let rest = (s.stolen_ns >> 10) << 24 | u64::from(s.state) << 16 | call;
                let flags = u64::from(s.iowait) << 1 | u64::from(s.preempted);
                (SWITCH, flags, pair(s.previous, s.process), rest)
            }
            EventKind::Waking { waker, waker_process, process } => {
                (WAKING, 0, pair(waker_process, waker), u64::from(process))
            }
            EventKind::Exit { name } => (EXIT, 0, half(&name, 0), half(&name, 8)),
            EventKind::Runtime(step) => {
                let name = match step {
                    Runtime::Operation(name) => name,
                    _ => [0; 16],
                };
                (RUNTIME, u64::from(step.number()), half(&name, 0), half(&name, 8))
            }
            EventKind::Ready { connection, bytes } => (READY, 0, connection, bytes),
            EventKind::Received { connection, bytes, peek } => {
                (RECEIVED, u64::from(peek), connection, bytes)
            }
            EventKind::Sent { connection, end } => (SENT, 0, connection, pair(end, 1)),
            EventKind::Transmitted { connection, end } => {
                (TRANSMITTED, 0, connection, pair(end, 1))
            }
            EventKind::Irq { since_ns, number } => (IRQ, 0, since_ns, u64::from(number)),
            EventKind::Softirq { since_ns, vector } => (SOFTIRQ, 0, since_ns, u64::from(vector)),
            EventKind::Stall { since_ns, what } => match what {
                Stall::Contention(sort) => (CONTENTION, 0, since_ns, u64::from(sort)),
                Stall::Reclaim => (RECLAIM, 0, since_ns, 0),
                Stall::Compaction => (COMPACTION, 0, since_ns, 0),
            },
            EventKind::Fault { since_ns, address } => (FAULT, 0, since_ns, address),
            EventKind::Blocked { second, frames: [a, b, c, d] } => {
                (BLOCKED, u64::from(second), pair(b, a), pair(d, c))
            }
            EventKind::Sample { process, address, in_kernel } => {
                (SAMPLE, u64::from(in_kernel), address, u64::from(process))
            }
        };
        [self.at_ns, a, b, u64::from(self.thread) << 32 | 1 << 16 | kind << 8 | flags]
    }
}

fn half(name: &[u8; 16], from: usize) -> u64 {
    u64::from_le_bytes(core::array::from_fn(|at| name[from + at]))
}

fn sixteen(a: u64, b: u64) -> [u8; 16] {
    let mut name = [0; 16];
    name[..8].copy_from_slice(&a.to_le_bytes());
    name[8..].copy_from_slice(&b.to_le_bytes());
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: this encoding is the kernel program's. Method: every kind is encoded and decoded; one
    /// switch is also compared with words assembled by hand as in the C source.
    #[test]
    fn events_survive_encoding_and_decoding() {
        let switch = Switch {
            previous: 7,
            process: 9,
            preempted: false,
            iowait: true,
            state: 1,
            call: Some(202),
            stolen_ns: 5 << 10,
        };
        let (connection, since_ns) = (0x7f00_0001_0000_1234, 77);
        let kinds = [
            EventKind::Switch(switch),
            EventKind::Switch(Switch { preempted: true, state: 0, call: None, ..switch }),
            EventKind::Waking { waker: 3, waker_process: 2, process: 8 },
            EventKind::Exit { name: *b"a name of 15 ch\0" },
            EventKind::Ready { connection, bytes: 12 },
            EventKind::Received { connection, bytes: 12, peek: true },
            EventKind::Sent { connection, end: u32::MAX },
            EventKind::Transmitted { connection, end: 17 },
            EventKind::Irq { since_ns, number: 33 },
            EventKind::Softirq { since_ns, vector: 3 },
            EventKind::Runtime(Runtime::Operation(*b"G1CollectForAll\0")),
            EventKind::Runtime(Runtime::ClassLoaded),
            EventKind::Stall { since_ns, what: Stall::Contention(0x21) },
            EventKind::Stall { since_ns, what: Stall::Reclaim },
            EventKind::Stall { since_ns, what: Stall::Compaction },
            EventKind::Fault { since_ns, address: 0x7f00_0000_1000 },
            EventKind::Blocked { second: true, frames: [1, 2, u32::MAX, 4] },
            EventKind::Sample { process: 8, address: 0x7f00_0000_1234, in_kernel: true },
        ];
        for kind in kinds {
            let event = Event { at_ns: 1 << 60, thread: 4_000_000_000, kind };
            assert_eq!(Event::decode(&event.encode()), Some(event));
        }
        let words = [1, 7 << 32 | 9, 5 << 24 | 1 << 16 | 202, 11 << 32 | 0xabcd << 16 | 0x102];
        let event = Event { at_ns: 1, thread: 11, kind: EventKind::Switch(switch) };
        assert_eq!((Event::decode(&words), lap(&words)), (Some(event), 0xabcd));
        assert_eq!(Event::decode(&[1, 2, 3, 0xff00]), None);
        for number in 0..=u8::MAX {
            let step = Runtime::of(number, [7; 16]);
            assert_eq!(step.is_some(), (1..=Runtime::COUNT).contains(&number));
            assert!(step.is_none_or(|step| step.number() == number));
        }
        assert_eq!([lap_of(0, 8), lap_of(7, 8), lap_of(8, 8), lap_of(8 * 0xffff, 8)], [1, 1, 2, 0]);
    }
}
