//! `elfen shim`: starts a program or finds one, observes it, and says what was seen.

use std::ffi::OsString;
use std::io::Write;
use std::process::{Child, ExitCode};
use std::sync::Arc;
use std::time::Duration;

use elfen_console::failure::{Failure, Status};
use elfen_console::output;
use elfen_host::affinity;
use elfen_rt::signal::page::Page;
use elfen_rt::signal::task::TaskMap;
use elfen_rt::signal::thread::ThreadSlot;
use std::sync::atomic::Ordering::Relaxed;

use super::args::{Args, Keep, Pace};
use super::finish;
use super::gather::{Context, Gathered, gather, share};
use super::lanes::{Chosen, choose};
use super::process::{check_process, new_page, page_of, task_map};
use super::wait::{End, outlast, take_signals, wait};
use crate::clock::Clock;
use crate::program::{self, Held, Start, StartError};
use crate::record::{Costing, Ended, Orders, Until};
use crate::recording::{Recording, Source, again};
use crate::round_trip;
use crate::session::{How, Observer, Seen};
use crate::summary::Summary;
use crate::symbols::{Layout, Symbols};

/// Round trips of up to this are near; further ones stretch the period.
const NEAR_TICKS: u64 = 300;
/// The period of auto, and the least time between two system calls that read.
const AUTO_NS: u64 = 1_000;
const FETCH_NS: u64 = 100_000;
const STRETCH_NS: u64 = 10_000_000;

pub(super) fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    elfen_console::usage::check_program("shim", &args.program)?;
    if let Some(process) = args.process {
        check_process(process)?;
    }
    let beside = match args.process {
        Some(process) => affinity::of(process),
        None => affinity::allowed(),
    };
    let beside = beside
        .map_err(|error| Failure::new(Status::Failed, "reading the lanes", error, "try again"))?;
    let chosen = choose(args.on.as_ref(), args.from, args.sibling, &beside)?;
    let clock = Clock::of_this_machine().map_err(|error| {
        let fix = "use a machine whose kernel keeps time by the time stamp counter";
        Failure::new(Status::Unsupported, "the clock of samples", error, fix)
    })?;
    let signals = take_signals()
        .map_err(|error| Failure::new(Status::Failed, "waiting for signals", error, "try again"))?;
    let pin = |error| {
        Failure::new(
            Status::Failed,
            "moving to the observer's lane",
            error,
            "name another with --from",
        )
    };
    affinity::pin(chosen.from).map_err(pin)?;
    let round_trip = chosen.on.iter().next().and_then(round_trip::ticks);
    let map = task_map();
    let mut run = Run { args, chosen, clock, round_trip, map, layout: Layout::default() };
    let (started, functions) = run.start(signals)?;
    run.observe(started, functions, out)
}

/// A program that was started, and what is known of it.
struct Started {
    /// It waits to be let go, until somebody looks.
    held: Option<Held>,
    child: Option<Child>,
    process: u32,
    page: Option<&'static Page<ThreadSlot>>,
    globals: Vec<(String, crate::reach::Place)>,
    shared_pages: u64,
    name: String,
}

struct Run<'a> {
    args: &'a Args,
    chosen: Chosen,
    clock: Clock,
    round_trip: Option<u64>,
    map: Result<&'static TaskMap, String>,
    layout: Layout,
}

impl Run<'_> {
    /// Starts the program, or looks at the one that runs.
    fn start(
        &mut self,
        signals: nix::sys::signal::SigSet,
    ) -> Result<(Started, Option<Source>), Failure> {
        let args = self.args;
        if args.program.is_empty() {
            let process = args.process.unwrap_or(0);
            if process != 0 {
                self.layout.look(process);
            }
            let page = page_of(process);
            let name = match args.process {
                Some(process) => program::name_of(process).unwrap_or_default(),
                None => "who runs".to_owned(),
            };
            let (held, child, globals, shared_pages) = (None, None, Vec::new(), 0);
            let started = Started { held, child, process, page, globals, shared_pages, name };
            return Ok((started, None));
        }
        let page = new_page()?;
        let file = crate::reach::program_file(&args.program[0]);
        let symbols = file.as_deref().and_then(|file| Symbols::read(file, file));
        let (globals, shared) = match &file {
            Some(file) => share(&args.watch, &args.rate, file)?,
            None => (Vec::new(), None),
        };
        let says = symbols.filter(|symbols| symbols.says_functions);
        let functions = says.map(|_| Source::EntriesAndReturns);
        let shares = shared.as_ref().filter(|shared| !shared.is_empty());
        let preload = (functions.is_some() || shares.is_some())
            .then(|| shares.map_or_else(|| "-".to_owned(), crate::reach::SharedGlobals::order));
        let order = Start {
            words: &args.program,
            on: &self.chosen.on,
            segment: page.memory().segment_id().unwrap_or(-1),
            preload,
            output_to_stderr: args.json,
            signals,
        };
        let held = program::start(&order).map_err(|error| not_started(&args.program[0], &error))?;
        let (process, name) = (held.process, args.program[0].to_string_lossy().into_owned());
        let shared_pages = shares.map_or(0, crate::reach::SharedGlobals::pages);
        let (held, child, page) = (Some(held), None, Some(page));
        let started = Started { held, child, process, page, globals, shared_pages, name };
        Ok((started, functions))
    }

    fn observe(
        mut self,
        mut started: Started,
        functions: Option<Source>,
        out: &mut dyn Write,
    ) -> Result<ExitCode, Failure> {
        let map = self.map.clone();
        let no_map = map.as_ref().err().cloned();
        let context = Context {
            process: started.process,
            page: started.page,
            map,
            chosen: &self.chosen,
            globals: &started.globals,
            layout: &self.layout,
            functions,
            clock: self.clock,
        };
        let gathered = gather(&self.args.watch, &self.args.rate, &context);
        let gathered = gathered.and_then(|gathered| match gathered.words.is_empty() {
            false => Ok(gathered),
            true => {
                let why = no_map.clone().unwrap_or_else(|| "nothing can be read of it".to_owned());
                let fix = "name something with --watch; `elfen shim signals` lists what there is";
                Err(Failure::new(Status::Failed, "elfen shim", why, fix))
            }
        });
        let outcome = gathered.and_then(|gathered| self.look(&mut started, gathered));
        let (known, seen, end) = match outcome {
            Ok(outcome) => outcome,
            Err(failure) => {
                // What waits to be let go ends with its pipe; what runs is not left for nothing.
                if let Some(child) = &mut started.child {
                    let _gone = child.kill();
                    let _reaped = child.wait();
                }
                return Err(failure);
            }
        };
        let wrong = |error| Failure::new(Status::Failed, "the recording", error, "report this");
        let mut recording = finish::recording(known, &seen).map_err(wrong)?;
        if let (Some(last), Some((first, end))) = (self.args.last, recording.span()) {
            let whole = self.clock.ns(end - first);
            let kept = u64::try_from(last.as_nanos()).unwrap_or(u64::MAX);
            recording.between(whole.saturating_sub(kept), whole);
        }
        let written = self.args.output.as_deref().map(|path| match self.args.last {
            Some(_) => finish::write(path, &recording.head, &again(&recording)),
            None => finish::write(path, &recording.head, &seen.pool),
        });
        self.print(&recording, no_map.as_deref(), functions, out)?;
        out.flush().map_err(Failure::output)?;
        written.transpose()?;
        let status = match (end, &mut started.child) {
            (End::Program(status), _) => status,
            (End::Signal(signal), _) => 128 + signal,
            (_, Some(child)) => outlast(child),
            _ => 0,
        };
        let cut =
            matches!(seen.ended, Ended::Moved | Ended::Full) || crate::reach::CutFile::was_seen();
        let status = if cut && status == 0 { 1 } else { status };
        Ok(ExitCode::from(u8::try_from(status).unwrap_or(1)))
    }

    /// The run itself.
    fn look(
        &mut self,
        started: &mut Started,
        gathered: Gathered,
    ) -> Result<(finish::Known, Seen, End), Failure> {
        let Gathered { words, reader } = gathered;
        let (period_ticks, fetch_ticks) = self.period();
        let until = self.args.until.as_deref().map(|text| until(text, &words)).transpose()?;
        let (costing, cost_unknown) = self.costing(started);
        let how = How {
            from: self.chosen.from,
            clock: self.clock,
            period_ticks,
            fetch_ticks,
            for_ticks: self.args.duration.map(|time| self.clock.ticks(nanos(time))),
            memory: self.args.memory,
            keeps_last: self.args.last.is_some(),
            keeps_samples: self.args.keep == Keep::Samples,
            until,
            costing,
        };
        let signals = words.signals.clone();
        if self.args.keep == Keep::Samples {
            warn_of_samples(self.args.memory, period_ticks, signals.len(), self.clock);
        }
        let orders = Arc::new(Orders::default());
        let (rate, steal) = (crate::clock::Rate::begin(), program::steal_ns(&self.chosen.on));
        let failed = |error| Failure::new(Status::Failed, "the observer", error, "try again");
        let observer = Observer::start(words, how, reader, orders.clone()).map_err(failed)?;
        if let Some(held) = started.held.take() {
            match held.go() {
                Ok(child) => started.child = Some(child),
                Err(error) => {
                    orders.stop.store(true, Relaxed);
                    observer.join();
                    let program = self.args.program.first().cloned().unwrap_or_default();
                    return Err(not_started(&program, &error));
                }
            }
        }
        let process = (started.process != 0).then_some(started.process);
        let end = wait(&mut started.child, process, &observer, &orders, &mut self.layout);
        let seen = observer.join();
        self.clock.ticks_per_second = rate.ticks_per_second();
        let refused = started.page.and_then(|page| page.slot(0)).map(|slot| &slot.refused);
        let known = finish::Known {
            program: started.name.clone(),
            process: started.process,
            on: self.chosen.on.to_string(),
            from: self.chosen.from,
            clock: self.clock,
            asked_period_ns: self.clock.ns(period_ticks),
            line_round_trip_ns: self.round_trip.map(|ticks| self.clock.ns(ticks)),
            steal_ns: program::steal_ns(&self.chosen.on).saturating_sub(steal),
            refused_threads: refused.map_or(0, |refused| refused.load(Relaxed)),
            exit_status: match end {
                End::Program(status) => Some(status),
                End::Gone | End::Signal(_) | End::Observer => None,
            },
            not_shared: started.shared_pages.saturating_sub(self.layout.shared_pages),
            layout: std::mem::take(&mut self.layout),
            signals,
            cost_unknown,
        };
        Ok((known, seen, end))
    }

    /// Ticks between samples and between readings.
    fn period(&self) -> (u64, u64) {
        let near = self.clock.ticks(AUTO_NS);
        let period = match self.args.period {
            Pace::Max => 0,
            Pace::Every(every) => self.clock.ticks(nanos(every)).max(1),
            // A distance that nobody could measure is taken for a far one.
            Pace::Auto => match self.round_trip.unwrap_or(NEAR_TICKS * 5) {
                round_trip if round_trip > NEAR_TICKS => near * round_trip / NEAR_TICKS,
                _ => near,
            },
        };
        (period, self.clock.ticks(FETCH_NS).max(period))
    }

    fn costing(&self, started: &Started) -> (Option<Costing>, String) {
        if !self.args.measure_cost {
            return (None, String::new());
        }
        let named = self.args.progress.as_ref().map(ToString::to_string);
        let of_global = started.globals.iter().find(|(name, _)| Some(name) == named.as_ref());
        let progress = match (&named, of_global) {
            (_, Some((_, place))) => Some(place.word),
            (None, None) => started
                .page
                .and_then(|page| page.slot(0))
                .map(|slot| crate::record::ThreadWord::Calls.of(slot)),
            (Some(_), None) => None,
        };
        match progress {
            Some(progress) => {
                (Some(Costing::new(progress, self.clock.ticks(STRETCH_NS))), String::new())
            }
            None => (
                None,
                "what counts as progress has to be watched as well, and be a global".to_owned(),
            ),
        }
    }

    fn print(
        &self,
        recording: &Recording,
        no_map: Option<&str>,
        functions: Option<Source>,
        out: &mut dyn Write,
    ) -> Result<(), Failure> {
        let summary = Summary::of(recording);
        let more = self.more(&summary, no_map, functions);
        output::print(out, self.args.json, &summary, || crate::text::text(&summary, &more))
    }

    /// What else would be possible with this program, for a user who did not ask for anything.
    fn more(
        &self,
        summary: &Summary,
        no_map: Option<&str>,
        functions: Option<Source>,
    ) -> Vec<String> {
        let mut more = Vec::new();
        if !self.args.watch.is_empty() {
            return more;
        }
        if let Some(why) = no_map {
            more.push(format!(
                "who runs, at every sample instead of each 100 us, and so when it waits for a CPU: \
                 as root, or after root ran `elfen signals up` (now: {why})"
            ));
        }
        if functions.is_none() && !self.args.program.is_empty() {
            more.push(
                "its functions: build it with -finstrument-functions, which gcc and clang have"
                    .to_owned(),
            );
        }
        if summary.tags.iter().all(|tag| tag.signal != "tag") && summary.program != "who runs" {
            more.push(
                "what it does in your own words: elfen_tag(\"parse\") of elfen_tag.h in C, \
                 elfen_rt::tag!(\"parse\") in Rust"
                    .to_owned(),
            );
        }
        if let Some(program) = self.args.program.first() {
            let program = elfen_console::shell::word(&program.to_string_lossy());
            more.push(format!(
                "its globals, without building it anew: `elfen shim signals {program}` lists them, \
                 --watch NAME looks at one"
            ));
        }
        more
    }
}

/// What a sample takes in a recording, of each signal: distance, count and index.
const BYTES_A_SAMPLE: u64 = 3;

fn warn_of_samples(memory: usize, period_ticks: u64, signals: usize, clock: Clock) {
    let samples = memory as u64 / (BYTES_A_SAMPLE * signals.max(1) as u64);
    // As fast as it goes is some 40 ns.
    let period_ns = clock.ns(period_ticks).max(40);
    let lasts = elfen_console::duration::show(samples.saturating_mul(period_ns));
    output::warn(&format!("--keep samples: --memory is full after some {lasts}"));
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn not_started(program: &OsString, error: &StartError) -> Failure {
    let what = format!("program {:?}", program.to_string_lossy());
    let fix = match error {
        StartError::NotFound | StartError::NoProgram => "name one that PATH has, or its file",
        StartError::Library(_) => "build all of Elfen, or name the folder in ELFEN_LIB",
        StartError::NotExecutable(_) | StartError::Io(_) => "check its file",
    };
    Failure::new(Status::Failed, what, error, fix)
}

fn until(text: &str, words: &crate::session::Words) -> Result<Until, Failure> {
    let wrong = |why: String| {
        Failure::new(
            Status::Usage,
            format!("--until {text:?}"),
            why,
            "write it as 'queue_len > 20'",
        )
    };
    let (name, above) = text.split_once('>').ok_or_else(|| wrong("it has no >".to_owned()))?;
    let above = above.trim().parse().map_err(|_| wrong("behind > is no number".to_owned()))?;
    let name = name.trim();
    let ends = |signal: &str| signal == name || signal.ends_with(&format!(".{name}"));
    let feed = words.signals.iter().position(|signal| ends(&signal.name));
    let feed = feed.ok_or_else(|| wrong(format!("{name:?} is not watched")))?;
    Ok(Until { feed, above })
}
