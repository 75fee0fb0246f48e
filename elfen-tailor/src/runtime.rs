//! What a JVM reports about itself: collections, halts with their operations, and loaded classes.
//! Compilations are not reported. They run next to the service and take only CPU time, which the
//! names of their threads show.
//!
//! The events come from probes in the JVM or from counters that it keeps. Without both, the walk
//! uses the names of the JVM's threads instead.

use std::collections::HashMap;

use elfen_rt::signal::event::{Event, EventKind, Runtime};

/// The first bytes of an operation's name; empty if the operation is unknown.
pub type Operation = [u8; 16];

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Activity {
    Gc,
    Safepoint(Operation),
    ClassLoad,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Interval {
    pub from_ns: u64,
    pub to_ns: u64,
    pub thread: u32,
    pub what: Activity,
}

/// The longest time that loading a class counts. A JVM reports only the end of loading. The time
/// begins at most this long before that end, and not before the previous class of the same thread
/// was loaded.
const CLASS_NS: u64 = 1_000_000;
/// Beginnings of the names of operations that collect garbage. They classify halts without events
/// of a collection.
const COLLECTIONS: [&str; 9] =
    ["G1", "Gen", "Parallel", "Collect", "Serial", "CGC", "Z", "X", "Shenandoah"];

#[derive(Debug, Default)]
pub struct Intervals {
    /// Halts and collections, sorted by their ends. Those of one JVM do not overlap.
    pauses: Vec<Interval>,
    /// The length of the longest pause.
    longest_ns: u64,
    /// The classes that each thread loaded, sorted.
    classes: HashMap<u32, Vec<Interval>>,
}

/// What a VM thread has begun and not ended yet.
#[derive(Clone, Copy, Debug, Default)]
struct Open {
    halted_ns: Option<u64>,
    collects_ns: Option<u64>,
    collected: bool,
    operation: Operation,
}

impl Intervals {
    /// Builds the intervals from events in the order of time.
    pub fn of<'a>(events: impl Iterator<Item = &'a Event>) -> Self {
        let mut all = Self::default();
        let mut open: HashMap<u32, Open> = HashMap::new();
        for event in events {
            let EventKind::Runtime(step) = event.kind else { continue };
            match step {
                Runtime::ClassLoaded => all.add_class(event.thread, event.at_ns),
                _ => all.handle_step(open.entry(event.thread).or_default(), event, step),
            }
        }
        all.sort();
        all
    }

    fn sort(&mut self) {
        self.pauses.sort_by_key(|pause| pause.to_ns);
        let lengths = self.pauses.iter().map(|pause| pause.to_ns - pause.from_ns);
        self.longest_ns = lengths.max().unwrap_or(0);
    }

    /// Shortens pauses of which an earlier end is known.
    pub(crate) fn shorten_pauses(&mut self, ended_ns: impl Fn(&Interval) -> u64) {
        for pause in &mut self.pauses {
            pause.to_ns = ended_ns(pause).clamp(pause.from_ns, pause.to_ns);
        }
        self.sort();
    }

    fn handle_step(&mut self, open: &mut Open, event: &Event, step: Runtime) {
        let at_ns = event.at_ns;
        let thread = event.thread;
        match step {
            Runtime::SafepointBegin => {
                *open = Open { halted_ns: Some(at_ns), ..Open::default() };
            }
            Runtime::GcBegin => {
                // Some collectors report the beginning twice.
                open.collects_ns.get_or_insert(at_ns);
            }
            Runtime::GcEnd => {
                let Some(from_ns) = open.collects_ns.take() else { return };
                open.collected = true;
                // If a halt surrounds the collection, the halt ends later and covers the whole
                // collection.
                if open.halted_ns.is_none() {
                    self.add(from_ns, at_ns, thread, Activity::Gc);
                }
            }
            Runtime::Operation(name) => open.operation = name,
            Runtime::SafepointEnd => {
                let Open { halted_ns, collected, operation, .. } = std::mem::take(open);
                let Some(from_ns) = halted_ns else { return };
                let what = if collected || is_collection(&operation) {
                    Activity::Gc
                } else {
                    Activity::Safepoint(operation)
                };
                self.add(from_ns, at_ns, thread, what);
            }
            Runtime::ClassLoaded => {}
        }
    }

    fn add(&mut self, from_ns: u64, to_ns: u64, thread: u32, what: Activity) {
        if from_ns < to_ns {
            self.pauses.push(Interval { from_ns, to_ns, thread, what });
        }
    }

    fn add_class(&mut self, thread: u32, at_ns: u64) {
        let classes = self.classes.entry(thread).or_default();
        let before_ns = classes.last().map_or(0, |class| class.to_ns);
        let from_ns = at_ns.saturating_sub(CLASS_NS).max(before_ns);
        if from_ns < at_ns {
            classes.push(Interval { from_ns, to_ns: at_ns, thread, what: Activity::ClassLoad });
        }
    }

    /// Halts and collections that overlap a span of time, in the order of their ends.
    pub fn pauses(&self, from_ns: u64, to_ns: u64) -> impl Iterator<Item = &Interval> {
        let first = self.pauses.partition_point(|pause| pause.to_ns <= from_ns);
        let past_ns = to_ns.saturating_add(self.longest_ns);
        self.pauses[first..]
            .iter()
            .take_while(move |pause| pause.to_ns < past_ns)
            .filter(move |pause| pause.from_ns < to_ns)
    }

    /// Classes that a thread loaded within a span of time.
    pub fn classes(&self, thread: u32, from_ns: u64, to_ns: u64) -> &[Interval] {
        let all = self.classes.get(&thread).map_or(&[][..], Vec::as_slice);
        let first = all.partition_point(|class| class.to_ns <= from_ns);
        let last = all.partition_point(|class| class.from_ns < to_ns);
        &all[first..last.max(first)]
    }

    pub fn is_empty(&self) -> bool {
        self.pauses.is_empty() && self.classes.is_empty()
    }
}

fn is_collection(operation: &Operation) -> bool {
    let name = operation_name(operation);
    name.contains("GC") || COLLECTIONS.iter().any(|of| name.starts_with(of))
}

pub fn operation_name(operation: &Operation) -> String {
    let end = operation.iter().position(|byte| *byte == 0).unwrap_or(operation.len());
    String::from_utf8_lossy(&operation[..end]).into_owned()
}

/// The job of a JVM's internal thread, by the thread's name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// The thread halts the other threads.
    Halts,
    Collects,
    Compiles,
}

impl Role {
    pub fn of(name: &str) -> Option<Self> {
        const COLLECT: [&str; 4] = ["GC Thread#", "G1 ", "ZWorker", "Shenandoah GC"];
        match name {
            "VM Thread" => Some(Self::Halts),
            name if COLLECT.iter().any(|of| name.starts_with(of)) => Some(Self::Collects),
            name if name.starts_with("C1 Comp") || name.starts_with("C2 Comp") => {
                Some(Self::Compiles)
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn events(steps: &[(u64, u32, Runtime)]) -> Vec<Event> {
        let event =
            |&(at_ns, thread, step)| Event { at_ns, thread, kind: EventKind::Runtime(step) };
        steps.iter().map(event).collect()
    }

    fn operation(name: &str) -> Operation {
        let mut bytes = [0; 16];
        bytes[..name.len()].copy_from_slice(name.as_bytes());
        bytes
    }

    /// Goal: a halt with a collection counts as a collection, and another halt gets the name of its
    /// operation. Counters report only collections. Method: each of these, and ends without
    /// beginnings.
    #[test]
    fn a_halt_with_a_collection_is_a_collection() {
        use Runtime::*;
        let steps = [
            (1, 9, GcEnd),
            (2, 9, SafepointEnd),
            (10, 9, SafepointBegin),
            (12, 9, Operation(operation("G1CollectForAllo"))),
            (13, 9, GcBegin),
            (14, 9, GcBegin),
            (20, 9, GcEnd),
            (21, 9, GcEnd),
            (22, 9, SafepointEnd),
            (30, 9, SafepointBegin),
            (31, 9, Operation(operation("FindDeadlocks"))),
            (35, 9, SafepointEnd),
            (40, 9, SafepointBegin),
            (41, 9, SafepointEnd),
            (50, 0, GcBegin),
            (55, 0, GcEnd),
        ];
        let all = Intervals::of(events(&steps).iter());
        let found: Vec<_> = all.pauses(0, 100).map(|i| (i.from_ns, i.to_ns, i.what)).collect();
        let expected = [
            (10, 22, Activity::Gc),
            (30, 35, Activity::Safepoint(operation("FindDeadlocks"))),
            (40, 41, Activity::Safepoint([0; 16])),
            (50, 55, Activity::Gc),
        ];
        assert_eq!(found, expected);
        let within = |from, to| all.pauses(from, to).map(|i| i.from_ns).collect::<Vec<u64>>();
        assert_eq!(within(12, 31), [10, 30]);
        assert_eq!(within(22, 30), [0; 0]);
    }

    #[test]
    fn a_class_counts_from_the_one_before() {
        let at = 10 * CLASS_NS;
        let steps = [at, at + 50, at + 9 * CLASS_NS].map(|at| (at, 7, Runtime::ClassLoaded));
        let all = Intervals::of(events(&steps).iter());
        let spans: Vec<(u64, u64)> =
            all.classes(7, 0, u64::MAX).iter().map(|i| (i.from_ns, i.to_ns)).collect();
        let expected = [(at - CLASS_NS, at), (at, at + 50), (at + 8 * CLASS_NS, at + 9 * CLASS_NS)];
        assert_eq!(spans, expected);
        assert_eq!((all.classes(7, at, at + 10).len(), all.classes(8, 0, at).len()), (1, 0));
    }

    #[test]
    fn threads_of_a_jvm_are_known_by_their_names() {
        let of =
            ["VM Thread", "GC Thread#1", "G1 Conc#0", "C2 CompilerThre", "http-0"].map(Role::of);
        let halts = Role::Halts;
        let collects = Role::Collects;
        let compiles = Role::Compiles;
        assert_eq!(of, [Some(halts), Some(collects), Some(collects), Some(compiles), None]);
    }
}
