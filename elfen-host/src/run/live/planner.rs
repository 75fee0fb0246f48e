//! The planner's side: from misses to places, and from counts to places that run too often.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering::*};
use std::thread;
use std::time::{Duration, Instant};

use elfen_instrument::live::{
    Change, FILTERED, Missed, Pages, Patched, ProgramId, SiteCounts, is_filtered,
};
use elfen_instrument::remote::release_late_threads;
use elfen_rt::clock::nanos;
use elfen_rt::process::{Identity, Liveness};

use super::exchange::{Exchange, Miss};
use super::handover::{Outcome, give_up, outcome, put};
use super::words::LiveWords;
use crate::process;
use crate::run::channels::Channels;

/// How often checks may run in a millisecond of a lane's time, all together. One takes up to a
/// nanosecond, and one that looks up its lane two, so this is two percent.
const ALL_PER_MS: u64 = 20_000;
const ALL_PER_MS_BY_CPU: u64 = 10_000;
/// The same of checks that are the only ones that their loops have, as a round of an interpreter's
/// loop, or a comparison, takes as little as 10 ns. As rates go up and down, one of them may have
/// run three quarters as often to be put back.
const DENSE_PER_MS: u64 = 80_000;
const DENSE_PER_MS_BY_CPU: u64 = 30_000;
/// How often the check of a loop of nanoseconds is to run, once there are rounds behind it, and how
/// many of these there are at most: while a thread is in them, nobody who looks at it finds it in
/// its program.
const THIN_PER_MS: u64 = 4_000;
const ROUNDS_MAX: usize = 64;
/// How often rates are looked at, and over how much time of the lane at least.
const RATES_EVERY: Duration = Duration::from_millis(20);
const RATES_OVER_NS: u64 = 2_000_000;

/// How often guards are called for one change, and how often a meeting is looked at.
const MEETINGS_MAX: u32 = 20;
const MEETING_LOOK: Duration = Duration::from_micros(100);

/// When a process that somebody traces is looked at again: tracers come and go.
const TRACED: Duration = Duration::from_millis(100);

/// How long the planner waits at most for the request lane to idle.
const WAIT: Duration = Duration::from_micros(200);
const WAITS_MAX: u32 = 50;

/// Runs until it is told to stop.
pub(super) fn plan(channels: &Channels, pages: Pages, exchange: &Exchange, stop: &AtomicBool) {
    let Some(words) = channels.live() else { return };
    let mut planner = Planner {
        channels,
        pages,
        exchange,
        stop,
        words,
        processes: HashMap::new(),
        lane_ns: 0,
        looked: Instant::now(),
        gone: SiteCounts::default(),
    };
    while !stop.load(Relaxed) {
        let miss = exchange.miss.lock().take();
        match miss {
            Some(miss) => planner.take_up(miss),
            None => rest(),
        }
        planner.look_at_rates();
    }
}

/// Until a guard has something to say, or it is time to look at rates.
fn rest() {
    release_late_threads();
    thread::park_timeout(RATES_EVERY);
}

struct Planner<'p> {
    channels: &'p Channels,
    pages: Pages,
    exchange: &'p Exchange,
    stop: &'p AtomicBool,
    words: &'p LiveWords,
    processes: HashMap<Identity, Known>,
    /// The lane's time at the last look at rates.
    lane_ns: u64,
    looked: Instant,
    /// The places of processes that are gone.
    gone: SiteCounts,
}

/// How often a check ran.
#[derive(Clone, Copy, Debug)]
struct Rate {
    who: Identity,
    place: u64,
    per_ms: u64,
    is_put_back: bool,
}

/// What became of a process.
#[derive(Debug)]
enum Known {
    Patched {
        patched: Box<Patched>,
        counts: HashMap<u64, u64>,
    },
    /// Left alone as long as it runs this program, and why.
    Refused(String, Option<ProgramId>),
    /// Left alone until then, as somebody traces it.
    Traced(String, Instant),
    /// Shares its memory with another process, which stands for both.
    Same(Identity),
}

impl Known {
    fn refused(why: &str, process: u32) -> Self {
        Self::Refused(why.to_owned(), ProgramId::of(process))
    }

    fn traced(why: &str) -> Self {
        Self::Traced(why.to_owned(), Instant::now() + TRACED)
    }
}

impl Planner<'_> {
    fn take_up(&mut self, miss: Miss) {
        self.wait_for_idle();
        let change = match self.propose(miss) {
            Ok(change) => change,
            Err(missed) => return self.words.count(&missed),
        };
        let (process, place, method) = (change.process, change.site, change.method.clone());
        let outcome = self.hand_over(change);
        if let (Outcome::Applied, Some(method)) = (outcome, method) {
            self.words.name_method(&method);
        }
        if let Some(patched) = self.patched(process) {
            match outcome {
                Outcome::Applied => {}
                Outcome::Refused => patched.was_refused(place),
                Outcome::Late => patched.was_late(place),
            }
        }
        // What was missed before the place was written is out of date.
        *self.exchange.miss.lock() = None;
        self.publish();
    }

    fn patched(&mut self, process: u32) -> Option<&mut Patched> {
        let own = self.processes.iter_mut().find(|(who, _)| who.pid().unsigned_abs() == process);
        match own {
            Some((_, Known::Patched { patched, .. })) => Some(patched),
            _ => None,
        }
    }

    /// Where this thread shares a CPU with the batch, its work beside a request is no better than
    /// the batch's. With several lanes one of them is always busy; a guard that holds its lane
    /// leaves little of it to this thread.
    fn wait_for_idle(&self) {
        if self.exchange.meetings.is_some() {
            return;
        }
        let is_busy = || self.channels.is_busy() && !self.stop.load(Relaxed);
        for _ in 0..WAITS_MAX {
            if !is_busy() {
                return;
            }
            thread::sleep(WAIT);
        }
    }

    fn propose(&mut self, miss: Miss) -> Result<Change, Missed> {
        let who = Identity::of(miss.process.cast_signed()).ok_or(Missed::Gone)?;
        let who = self.memory_of(who)?;
        match self.processes.get_mut(&who) {
            Some(Known::Patched { patched, .. }) => {
                let (began, is_first) = (Instant::now(), patched.site_counts().processes == 0);
                let change = patched.propose(miss.stood, &self.pages);
                // Every further miss would stop a thread of it for nothing.
                let left_alone = match &change {
                    Err(Missed::Process(why)) => Some(Known::refused(why, miss.process)),
                    Err(Missed::Traced(why)) => Some(Known::traced(why)),
                    _ => None,
                };
                let is_filtered = matches!(&change, Err(Missed::Process(why)) if why == FILTERED);
                match left_alone {
                    Some(known) if is_first => _ = self.processes.insert(who, known),
                    Some(_) if is_filtered => self.leave_alone(who, FILTERED),
                    _ => {}
                }
                let change = change?;
                if is_first {
                    self.words.first_touch_ns.fetch_max(nanos(began.elapsed()), Relaxed);
                }
                Ok(change)
            }
            _ => Err(Missed::Gone),
        }
    }

    /// The process that stands for the memory of `who`, which is met if it is new.
    fn memory_of(&mut self, who: Identity) -> Result<Identity, Missed> {
        match self.processes.get(&who) {
            Some(Known::Patched { patched, .. }) if patched.is_same_program() => return Ok(who),
            Some(Known::Refused(why, program))
                if *program == ProgramId::of(who.pid().unsigned_abs()) =>
            {
                return Err(Missed::Process(why.clone()));
            }
            Some(Known::Traced(why, until)) if Instant::now() < *until => {
                return Err(Missed::Traced(why.clone()));
            }
            Some(Known::Same(other)) if shares_memory(who, *other) => return Ok(*other),
            _ => {}
        }
        // The lane may have others of this rank: a run that ends just now, or one beside this one.
        if !process::descends(who.pid().unsigned_abs(), std::process::id()) {
            return Err(Missed::Foreign);
        }
        self.forget_the_dead();
        let known = match self.meet(who) {
            Err(Missed::Process(why)) => Known::refused(&why, who.pid().unsigned_abs()),
            Err(Missed::Traced(why)) => Known::traced(&why),
            known => known?,
        };
        if let (Known::Patched { .. }, Some(Known::Traced(..))) = (&known, self.processes.get(&who))
        {
            self.words.say_why("");
        }
        let met = match &known {
            Known::Same(other) => Ok(*other),
            Known::Refused(why, _) => Err(Missed::Process(why.clone())),
            Known::Traced(why, _) => Err(Missed::Traced(why.clone())),
            Known::Patched { .. } => Ok(who),
        };
        self.processes.insert(who, known);
        met
    }

    /// A child has its parent's checks, as long as it runs the same program.
    fn meet(&self, who: Identity) -> Result<Known, Missed> {
        let counts = HashMap::new;
        for (&other, known) in &self.processes {
            let Known::Patched { patched, .. } = known else { continue };
            if other != who && shares_memory(who, other) {
                return Ok(Known::Same(other));
            }
            if let Some(fork) = patched.of_fork(who.pid().unsigned_abs()) {
                return Ok(Known::Patched { patched: Box::new(fork), counts: counts() });
            }
        }
        let patched = Patched::open(who.pid().unsigned_abs(), self.dense_per_ms() / 4 * 3)?;
        let patched = Box::new(patched);
        Ok(Known::Patched { patched, counts: counts() })
    }

    fn forget_the_dead(&mut self) {
        let gone = &mut self.gone;
        self.processes.retain(|who, known| {
            let lives = who.liveness() != Liveness::Dead;
            if let (false, Known::Patched { patched, .. }) = (lives, known) {
                *gone += patched.site_counts();
            }
            lives
        });
    }

    /// Gives a change to the guards, and waits for what becomes of it.
    fn hand_over(&self, change: Change) -> Outcome {
        self.exchange.unclear.store(0, Relaxed);
        put(&self.exchange.change, change);
        for _ in 0..self.exchange.meetings.as_ref().map_or(u32::MAX, |_| MEETINGS_MAX) {
            if let Some(meetings) = &self.exchange.meetings {
                meetings.hold(self.channels, || thread::park_timeout(MEETING_LOOK));
                let is_met = outcome(&self.exchange.change).is_some();
                let count = if is_met { &self.words.meetings } else { &self.words.unmet };
                count.fetch_add(1, Relaxed);
            }
            match outcome(&self.exchange.change) {
                None if self.stop.load(Relaxed) => break,
                // A guard did not come, or this run has one, which sees to it when it can.
                None => rest(),
                Some(outcome) => return outcome,
            }
        }
        give_up(&self.exchange.change)
    }

    /// Takes the checks out of processes that filter their system calls by now, or have asked for
    /// it: their checks no longer ring.
    fn look_at_filters(&mut self) {
        let filters = |who: &Identity, known: &Known| match known {
            Known::Patched { patched, .. } => {
                patched.requested_filter() || is_filtered(who.pid().unsigned_abs())
            }
            _ => false,
        };
        let all: Vec<Identity> = self
            .processes
            .iter()
            .filter(|(who, known)| filters(who, known))
            .map(|(&who, _)| who)
            .collect();
        for who in all {
            self.leave_alone(who, FILTERED);
        }
    }

    /// Until all checks are out it is looked at again.
    fn leave_alone(&mut self, who: Identity, why: &str) {
        let is_on = |planner: &Self| match planner.processes.get(&who) {
            Some(Known::Patched { patched, .. }) => patched.sites_on().collect(),
            _ => Vec::new(),
        };
        is_on(self).into_iter().for_each(|place| self.take_out(who, place));
        if is_on(self).is_empty() {
            self.words.count(&Missed::Process(why.to_owned()));
            let refused = Known::refused(why, who.pid().unsigned_abs());
            if let Some(Known::Patched { patched, .. }) = self.processes.insert(who, refused) {
                self.gone += patched.site_counts();
            }
        }
    }

    /// Sees to what runs too often.
    fn look_at_rates(&mut self) {
        if self.looked.elapsed() < RATES_EVERY {
            return;
        }
        self.look_at_filters();
        let lane_ns = self.channels.ran_ns();
        let over_ns = lane_ns.saturating_sub(self.lane_ns);
        if over_ns < RATES_OVER_NS {
            return;
        }
        (self.lane_ns, self.looked) = (lane_ns, Instant::now());
        let per_ms = |ran: u64| {
            u64::try_from(u128::from(ran) * 1_000_000 / u128::from(over_ns)).unwrap_or(u64::MAX)
        };
        let mut rates: Vec<Rate> = Vec::new();
        for (&who, known) in &mut self.processes {
            let Known::Patched { patched, counts } = known else { continue };
            for (place, count) in patched.counts() {
                let before = counts.insert(place, count).unwrap_or(0);
                if patched.is_on(place) {
                    let per_ms = per_ms(count.saturating_sub(before));
                    patched.set_rate(place, per_ms);
                    let is_put_back = patched.is_put_back(place);
                    rates.push(Rate { who, place, per_ms, is_put_back });
                }
            }
        }
        self.words.checks_per_ms.store(rates.iter().map(|one| one.per_ms).sum(), Relaxed);
        self.take_down(rates);
        self.publish();
    }

    /// The densest first, until what is left may run. What was put back has a limit of its own.
    fn take_down(&mut self, mut rates: Vec<Rate>) {
        rates.sort_by_key(|one| std::cmp::Reverse(one.per_ms));
        let by_cpu = self.exchange.meetings.is_some();
        let most = if by_cpu { ALL_PER_MS_BY_CPU } else { ALL_PER_MS };
        for (put_back, most) in [(false, most), (true, self.dense_per_ms())] {
            let of_these = || rates.iter().filter(|one| one.is_put_back == put_back);
            let mut all: u64 = of_these().map(|one| one.per_ms).sum();
            for &Rate { who, place, per_ms, .. } in of_these() {
                if all <= most {
                    break;
                }
                all -= per_ms;
                if !self.thin_out(who, place, per_ms) {
                    self.take_out(who, place);
                }
            }
        }
    }

    fn dense_per_ms(&self) -> u64 {
        if self.exchange.meetings.is_some() { DENSE_PER_MS_BY_CPU } else { DENSE_PER_MS }
    }

    /// Says whether there is nothing else to be done about a place that runs too often.
    fn thin_out(&mut self, who: Identity, place: u64, rate: u64) -> bool {
        let rounds = usize::try_from(rate.div_ceil(THIN_PER_MS)).unwrap_or(usize::MAX);
        let rounds = rounds.clamp(2, ROUNDS_MAX);
        let Some(Known::Patched { patched, .. }) = self.processes.get_mut(&who) else {
            return true;
        };
        let Some(change) = patched.thin_out(place, rounds, &self.pages) else { return false };
        let outcome = self.hand_over(change);
        if let Some(Known::Patched { patched, counts }) = self.processes.get_mut(&who) {
            patched.was_thinned(outcome == Outcome::Applied);
            match outcome {
                // It counts anew.
                Outcome::Applied => drop(counts.remove(&place)),
                Outcome::Refused => patched.was_refused(place),
                Outcome::Late => {}
            }
        }
        true
    }

    fn take_out(&mut self, who: Identity, place: u64) {
        let Some(Known::Patched { patched, .. }) = self.processes.get_mut(&who) else { return };
        let Some(change) = patched.drop_dense(place) else { return };
        if self.hand_over(change) == Outcome::Late
            && let Some(Known::Patched { patched, .. }) = self.processes.get_mut(&who)
        {
            patched.was_not_dropped(place);
        }
    }

    fn publish(&self) {
        let mut all = self.gone;
        for known in self.processes.values() {
            if let Known::Patched { patched, .. } = known {
                all += patched.site_counts();
            }
        }
        self.words.publish(all);
    }
}

/// Where the kernel does not say, they are taken to.
fn shares_memory(one: Identity, other: Identity) -> bool {
    let pid = |who: Identity| who.pid().unsigned_abs();
    process::share_memory(pid(one), pid(other)).unwrap_or(true)
}
