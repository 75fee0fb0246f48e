//! Rebuilds, from recorded events, the state of each thread and the thread on each CPU over time.
//!
//! A gap in the events makes all states before its end unknown. The walk looks states up by time.

use std::collections::HashMap;

use elfen_rt::signal::event::{Event, EventKind, STATE_STOPPED, STATE_TRACED, Switch};

use crate::runtime::{Interval, Intervals};
use crate::stalls::Stalls;
use crate::trace::Trace;

/// The thread that ended a sleep, and its process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Waker {
    pub thread: u32,
    pub process: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sleep {
    pub call: Option<u16>,
    pub iowait: bool,
    pub stopped: bool,
    pub waker: Option<Waker>,
    /// The sleep began before the first event or in a gap, so its reason is unknown.
    pub is_unknown: bool,
    /// Where the kernel waited for a disk: an address in [`Trace::functions`]; 0 if unknown.
    pub function: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    Running { cpu: u32 },
    Runnable { preempted: bool },
    Sleeping(Sleep),
}

/// The state of a thread from `from_ns` until its next `Stretch`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stretch {
    pub from_ns: u64,
    pub state: State,
}

/// The thread on a CPU from `from_ns` until the next `Run` of that CPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Run {
    pub from_ns: u64,
    /// 0 while the CPU idles.
    pub thread: u32,
    /// The total time that the hypervisor had stolen from this CPU by `from_ns`.
    pub stolen_ns: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Interrupt {
    pub from_ns: u64,
    pub to_ns: u64,
    pub soft: bool,
    pub number: u32,
}

/// The most CPU time that a JVM's VM thread uses between waking the halted threads and reporting
/// the end of the halt.
const RELEASE_REPORT_MAX_NS: u64 = 200_000;

#[derive(Debug, Default)]
pub struct Timeline {
    threads: HashMap<u32, Vec<Stretch>>,
    cpus: Vec<Vec<Run>>,
    interrupts: Vec<Vec<Interrupt>>,
    pub runtime: Intervals,
    pub stalls: Stalls,
    began_ns: u64,
    /// Threads that were woken before they had gone to sleep, with their wakers.
    woken_early: HashMap<u32, Waker>,
    /// The end of the latest gap. States that began before it may be out of date.
    gap_end_ns: u64,
}

impl Timeline {
    /// Builds the timeline of a trace; `events` are its [`Trace::events_in_order`].
    pub fn new(trace: &Trace, events: &[(u32, Event)]) -> Self {
        let mut line = Self {
            cpus: vec![Vec::new(); trace.events.len()],
            interrupts: vec![Vec::new(); trace.events.len()],
            began_ns: trace.head.began_ns,
            ..Self::default()
        };
        let mut gaps: Vec<u64> = trace.gaps.iter().map(|gap| gap.to_ns).collect();
        gaps.sort_unstable();
        let mut gaps = gaps.into_iter().peekable();
        line.runtime = Intervals::of(events.iter().map(|(_, event)| event));
        for &(cpu, ref event) in events {
            while let Some(gap_ns) = gaps.next_if(|gap_ns| *gap_ns <= event.at_ns) {
                line.gap_end_ns = gap_ns;
            }
            match event.kind {
                EventKind::Switch(switch) => line.switch(cpu, event, switch),
                EventKind::Waking { waker, waker_process, .. } => {
                    line.wake(event, Waker { thread: waker, process: waker_process });
                }
                EventKind::Irq { since_ns, number } => {
                    line.interrupt(cpu, since_ns, event.at_ns, false, number);
                }
                EventKind::Softirq { since_ns, vector } => {
                    line.interrupt(cpu, since_ns, event.at_ns, true, vector);
                }
                EventKind::Blocked { frames, .. } => {
                    line.note_wait_function(event.thread, wait_function(trace, frames))
                }
                _ => line.stalls.add(event),
            }
        }
        let mut runtime = std::mem::take(&mut line.runtime);
        runtime.shorten_pauses(|pause| line.release_ns(pause));
        line.runtime = runtime;
        line
    }

    /// When the threads that a JVM had halted could continue. The VM thread first wakes them and
    /// then reports the end of the halt. If a woken thread preempts the VM thread between the two,
    /// the report is later than the release.
    fn release_ns(&self, pause: &Interval) -> u64 {
        let all = self.threads.get(&pause.thread).map_or(&[][..], Vec::as_slice);
        let until = all.partition_point(|stretch| stretch.from_ns < pause.to_ns);
        let mut release_ns = pause.to_ns;
        let mut at_ns = pause.to_ns;
        let mut ran_ns = 0;
        for stretches in all[..until].windows(2).rev() {
            let [before, stretch] = [stretches[0], stretches[1]];
            if stretch.from_ns <= pause.from_ns {
                break;
            }
            match (before.state, stretch.state) {
                (_, State::Running { .. }) => ran_ns += at_ns - stretch.from_ns,
                (State::Running { cpu }, State::Runnable { preempted: true })
                    if self.runs_woken_thread(cpu, stretch.from_ns, pause.thread) =>
                {
                    release_ns = stretch.from_ns;
                }
                _ => {}
            }
            if ran_ns > RELEASE_REPORT_MAX_NS {
                break;
            }
            at_ns = stretch.from_ns;
        }
        release_ns
    }

    /// Whether the thread that starts to run on `cpu` at `at_ns` was woken by `woken_by`.
    fn runs_woken_thread(&self, cpu: u32, at_ns: u64, woken_by: u32) -> bool {
        let Some((.., thread, _)) = self.runs(cpu, at_ns, at_ns + 1).last() else { return false };
        let stretches = self.threads.get(&thread).map_or(&[][..], Vec::as_slice);
        let after = stretches.partition_point(|stretch| stretch.from_ns <= at_ns);
        let slept = stretches[..after].iter().rev().find_map(|stretch| match stretch.state {
            State::Sleeping(sleep) => Some(sleep),
            _ => None,
        });
        slept.and_then(|sleep| sleep.waker).is_some_and(|waker| waker.thread == woken_by)
    }

    fn switch(&mut self, cpu: u32, event: &Event, switch: Switch) {
        let stolen_ns = switch.stolen_ns;
        let gap_end_ns = self.gap_end_ns;
        let runs = &mut self.cpus[cpu as usize];
        // During the gap, other threads may have run here.
        if runs.last().is_some_and(|run| run.from_ns < gap_end_ns && gap_end_ns < event.at_ns) {
            runs.push(Run { from_ns: gap_end_ns, thread: switch.previous, stolen_ns });
        }
        runs.push(Run { from_ns: event.at_ns, thread: event.thread, stolen_ns });
        if switch.previous != 0 {
            let state = if switch.preempted {
                State::Runnable { preempted: true }
            } else {
                State::Sleeping(Sleep {
                    call: switch.call,
                    iowait: switch.iowait,
                    stopped: switch.state & (STATE_STOPPED | STATE_TRACED) != 0,
                    waker: None,
                    is_unknown: false,
                    function: 0,
                })
            };
            self.enter_state(switch.previous, event.at_ns, state, State::Running { cpu });
        }
        if event.thread != 0 {
            let before = State::Runnable { preempted: false };
            self.wake_early(event.thread);
            self.enter_state(event.thread, event.at_ns, State::Running { cpu }, before);
        }
    }

    /// Handles a thread that was woken on its way to sleep and runs now. The wake-up event precedes
    /// the switch event of that sleep. So if the thread has slept since, the early waker ended the
    /// sleep.
    fn wake_early(&mut self, thread: u32) {
        let Some(waker) = self.woken_early.remove(&thread) else { return };
        let Some(stretches) = self.threads.get_mut(&thread) else { return };
        if let Some(Stretch { from_ns, state: State::Sleeping(sleep) }) = stretches.last_mut() {
            sleep.waker = Some(waker);
            let from_ns = *from_ns;
            let state = State::Runnable { preempted: false };
            stretches.push(Stretch { from_ns, state });
        }
    }

    fn wake(&mut self, event: &Event, waker: Waker) {
        let sleep = Sleep {
            call: None,
            iowait: false,
            stopped: false,
            waker: Some(waker),
            is_unknown: true,
            function: 0,
        };
        let gap_end_ns = self.gap_end_ns;
        let stretches = self.threads.entry(event.thread).or_default();
        match stretches.last_mut().filter(|stretch| stretch.from_ns >= gap_end_ns) {
            Some(Stretch { state: State::Sleeping(sleep), .. }) => sleep.waker = Some(waker),
            // The thread was on its way to sleep. It stays awake, or is woken as soon as it sleeps.
            Some(Stretch { state: State::Running { .. }, .. }) => {
                self.woken_early.insert(event.thread, waker);
                return;
            }
            Some(_) => return,
            None => {}
        }
        let state = State::Runnable { preempted: false };
        self.enter_state(event.thread, event.at_ns, state, State::Sleeping(sleep));
    }

    /// Records the kernel function in which a thread slept. Its event comes when the thread
    /// continues.
    fn note_wait_function(&mut self, thread: u32, function: u32) {
        let stretches = self.threads.get_mut(&thread).map_or(&mut [][..], Vec::as_mut_slice);
        // The state after the wake-up may already follow the sleep.
        for stretch in stretches.iter_mut().rev().take(2) {
            if let State::Sleeping(sleep) = &mut stretch.state {
                // If a stack has several parts, the first is nearest to what the thread waits for.
                sleep.function = if sleep.function == 0 { function } else { sleep.function };
                return;
            }
        }
    }

    /// Changes the state of a thread. `before` is its state until now. It is used only for the
    /// first event of a thread, or the first event after a gap.
    fn enter_state(&mut self, thread: u32, at_ns: u64, state: State, before: State) {
        let began_ns = self.began_ns.max(self.gap_end_ns);
        let gap_end_ns = self.gap_end_ns;
        let stretches = self.threads.entry(thread).or_default();
        let is_known = stretches.last().is_some_and(|stretch| stretch.from_ns >= gap_end_ns);
        if !is_known && began_ns < at_ns {
            stretches.push(Stretch { from_ns: began_ns, state: before });
        }
        stretches.push(Stretch { from_ns: at_ns, state });
    }

    fn interrupt(&mut self, cpu: u32, from_ns: u64, to_ns: u64, soft: bool, number: u32) {
        if from_ns < to_ns {
            self.interrupts[cpu as usize].push(Interrupt { from_ns, to_ns, soft, number });
        }
    }

    /// Each thread with its states, in the order of time.
    pub fn threads(&self) -> impl Iterator<Item = (u32, &[Stretch])> {
        self.threads.iter().map(|(thread, stretches)| (*thread, stretches.as_slice()))
    }

    /// The state of a thread just before `at_ns`, and the state that follows it.
    pub fn state_before(&self, thread: u32, at_ns: u64) -> Option<(Stretch, Option<Stretch>)> {
        let stretches = self.threads.get(&thread)?;
        let after = stretches.partition_point(|stretch| stretch.from_ns < at_ns);
        let stretch = stretches.get(after.checked_sub(1)?)?;
        Some((*stretch, stretches.get(after).copied()))
    }

    /// The CPU that a thread runs on next, at or after `at_ns`.
    pub fn next_cpu(&self, thread: u32, at_ns: u64) -> Option<u32> {
        let stretches = self.threads.get(&thread)?;
        let after = stretches.partition_point(|stretch| stretch.from_ns < at_ns);
        stretches[after..].iter().find_map(|stretch| match stretch.state {
            State::Running { cpu } => Some(cpu),
            _ => None,
        })
    }

    /// The threads that ran on a CPU within a span, as (from, to, thread, stolen time). The events
    /// do not show when in a run the hypervisor took the CPU. So stolen time counts from the
    /// beginning of the run. It counts only once, even if several requests were served in the run.
    pub fn runs(
        &self,
        cpu: u32,
        from_ns: u64,
        to_ns: u64,
    ) -> impl Iterator<Item = (u64, u64, u32, u64)> {
        let runs = self.cpus.get(cpu as usize).map_or(&[][..], Vec::as_slice);
        let first = runs.partition_point(|run| run.from_ns <= from_ns).saturating_sub(1);
        let last = runs.partition_point(|run| run.from_ns < to_ns);
        (first..last.max(first)).map(move |at| {
            let next = runs.get(at + 1);
            let until_ns = next.map_or(to_ns, |next| next.from_ns);
            let stolen_ns =
                next.map_or(0, |next| next.stolen_ns.saturating_sub(runs[at].stolen_ns));
            let begin_ns = runs[at].from_ns.max(from_ns);
            let end_ns = until_ns.min(to_ns);
            let stolen_until_ns = runs[at].from_ns.saturating_add(stolen_ns).min(end_ns);
            (begin_ns, end_ns, runs[at].thread, stolen_until_ns.saturating_sub(begin_ns))
        })
    }

    pub fn interrupts(&self, cpu: u32, from_ns: u64, to_ns: u64) -> &[Interrupt] {
        let all = self.interrupts.get(cpu as usize).map_or(&[][..], Vec::as_slice);
        let first = all.partition_point(|one| one.to_ns <= from_ns);
        let last = all.partition_point(|one| one.to_ns < to_ns);
        // The first interrupt that ends after the span may have begun within the span.
        let last = (last + 1).min(all.len()).max(first);
        &all[first..last]
    }
}

/// The innermost function that shows what the thread waits for; 0 if no name is known.
fn wait_function(trace: &Trace, frames: [u32; 4]) -> u32 {
    /// Beginnings of the names of functions that are on the stack of every wait.
    const GENERIC_WAITS: [&str; 12] = [
        "schedule",
        "io_schedule",
        "__schedule",
        "bit_wait",
        "__wait_on_bit",
        "out_of_line_wait_on_bit",
        "folio_wait_bit",
        "__folio_lock",
        "wait_for_completion",
        "__wait_for_common",
        "wait_for_common",
        "mutex_lock_io",
    ];
    let is_specific = |address: &u32| {
        let name = trace.functions.get(address);
        name.is_some_and(|name| !GENERIC_WAITS.iter().any(|generic| name.starts_with(generic)))
    };
    frames.into_iter().find(is_specific).unwrap_or(0)
}
