//! Records samples of a program and its children.
//!
//! Each thread has its own events. The kernel's record of a new thread opens its events, and
//! /proc is searched for those whose record came too late. An event is not inherited: inherited
//! events would all have the interval of the first one.

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use elfen_core_model::sample::InstructionSample;
use elfen_instrument::process::threads_of;
use elfen_machine::samplers;
use elfen_machine::source::{Source as MachineSource, SourceError};
use nix::poll::{PollFd, PollFlags, poll};
use rand::SeedableRng;
use rand_xoshiro::Xoshiro256PlusPlus;

use super::event::{EventPlan, ThreadEvent, plans};
use super::records::{PerfRecord, parse};
use super::spaces::{Found, Spaces};
use super::spe;
use crate::profile::{Place, SampledEvent, SampledPlace, Source};
use crate::program::{self, ticks};
use crate::recording::{ProgramRecording, Recorded, RecordingError, Subject};

/// How long a wait for samples takes at most: new threads and the program's end are looked for.
const POLL_MS: u8 = 10;
/// How often /proc is searched for threads and processes.
const LOOK: Duration = Duration::from_millis(50);
/// Less than one in this number of samples is not worth a remark.
const FEW: u64 = 50;

#[derive(Debug, thiserror::Error)]
pub enum PreciseError {
    #[error(transparent)]
    Recording(#[from] RecordingError),
    #[error("this machine has no precise hardware samples: {0}")]
    NoSource(&'static str),
    #[error("{0}")]
    Machine(SourceError),
    #[error("perf_event_open(2) is forbidden")]
    Forbidden,
    #[error("the kernel refuses the event {device}: {error}")]
    Refused { device: String, error: io::Error },
    #[error("its threads cannot be watched: {0}")]
    Closed(io::Error),
}

/// The events that this machine can sample, and the kernel allows.
#[derive(Debug)]
pub struct Sampling {
    plans: Vec<EventPlan>,
    /// Events that the kernel does not accept, and why.
    refused: Vec<String>,
}

impl Sampling {
    /// Finds the events of a machine, with one sample in `every` instructions or operations.
    pub fn of(machine: &MachineSource, every: u64) -> Result<Self, PreciseError> {
        let found = samplers::read(machine).map_err(PreciseError::Machine)?;
        let plans = plans(&found, every);
        if plans.is_empty() {
            let why = samplers::why_none(machine).map_err(PreciseError::Machine)?;
            return Err(PreciseError::NoSource(why));
        }
        let (plans, refused) = choose(plans)?;
        Ok(Self { plans, refused })
    }

    /// What is sampled, in words.
    pub fn how(&self) -> String {
        let one = |plan: &EventPlan| {
            let SampledEvent { device, source, unit, interval, .. } = &plan.described;
            format!("{source} ({device}), one in {interval} {}", unit.name())
        };
        let all: Vec<String> = self.plans.iter().map(one).collect();
        format!("{}, at random intervals", all.join("; "))
    }

    /// Starts the program, or takes the process, and records until it ends or the time is over.
    pub fn record(
        self,
        subject: &Subject,
        running: impl Fn(i32),
    ) -> Result<Recorded, PreciseError> {
        let recording = ProgramRecording::begin(subject, Source::Samples, &running)?;
        let mut recorder = Recorder::new(recording, self.plans);
        recorder.recording.profile.left = self.refused;
        let outcome = recorder.run();
        recorder.finish();
        outcome?;
        Ok(recorder.recording.end()?)
    }
}

/// Keeps the events that the kernel accepts, and says why it does not accept the others.
fn choose(plans: Vec<EventPlan>) -> Result<(Vec<EventPlan>, Vec<String>), PreciseError> {
    let (mut accepted, mut refused) = (Vec::new(), Vec::new());
    for mut plan in plans {
        match plan.choose() {
            Ok(()) => accepted.push(plan),
            Err(error) => refused.push((plan.described, error)),
        }
    }
    if accepted.is_empty()
        && let Some((event, error)) = refused.pop()
    {
        return Err(match error.kind() {
            io::ErrorKind::PermissionDenied => PreciseError::Forbidden,
            _ => PreciseError::Refused { device: event.device, error },
        });
    }
    let note = |(event, error): &(SampledEvent, io::Error)| {
        format!("{} of {}: {error}", event.unit.name(), event.device)
    };
    Ok((accepted, refused.iter().map(note).collect()))
}

/// Events of one thread, in the order of the plans; `None` for one that was refused.
#[derive(Debug)]
struct Thread {
    process: u32,
    events: Vec<Option<ThreadEvent>>,
}

/// What was not attributed to an instruction.
#[derive(Default, Debug)]
struct Losses {
    /// Samples in the kernel, in code of no file, and without a known instruction.
    kernel: u64,
    no_file: u64,
    unknown: u64,
    throttled: u64,
    /// Threads that ended before their events were open, and threads that lack an event.
    short_threads: usize,
    unwatched: HashSet<u32>,
}

struct Recorder<'a> {
    recording: ProgramRecording<'a>,
    plans: Vec<EventPlan>,
    threads: BTreeMap<u32, Thread>,
    spaces: Spaces,
    /// Processes that were watched.
    processes: HashSet<u32>,
    /// New threads, with their processes.
    created: Vec<(u32, u32)>,
    /// Samples whose address is in no known mapping, with their event and process. The record of
    /// the mapping may be in the buffer of another thread.
    unplaced: Vec<(usize, u32, InstructionSample)>,
    losses: Losses,
    /// Why the last event that was not opened was refused.
    refused: Option<io::Error>,
    random: Xoshiro256PlusPlus,
}

impl<'a> Recorder<'a> {
    fn new(mut recording: ProgramRecording<'a>, plans: Vec<EventPlan>) -> Self {
        let sampled_events = plans.iter().map(|plan| plan.described.clone()).collect();
        recording.profile.sampled_events = sampled_events;
        Self {
            recording,
            plans,
            threads: BTreeMap::new(),
            spaces: Spaces::default(),
            processes: HashSet::new(),
            created: Vec::new(),
            unplaced: Vec::new(),
            losses: Losses::default(),
            refused: None,
            random: Xoshiro256PlusPlus::seed_from_u64(ticks()),
        }
    }

    fn run(&mut self) -> Result<(), PreciseError> {
        let mut looked: Option<Instant> = None;
        loop {
            if looked.is_none_or(|looked| looked.elapsed() >= LOOK) {
                self.look();
                if looked.is_none()
                    && !self.recording.has_child()
                    && self.threads.is_empty()
                    && let Some(error) = self.refused.take()
                {
                    return Err(PreciseError::Closed(error));
                }
                looked = Some(Instant::now());
            }
            let ended_threads = self.wait();
            self.read_all();
            for thread in ended_threads {
                self.close(thread);
            }
            let is_over = self.threads.is_empty() && self.recording.named_process_has_ended();
            if !self.recording.goes_on()? || is_over {
                return Ok(());
            }
        }
    }

    /// Waits until there is something to read. Returns threads that have ended.
    fn wait(&self) -> Vec<u32> {
        let events = self.threads.iter().flat_map(|(&thread, one)| {
            one.events.iter().flatten().map(move |event| (thread, event))
        });
        let (threads, mut waits): (Vec<u32>, Vec<PollFd<'_>>) = events
            .map(|(thread, event)| (thread, PollFd::new(event.as_fd(), PollFlags::POLLIN)))
            .unzip();
        // An interrupted wait is as good as one that is over.
        let _interrupted = poll(&mut waits, POLL_MS);
        let has_ended = |wait: &PollFd<'_>| {
            wait.revents().is_some_and(|found| found.contains(PollFlags::POLLHUP))
        };
        let ended = threads.into_iter().zip(&waits).filter(|(_, wait)| has_ended(wait));
        ended.map(|(thread, _)| thread).collect()
    }

    /// Looks for threads of the program that have no events.
    fn look(&mut self) {
        for process in program::family(self.recording.root) {
            for thread in threads_of(process) {
                self.watch(process, thread);
            }
        }
    }

    /// Opens the events of a thread. Returns whether it has any now; a thread that has ended has
    /// none.
    fn watch(&mut self, process: u32, thread: u32) -> bool {
        if self.threads.contains_key(&thread) {
            return true;
        }
        let mut events = Vec::new();
        for plan in &self.plans {
            let interval = plan.random_interval(&mut self.random);
            match plan.open(thread, interval) {
                Ok(event) => events.push(Some(event)),
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return false,
                Err(error) => {
                    self.losses.unwatched.insert(thread);
                    self.refused = Some(error);
                    events.push(None);
                }
            }
        }
        if events.iter().all(Option::is_none) {
            return true;
        }
        if self.processes.insert(process) {
            self.recording.profile.programs += 1;
            self.spaces.read(process, &mut self.recording.profile);
        }
        self.threads.insert(thread, Thread { process, events });
        true
    }

    /// Reads all buffers, and begins new intervals.
    fn read_all(&mut self) {
        let known: Vec<u32> = self.threads.keys().copied().collect();
        for &thread in &known {
            self.read_thread(thread);
        }
        for (event, process, sample) in std::mem::take(&mut self.unplaced) {
            match self.spaces.find(process, sample.pc) {
                Found::Place(place) => self.add(event, place, &sample),
                Found::NoFile => self.losses.no_file += 1,
                Found::Unknown => self.losses.unknown += 1,
            }
        }
        for (process, thread) in std::mem::take(&mut self.created) {
            if !self.watch(process, thread) {
                self.losses.short_threads += 1;
            }
        }
    }

    fn read_thread(&mut self, thread: u32) {
        // All events of a thread report the same mappings and threads.
        let mut is_first = true;
        for number in 0..self.plans.len() {
            let Some(event) = self.event(thread, number) else { continue };
            let bytes = event.ring.take();
            let samples = self.read_records(thread, number, &bytes, is_first);
            is_first = false;
            if samples > 0 {
                let interval = self.plans[number].random_interval(&mut self.random);
                if let Some(event) = self.event(thread, number) {
                    // This fails for a thread that has ended.
                    let _gone = event.set_interval(interval);
                }
            }
        }
    }

    fn event(&mut self, thread: u32, number: usize) -> Option<&mut ThreadEvent> {
        self.threads.get_mut(&thread)?.events.get_mut(number)?.as_mut()
    }

    /// Returns how many samples there were.
    fn read_records(&mut self, thread: u32, number: usize, bytes: &[u8], has_changes: bool) -> u64 {
        let (decoding, needs_exact) = (self.plans[number].decoding, self.plans[number].needs_exact);
        let (records, rest) = parse(bytes, decoding.sample_type());
        // The kernel writes whole records.
        let (mut samples, mut lost) = (0, u64::from(rest > 0));
        for record in records {
            match record {
                PerfRecord::Sample(sample) => {
                    samples += 1;
                    let is_exact = sample.is_exact || !needs_exact;
                    if !sample.is_user {
                        self.losses.kernel += 1;
                    } else if let Some(found) = decoding.decode(&sample).filter(|_| is_exact) {
                        self.place(number, sample.process, found);
                    } else {
                        self.losses.unknown += 1;
                    }
                }
                PerfRecord::Aux(piece) => {
                    let Some(event) = self.event(thread, number) else { continue };
                    let bytes = event.ring.take_aux(piece.from, piece.bytes);
                    let process = self.threads.get(&thread).map_or(0, |one| one.process);
                    let decoded = spe::decode_piece(&bytes, &piece, thread);
                    samples += decoded.samples.len() as u64;
                    lost += decoded.damaged;
                    for sample in decoded.samples {
                        self.place(number, process, sample);
                    }
                }
                PerfRecord::Lost(count) => lost += count,
                PerfRecord::Throttled => self.losses.throttled += 1,
                _ if !has_changes => {}
                PerfRecord::Mapped { process, range, offset, path } => {
                    self.spaces.map(process, range, offset, &path, &mut self.recording.profile);
                }
                PerfRecord::Forked { process, parent, thread } => {
                    self.spaces.fork(process, parent);
                    self.created.push((process, thread));
                }
                PerfRecord::Executed { process } => {
                    self.spaces.clear(process);
                    self.recording.profile.programs += 1;
                }
            }
        }
        let described = &mut self.recording.profile.sampled_events[number];
        described.samples += samples;
        described.lost = described.lost.saturating_add(lost);
        samples
    }

    /// Adds a sample to its place, or keeps it until all buffers were read.
    fn place(&mut self, number: usize, process: u32, sample: InstructionSample) {
        match self.spaces.find(process, sample.pc) {
            Found::Place(place) => self.add(number, place, &sample),
            Found::NoFile => self.losses.no_file += 1,
            Found::Unknown => self.unplaced.push((number, process, sample)),
        }
    }

    fn add(&mut self, number: usize, place: Place, sample: &InstructionSample) {
        let event = u32::try_from(number).unwrap_or(u32::MAX);
        let samples = &mut self.recording.profile.samples;
        samples.entry(SampledPlace { place, event }).or_default().add(sample);
    }

    /// Ends the events of a thread.
    fn close(&mut self, thread: u32) {
        // Disabled events have written their last records, and have updated their counts.
        for number in 0..self.plans.len() {
            if let Some(event) = self.event(thread, number) {
                let _gone = event.counter.disable();
            }
        }
        self.read_thread(thread);
        let Some(Thread { events, .. }) = self.threads.remove(&thread) else { return };
        let mut ran_ns = 0;
        for (number, mut event) in events.into_iter().enumerate() {
            let Some(event) = &mut event else { continue };
            let Ok(data) = event.counter.read_full() else { continue };
            let enabled = data.time_enabled().unwrap_or_default().as_nanos();
            let running = data.time_running().unwrap_or_default().as_nanos();
            ran_ns = ran_ns.max(u64::try_from(enabled).unwrap_or(u64::MAX));
            // Events that share a counter run in turn.
            let whole = u128::from(data.count()).saturating_mul(enabled) / running.max(1);
            let described = &mut self.recording.profile.sampled_events[number];
            let whole = u64::try_from(whole).unwrap_or(u64::MAX);
            described.counted = described.counted.saturating_add(whole);
        }
        self.recording.profile.ran_ns = self.recording.profile.ran_ns.saturating_add(ran_ns);
    }

    /// Ends all events, and notes what was not attributed.
    fn finish(&mut self) {
        self.read_all();
        let all: Vec<u32> = self.threads.keys().copied().collect();
        for thread in all {
            self.close(thread);
        }
        // What is new now is not watched any more.
        self.created.clear();
        self.read_all();
        let losses = std::mem::take(&mut self.losses);
        let all: u64 = self.recording.profile.sampled_events.iter().map(|one| one.samples).sum();
        self.recording.profile.left.extend(losses.notes(all, self.refused.take()));
    }
}

impl Losses {
    fn notes(&self, all: u64, refused: Option<io::Error>) -> Vec<String> {
        let mut notes = Vec::new();
        for (count, what) in [
            (self.kernel, "in the kernel"),
            (self.no_file, "in code of no file, which the program generated"),
            (self.unknown, "whose instruction is not known"),
        ] {
            if count.saturating_mul(FEW) > all {
                notes.push(format!("{count} of {all} samples: {what}"));
            }
        }
        if self.throttled > 0 {
            let why = "the kernel paused the sampling: its interrupts took too long";
            notes.push(format!("{} times: {why}", self.throttled));
        }
        let threads =
            |count: usize| if count == 1 { "1 thread".into() } else { format!("{count} threads") };
        if self.short_threads > 0 {
            let why = "too short to be watched";
            notes.push(format!("{}: {why}", threads(self.short_threads)));
        }
        if let Some(error) = refused
            && !self.unwatched.is_empty()
        {
            notes.push(format!("{}: {error}", threads(self.unwatched.len())));
        }
        notes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::precise::event::tests::clock;
    use crate::profile::Profile;

    fn recorded(program: &[&str], process: Option<u32>) -> Recorded {
        let subject = Subject {
            program: program.iter().map(Into::into).collect(),
            process,
            duration: Some(Duration::from_secs(60)),
        };
        let (plans, refused) = choose(vec![clock(200_000)]).unwrap();
        Sampling { plans, refused }.record(&subject, |_| {}).unwrap()
    }

    fn samples_in(profile: &Profile, name: &str) -> u64 {
        let is_it = |at: &&SampledPlace| {
            let file = profile.files.get(usize::try_from(at.place.file).unwrap()).unwrap();
            file.path.rsplit('/').next() == Some(name)
        };
        profile.samples.keys().filter(is_it).map(|at| profile.samples[at].samples).sum()
    }

    const LOOP: &str = "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done";

    /// Goal: samples of a program and its children are attributed to their files, and the mean
    /// interval is that of the event's own count. Method: the kernel's clock as the event, and
    /// shells that count: one under a name of its own, started by another.
    #[test]
    #[ignore = "needs root, or kernel.perf_event_paranoid of at most 2"]
    fn a_program_and_its_children_are_sampled() {
        let folder = tempfile::tempdir().unwrap();
        let inner = folder.path().join("inner");
        std::fs::copy(std::fs::canonicalize("/bin/sh").unwrap(), &inner).unwrap();
        let outer = folder.path().join("outer");
        std::fs::copy(&inner, &outer).unwrap();
        let script = format!("{} -c '{LOOP}' & {LOOP}; wait", inner.display());
        let words = [outer.to_str().unwrap(), "-c", &script];
        let recorded = recorded(&words, None);
        assert!(recorded.ended.unwrap().success());
        let profile = &recorded.profile;
        let [event] = &profile.sampled_events[..] else { panic!("{profile:?}") };
        let (own, child) = (samples_in(profile, "outer"), samples_in(profile, "inner"));
        assert!(own > 20 && child > 20, "{own} {child} of {event:?}: {:?}", profile.left);
        let placed: u64 = profile.samples.values().map(|one| one.samples).sum();
        assert!(placed * 10 >= event.samples * 9, "{placed} of {event:?}: {:?}", profile.left);
        // The clock counts nanoseconds, as the CPU time is counted.
        assert!(event.counted * 10 > profile.ran_ns * 9, "{event:?} in {} ns", profile.ran_ns);
        assert!(event.counted * 9 < profile.ran_ns * 10, "{event:?} in {} ns", profile.ran_ns);
        assert!(event.mean_interval() > 90_000.0, "{event:?}");
        assert!(profile.programs >= 2, "{profile:?}");
    }

    /// Goal: a process that runs already is sampled with the files that it had mapped, and the
    /// recording ends with it.
    #[test]
    #[ignore = "needs root, or kernel.perf_event_paranoid of at most 2"]
    fn a_running_process_is_sampled() {
        let script = format!("{LOOP}; {LOOP}; {LOOP}");
        let mut child = std::process::Command::new("sh").args(["-c", &script]).spawn().unwrap();
        let recorded = recorded(&[], Some(child.id()));
        let ended = child.wait().unwrap();
        assert!(ended.success());
        let profile = &recorded.profile;
        assert!(!profile.samples.is_empty(), "{profile:?}");
        assert_eq!((recorded.ended, profile.programs), (None, 1));
    }

    #[test]
    fn a_machine_without_devices_is_refused() {
        let vm = MachineSource::parse_recording("/proc/cpuinfo: flags: hypervisor\n").unwrap();
        let error = Sampling::of(&vm, 1000).unwrap_err();
        assert!(matches!(error, PreciseError::NoSource(_)), "{error}");
        assert!(error.to_string().starts_with("this machine has no precise hardware samples: "));
    }

    /// Goal: an event that the kernel does not know is refused with the kernel's reason. Method:
    /// a device with a number that no device has.
    #[test]
    fn events_that_the_kernel_refuses_are_named() {
        let mut wrong = clock(1000);
        wrong.number = u32::MAX;
        let error = choose(vec![wrong.clone()]).unwrap_err();
        assert!(error.to_string().starts_with("the kernel refuses the event clock: "), "{error}");
        if let Ok((accepted, refused)) = choose(vec![wrong, clock(200_000)]) {
            assert_eq!((accepted.len(), refused.len()), (1, 1));
            assert!(refused[0].starts_with("instructions of clock: "), "{refused:?}");
        }
    }
}
