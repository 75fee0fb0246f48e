//! Events put together: what each thread did from when to when, and who had each CPU.

use std::collections::HashMap;

use elfen_rt::signal::event::{Event, Kind, STATE_STOPPED, STATE_TRACED, Switch};

use crate::runtime::{Interval, Intervals};
use crate::stalls::Stalls;
use crate::trace::Tale;

/// Who ended a sleep.
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
    /// It began before the first event, so nothing is known of why.
    pub unseen: bool,
    /// Of a sleep for a disk, what the kernel waited in: an address of [`Tale::functions`], or 0.
    pub within: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    Running { cpu: u32 },
    Runnable { preempted: bool },
    Sleeping(Sleep),
}

/// A state, from a time until the thread's next stretch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stretch {
    pub from_ns: u64,
    pub state: State,
}

/// A thread has a CPU, until the CPU's next run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Run {
    pub from_ns: u64,
    /// 0: nobody.
    pub thread: u32,
    /// What the hypervisor had taken of this CPU by then.
    pub stolen_ns: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Interrupt {
    pub from_ns: u64,
    pub to_ns: u64,
    pub soft: bool,
    pub number: u32,
}

/// Who halts others runs for less than that from when it wakes them until it has said so.
const LETTING_GO_NS: u64 = 200_000;

#[derive(Debug, Default)]
pub struct Timeline {
    threads: HashMap<u32, Vec<Stretch>>,
    cpus: Vec<Vec<Run>>,
    interrupts: Vec<Vec<Interrupt>>,
    pub runtime: Intervals,
    pub stalls: Stalls,
    began_ns: u64,
    /// Threads that were woken while they ran.
    woken_early: HashMap<u32, Waker>,
    /// Until then something is missing: what threads were in before, they may not be any more.
    unseen_ns: u64,
}

impl Timeline {
    pub fn of(tale: &Tale) -> Self {
        let mut line = Self {
            cpus: vec![Vec::new(); tale.events.len()],
            interrupts: vec![Vec::new(); tale.events.len()],
            began_ns: tale.head.began_ns,
            ..Self::default()
        };
        let mut gaps: Vec<u64> = tale.gaps.iter().map(|gap| gap.to_ns).collect();
        gaps.sort_unstable();
        let mut gaps = gaps.into_iter().peekable();
        let events = in_order(tale);
        line.runtime = Intervals::of(events.iter().map(|(_, event)| event));
        for (cpu, event) in events {
            while let Some(gap_ns) = gaps.next_if(|gap_ns| *gap_ns <= event.at_ns) {
                line.unseen_ns = gap_ns;
            }
            match event.kind {
                Kind::Switch(switch) => line.switch(cpu, &event, switch),
                Kind::Waking { waker, waker_process, .. } => {
                    line.wake(&event, Waker { thread: waker, process: waker_process });
                }
                Kind::Irq { since_ns, number } => {
                    line.interrupt(cpu, since_ns, event.at_ns, false, number);
                }
                Kind::Softirq { since_ns, vector } => {
                    line.interrupt(cpu, since_ns, event.at_ns, true, vector);
                }
                Kind::Blocked { frames, .. } => line.slept_in(event.thread, waits_in(tale, frames)),
                _ => line.stalls.add(&event),
            }
        }
        let mut runtime = std::mem::take(&mut line.runtime);
        runtime.end_at(|pause| line.released_ns(pause));
        line.runtime = runtime;
        line
    }

    /// When those whom a runtime had halted could go on. It wakes them, and says so when it has:
    /// where one of them takes its CPU meanwhile, that is later than they went on.
    fn released_ns(&self, pause: &Interval) -> u64 {
        let all = self.threads.get(&pause.thread).map_or(&[][..], Vec::as_slice);
        let until = all.partition_point(|stretch| stretch.from_ns < pause.to_ns);
        let (mut released_ns, mut at_ns, mut ran_ns) = (pause.to_ns, pause.to_ns, 0);
        for stretches in all[..until].windows(2).rev() {
            let [before, stretch] = [stretches[0], stretches[1]];
            if stretch.from_ns <= pause.from_ns {
                break;
            }
            match (before.state, stretch.state) {
                (_, State::Running { .. }) => ran_ns += at_ns - stretch.from_ns,
                (State::Running { cpu }, State::Runnable { preempted: true })
                    if self.goes_on(cpu, stretch.from_ns, pause.thread) =>
                {
                    released_ns = stretch.from_ns;
                }
                _ => {}
            }
            if ran_ns > LETTING_GO_NS {
                break;
            }
            at_ns = stretch.from_ns;
        }
        released_ns
    }

    /// Whether somebody begins to run on a CPU whom this thread had woken.
    fn goes_on(&self, cpu: u32, at_ns: u64, woken_by: u32) -> bool {
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
        let (stolen_ns, unseen_ns) = (switch.stolen_ns, self.unseen_ns);
        let runs = &mut self.cpus[cpu as usize];
        // Since something was missed another one may have it.
        if runs.last().is_some_and(|run| run.from_ns < unseen_ns && unseen_ns < event.at_ns) {
            runs.push(Run { from_ns: unseen_ns, thread: switch.previous, stolen_ns });
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
                    unseen: false,
                    within: 0,
                })
            };
            self.enter(switch.previous, event.at_ns, state, State::Running { cpu });
        }
        if event.thread != 0 {
            let before = State::Runnable { preempted: false };
            self.wake_early(event.thread);
            self.enter(event.thread, event.at_ns, State::Running { cpu }, before);
        }
    }

    /// A thread runs. If it has slept and nobody woke it since, who woke it on its way to sleep
    /// did: that is written down first, and done when the thread has left its CPU.
    fn wake_early(&mut self, thread: u32) {
        let Some(waker) = self.woken_early.remove(&thread) else { return };
        let Some(stretches) = self.threads.get_mut(&thread) else { return };
        if let Some(Stretch { from_ns, state: State::Sleeping(sleep) }) = stretches.last_mut() {
            sleep.waker = Some(waker);
            let (from_ns, state) = (*from_ns, State::Runnable { preempted: false });
            stretches.push(Stretch { from_ns, state });
        }
    }

    fn wake(&mut self, event: &Event, waker: Waker) {
        let unseen = Sleep {
            call: None,
            iowait: false,
            stopped: false,
            waker: Some(waker),
            unseen: true,
            within: 0,
        };
        let unseen_ns = self.unseen_ns;
        let stretches = self.threads.entry(event.thread).or_default();
        match stretches.last_mut().filter(|stretch| stretch.from_ns >= unseen_ns) {
            Some(Stretch { state: State::Sleeping(sleep), .. }) => sleep.waker = Some(waker),
            // It was on its way to sleep, and stays or is woken as soon as it sleeps.
            Some(Stretch { state: State::Running { .. }, .. }) => {
                self.woken_early.insert(event.thread, waker);
                return;
            }
            Some(_) => return,
            None => {}
        }
        let state = State::Runnable { preempted: false };
        self.enter(event.thread, event.at_ns, state, State::Sleeping(unseen));
    }

    /// A thread goes on after it slept in this.
    fn slept_in(&mut self, thread: u32, function: u32) {
        let stretches = self.threads.get_mut(&thread).map_or(&mut [][..], Vec::as_mut_slice);
        // It was woken since.
        for stretch in stretches.iter_mut().rev().take(2) {
            if let State::Sleeping(sleep) = &mut stretch.state {
                // The first part of a stack is nearer to what it waits for.
                sleep.within = if sleep.within == 0 { function } else { sleep.within };
                return;
            }
        }
    }

    /// A thread changes its state; `before` is what it was in if this is the first that is seen,
    /// or the first since something was missed.
    fn enter(&mut self, thread: u32, at_ns: u64, state: State, before: State) {
        let (began_ns, unseen_ns) = (self.began_ns.max(self.unseen_ns), self.unseen_ns);
        let stretches = self.threads.entry(thread).or_default();
        let is_known = stretches.last().is_some_and(|stretch| stretch.from_ns >= unseen_ns);
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

    /// Every thread with its stretches, in the order of their times.
    pub fn threads(&self) -> impl Iterator<Item = (u32, &[Stretch])> {
        self.threads.iter().map(|(thread, stretches)| (*thread, stretches.as_slice()))
    }

    /// What a thread was in just before a time, and where it went from there.
    pub fn before(&self, thread: u32, at_ns: u64) -> Option<(Stretch, Option<Stretch>)> {
        let stretches = self.threads.get(&thread)?;
        let after = stretches.partition_point(|stretch| stretch.from_ns < at_ns);
        let stretch = stretches.get(after.checked_sub(1)?)?;
        Some((*stretch, stretches.get(after).copied()))
    }

    /// The CPU that a thread runs on next, at or after a time.
    pub fn next_cpu(&self, thread: u32, at_ns: u64) -> Option<u32> {
        let stretches = self.threads.get(&thread)?;
        let after = stretches.partition_point(|stretch| stretch.from_ns < at_ns);
        stretches[after..].iter().find_map(|stretch| match stretch.state {
            State::Running { cpu } => Some(cpu),
            _ => None,
        })
    }

    /// Who had a CPU in a span: from, to, thread, and what was stolen of that. Where in a run its
    /// CPU was taken away is not told: it counts from the run's beginning, and once, however many
    /// requests were served in it.
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
            let (begin_ns, end_ns) = (runs[at].from_ns.max(from_ns), until_ns.min(to_ns));
            let stolen_until_ns = runs[at].from_ns.saturating_add(stolen_ns).min(end_ns);
            (begin_ns, end_ns, runs[at].thread, stolen_until_ns.saturating_sub(begin_ns))
        })
    }

    pub fn interrupts(&self, cpu: u32, from_ns: u64, to_ns: u64) -> &[Interrupt] {
        let all = self.interrupts.get(cpu as usize).map_or(&[][..], Vec::as_slice);
        let first = all.partition_point(|one| one.to_ns <= from_ns);
        let last = all.partition_point(|one| one.to_ns < to_ns);
        // The one that ends behind the span may have begun in it.
        let last = (last + 1).min(all.len()).max(first);
        &all[first..last]
    }
}

/// The innermost function that says what for somebody waits, where names are known; else 0.
fn waits_in(tale: &Tale, frames: [u32; 4]) -> u32 {
    /// How these names begin: who waits for anything is in one of them.
    const ANYHOW: [&str; 12] = [
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
    let tells = |address: &u32| {
        let name = tale.functions.get(address);
        name.is_some_and(|name| !ANYHOW.iter().any(|anyhow| name.starts_with(anyhow)))
    };
    frames.into_iter().find(tells).unwrap_or(0)
}

/// All events with their CPU, by time; those of one moment in the order of their CPUs.
pub fn in_order(tale: &Tale) -> Vec<(u32, Event)> {
    let mut all: Vec<(u32, Event)> = (0..)
        .zip(&tale.events)
        .flat_map(|(cpu, events)| events.iter().map(move |event| (cpu, *event)))
        .collect();
    all.sort_by_key(|(_, event)| event.at_ns);
    all
}
