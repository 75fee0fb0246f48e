//! `elfen shim`: starts or finds a program, observes it, and prints the summary.
//!
//! [`run`] prepares everything that can fail without a program. [`Run::observe`] then runs the
//! observers and writes the outcome.

use std::fs::File;
use std::io::{self, Seek, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use elfen_console::failure::{Failure, Status};
use elfen_console::output;
use elfen_console::terminal::{self, Role, Screen};
use elfen_machine::affinity;
use elfen_machine::cpulist::CpuSet;
use elfen_rt::signal::task::TaskMap;
use elfen_rt::signal::thread::ThreadSlot;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::args::{Args, Keep, PeriodChoice, check_args};
use super::count;
use super::gather::{Context, gather_words};
use super::lane_choice::{LaneChoice, choose};
use super::live::LiveView;
use super::outcome::{self, RecordingFile};
use super::suggestions::suggestions;
use super::target::{
    Target, check_process, create_output_file, open_task_map, prepare_target, start_failure,
};
use super::wait::{End, block_signals, blocked_signals, signal_failure, wait, wait_for_exit};

use crate::clock::{Clock, Moment};
use crate::cost::CostMeter;
use crate::fold::Fold;
use crate::live::LiveTotals;
use crate::observers::Observers;
use crate::pacing::{AUTO_NS, Pacing};
use crate::program;
use crate::reach::{PageSupervisor, StopTimes};
use crate::recording::{Head, ObserverHead, Signal, Source};
use crate::round_trip;
use crate::session::{EndReason, ObserverControl, Until};
use crate::session::{ObserverConfig, ObserverResult, Words};
use crate::summary::Summary;
use crate::symbols::{FunctionReporting, Layout};
use crate::tally::Tally;

/// The round trip to assume if it could not be measured: a long one.
const FAR_TICKS: u64 = 1_500;
/// The shortest time between two readings by system calls.
const FETCH_NS: u64 = 100_000;
/// Length of the phases of `--measure-cost`.
const PHASE_NS: u64 = 10_000_000;
/// Memory of the runs that `--keep histogram` adds up at a time: about a million runs.
const FOLD_BYTES: usize = 4 << 20;

pub(super) fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    elfen_console::usage::check_program("shim", &args.program)?;
    if let Some(process) = args.pid {
        check_process(process)?;
    }
    check_args(args)?;
    let allowed = match args.pid {
        Some(process) => affinity::of(process),
        None => affinity::allowed(),
    };
    let allowed = allowed
        .map_err(|error| Failure::new(Status::Failed, "reading the lanes", error, "try again"))?;
    let chosen = choose(args.cpu.as_ref(), args.observer_cpu.as_ref(), args.sibling, &allowed)?;
    let clock = Clock::of_this_machine().map_err(|error| {
        let fix = "use a machine whose kernel keeps time by the time stamp counter";
        Failure::new(Status::Unsupported, "the clock of samples", error, fix)
    })?;
    let signals = blocked_signals().map_err(signal_failure)?;
    let pin = |error| {
        Failure::new(
            Status::Failed,
            "moving to the observer's lane",
            error,
            "name another with --observer-cpu",
        )
    };
    let screen = if args.live && terminal::is_there() {
        let failed =
            |error| Failure::new(Status::Failed, "the terminal", error, "leave out --live");
        match terminal::split().map_err(failed)? {
            Role::Draw(screen) => Some(screen),
            Role::Done(code) => return Ok(code),
            Role::Died(signal) => {
                let why = format!("the process that drew on it was ended by {signal}");
                let fix = "leave out --live, and report this";
                return Err(Failure::new(Status::Failed, "the terminal", why, fix));
            }
        }
    } else {
        None
    };
    // After the split into two processes: the one that only waits has no recording to write.
    let file = args.output.as_deref().map(RecordingFile::open).transpose()?;
    let output = match &screen {
        Some(_) if !args.program.is_empty() => Some(create_output_file()?),
        _ => None,
    };
    // The longest of all observers. The first observer is measured last, because this thread stays
    // on its lane.
    let mut round_trip = Some(0);
    for (from, on) in chosen.parts().iter().rev() {
        affinity::pin(*from).map_err(pin)?;
        let ticks = on.iter().next().and_then(round_trip::measure_ticks);
        round_trip = round_trip.zip(ticks).map(|(one, other)| one.max(other));
    }
    let map = open_task_map();
    let mut layout = Layout::default();
    let target = prepare_target(args, &chosen, &mut layout, output.as_ref(), signals)?;
    let run = Run { args, file, chosen, clock, round_trip, map, layout, screen, output };
    run.observe(target, out)
}

struct Run<'a> {
    args: &'a Args,
    file: Option<RecordingFile<'a>>,
    chosen: LaneChoice,
    clock: Clock,
    round_trip: Option<u64>,
    map: Result<&'static TaskMap, String>,
    layout: Layout,
    screen: Option<Screen>,
    /// The program's output, if this command draws on the terminal.
    output: Option<File>,
}

impl Run<'_> {
    fn observe(mut self, mut target: Target, out: &mut dyn Write) -> Result<ExitCode, Failure> {
        let map = self.map.clone();
        let no_map = map.as_ref().err().cloned();
        let context = Context {
            process: target.process,
            children: self.args.follow,
            page: target.page,
            map,
            chosen: &self.chosen,
            globals: &target.globals,
            layout: &self.layout,
            functions: target.reporting.map(Source::from),
            clock: self.clock,
            round_trip: self.round_trip,
        };
        let gathered = gather_words(&self.args.watch, &self.args.rates(), &context);
        let gathered = gathered.and_then(|gathered| {
            if gathered[0].is_empty() {
                let why = no_map.clone().unwrap_or_else(|| "it has no signal to watch".to_owned());
                let fix = "name a signal with --watch; `elfen shim signals` lists them";
                return Err(Failure::new(Status::Failed, "elfen shim", why, fix));
            }
            Ok(gathered)
        });
        let outcome = gathered.and_then(|gathered| self.run_observers(&mut target, gathered, out));
        let (facts, mut result, end) = match outcome {
            Ok(outcome) => outcome,
            Err(failure) => {
                // A process that was not released ends with its pipe. A released program is killed,
                // because it was started only to be observed.
                if let Some(child) = &mut target.child {
                    let _gone = child.kill();
                    let _reaped = child.wait();
                }
                return Err(failure);
            }
        };
        let wrong = |error| Failure::new(Status::Failed, "the recording", error, "report this");
        let mut recording = outcome::make_recording(facts, &result).map_err(wrong)?;
        if let (Some(last), Some((first, end))) = (self.args.keep_last, recording.span()) {
            let whole = self.clock.ns(end - first);
            let kept = u64::try_from(last.as_nanos()).unwrap_or(u64::MAX);
            recording.cut_to(whole.saturating_sub(kept), whole);
        }
        let written = self.file.take().map(|file| match self.args.keep_last {
            Some(_) => file.write(&recording.head, &recording.to_pool()),
            None => file.write(&recording.head, &result.pool),
        });
        if let Some(mut output) = self.output.take() {
            let copied = output.rewind().and_then(|()| io::copy(&mut output, out));
            copied.map_err(Failure::output)?;
        }
        let mut tally = result.tally.take().unwrap_or_default();
        tally.add(Tally::of(&recording));
        let summary = Summary::from(&recording.head, tally, self.args.keep == Keep::Histogram);
        self.print(&summary, no_map.as_deref(), &target, out)?;
        out.flush().map_err(Failure::output)?;
        written.transpose()?;
        let status = match (end, &mut target.child) {
            (End::Program(status), _) => status,
            (End::Signal(signal), child) => {
                if let Some(child) = child {
                    output::warn(&format!("process {} still runs, unobserved", child.id()));
                }
                128 + signal
            }
            (_, Some(child)) => wait_for_exit(child),
            _ => 0,
        };
        let cut = matches!(result.ended, EndReason::Moved | EndReason::Full | EndReason::Unshared)
            || crate::reach::saw_truncated_file();
        let status = if cut && status == 0 { 1 } else { status };
        Ok(ExitCode::from(u8::try_from(status).unwrap_or(1)))
    }

    /// Runs the observers until the run ends.
    fn run_observers(
        &mut self,
        target: &mut Target,
        gathered: Vec<Words>,
        out: &mut dyn Write,
    ) -> Result<(outcome::RunFacts, ObserverResult, End), Failure> {
        let (period_ticks, _) = self.period();
        self.clock = self.clock.in_units(match self.args.period {
            PeriodChoice::Auto => self.clock.ticks(AUTO_NS),
            PeriodChoice::Max | PeriodChoice::Every(_) => period_ticks,
        });
        let until =
            self.args.until.as_deref().map(|text| parse_until(text, &gathered)).transpose()?;
        let (mut cost_meter, cost_unknown) = self.cost_meter(target);
        let parts = self.chosen.parts();
        let own = (target.process, target.name.clone());
        let of_each = gathered.iter().zip(&parts).enumerate();
        let configs = of_each.map(|(index, (words, (from, _)))| ObserverConfig {
            until: until.filter(|(part, _)| *part == index).map(|(_, until)| until),
            cost_meter: cost_meter.take(),
            fold: (self.args.keep == Keep::Histogram).then(|| {
                let fold = Fold::of(&words.signals, self.clock, own.clone());
                fold.bridging(self.args.bridge.map_or(0, nanos))
            }),
            live: self.args.live.then(|| Arc::new(LiveTotals::of(words.signals.len()))),
            ..self.observer_config(*from, parts.len())
        });
        let configs: Vec<ObserverConfig> = configs.collect();
        let of_all = gathered.iter().flat_map(|words| &words.signals);
        let mut signals: Vec<Signal> = of_all.cloned().collect();
        let counts: Vec<usize> = gathered.iter().map(|words| words.signals.len()).collect();
        let lives: Vec<Arc<LiveTotals>> =
            configs.iter().filter_map(|config| config.live.clone()).collect();
        let mut view = self.args.live.then(|| {
            LiveView::of(lives, signals.clone(), self.clock, own.clone(), self.screen.take())
        });
        if self.args.keep == Keep::Samples {
            warn_of_samples(self.args.memory, period_ticks, signals.len(), self.clock);
        }
        let control = Arc::new(ObserverControl::default());
        let (rate, steal) = (crate::clock::Rate::begin(), program::steal_ns(&self.chosen.on));
        let began = Moment::now();
        let failed = |error| Failure::new(Status::Failed, "the observer", error, "try again");
        block_signals()?;
        let each = gathered.into_iter().zip(configs);
        let observer = Observers::start(each, &control).map_err(failed)?;
        if let Some(pending) = target.pending.take() {
            match pending.release() {
                Ok(child) => target.child = Some(child),
                Err(error) => {
                    control.stop.store(true, Relaxed);
                    observer.join();
                    let program = self.args.program.first().cloned().unwrap_or_default();
                    return Err(start_failure(&program, &error));
                }
            }
        }
        let process = (target.process != 0).then_some(target.process);
        let shown = view.as_mut().map(|view| (view, out));
        let child = &mut target.child;
        let supervisor = target.supervisor.as_ref();
        let end = wait(child, process, &observer, &control, &mut self.layout, supervisor, shown);
        let mut result = observer.join();
        drop(view);
        let end = end?;
        if target.supervisor.as_ref().is_some_and(PageSupervisor::was_killed) {
            result.ended = EndReason::Unshared;
        }
        let stopped =
            target.supervisor.take().map_or(Ok(StopTimes::default()), make_pages_private)?;
        self.clock.ticks_per_second = rate.ticks_per_second();
        let first = target.page.and_then(|page| page.slot(0));
        let of_first =
            |word: fn(&ThreadSlot) -> &AtomicU64| first.map_or(0, |slot| word(slot).load(Relaxed));
        let entries = of_first(|slot| &slot.entries);
        let counting = (of_first(|slot| &slot.counting), of_first(|slot| &slot.uncounted));
        count::warn_uncounted(&self.args.count_at, counting);
        correct_sources(&mut signals, target.reporting, of_first(|slot| &slot.returns));
        let head = Head {
            program: target.name.clone(),
            process: target.process,
            children: self.args.follow,
            on: self.chosen.on.to_string(),
            from: self.chosen.first(),
            observers: observer_heads(&parts, &counts),
            clock: self.clock,
            began: Some(began),
            asked_period_ns: match self.args.period {
                PeriodChoice::Auto => None,
                PeriodChoice::Max => Some(0),
                PeriodChoice::Every(every) => Some(nanos(every)),
            },
            line_round_trip_ns: self.round_trip.map(|ticks| self.clock.ns(ticks)),
            signals,
            steal_ns: program::steal_ns(&self.chosen.on).saturating_sub(steal),
            stopped_ns: stopped.to_share_ns + stopped.at_end_ns,
            stopped_at_end_ns: stopped.at_end_ns,
            refused_threads: of_first(|slot| &slot.refused),
            entries,
            ambiguous: of_first(|slot| &slot.ambiguous),
            keeps_samples: self.args.keep == Keep::Samples,
            bridge_ns: self.args.bridge.map_or(0, nanos),
            cost_unknown,
            exit_status: match end {
                End::Program(status) => Some(status),
                End::Gone | End::Signal(_) | End::Observer | End::Unshared => None,
            },
            ..Head::default()
        };
        let facts = outcome::RunFacts {
            head,
            is_silent: entries == 0
                && target.reporting.is_some_and(|reporting| reporting != FunctionReporting::Hooks),
            not_shared: target.shared_pages.saturating_sub(self.layout.shared_pages),
            layout: std::mem::take(&mut self.layout),
        };
        Ok((facts, result, end))
    }

    /// The configuration of one observer, which gets an equal part of the memory.
    fn observer_config(&self, from: u32, observers: usize) -> ObserverConfig {
        let (period_ticks, fetch_ticks) = self.period();
        let memory = self.args.memory / observers.max(1);
        ObserverConfig {
            from,
            clock: self.clock,
            period_ticks,
            pacing: self.pacing(),
            fetch_ticks,
            for_ticks: self.args.duration.map(|time| self.clock.ticks(nanos(time))),
            memory: match self.args.keep {
                Keep::Histogram => memory.min(FOLD_BYTES),
                Keep::Runs | Keep::Samples => memory,
            },
            keeps_last: self.args.keep_last.is_some(),
            keeps_samples: self.args.keep == Keep::Samples,
            ..ObserverConfig::default()
        }
    }

    /// Ticks between samples, and between readings by system calls.
    fn period(&self) -> (u64, u64) {
        let period = match self.args.period {
            PeriodChoice::Max => 0,
            PeriodChoice::Every(every) => self.clock.ticks(nanos(every)).max(1),
            PeriodChoice::Auto => self.pacing().map_or(0, |pacing| pacing.initial_period()),
        };
        (period, self.clock.ticks(FETCH_NS).max(period))
    }

    fn pacing(&self) -> Option<Pacing> {
        let is_auto = self.args.period == PeriodChoice::Auto;
        let round_trip = self.round_trip.unwrap_or(FAR_TICKS);
        is_auto.then(|| Pacing::new(self.clock.ticks(AUTO_NS), round_trip))
    }

    /// The meter of `--measure-cost`, or the reason why there is none.
    fn cost_meter(&self, target: &Target) -> (Option<CostMeter>, String) {
        if !self.args.measure_cost {
            return (None, String::new());
        }
        let named = self.args.progress.as_ref().map(ToString::to_string);
        let of_global = target.globals.iter().find(|(name, _)| Some(name) == named.as_ref());
        let progress = match (&named, of_global) {
            (_, Some((_, place))) => Some(place.word),
            (None, None) => target
                .page
                .and_then(|page| page.slot(0))
                .map(|slot| crate::followed_lane::ThreadWord::Calls.of(slot)),
            (Some(_), None) => None,
        };
        match progress {
            Some(progress) => {
                (Some(CostMeter::new(progress, self.clock.ticks(PHASE_NS))), String::new())
            }
            None => {
                (None, "the signal of --progress must be a global, and be watched too".to_owned())
            }
        }
    }

    fn print(
        &self,
        summary: &Summary,
        no_map: Option<&str>,
        target: &Target,
        out: &mut dyn Write,
    ) -> Result<(), Failure> {
        let Target { reporting, own_globals, .. } = target;
        let suggestions = suggestions(self.args, summary, no_map, *reporting, own_globals);
        output::print(out, self.args.json, summary, || crate::text::text(summary, &suggestions))
    }
}

/// Makes the shared pages private again. Returns how long the process was stopped.
fn make_pages_private(mut supervisor: PageSupervisor) -> Result<StopTimes, Failure> {
    supervisor.end().map_err(|error| {
        let fix = "run the command once more: at its end it makes the pages private";
        Failure::new(Status::Failed, "making the process's pages private again", error, fix)
    })?;
    if supervisor.was_killed() {
        let took = elfen_console::duration::show(supervisor.stopped.at_end_ns);
        output::warn(&format!(
            "the supervisor of the shared pages was killed, so this command made them private \
             again, in {took}; a child that was forked in that moment may have been killed"
        ));
    }
    let (forked, late) = supervisor.children;
    if late > 0 {
        output::warn(&format!(
            "{late} of {forked} children have the shared pages with the content of a moment after \
             their fork, because other threads went on"
        ));
    }
    Ok(supervisor.stopped)
}

/// What each of several observers watches; empty if there is only one.
fn observer_heads(parts: &[(u32, CpuSet)], signals: &[usize]) -> Vec<ObserverHead> {
    let of_one = |((from, on), signals): (&(u32, CpuSet), &usize)| ObserverHead {
        from: *from,
        on: on.to_string(),
        signals: *signals,
    };
    match parts {
        [_] => Vec::new(),
        parts => parts.iter().zip(signals).map(of_one).collect(),
    }
}

/// Corrects the source of functions that report no returns although their file is built for it.
fn correct_sources(signals: &mut [Signal], reporting: Option<FunctionReporting>, returns: u64) {
    if reporting == Some(FunctionReporting::EntriesAndReturns) && returns == 0 {
        let by_entries = |signal: &&mut Signal| signal.source == Source::EntriesAndReturns;
        let signals = signals.iter_mut().filter(by_entries);
        signals.for_each(|signal| signal.source = Source::Entries);
    }
}

/// Bytes of a sample of one signal with `--keep samples`: distance, count and tag.
const BYTES_A_SAMPLE: u64 = 3;

fn warn_of_samples(memory: usize, period_ticks: u64, signals: usize, clock: Clock) {
    let samples = memory as u64 / (BYTES_A_SAMPLE * signals.max(1) as u64);
    // With --period max, a sample takes about 40 ns.
    let period_ns = clock.ns(period_ticks).max(40);
    let lasts = elfen_console::duration::show(samples.saturating_mul(period_ns));
    output::warn(&format!("--keep samples: --memory is full after about {lasts}"));
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Parses `--until`. Returns the number of the observer that has the signal, and the limit.
fn parse_until(text: &str, gathered: &[Words]) -> Result<(usize, Until), Failure> {
    let wrong = |why: String| {
        Failure::new(
            Status::Usage,
            format!("--until {text:?}"),
            why,
            "write it as 'queue_len > 20'",
        )
    };
    let (name, above) = text.split_once('>').ok_or_else(|| wrong("it has no >".to_owned()))?;
    let above: i128 =
        above.trim().parse().map_err(|_| wrong("there is no number after >".to_owned()))?;
    let name = name.trim();
    let ends = |signal: &str| signal == name || signal.ends_with(&format!(".{name}"));
    let found = gathered.iter().enumerate().find_map(|(part, words)| {
        let feed = words.signals.iter().position(|signal| ends(&signal.name))?;
        Some((part, feed, words.signals[feed].signed))
    });
    let Some((part, feed, signed)) = found else {
        return Err(wrong(format!("{name:?} is not watched")));
    };
    let above = if signed {
        i64::try_from(above).map(i64::cast_unsigned).ok()
    } else {
        u64::try_from(above).ok()
    };
    let above = above.ok_or_else(|| wrong(format!("{name:?} cannot have such a value")))?;
    Ok((part, Until { feed, above, signed }))
}
