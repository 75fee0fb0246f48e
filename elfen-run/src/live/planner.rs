//! The planner: turns misses into patch sites, and thins out or removes checks that run too often.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering::*};
use std::thread;
use std::time::{Duration, Instant};

use elfen_instrument::live::{Change, FILTERED, Missed, Pages, Patched, SiteCounts};
use elfen_instrument::process::{ProgramId, is_filtered};
use elfen_instrument::remote::release_late_threads;
use elfen_rt::clock::{monotonic_ns, nanos};
use elfen_rt::process::{Identity, Liveness};

use super::handover::{Exchange, Miss};
use super::handover::{Outcome, give_up, outcome, put};
use super::page::LiveWords;
use crate::channels::Channels;
use elfen_machine::process;

/// How often all checks together may run in a millisecond of a lane's time. A check takes up to a
/// nanosecond, and one that looks up its lane takes two, so this is two percent.
const ALL_PER_MS: u64 = 20_000;
const ALL_PER_MS_BY_CPU: u64 = 10_000;
/// The limit for checks that are the only ones in their loops. A round of an interpreter's loop, or
/// a comparison, takes as little as 10 ns. Rates vary, so a check is put back only if its rate was
/// at most three quarters of this.
const DENSE_PER_MS: u64 = 80_000;
const DENSE_PER_MS_BY_CPU: u64 = 30_000;
/// How often the check of a loop of nanoseconds should run once rounds of the loop are copied
/// behind it, and how many rounds at most. A thread inside the copies is outside of its program's
/// code, so no observer can tell where it stands.
const THIN_PER_MS: u64 = 4_000;
const ROUNDS_MAX: usize = 64;
/// How often rates are computed, and over how much of the lanes' time at least.
const RATES_EVERY: Duration = Duration::from_millis(20);
const RATES_OVER_NS: u64 = 2_000_000;

/// How often guards are called for one change, and how often the planner checks a rendezvous.
const RENDEZVOUS_MAX: u32 = 20;
const RENDEZVOUS_POLL: Duration = Duration::from_micros(100);

/// When a process that is being traced is tried again: tracers come and go.
const TRACED: Duration = Duration::from_millis(100);

/// How long the planner sleeps, and how often at most, until the request lane idles.
const WAIT: Duration = Duration::from_micros(200);
const WAITS_MAX: u32 = 50;

/// Plans until `stop` is set.
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
        rates_at: Instant::now(),
        gone: SiteCounts::default(),
    };
    while !stop.load(Relaxed) {
        let miss = exchange.miss.lock().take();
        match miss {
            Some(miss) => planner.handle_miss(miss),
            None => sleep_until_woken(),
        }
        planner.check_rates();
    }
}

/// Sleeps until a guard wakes this thread, or rates are due.
fn sleep_until_woken() {
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
    /// The lanes' time when rates were last computed.
    lane_ns: u64,
    rates_at: Instant,
    /// The sum over processes that have ended.
    gone: SiteCounts,
}

/// The rate of a check.
#[derive(Clone, Copy, Debug)]
struct Rate {
    identity: Identity,
    place: u64,
    per_ms: u64,
    is_put_back: bool,
}

/// What the planner has decided about a process.
#[derive(Debug)]
enum Known {
    Patched {
        patched: Box<Patched>,
        counts: HashMap<u64, u64>,
    },
    /// Refused for this reason, as long as the process runs this program.
    Refused(String, Option<ProgramId>),
    /// Refused until this time, because the process is being traced.
    Traced(String, Instant),
    /// It shares its memory with this other process, which stands for both.
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
    fn handle_miss(&mut self, miss: Miss) {
        self.wait_for_idle();
        let change = match self.propose(miss) {
            Ok(change) => change,
            Err(missed) => return self.words.count(&missed),
        };
        let process = change.process;
        let place = change.site;
        let method = change.method.clone();
        let outcome = self.hand_over(change);
        if let (Outcome::Applied, Some(method)) = (outcome, method) {
            self.words.name_method(&method);
        }
        if let Some(patched) = self.patched(process) {
            match outcome {
                Outcome::Applied => self.words.note_check(monotonic_ns()),
                Outcome::Refused => patched.was_refused(place),
                Outcome::Late => patched.was_late(place),
            }
        }
        // A miss from before the write is out of date.
        *self.exchange.miss.lock() = None;
        self.publish();
    }

    fn patched(&mut self, process: u32) -> Option<&mut Patched> {
        let own = self
            .processes
            .iter_mut()
            .find(|(identity, _)| identity.pid().unsigned_abs() == process);
        match own {
            Some((_, Known::Patched { patched, .. })) => Some(patched),
            _ => None,
        }
    }

    /// Waits until the request lane idles. On a shared CPU, the planner's work next to a request is
    /// no better than the batch's. With several lanes one is always busy, and guards that occupy
    /// their lanes leave little CPU time to this thread anyway.
    fn wait_for_idle(&self) {
        if self.exchange.rendezvous.is_some() {
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
        let identity = Identity::of(miss.process.cast_signed()).ok_or(Missed::Gone)?;
        let identity = self.owner_of_memory(identity)?;
        match self.processes.get_mut(&identity) {
            Some(Known::Patched { patched, .. }) => {
                let began = Instant::now();
                let is_first = patched.site_counts().processes == 0;
                let change = patched.propose(miss.stood, &self.pages);
                // Otherwise every further miss would stop one of its threads in vain.
                let left_alone = match &change {
                    Err(Missed::Process(why)) => Some(Known::refused(why, miss.process)),
                    Err(Missed::Traced(why)) => Some(Known::traced(why)),
                    _ => None,
                };
                let is_filtered = matches!(&change, Err(Missed::Process(why)) if why == FILTERED);
                match left_alone {
                    Some(known) if is_first => drop(self.processes.insert(identity, known)),
                    Some(_) if is_filtered => self.refuse_process(identity, FILTERED),
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

    /// The process that stands for the memory of `identity`. Examines `identity` if it is new.
    fn owner_of_memory(&mut self, identity: Identity) -> Result<Identity, Missed> {
        match self.processes.get(&identity) {
            Some(Known::Patched { patched, .. }) if patched.is_same_program() => {
                return Ok(identity);
            }
            Some(Known::Refused(why, program))
                if *program == ProgramId::of(identity.pid().unsigned_abs()) =>
            {
                return Err(Missed::Process(why.clone()));
            }
            Some(Known::Traced(why, until)) if Instant::now() < *until => {
                return Err(Missed::Traced(why.clone()));
            }
            Some(Known::Same(other)) if shares_memory(identity, *other) => return Ok(*other),
            _ => {}
        }
        // A foreign process may run on the lane at this rank, for example of a second run.
        if !process::descends(identity.pid().unsigned_abs(), std::process::id()) {
            return Err(Missed::Foreign);
        }
        self.forget_the_dead();
        let known = match self.examine(identity) {
            Err(Missed::Process(why)) => Known::refused(&why, identity.pid().unsigned_abs()),
            Err(Missed::Traced(why)) => Known::traced(&why),
            known => known?,
        };
        if let (Known::Patched { .. }, Some(Known::Traced(..))) =
            (&known, self.processes.get(&identity))
        {
            self.words.record_reason("");
        }
        let owner = match &known {
            Known::Same(other) => Ok(*other),
            Known::Refused(why, _) => Err(Missed::Process(why.clone())),
            Known::Traced(why, _) => Err(Missed::Traced(why.clone())),
            Known::Patched { .. } => Ok(identity),
        };
        self.processes.insert(identity, known);
        owner
    }

    /// Examines a process. A child has its parent's checks, as long as it runs the same program.
    fn examine(&self, identity: Identity) -> Result<Known, Missed> {
        let counts = HashMap::new;
        for (&other, known) in &self.processes {
            let Known::Patched { patched, .. } = known else { continue };
            if other != identity && shares_memory(identity, other) {
                return Ok(Known::Same(other));
            }
            if let Some(fork) = patched.of_fork(identity.pid().unsigned_abs()) {
                return Ok(Known::Patched { patched: Box::new(fork), counts: counts() });
            }
        }
        let patched = Patched::open(identity.pid().unsigned_abs(), self.dense_per_ms() / 4 * 3)?;
        let patched = Box::new(patched);
        Ok(Known::Patched { patched, counts: counts() })
    }

    fn forget_the_dead(&mut self) {
        let gone = &mut self.gone;
        self.processes.retain(|identity, known| {
            let lives = identity.liveness() != Liveness::Dead;
            if let (false, Known::Patched { patched, .. }) = (lives, known) {
                *gone += patched.site_counts();
            }
            lives
        });
    }

    /// Gives a change to the guards, and waits for its outcome.
    fn hand_over(&self, change: Change) -> Outcome {
        self.exchange.unclear.store(0, Relaxed);
        put(&self.exchange.change, change);
        for _ in 0..self.exchange.rendezvous.as_ref().map_or(u32::MAX, |_| RENDEZVOUS_MAX) {
            if let Some(rendezvous) = &self.exchange.rendezvous {
                rendezvous.run(self.channels, || thread::park_timeout(RENDEZVOUS_POLL));
                let is_met = outcome(&self.exchange.change).is_some();
                let count =
                    if is_met { &self.words.rendezvous } else { &self.words.rendezvous_missed };
                count.fetch_add(1, Relaxed);
            }
            match outcome(&self.exchange.change) {
                None if self.stop.load(Relaxed) => break,
                // A guard did not come; or the run has one guard, which writes when it can.
                None => sleep_until_woken(),
                Some(outcome) => return outcome,
            }
        }
        give_up(&self.exchange.change)
    }

    /// Takes the checks out of processes that filter their system calls by now, or have requested
    /// it: their checks can no longer ring the doorbell.
    fn check_filters(&mut self) {
        let filters = |identity: &Identity, known: &Known| match known {
            Known::Patched { patched, .. } => {
                patched.requested_filter() || is_filtered(identity.pid().unsigned_abs())
            }
            _ => false,
        };
        let all: Vec<Identity> = self
            .processes
            .iter()
            .filter(|(identity, known)| filters(identity, known))
            .map(|(&identity, _)| identity)
            .collect();
        for identity in all {
            self.refuse_process(identity, FILTERED);
        }
    }

    /// Takes the checks out of a process. Until all are out, later checks of filters repeat this.
    fn refuse_process(&mut self, identity: Identity, why: &str) {
        let patched_sites = |planner: &Self| match planner.processes.get(&identity) {
            Some(Known::Patched { patched, .. }) => patched.sites_on().collect(),
            _ => Vec::new(),
        };
        patched_sites(self).into_iter().for_each(|place| self.take_out(identity, place));
        if patched_sites(self).is_empty() {
            self.words.count(&Missed::Process(why.to_owned()));
            let refused = Known::refused(why, identity.pid().unsigned_abs());
            if let Some(Known::Patched { patched, .. }) = self.processes.insert(identity, refused) {
                self.gone += patched.site_counts();
            }
        }
    }

    /// Computes rates, and acts on checks that run too often.
    fn check_rates(&mut self) {
        if self.rates_at.elapsed() < RATES_EVERY {
            return;
        }
        self.check_filters();
        let lane_ns = self.channels.ran_ns();
        let over_ns = lane_ns.saturating_sub(self.lane_ns);
        if over_ns < RATES_OVER_NS {
            return;
        }
        self.lane_ns = lane_ns;
        self.rates_at = Instant::now();
        let per_ms = |ran: u64| {
            u64::try_from(u128::from(ran) * 1_000_000 / u128::from(over_ns)).unwrap_or(u64::MAX)
        };
        let mut rates: Vec<Rate> = Vec::new();
        for (&identity, known) in &mut self.processes {
            let Known::Patched { patched, counts } = known else { continue };
            for (place, count) in patched.counts() {
                let before = counts.insert(place, count).unwrap_or(0);
                if patched.is_on(place) {
                    let per_ms = per_ms(count.saturating_sub(before));
                    patched.set_rate(place, per_ms);
                    let is_put_back = patched.is_put_back(place);
                    rates.push(Rate { identity, place, per_ms, is_put_back });
                }
            }
        }
        self.words.checks_per_ms.store(rates.iter().map(|one| one.per_ms).sum(), Relaxed);
        self.limit_rates(rates);
        self.publish();
    }

    /// Reduces the densest checks first, until the rest may run. Checks that were put back have
    /// their own limit.
    fn limit_rates(&mut self, mut rates: Vec<Rate>) {
        rates.sort_by_key(|one| std::cmp::Reverse(one.per_ms));
        let by_cpu = self.exchange.rendezvous.is_some();
        let most = if by_cpu { ALL_PER_MS_BY_CPU } else { ALL_PER_MS };
        for (put_back, most) in [(false, most), (true, self.dense_per_ms())] {
            let of_these = || rates.iter().filter(|one| one.is_put_back == put_back);
            let mut all: u64 = of_these().map(|one| one.per_ms).sum();
            for &Rate { identity, place, per_ms, .. } in of_these() {
                if all <= most {
                    break;
                }
                all -= per_ms;
                if !self.thin_out(identity, place, per_ms) {
                    self.take_out(identity, place);
                }
            }
        }
    }

    fn dense_per_ms(&self) -> u64 {
        if self.exchange.rendezvous.is_some() { DENSE_PER_MS_BY_CPU } else { DENSE_PER_MS }
    }

    /// Puts rounds of its loop behind a check that runs too often. Returns `false` if the check can
    /// only be taken out.
    fn thin_out(&mut self, identity: Identity, place: u64, rate: u64) -> bool {
        let rounds = usize::try_from(rate.div_ceil(THIN_PER_MS)).unwrap_or(usize::MAX);
        let rounds = rounds.clamp(2, ROUNDS_MAX);
        let Some(Known::Patched { patched, .. }) = self.processes.get_mut(&identity) else {
            return true;
        };
        let Some(change) = patched.thin_out(place, rounds, &self.pages) else { return false };
        let outcome = self.hand_over(change);
        if let Some(Known::Patched { patched, counts }) = self.processes.get_mut(&identity) {
            patched.was_thinned(outcome == Outcome::Applied);
            match outcome {
                // The check's count starts from 0.
                Outcome::Applied => drop(counts.remove(&place)),
                Outcome::Refused => patched.was_refused(place),
                Outcome::Late => {}
            }
        }
        true
    }

    fn take_out(&mut self, identity: Identity, place: u64) {
        let Some(Known::Patched { patched, .. }) = self.processes.get_mut(&identity) else {
            return;
        };
        let Some(change) = patched.drop_dense(place) else { return };
        if self.hand_over(change) == Outcome::Late
            && let Some(Known::Patched { patched, .. }) = self.processes.get_mut(&identity)
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

/// Whether two processes share their memory; assumed where the kernel does not say.
fn shares_memory(one: Identity, other: Identity) -> bool {
    let pid = |identity: Identity| identity.pid().unsigned_abs();
    process::share_memory(pid(one), pid(other)).unwrap_or(true)
}
