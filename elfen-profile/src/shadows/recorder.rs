//! Makes shadows of a program and its children at random times, and adds up what they have shown.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::thread::sleep;
use std::time::{Duration, Instant};

use elfen_instrument::process::{
    ProgramId, Stat, is_filtered, stat, status_field, thread_stat, threads_of,
};
use elfen_instrument::remote::{
    Mapping, Paused, TouchError, Tracee, mappings, release_late_threads,
};
use elfen_machine::affinity;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use super::calls::{Ids, World};
use super::copier::{Copier, Refusal, is_traced_here};
use super::files::Files;
use super::lent::Lent;
use super::limits::lacks_room;
use super::shadow::{Ended, Length, Shadow};
use crate::control::{Control, Recording};
use crate::engine::space::{Notes, Space};
use crate::engine::tally::{Tally, are_known};
use crate::profile::{Source, What};
use crate::program::{self, tick_ns, ticks};
use crate::recording::{Process, ProgramRecording, Recorded, RecordingError, Subject, prepared};

/// How often it is looked whether the program has ended.
const LOOK: Duration = Duration::from_millis(20);
/// When no thread can be stopped in its own code, the next one is tried so much later, about.
const AGAIN: Duration = Duration::from_millis(2);
/// The shortest mean interval.
const INTERVAL_MIN: f64 = 1e6;
/// A shadow of any length is over by then.
const SHADOW_MAX: Duration = Duration::from_secs(10);
/// What the fault of a page costs that is copied because a shadow has it too.
const FAULT_NS: f64 = 2_000.0;
/// What stopping a program for a megabyte of its memory costs, before it was measured.
const STALL_NS_PER_MB: f64 = 35_000.0;
const STALL_NS: f64 = 200_000.0;
/// Weight of the newest shadow in means.
const NEWEST: f64 = 0.2;
const PAGE: u64 = 4096;
/// A program that runs for less than this is not worth a copier.
const TICKS_MIN: u64 = 1;

#[derive(Debug, thiserror::Error)]
pub enum ShadowError {
    #[error(transparent)]
    Recording(#[from] RecordingError),
    #[error("{0}")]
    Refused(String),
}

/// What to record.
#[derive(Clone, Debug)]
pub struct Order {
    /// The part of the program's time that its stops and page faults may cost.
    pub cost: f64,
    /// How many CPUs the shadows may use.
    pub load: f64,
    /// Instructions of one shadow.
    pub sample: u64,
    /// The longest stop of the program.
    pub stall_max: Duration,
    /// The CPU of the shadows. Without it, the lanes that `elfen run` has lent to a batch.
    pub cpu: Option<u32>,
    pub what: What,
    /// Until each path, or block, of more than 1 % is known with this relative error.
    pub until: Option<f64>,
}

/// What became of the shadows.
#[derive(Default, Debug)]
pub struct Shadows {
    /// Why shadows ended, and how many did so.
    pub ends: BTreeMap<String, u64>,
    /// The longest stop of the program.
    pub stall: Duration,
    /// How many shadows ran on lanes of `elfen run`.
    pub on_lent: u64,
    pub warnings: Vec<String>,
}

/// A process that shadows are made of.
#[derive(Debug)]
struct Prepared {
    program: ProgramId,
    copier: Copier,
    /// The code cache, and the words in it for the shadow.
    space: Option<(Space, u32)>,
    tally: Tally,
    /// What an earlier cache has shown is in the profile already.
    has_moved: bool,
    /// Descriptors of regular files that shadows have used.
    used: BTreeSet<i32>,
    /// Code near these addresses has no room in the cache yet.
    rooms: Vec<u64>,
    /// User time and page faults: when the process was found, and at last.
    user: [u64; 2],
    faults: [u64; 2],
    /// Page faults when the last shadow was made.
    faults_then: Option<u64>,
}

/// What came of an attempt to make a shadow.
#[derive(Clone, Copy, Debug)]
enum Sampled {
    Shadow,
    /// A thread was stopped for this time, but was not in its own code.
    Stopped(Duration),
    Nothing,
}

struct Recorder<'a> {
    recording: ProgramRecording<'a>,
    order: Order,
    control: Control,
    processes: HashMap<u32, Process<Prepared>>,
    random: Xoshiro256PlusPlus,
    shadows: Shadows,
    /// Means: how long a shadow stops the program, what its page faults cost, and how long it runs.
    stall_ns: f64,
    faults_ns: f64,
    took_ns: f64,
    /// The least that was measured: other programs only make a stop longer.
    stall_ns_per_mb: f64,
    sums_ns: f64,
    ran_ticks: u64,
    shadow_ticks: u64,
}

/// Starts the program, or takes the process, and records until it ends or the time is over.
pub fn record(
    subject: &Subject,
    order: &Order,
    running: impl Fn(i32),
) -> Result<(Recorded, Shadows), ShadowError> {
    continue_by_shadows(ProgramRecording::begin(subject, Source::Shadows, &running)?, order)
}

/// Records by shadows what has begun in another way. What it has so far does not count.
pub(crate) fn continue_by_shadows(
    mut recording: ProgramRecording<'_>,
    order: &Order,
) -> Result<(Recorded, Shadows), ShadowError> {
    recording.start_again(Source::Shadows);
    let mut recorder = Recorder::new(order, recording);
    let outcome = recorder.run();
    recorder.finish();
    outcome?;
    let shadows_own = recorder.shadows_own();
    let Recorder { mut recording, shadows, sums_ns, ran_ticks, .. } = recorder;
    recording.profile.ran_ns = ran_ticks * tick_ns();
    let cost = Duration::from_secs_f64(sums_ns / 1e9);
    recording.profile.cost_ns = u64::try_from(cost.as_nanos()).unwrap_or(u64::MAX);
    let mut recorded = recording.end()?;
    recorded.own += shadows_own;
    Ok((recorded, shadows))
}

impl<'a> Recorder<'a> {
    fn new(order: &Order, recording: ProgramRecording<'a>) -> Self {
        Self {
            order: order.clone(),
            control: Control::of(recording.root),
            processes: HashMap::from([(recording.root, Process::Waits)]),
            recording,
            random: Xoshiro256PlusPlus::seed_from_u64(ticks()),
            shadows: Shadows::default(),
            stall_ns: STALL_NS,
            faults_ns: 0.0,
            took_ns: 0.0,
            stall_ns_per_mb: STALL_NS_PER_MB,
            sums_ns: 0.0,
            ran_ticks: 0,
            shadow_ticks: 0,
        }
    }

    fn run(&mut self) -> Result<(), ShadowError> {
        let mut next = Instant::now();
        while self.recording.goes_on()? && !self.recording.named_process_has_ended() {
            release_late_threads();
            for settings in self.control.serve(|| self.state()) {
                let Order { cost, load, sample, .. } = &mut self.order;
                *cost = settings.cost.unwrap_or(*cost);
                *load = settings.load.unwrap_or(*load);
                *sample = settings.sample.unwrap_or(*sample);
            }
            let now = Instant::now();
            if now >= next {
                let mean = match self.sample()? {
                    Sampled::Shadow => {
                        let tallies = prepared(&self.processes).map(|prepared| &prepared.tally);
                        self.recording.is_known =
                            self.order.until.is_some_and(|error| are_known(tallies, error));
                        self.interval()
                    }
                    Sampled::Stopped(time) => AGAIN.max(time.div_f64(self.order.cost)),
                    Sampled::Nothing => AGAIN,
                };
                next = now + mean.mul_f64(self.random.random_range(0.5..1.5));
            }
            self.wait(next.saturating_duration_since(Instant::now()).min(LOOK));
        }
        Ok(())
    }

    /// What this recording says of itself.
    fn state(&self) -> Recording {
        let (mut ran, mut shadows) = (self.ran_ticks, self.recording.profile.bursts);
        for prepared in prepared(&self.processes) {
            ran += prepared.user[1].saturating_sub(prepared.user[0]);
            shadows += prepared.tally.bursts;
        }
        Recording {
            bursts: shadows,
            cost_percent: self.sums_ns / ((ran * tick_ns()) as f64).max(1.0) * 100.0,
            ..self.recording.state(self.recording.own() + self.shadows_own(), self.order.cost)
        }
    }

    /// The CPU time of all shadows.
    fn shadows_own(&self) -> Duration {
        Duration::from_nanos(self.shadow_ticks * tick_ns())
    }

    /// Waits for a time, or until the program ends.
    fn wait(&self, time: Duration) {
        // poll(2) takes milliseconds, and would end too early.
        if time >= Duration::from_millis(2) {
            self.recording.wait(time - Duration::from_millis(1));
        } else {
            sleep(time);
        }
    }

    /// The mean time between two shadows.
    fn interval(&self) -> Duration {
        let by_cost = (self.stall_ns + self.faults_ns) / self.order.cost;
        let by_load = self.took_ns / self.order.load;
        Duration::from_secs_f64(by_cost.max(by_load).max(INTERVAL_MIN) / 1e9)
    }

    /// The threads that run now, of all processes of the program.
    fn running_threads(&mut self) -> Vec<(u32, u32)> {
        let mut found = Vec::new();
        let family = program::family(self.recording.root);
        for &process in &family {
            // Copiers are traced by us.
            if is_traced_here(process) {
                continue;
            }
            self.processes.entry(process).or_insert(Process::Waits);
            let runs = |thread: &u32| thread_stat(*thread).is_some_and(|stat| stat.state == 'R');
            let threads = threads_of(process);
            found.extend(threads.into_iter().filter(runs).map(|thread| (process, thread)));
        }
        let gone: Vec<u32> = self.processes.keys().copied().collect();
        for process in gone.into_iter().filter(|process| !family.contains(process)) {
            self.close(process);
        }
        found
    }

    /// Makes a shadow of a thread that runs.
    fn sample(&mut self) -> Result<Sampled, ShadowError> {
        let threads = self.running_threads();
        self.look_at_programs();
        let Some(&(process, thread)) = threads.choose(&mut self.random) else {
            return Ok(Sampled::Nothing);
        };
        if let Some(Process::Waits) = self.processes.get(&process) {
            self.prepare(process)?;
        }
        let Some(Process::Prepared(mut prepared)) = self.processes.remove(&process) else {
            return Ok(Sampled::Nothing);
        };
        let made = self.make(process, thread, &mut prepared);
        match made {
            Ok(made) => {
                self.processes.insert(process, Process::Prepared(prepared));
                Ok(made)
            }
            Err(error) => {
                self.recording.note(process, &error);
                self.end_process(process, *prepared);
                self.processes.insert(process, Process::Refused(ProgramId::of(process)));
                Ok(Sampled::Nothing)
            }
        }
    }

    /// Closes what was prepared for programs that do not run any more.
    fn look_at_programs(&mut self) {
        let known: Vec<u32> = self.processes.keys().copied().collect();
        for process in known {
            let now = ProgramId::of(process);
            let is_other = match self.processes.get(&process) {
                Some(Process::Prepared(prepared)) => now != Some(prepared.program),
                Some(Process::Refused(program)) => now != *program,
                _ => false,
            };
            if is_other {
                self.close(process);
                if now.is_some() {
                    self.processes.insert(process, Process::Waits);
                }
            }
        }
    }

    fn new_tally(&self) -> Tally {
        Tally::of_pieces(self.order.what, self.order.until.is_some())
    }

    fn prepare(&mut self, process: u32) -> Result<(), ShadowError> {
        let (is_root, has_child) = (process == self.recording.root, self.recording.has_child());
        let (is_child, is_named) = (is_root && has_child, is_root && !has_child);
        let Some(program) = ProgramId::of(process) else { return Ok(()) };
        let Some(Stat { user_ticks: user, faults, .. }) = stat(process) else { return Ok(()) };
        if !is_named && user < TICKS_MIN {
            return Ok(());
        }
        // All but a named process have begun while it was watched.
        let (user, faults) = if is_named { (user, faults) } else { (0, 0) };
        let state = match Copier::create(process, is_child) {
            Ok(copier) => Process::Prepared(Box::new(Prepared {
                program,
                copier,
                space: None,
                tally: self.new_tally(),
                has_moved: false,
                used: BTreeSet::new(),
                rooms: Vec::new(),
                user: [user, user],
                faults: [faults, faults],
                faults_then: None,
            })),
            Err(Refusal::Touch(TouchError::Busy)) => return Ok(()),
            Err(error) if is_named => return Err(ShadowError::Refused(error.to_string())),
            Err(error) => {
                self.recording.note(process, &error);
                Process::Refused(Some(program))
            }
        };
        self.processes.insert(process, state);
        Ok(())
    }

    /// Makes one shadow and runs it, if the thread is in its own code.
    fn make(
        &mut self,
        process: u32,
        thread: u32,
        prepared: &mut Prepared,
    ) -> Result<Sampled, Refusal> {
        let Some(memory) = memory_of(process) else { return Ok(Sampled::Nothing) };
        let stall_ns = STALL_NS + memory as f64 / f64::from(1 << 20) * self.stall_ns_per_mb;
        let (stall, most) = (Duration::from_secs_f64(stall_ns / 1e9), self.order.stall_max);
        if stall > most {
            return Err(Refusal::Stall { megabytes: memory >> 20, stall, most });
        }
        if is_filtered(process) {
            return Err(Refusal::Unfit("it filters its system calls since then"));
        }
        if let Some(why) = lacks_room(process, memory) {
            return Err(Refusal::Unfit(why));
        }
        let before = stat(process).map(|stat| stat.faults);
        if let (Some(last), Some(now)) = (prepared.faults_then, before) {
            // Each page can fault once because of a shadow. The program's own faults count too.
            let faults_ns = now.saturating_sub(last).min(memory / PAGE) as f64 * FAULT_NS;
            self.sums_ns += faults_ns;
            self.faults_ns += (faults_ns - self.faults_ns) * NEWEST;
        }
        prepared.faults_then = before;
        let began = Instant::now();
        let stopped = Paused::stop(thread).ok();
        let is_its_own = std::fs::metadata(format!("/proc/{process}/task/{thread}")).is_ok();
        let found = stopped.filter(|_| is_its_own).and_then(|paused| {
            let vectors = paused.tracee().vectors().ok()?;
            Some((paused, vectors))
        });
        let Some((paused, vectors)) = found else {
            let time = began.elapsed();
            self.sums_ns += time.as_nanos() as f64;
            return Ok(Sampled::Stopped(time));
        };
        let files = Files::of(process, &prepared.used);
        let registers = paused.registers;
        let stalled = Cell::new(Duration::ZERO);
        let copy = prepared.copier.copy(&registers, || {
            drop(paused);
            stalled.set(began.elapsed());
        })?;
        let stall_ns = stalled.get().as_nanos() as f64;
        self.shadows.stall = self.shadows.stall.max(stalled.get());
        let per_mb = (stall_ns - STALL_NS).max(0.0) / (memory as f64 / f64::from(1 << 20)).max(1.0);
        self.stall_ns_per_mb = self.stall_ns_per_mb.min(per_mb);
        self.sums_ns += stall_ns;
        self.stall_ns += (stall_ns - self.stall_ns) * NEWEST;
        let outcome = self.run_copy(copy, process, thread, prepared, files, registers, vectors);
        if let Some(stat) = stat(copy.0.unsigned_abs()) {
            self.shadow_ticks += stat.user_ticks + stat.system_ticks;
        }
        take_back(copy.0.unsigned_abs());
        prepared.copier.end(copy);
        let took_ns = began.elapsed().as_nanos() as f64;
        self.took_ns += (took_ns - self.took_ns) * NEWEST;
        let ended = match outcome {
            Err(Refusal::Io(error)) if error.kind() == io::ErrorKind::AlreadyExists => {
                // The program has mapped something where its copies have the cache.
                self.add_space(prepared);
                return Ok(Sampled::Shadow);
            }
            // It was killed between two stops, as for lack of memory.
            Err(Refusal::Io(error)) if error.raw_os_error() == Some(libc::ESRCH) => {
                *self.shadows.ends.entry("it was killed".to_owned()).or_default() += 1;
                return Ok(Sampled::Shadow);
            }
            outcome => outcome?,
        };
        prepared.rooms.extend(ended.needs_room);
        *self.shadows.ends.entry(ended.why).or_default() += 1;
        for (sum, calls) in self.recording.profile.calls.iter_mut().zip(ended.calls) {
            *sum += calls;
        }
        if let Some(stat) = stat(process) {
            (prepared.user[1], prepared.faults[1]) = (stat.user_ticks, stat.faults);
        }
        Ok(Sampled::Shadow)
    }

    #[expect(clippy::too_many_arguments, reason = "all of them are what a copy is made of")]
    fn run_copy(
        &mut self,
        copy: Tracee,
        process: u32,
        thread: u32,
        prepared: &mut Prepared,
        files: Files,
        registers: libc::user_regs_struct,
        vectors: Vec<u8>,
    ) -> Result<Ended, Refusal> {
        let id = copy.0.unsigned_abs();
        take_back(id);
        copy.set_signal_mask(u64::MAX)?;
        copy.set_registers(&registers)?;
        let Prepared { space, tally, used, rooms, .. } = prepared;
        let notes = Notes::events_of(self.order.what);
        let (space, context) = match space {
            Some((space, context)) => {
                space.move_to(copy, id)?;
                for gone in space.objects.gone() {
                    space.retire(&gone);
                    tally.note_change();
                }
                (space, *context)
            }
            None => {
                let mut new = Space::set_up(copy, id, notes)?;
                let context = new
                    .take_context()
                    .ok_or_else(|| io::Error::from(io::ErrorKind::StorageFull))?;
                let (space, context) = space.insert((new, context));
                (space, *context)
            }
        };
        space.stop_at_calls(context);
        for room in rooms.drain(..) {
            space.add_cluster_near(copy, room)?;
        }
        // What is read-only now must not become writable either.
        let shared: Vec<Mapping> = mappings(id)?.into_iter().filter(|one| !one.private).collect();
        let code = space.objects.images().iter().map(|image| image.range.clone()).collect();
        let world = World {
            id,
            ids: ids(process, thread),
            files,
            shared: shared.iter().map(|one| one.range.clone()).collect(),
            code,
        };
        let gs_base = registers.gs_base;
        let mut shadow =
            Shadow { thread: copy, space, tally, world, registers, vectors, gs_base, context };
        shadow.lock(&shared)?;
        yield_to_all(id);
        self.place(id);
        let mut on = shadow.begin();
        let mut until = Instant::now() + SHADOW_MAX;
        if let Some(deadline) = self.recording.deadline {
            until = until.min(deadline);
        }
        let program = self.recording.root_fd();
        let length = Length { instructions: self.order.sample, until, program };
        let ended = shadow.run(length, &mut on);
        used.extend(shadow.world.files.used());
        tally.end_shadow(&space.cache);
        Ok(ended?)
    }

    /// Moves a shadow to its CPUs.
    fn place(&mut self, shadow: u32) {
        let lent = if self.order.cpu.is_none() { Lent::find() } else { None };
        let cpus = match (&lent, self.order.cpu) {
            (Some(lent), _) => Ok(lent.lanes.clone()),
            (None, Some(cpu)) => Ok([cpu].into_iter().collect()),
            (None, None) => affinity::allowed(),
        };
        if let Some(lent) = lent {
            self.shadows.on_lent += 1;
            if let Err(why) = lent.take(shadow)
                && self.recording.is_new(why.clone())
            {
                self.shadows.warnings.push(why);
            }
        }
        // The right result does not need it.
        let _gone = cpus.and_then(|cpus| affinity::set(shadow, &cpus));
    }

    /// Adds what was seen of a process, and forgets it.
    fn close(&mut self, process: u32) {
        if let Some(Process::Prepared(prepared)) = self.processes.remove(&process) {
            self.end_process(process, *prepared);
        }
    }

    /// Adds what the shadows with one cache have shown.
    fn add_space(&mut self, prepared: &mut Prepared) {
        let Some((space, _)) = prepared.space.take() else { return };
        let new = self.new_tally();
        let mut tally = std::mem::replace(&mut prepared.tally, new);
        let profile = &mut self.recording.profile;
        tally.add_to(profile, &space.cache, &space.objects);
        if tally.lost > 0 {
            profile.left.push(format!("{} pieces whose way was not found", tally.lost));
        }
        profile.programs -= u64::from(std::mem::replace(&mut prepared.has_moved, true));
    }

    fn end_process(&mut self, process: u32, mut prepared: Prepared) {
        self.add_space(&mut prepared);
        let Prepared { copier, user, faults, .. } = prepared;
        if let Err(error) = copier.remove() {
            self.recording.note(process, &error);
        }
        let now = stat(process);
        let [user_now, faults_now] = match now {
            Some(Stat { user_ticks, faults, .. }) => [user_ticks, faults],
            None => [user[1], faults[1]],
        };
        self.ran_ticks += user_now.saturating_sub(user[0]);
        self.recording.profile.faults += faults_now.saturating_sub(faults[0]);
    }

    /// Takes everything of ours out of all processes.
    fn finish(&mut self) {
        let known: Vec<u32> = self.processes.keys().copied().collect();
        for process in known {
            self.close(process);
        }
    }
}

/// Moves a shadow off lent lanes. Its beginning and its end are waited for without a limit, and on
/// a lane it may get no time.
fn take_back(process: u32) {
    // This fails only if it was killed.
    let _gone = affinity::allowed().and_then(|cpus| affinity::set(process, &cpus));
}

/// Gives way to everything else, and makes the kernel kill this process first if memory is short.
fn yield_to_all(process: u32) {
    let id = process.cast_signed();
    // None of this is needed for a right result.
    let _forbidden = std::fs::write(format!("/proc/{process}/oom_score_adj"), "1000");
    let idle = libc::sched_param { sched_priority: 0 };
    // SAFETY: `idle` is a local variable.
    unsafe { libc::sched_setscheduler(id, libc::SCHED_IDLE, &idle) };
}

/// The resident memory of a process in bytes.
fn memory_of(process: u32) -> Option<u64> {
    let text = status_field(process, "VmRSS")?;
    let kilobytes: u64 = text.split_whitespace().next()?.parse().ok()?;
    Some(kilobytes << 10)
}

/// The ids of a thread as its process sees them.
fn ids(process: u32, thread: u32) -> Ids {
    let last = |task, name| -> i64 {
        let text = status_field(task, name).unwrap_or_default();
        text.split_whitespace().next_back().and_then(|id| id.parse().ok()).unwrap_or(0)
    };
    Ids {
        process: last(process, "NSpid"),
        thread: last(thread, "NSpid"),
        parent: last(process, "PPid"),
    }
}
