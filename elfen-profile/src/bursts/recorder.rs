//! Records bursts of a program and its children.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::ops::Range;
use std::thread::sleep;
use std::time::{Duration, Instant};

use elfen_instrument::process::{ProgramId, is_filtered, numbers_in, threads_of};
use elfen_instrument::remote::{TouchError, release_late_threads};
use elfen_stream::layout;
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use super::clock::Clock;
use super::refusal::Refusal;
use super::removal::{self, Found};
use super::stack;
use super::target::Target;
use crate::control::{Control, Recording};
use crate::engine::region::CONTEXTS_MAX;
use crate::engine::tally::{Tally, are_known};
use crate::engine::unwind::StackCopy;
use crate::engine::walk::Burst;
use crate::profile::{Source, What};
use crate::program::{self, own_ns, ticks, ticks_per_second, user_ticks};
use crate::recording::{Process, ProgramRecording, Recorded, RecordingError, Subject, prepared};

/// How often finished bursts are read; more often while most code is new.
const POLL: Duration = Duration::from_millis(40);
const POLL_NEW: Duration = Duration::from_millis(4);
/// How often new threads and processes are looked for.
const LOOK: Duration = Duration::from_millis(50);
/// In this time, a program that was executed has its C library.
const LOADED_WITHIN: Duration = Duration::from_secs(1);
/// The longest mean interval, in CPU time.
const INTERVAL_NS_MAX: f64 = 1e9;
/// A thread keeps the bursts of this many mean intervals until they are read.
const KEPT: f64 = layout::KEPT_MAX as f64 / 1.5;
/// Less than one in this number of bursts in code of no file is not worth a remark.
const FOREIGN_FROM: u64 = 50;
/// The ends of a burst block signals too, but hardly at three looks in a row.
const BLOCKED_MAX: u32 = 3;
/// A thread that was in a system call is looked at again once it has run for so long.
const STEADY_NS: u64 = 1_000_000;
/// The part of the usual interval while most code is new.
const INTERVAL_NEW: f64 = 0.2;
/// A thread that runs on more stacks in turn, as coroutines do, has no callers there.
const STACKS_MAX: u32 = 8;
/// What it may cost to look at new code sooner, besides the usual cost.
const NEW_NS: f64 = 3e6;
/// Most code is new if more of the last bursts could not go their way.
const NEW_FROM: f64 = 0.1;
/// What a burst costs a program besides its time: a signal, its handler, and cold caches behind.
const SIGNAL_NS: f64 = 10_000.0;
/// The part of a burst's time by which it is slower than the program's own code.
const SLOWER: f64 = 0.8;
/// A longer burst was interrupted by other programs.
const BURST_NS_MAX: f64 = 200_000.0;
/// Cost of a burst, and CPU time for reading one, before they are known.
const BURST_NS: f64 = 25_000.0;
const READ_NS: f64 = 50_000.0;
/// Weight of the newest burst in the mean cost.
const NEWEST: f64 = 0.05;
/// The same for the bursts that are read together.
const READ_NEWEST: f64 = 0.2;
const ADDRESSES_MAX: u64 = layout::ADDRESSES_MAX as u64;
const BURST_WORDS: usize = layout::BURST_WORDS as usize;
const IDLE: u64 = layout::IDLE as u64;
const ARMED: u64 = layout::ARMED as u64;
const RUNS: u64 = layout::RUNS as u64;
const DONE: u64 = layout::DONE as u64;
const REFUSED: u64 = layout::REFUSED as u64;

#[derive(Debug, thiserror::Error)]
pub enum BurstError {
    #[error(transparent)]
    Recording(#[from] RecordingError),
    #[error("perf_event_open(2) is forbidden")]
    Forbidden,
    #[error("{0}")]
    Refused(String),
    /// The process may not be traced.
    #[error("{0}")]
    Closed(String),
}

/// What to record.
#[derive(Clone, Debug)]
pub struct Order {
    /// The part of the program's CPU time that the profile may cost.
    pub cost: f64,
    /// Events of one burst.
    pub events: u32,
    pub what: What,
    /// Until each path, or block, of more than 1 % is known with this relative error.
    pub until: Option<f64>,
}

#[derive(Debug)]
struct Thread {
    slot: u32,
    /// The events that its next burst may have.
    events: u32,
    clock: Clock,
    /// Its run time when it was last looked at.
    ran_ns: u64,
    /// At how many looks in a row it has blocked the signal of its clock.
    blocked: u32,
    /// How often it was looked up where its stack is.
    stacks_found: u32,
    /// Where its stack pointer may be.
    stack: Range<u64>,
}

#[derive(Debug)]
struct Prepared {
    target: Target,
    threads: BTreeMap<u32, Thread>,
    /// Threads whose stacks are not known yet, and their run time when they were looked at last.
    waiting: HashMap<u32, u64>,
    /// Threads without room for the frame of a signal, and threads that block it.
    unfit: HashSet<u32>,
    blocked: HashSet<u32>,
    tally: Tally,
    /// User time at the beginning, and at last, in ticks of the clock of stat.
    user: [u64; 2],
}

/// Starts the program, or takes the process, and records until it ends or the time is over.
pub fn record(
    subject: &Subject,
    order: &Order,
    running: impl Fn(i32),
) -> Result<Recorded, BurstError> {
    check()?;
    let recording = ProgramRecording::begin(subject, Source::Bursts, &running)?;
    let mut recorder = Recorder::new(order, recording);
    recorder.run_and_finish()?;
    recorded(recorder)
}

/// Whether bursts are possible at all.
pub(crate) fn check() -> Result<(), BurstError> {
    match Clock::open(own_thread(), 0) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Err(BurstError::Forbidden),
        _ => Ok(()),
    }
}

pub(crate) enum Attempt<'a> {
    Recorded(Recorded),
    /// Why not, and the recording, which has no burst.
    Refused(String, ProgramRecording<'a>),
}

/// Records as [`record`] does, unless the program itself can have no bursts.
pub(crate) fn attempt<'a>(
    recording: ProgramRecording<'a>,
    order: &Order,
) -> Result<Attempt<'a>, BurstError> {
    let mut recorder = Recorder::new(order, recording);
    recorder.gives_up = true;
    recorder.run_and_finish()?;
    match recorder.refused.take() {
        Some(why) => Ok(Attempt::Refused(why, recorder.recording)),
        None => recorded(recorder).map(Attempt::Recorded),
    }
}

fn recorded(mut recorder: Recorder<'_>) -> Result<Recorded, BurstError> {
    let all = recorder.bursts + recorder.missed;
    let left = &mut recorder.recording.profile.left;
    if recorder.foreign * FOREIGN_FROM > all {
        let percent = recorder.foreign * 100 / all;
        let note = format!("{percent} % of the time: code of no file, which the program generated");
        left.push(note);
    }
    if recorder.blocked > 0 {
        let threads = if recorder.blocked == 1 { "thread" } else { "threads" };
        let note = format!(
            "{} {threads} that blocked all signals; --by shadows sees these",
            recorder.blocked
        );
        left.push(note);
    }
    if recorder.unfit > 0 {
        let threads = if recorder.unfit == 1 { "thread" } else { "threads" };
        let note = format!(
            "{} {threads} on small stacks, as coroutines have; --by shadows sees these",
            recorder.unfit
        );
        left.push(note);
    }
    if recorder.lost > 0 {
        let note = format!("{} bursts whose way was not found", recorder.lost);
        left.push(note);
    }
    let whole = |ns: f64| u64::try_from(Duration::from_secs_f64(ns / 1e9).as_nanos()).unwrap_or(0);
    recorder.recording.profile.ran_ns = whole(recorder.ran_ns);
    recorder.recording.profile.cost_ns = whole(recorder.cost_ns);
    Ok(recorder.recording.end()?)
}

struct Recorder<'a> {
    recording: ProgramRecording<'a>,
    /// It ends if the program itself is refused, for this reason.
    gives_up: bool,
    refused: Option<String>,
    order: Order,
    control: Control,
    processes: HashMap<u32, Process<Prepared>>,
    /// Since when processes have no known C library.
    loading: HashMap<u32, Instant>,
    free: Vec<u32>,
    random: Xoshiro256PlusPlus,
    /// Mean cost of a burst, and sums.
    burst_ns: f64,
    cost_ns: f64,
    ran_ns: f64,
    bursts: u64,
    missed: u64,
    lost: u64,
    /// Bursts that began in code of no file.
    foreign: u64,
    /// Threads whose signals were blocked.
    blocked: u64,
    /// Threads whose stacks have no room for a signal.
    unfit: u64,
    began_ticks: u64,
    /// CPU time of this process for reading a burst.
    read_ns: f64,
    /// The part of the last bursts that could not go their way.
    new: f64,
    /// The inodes of the memory of all processes so far.
    regions: Vec<u64>,
}

impl<'a> Recorder<'a> {
    fn new(order: &Order, recording: ProgramRecording<'a>) -> Self {
        Self {
            order: order.clone(),
            control: Control::of(recording.root),
            processes: HashMap::from([(recording.root, Process::Waits)]),
            loading: HashMap::new(),
            gives_up: false,
            refused: None,
            recording,
            free: (0..CONTEXTS_MAX).rev().collect(),
            random: Xoshiro256PlusPlus::seed_from_u64(ticks()),
            burst_ns: BURST_NS,
            cost_ns: 0.0,
            ran_ns: 0.0,
            bursts: 0,
            missed: 0,
            lost: 0,
            foreign: 0,
            blocked: 0,
            unfit: 0,
            began_ticks: ticks(),
            read_ns: READ_NS,
            new: 1.0,
            regions: Vec::new(),
        }
    }

    fn run_and_finish(&mut self) -> Result<(), BurstError> {
        let outcome = self.run();
        self.finish();
        outcome
    }

    fn run(&mut self) -> Result<(), BurstError> {
        let mut looked = None;
        while self.recording.goes_on()? && self.refused.is_none() {
            for settings in self.control.serve(|| self.state()) {
                self.order.cost = settings.cost.unwrap_or(self.order.cost);
                self.order.events = settings.edges.unwrap_or(self.order.events);
            }
            if looked.is_none_or(|looked: Instant| looked.elapsed() >= LOOK) {
                looked = Some(Instant::now());
                self.look()?;
                let tallies = prepared(&self.processes).map(|prepared| &prepared.tally);
                self.recording.is_known =
                    self.order.until.is_some_and(|error| are_known(tallies, error));
                if !self.recording.has_child() && self.processes.is_empty() {
                    return Ok(());
                }
            }
            self.read_all();
            release_late_threads();
            self.recording.wait(self.poll());
        }
        Ok(())
    }

    /// What this recording says of itself.
    fn state(&self) -> Recording {
        let ran_ns = self.ran_ns + self.ran_now_ns();
        Recording {
            bursts: self.bursts,
            cost_percent: self.cost_ns / ran_ns.max(1.0) * 100.0,
            ..self.recording.state(self.recording.own(), self.order.cost)
        }
    }

    /// User time of the processes that run, while they were watched.
    fn ran_now_ns(&self) -> f64 {
        let ticks = prepared(&self.processes).map(|prepared| prepared.user[1] - prepared.user[0]);
        let ticks = ticks.sum::<u64>();
        #[expect(clippy::cast_precision_loss, reason = "an estimate")]
        let ticks = ticks as f64;
        ticks / ticks_per_second() as f64 * 1e9
    }

    /// Looks for processes and threads that are new, or have ended.
    fn look(&mut self) -> Result<(), BurstError> {
        let found = program::family(self.recording.root);
        for &process in &found {
            self.processes.entry(process).or_insert(Process::Waits);
        }
        let known: Vec<u32> = self.processes.keys().copied().collect();
        for process in known {
            if !found.contains(&process) && threads_of(process).is_empty() {
                self.forget(process);
                continue;
            }
            let state = self.processes.remove(&process);
            let state = match state {
                Some(Process::Prepared(prepared)) if !prepared.target.is_there() => {
                    // It executes another program now.
                    self.close(*prepared);
                    Process::Waits
                }
                Some(Process::Prepared(prepared)) if is_filtered(process) => {
                    // A filter may kill it for what a burst needs, and for what detaching needs.
                    self.recording
                        .note(process, &Refusal::Unfit("it filters its system calls since then"));
                    self.close(*prepared);
                    Process::Refused(ProgramId::of(process))
                }
                Some(Process::Refused(program)) if program != ProgramId::of(process) => {
                    Process::Waits
                }
                Some(Process::Waits) => self.prepare(process)?,
                Some(state) => state,
                None => continue,
            };
            self.processes.insert(process, state);
            self.look_for_threads(process);
        }
        Ok(())
    }

    fn prepare(&mut self, process: u32) -> Result<Process<Prepared>, BurstError> {
        let is_named = !self.recording.has_child() && process == self.recording.root;
        // One tick is 10 ms. To prepare a process takes about a millisecond.
        if !is_named && user_ticks(process).unwrap_or(0) == 0 {
            return Ok(Process::Waits);
        }
        match Target::attach(process, self.order.what.needs_addresses(), &self.regions) {
            Ok(target) => {
                self.loading.remove(&process);
                self.regions.extend(target.region.inode());
                let user = user_ticks(process).unwrap_or(0);
                let tally = Tally::new(self.order.what, self.order.until.is_some());
                Ok(Process::Prepared(Box::new(Prepared {
                    target,
                    threads: BTreeMap::new(),
                    waiting: HashMap::new(),
                    unfit: HashSet::new(),
                    blocked: HashSet::new(),
                    tally,
                    user: [user, user],
                })))
            }
            Err(Refusal::NoLibrary) if self.may_be_loading(process) => Ok(Process::Waits),
            Err(error @ Refusal::Touch(TouchError::Refused(_))) if is_named => {
                Err(BurstError::Closed(error.to_string()))
            }
            Err(error)
                if self.gives_up
                    && process == self.recording.root
                    && self.bursts + self.missed == 0 =>
            {
                self.refused = Some(error.to_string());
                Ok(Process::Refused(ProgramId::of(process)))
            }
            Err(error) if is_named => Err(BurstError::Refused(error.to_string())),
            Err(error) => {
                self.recording.note(process, &error);
                Ok(Process::Refused(ProgramId::of(process)))
            }
        }
    }

    /// Whether a process without a known C library may be about to load one.
    fn may_be_loading(&mut self, process: u32) -> bool {
        let since = *self.loading.entry(process).or_insert_with(Instant::now);
        let is_loading = since.elapsed() < LOADED_WITHIN;
        if !is_loading {
            self.loading.remove(&process);
        }
        is_loading
    }

    fn look_for_threads(&mut self, process: u32) {
        let mean = self.interval_ns();
        let Some(Process::Prepared(prepared)) = self.processes.get_mut(&process) else { return };
        let Prepared { target, threads, waiting, unfit, blocked, user, .. } = &mut **prepared;
        target.beat();
        if let Some(now) = user_ticks(process) {
            user[1] = now;
        }
        let now = threads_of(process);
        waiting.retain(|thread, _| now.contains(thread));
        unfit.retain(|thread| now.contains(thread));
        blocked.retain(|thread| now.contains(thread));
        threads.retain(|thread, one| {
            let stays = now.contains(thread);
            if !stays {
                target.set_word(one.slot, layout::STATE, IDLE);
                self.free.push(one.slot);
            }
            stays
        });
        for thread in now {
            if let Some(one) = threads.get_mut(&thread) {
                let ran = ran_ns(process, thread);
                let has_run = ran != std::mem::replace(&mut one.ran_ns, ran);
                if !has_run || one.blocked == BLOCKED_MAX {
                    continue;
                }
                let blocks = blocks_by_itself(target, one, thread);
                one.blocked = if blocks { one.blocked + 1 } else { 0 };
                if one.blocked == BLOCKED_MAX {
                    // A signal that waits would end a system call.
                    let _gone = one.clock.stop();
                    self.blocked += 1;
                }
                continue;
            }
            let ran_ns = ran_ns(process, thread);
            let is_idle = waiting.get(&thread).is_some_and(|&then| ran_ns < then + STEADY_NS);
            if unfit.contains(&thread) || is_idle {
                continue;
            }
            waiting.insert(thread, ran_ns);
            let stack = match stack::of_thread(process, thread) {
                // The signal would wait, and then end a system call.
                Ok(Some(stack)) if stack.blocks_signal => {
                    if blocked.insert(thread) {
                        self.blocked += 1;
                    }
                    continue;
                }
                Ok(Some(stack)) => stack,
                Ok(None) => {
                    unfit.insert(thread);
                    self.unfit += 1;
                    continue;
                }
                // It was in a system call.
                Err(_) => continue,
            };
            // Another part of this process may use the descriptor of a slot.
            let opened = loop {
                let Some(slot) = self.free.pop() else { return };
                match Clock::open(thread, slot) {
                    Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
                    opened => break (slot, opened),
                }
            };
            let (slot, Ok(clock)) = opened else {
                // The thread has ended.
                self.free.push(opened.0);
                continue;
            };
            target.set_up_slot(slot, stack.fs_base, self.order.what.stacks);
            let one = Thread {
                slot,
                events: self.order.events,
                clock,
                ran_ns,
                blocked: 0,
                stacks_found: 0,
                stack: stack.places,
            };
            arm(target, &one, mean, &mut self.random);
            let _gone = one.clock.start();
            threads.insert(thread, one);
        }
    }

    /// Reads the bursts that have ended, and lets the next ones come at another interval.
    fn read_all(&mut self) {
        let interval = self.interval_ns();
        let ns_per_tick = self.ns_per_tick();
        for (&process, state) in &mut self.processes {
            let Process::Prepared(prepared) = state else { continue };
            let Prepared { target, threads, tally, .. } = &mut **prepared;
            if target.follow_changes() {
                tally.note_change();
            }
            let (own, mut read) = (own_ns(), 0_u32);
            let mut refused = Vec::new();
            for (&thread, one) in &mut *threads {
                let state = target.word(one.slot, layout::STATE);
                let at = target.word_at(one.slot, layout::STATE);
                if state == REFUSED {
                    refused.push(thread);
                }
                if state != DONE || !target.region.replace_word(at, DONE, IDLE) {
                    continue;
                }
                let bursts = read_bursts(target, one, self.order.what, process);
                let given = std::mem::replace(&mut one.events, self.order.events);
                if self.order.what.stacks
                    && one.stacks_found < STACKS_MAX
                    && let Some(last) = bursts.iter().rfind(|burst| !burst.is_missed)
                    && last.stack.bytes.is_empty()
                {
                    one.stacks_found += 1;
                    target.name_stack(one.slot, last.stack.pointer());
                }
                if bursts.iter().all(|burst| one.stack.contains(&burst.stack_at)) {
                    arm(target, one, interval, &mut self.random);
                } else {
                    // As a coroutine, it is on another stack by turns, of unknown size.
                    let _gone = one.clock.stop();
                    self.unfit += 1;
                }
                for mut burst in bursts {
                    read += 1;
                    let at = if burst.is_missed { burst.began_at } else { burst.left_at };
                    let is_new = target.is_new(at);
                    self.new += NEWEST * (if is_new { 1.0 } else { 0.0 } - self.new);
                    if burst.is_missed {
                        self.missed += 1;
                        self.foreign += u64::from(target.has_no_code(at));
                        self.cost_ns += SIGNAL_NS;
                        tally.note_unknown(burst.began_at);
                        continue;
                    }
                    #[expect(clippy::cast_precision_loss, reason = "bursts are short")]
                    let cost = SIGNAL_NS + SLOWER * ns_per_tick * burst.ticks as f64;
                    let cost = cost.min(BURST_NS_MAX);
                    self.cost_ns += cost;
                    self.burst_ns += NEWEST * (cost - self.burst_ns);
                    self.bursts += 1;
                    if !target.has_no_changes() {
                        // The stack may lead to libraries that are gone.
                        burst.stack = StackCopy::default();
                    }
                    let images = target.objects.images().len();
                    tally.add_burst(&target.cache, &mut target.objects, &burst, given);
                    target.check_new_images(images);
                }
            }
            // What follows is done once for each block.
            #[expect(clippy::cast_precision_loss, reason = "an estimate")]
            let own = own_ns().saturating_sub(own) as f64;
            if read > 0 {
                self.read_ns += READ_NEWEST * (own / f64::from(read) - self.read_ns);
            }
            for thread in refused {
                if let Some(one) = threads.get_mut(&thread) {
                    // Its slot stays its own: a signal may still be on its way.
                    target.set_word(one.slot, layout::STATE, IDLE);
                    let _gone = one.clock.stop();
                }
            }
            for at in tally.take_unknown() {
                target.translate(at);
            }
        }
    }

    /// The mean interval at which neither the bursts nor their reading cost more than they may.
    fn interval_ns(&self) -> f64 {
        let usual = self.burst_ns.max(self.read_ns) / self.order.cost;
        let wanted = if self.is_new() { usual * INTERVAL_NEW } else { usual };
        let least = self.poll().as_secs_f64() * 1e9 / KEPT;
        wanted.clamp(least, INTERVAL_NS_MAX)
    }

    fn poll(&self) -> Duration {
        if self.is_new() { POLL_NEW } else { POLL }
    }

    fn ns_per_tick(&self) -> f64 {
        let ticks = ticks().saturating_sub(self.began_ticks).max(1);
        #[expect(clippy::cast_precision_loss, reason = "an estimate")]
        let ticks = ticks as f64;
        self.recording.began.elapsed().as_secs_f64() * 1e9 / ticks
    }

    /// Whether most code is new, and looking at it sooner is not too expensive yet.
    fn is_new(&self) -> bool {
        let may_cost =
            NEW_NS + self.order.cost * self.recording.began.elapsed().as_secs_f64() * 1e9;
        self.new > NEW_FROM && self.cost_ns < may_cost
    }

    fn forget(&mut self, process: u32) {
        self.loading.remove(&process);
        if let Some(Process::Prepared(prepared)) = self.processes.remove(&process) {
            self.close(*prepared);
        }
    }

    /// Adds what a process has shown to the profile, and ends its clocks.
    fn close(&mut self, prepared: Prepared) -> Option<Target> {
        let Prepared { target, threads, mut tally, user, .. } = prepared;
        self.free.extend(threads.values().map(|one| one.slot));
        drop(threads);
        #[expect(clippy::cast_precision_loss, reason = "an estimate")]
        let user_ns = (user[1] - user[0]) as f64 / ticks_per_second() as f64 * 1e9;
        self.ran_ns += user_ns;
        self.lost += tally.lost;
        if tally.bursts > 0 {
            tally.add_to(&mut self.recording.profile, &target.cache, &target.objects);
        }
        target.is_there().then_some(target)
    }

    /// Ends all bursts, and takes everything out of the processes.
    fn finish(&mut self) {
        self.read_all();
        let all: Vec<u32> = self.processes.keys().copied().collect();
        for process in all {
            let Some(Process::Prepared(mut prepared)) = self.processes.remove(&process) else {
                continue;
            };
            if let Some(now) = user_ticks(process) {
                prepared.user[1] = now;
            }
            let Prepared { target, threads, .. } = &*prepared;
            for one in threads.values() {
                let at = target.word_at(one.slot, layout::STATE);
                for state in [ARMED, DONE] {
                    target.region.replace_word(at, state, IDLE);
                }
            }
            let deadline = Instant::now() + Duration::from_secs(1);
            let runs = || threads.values().any(|one| target.word(one.slot, layout::STATE) == RUNS);
            while runs() && target.is_there() && Instant::now() < deadline {
                sleep(Duration::from_millis(1));
            }
            if let Some(target) = self.close(*prepared)
                && let Err(error) = target.detach()
            {
                self.recording.note(process, &error);
            }
        }
        self.clean_children();
    }

    /// Takes everything out of children that were forked meanwhile, wherever they are now.
    fn clean_children(&mut self) {
        let all = if self.regions.is_empty() { Vec::new() } else { numbers_in("/proc") };
        for process in all {
            let found = Found::of(process);
            // Not one that shares its memory with a process that still has it.
            let is_copy =
                |found: &Found| self.regions.contains(&found.inode) && found.is_copy(process);
            if found.as_ref().is_some_and(is_copy)
                && let Err(error) = removal::remove(process)
            {
                self.recording.note(process, &error);
            }
        }
    }
}

/// Lets a thread begin bursts at a random interval around the mean.
fn arm(target: &Target, one: &Thread, mean_ns: f64, random: &mut impl rand::Rng) {
    target.set_word(one.slot, layout::EVENTS_GIVEN, one.events.into());
    target.set_word(one.slot, layout::KEPT, 0);
    target.set_word(one.slot, layout::ADDRESSES_LEFT, ADDRESSES_MAX);
    target.set_word(one.slot, layout::STATE, ARMED);
    let times = random.random_range(0.5..1.5);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is in range")]
    let period = (mean_ns * times) as u64;
    // This fails for a thread that has ended.
    let _gone = one.clock.set(period);
}

/// Reads the bursts of a thread, whose words may hold anything.
fn read_bursts(target: &Target, one: &Thread, what: What, process: u32) -> Vec<Burst> {
    let slot = one.slot;
    let kept = target.word(slot, layout::KEPT).min(layout::KEPT_MAX.unsigned_abs().into());
    let (kept_at, events) =
        (target.word_at(slot, layout::KEPT_AT), target.word_at(slot, layout::EVENTS));
    let mut bursts: Vec<(u64, Burst)> = (0..kept)
        .map(|number| {
            let at = kept_at + number * u64::from(layout::KEPT_BYTES.unsigned_abs());
            burst(target, one, at, |_| at + 64)
        })
        .collect();
    let last = target.word_at(slot, layout::EVENTS_LEFT);
    bursts.push(burst(target, one, last, |left| events + 8 * (left + 1)));
    // Addresses are appended downwards.
    let mut left = target.word(slot, layout::ADDRESSES_LEFT).min(ADDRESSES_MAX);
    for (number, (before, burst)) in (0..=kept).rev().zip(bursts.iter_mut().rev()) {
        let count = (*before).min(ADDRESSES_MAX).saturating_sub(left);
        if burst.is_missed {
            continue;
        }
        if what.stacks {
            let at = target.word_at(slot, layout::STACKS);
            burst.stack =
                stack(target, at + number * u64::from(layout::STACK_BYTES.unsigned_abs()));
        }
        if what.needs_addresses() {
            let at = target.word_at(slot, layout::ADDRESSES) + 8 * (left + 1);
            burst.addresses = target.region.words(at, usize::try_from(count).unwrap_or(0));
            burst.addresses.reverse();
            burst.process = process;
        }
        left += count;
    }
    bursts.into_iter().map(|(_, burst)| burst).collect()
}

/// Reads the words of one burst, and its events. Returns also how many addresses could be appended
/// at its beginning.
fn burst(target: &Target, one: &Thread, at: u64, events_at: impl Fn(u64) -> u64) -> (u64, Burst) {
    let words = target.region.words(at, BURST_WORDS);
    let [left, began_at, code, left_at, began, ended, addresses, stack_at] = words[..] else {
        return (0, Burst::default());
    };
    let given = u64::from(one.events);
    let left = left.min(given);
    let mut events =
        target.region.words(events_at(left), usize::try_from(given - left).unwrap_or(0));
    events.reverse();
    let (is_missed, ticks) = (code == 0, ended.saturating_sub(began));
    let burst = Burst { began_at, is_missed, left_at, events, ticks, stack_at, ..Burst::default() };
    (addresses, burst)
}

fn stack(target: &Target, at: u64) -> StackCopy {
    let words = target.region.words(at, 18);
    let Some((&copied, registers)) = words.split_first() else { return StackCopy::default() };
    let most = u64::from(layout::STACK_COPY_BYTES.unsigned_abs());
    let mut bytes = vec![0; usize::try_from(copied.min(most)).unwrap_or(0)];
    target.region.read(at + u64::from(layout::STACK_COPY.unsigned_abs()), &mut bytes);
    StackCopy { registers: registers.to_vec(), bytes }
}

/// The time that a thread has run.
fn ran_ns(process: u32, thread: u32) -> u64 {
    let path = format!("/proc/{process}/task/{thread}/schedstat");
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.split_whitespace().next().and_then(|word| word.parse().ok()).unwrap_or(0)
}

/// Whether a thread blocks the signal of its clock, and not because it is in a burst.
fn blocks_by_itself(target: &Target, one: &Thread, thread: u32) -> bool {
    let words = || [layout::STATE, layout::KEPT].map(|word| target.word(one.slot, word));
    let before = words();
    [ARMED, DONE].contains(&before[0]) && stack::blocks_signal(thread) && words() == before
}

fn own_thread() -> u32 {
    // SAFETY: takes nothing.
    unsafe { libc::gettid() }.unsigned_abs()
}
