//! `elfen shim`: starts or finds a program, observes it, and prints the summary.
//!
//! [`run`] prepares everything that can fail without a program. [`Run::observe`] then runs the
//! observers, and [`Run::finish`] writes what they found.

use std::io::{self, Seek, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use elfen_console::failure::{Failure, Status};
use elfen_console::output;
use elfen_console::terminal::{self, Role};
use elfen_machine::affinity;
use elfen_machine::cpulist::CpuSet;
use elfen_rt::signal::thread::ThreadSlot;

use super::args::{Keep, ObserveArgs, PeriodChoice, check_args};
use super::count;
use super::gather::gather_words;
use super::lane_choice::choose;
use super::live::LiveView;
use super::recording_file::RecordingFile;
use super::suggestions::suggestions;
use super::target::{
    Run, Target, check_process, create_output_file, open_task_map, prepare_target, start_failure,
};
use super::wait::{End, block_signals, blocked_signals, signal_failure, wait, wait_for_exit};
use crate::clock::{Clock, Moment};
use crate::cost::{CostMeter, cost_of};
use crate::fold::Fold;
use crate::live::LiveTotals;
use crate::observers::Observers;
use crate::pacing::{AUTO_NS, Pacing};
use crate::program;
use crate::reach::{PageSupervisor, StopTimes};
use crate::recording::{
    Dte, Head, ObserverHead, Periods, ReadError, Recording, RunFigures, Signal, Source,
};
use crate::round_trip;
use crate::session::{EndReason, ObserverConfig, ObserverControl, ObserverResult, Until, Words};
use crate::summary::Summary;
use crate::symbols::{FunctionReporting, Layout, Names};

/// The assumed round trip if it could not be measured. It is long, so that the period is long.
const FAR_TICKS: u64 = 1_500;
/// The shortest time between two readings by system calls.
const FETCH_NS: u64 = 100_000;
/// Length of the phases of `--measure-cost`.
const PHASE_NS: u64 = 10_000_000;
/// The memory that `--keep histogram` fills before it adds up its runs: about a million runs.
const FOLD_BYTES: usize = 4 << 20;

pub(super) fn run(args: &ObserveArgs, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    elfen_console::usage::check_program::<ObserveArgs>("shim", &args.program)?;
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
    let lanes = choose(args.cpu.as_ref(), args.observer_cpu.as_ref(), args.sibling, &allowed)?;
    let clock = Clock::of_this_machine().map_err(|error| {
        let fix = "use a machine whose kernel uses the time stamp counter as its clock";
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
    // Opened after the split into two processes, because the process that only waits writes no
    // recording.
    let file = args.output.as_deref().map(RecordingFile::open).transpose()?;
    let output = match &screen {
        Some(_) if !args.program.is_empty() => Some(create_output_file()?),
        _ => None,
    };
    // The longest round trip of all observers. The first observer is measured last, because this
    // thread stays on that observer's lane.
    let mut round_trip = Some(0);
    for (from, on) in lanes.parts().iter().rev() {
        affinity::pin(*from).map_err(pin)?;
        let ticks = on.iter().next().and_then(round_trip::measure_ticks);
        round_trip = round_trip.zip(ticks).map(|(one, other)| one.max(other));
    }
    let map = open_task_map();
    let mut layout = Layout::default();
    let target = prepare_target(args, &lanes, &mut layout, output.as_ref(), signals)?;
    let mut run = Run { args, file, lanes, clock, round_trip, map, layout, target, screen, output };
    match run.observe(out) {
        Ok(observed) => run.finish(observed, out),
        Err(failure) => {
            // A process that was not released ends when its pipe closes. A released program is
            // killed, because it was started only to be observed.
            if let Some(child) = &mut run.target.child {
                let _gone = child.kill();
                let _reaped = child.wait();
            }
            Err(failure)
        }
    }
}

/// The result of the observation.
struct Observed {
    /// The head of the recording, without the results of the observers.
    head: Head,
    result: ObserverResult,
    end: End,
}

impl Run<'_> {
    /// Runs the observers until the run ends.
    fn observe(&mut self, out: &mut dyn Write) -> Result<Observed, Failure> {
        let gathered = gather_words(self)?;
        let (period_ticks, _) = self.period();
        self.clock = self.clock.in_units(match self.args.period {
            PeriodChoice::Auto => self.clock.ticks(AUTO_NS),
            PeriodChoice::Max | PeriodChoice::Every(_) => period_ticks,
        });
        let until =
            self.args.until.as_deref().map(|text| parse_until(text, &gathered)).transpose()?;
        let (mut cost_meter, cost_unknown) = self.cost_meter();
        let parts = self.lanes.parts();
        let of_all = gathered.iter().flat_map(|words| &words.signals);
        let mut head = Head {
            program: self.target.name.clone(),
            process: self.target.process,
            children: self.args.follow,
            machine: cpu_model(),
            on: self.lanes.on.to_string(),
            from: self.lanes.first(),
            observers: observer_heads(&parts, &gathered),
            clock: self.clock,
            signals: of_all.cloned().collect(),
            keeps_samples: self.args.keep == Keep::Samples,
            bridge_ns: self.args.bridge.map_or(0, nanos),
            figures: RunFigures { cost_unknown, ..RunFigures::default() },
            ..Head::default()
        };
        let of_each = gathered.iter().zip(&parts).enumerate();
        let configs = of_each.map(|(index, (words, (from, _)))| ObserverConfig {
            until: until.filter(|(part, _)| *part == index).map(|(_, until)| until),
            cost_meter: cost_meter.take(),
            fold: (self.args.keep == Keep::Histogram).then(|| {
                let signals = words.signals.clone();
                Fold::of(Head { observers: Vec::new(), signals, ..head.clone() })
            }),
            live: self.args.live.then(|| Arc::new(LiveTotals::of(words.signals.len()))),
            ..self.observer_config(*from, parts.len())
        });
        let configs: Vec<ObserverConfig> = configs.collect();
        let lives: Vec<Arc<LiveTotals>> =
            configs.iter().filter_map(|config| config.live.clone()).collect();
        let mut view = self.args.live.then(|| LiveView::of(lives, &head, self.screen.take()));
        if self.args.keep == Keep::Samples {
            warn_of_samples(self.args.memory, period_ticks, head.signals.len(), self.clock);
        }
        let control = Arc::new(ObserverControl::default());
        let (rate, steal_ns) = (crate::clock::Rate::begin(), program::steal_ns(&self.lanes.on));
        head.began = Some(Moment::now());
        let failed = |error| Failure::new(Status::Failed, "the observer", error, "try again");
        block_signals()?;
        let observer = Observers::start(gathered.into_iter().zip(configs), &control);
        let observer = observer.map_err(failed)?;
        if let Some(pending) = self.target.pending.take() {
            match pending.release() {
                Ok(child) => self.target.child = Some(child),
                Err(error) => {
                    control.stop.store(true, Relaxed);
                    observer.join();
                    return Err(start_failure(&self.args.program[0], &error));
                }
            }
        }
        let shown = view.as_mut().map(|view| (view, out));
        let Target { child, process, supervisor, .. } = &mut self.target;
        let process = (*process != 0).then_some(*process);
        let (layout, supervisor) = (&mut self.layout, supervisor.as_ref());
        let end = wait(child, process, &observer, &control, layout, supervisor, shown);
        let mut result = observer.join();
        drop(view);
        let end = end?;
        if let Some(supervisor) = self.target.supervisor.take() {
            if supervisor.was_killed() {
                result.ended = EndReason::Unshared;
            }
            let stopped = make_pages_private(supervisor)?;
            head.figures.stopped_ns = stopped.to_share_ns + stopped.at_end_ns;
            head.figures.stopped_at_end_ns = stopped.at_end_ns;
        }
        head.steal_ns = program::steal_ns(&self.lanes.on).saturating_sub(steal_ns);
        self.clock.ticks_per_second = rate.ticks_per_second();
        head.clock = self.clock;
        Ok(Observed { head, result, end })
    }

    /// Writes the recording, prints the summary, and returns the exit status.
    fn finish(mut self, observed: Observed, out: &mut dyn Write) -> Result<ExitCode, Failure> {
        let Observed { head, mut result, end } = observed;
        let wrong = |error| Failure::new(Status::Failed, "the recording", error, "report this");
        let mut recording = self.make_recording(head, &result, end).map_err(wrong)?;
        if let (Some(last), Some((first, end))) = (self.args.keep_last, recording.span()) {
            let whole = self.clock.ns(end - first);
            recording.cut_to(whole.saturating_sub(nanos(last)), whole);
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
        tally.add(&recording);
        let summary = Summary::from(&recording.head, tally, self.args.keep == Keep::Histogram);
        let no_map = self.map.as_ref().err().map(String::as_str);
        let (reporting, globals) = (self.target.reporting, &self.target.own_globals);
        let suggestions = suggestions(self.args, &summary, no_map, reporting, globals);
        output::print(out, self.args.json, &summary, || crate::text::text(&summary, &suggestions))?;
        out.flush().map_err(Failure::output)?;
        written.transpose()?;
        let status = match (end, &mut self.target.child) {
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

    /// Makes the recording, with the names of all values.
    fn make_recording(
        &mut self,
        mut head: Head,
        result: &ObserverResult,
        end: End,
    ) -> Result<Recording, ReadError> {
        let clock = head.clock;
        let first = self.target.page.and_then(|page| page.slot(0));
        let of_first =
            |word: fn(&ThreadSlot) -> &AtomicU64| first.map_or(0, |slot| word(slot).load(Relaxed));
        let counting = (of_first(|slot| &slot.counting), of_first(|slot| &slot.uncounted));
        count::warn_uncounted(&self.args.count_at, counting);
        correct_sources(&mut head.signals, self.target.reporting, of_first(|slot| &slot.returns));
        head.line_round_trip_ns = self.round_trip.map(|ticks| clock.ns(ticks));
        head.figures.refused_threads = of_first(|slot| &slot.refused);
        head.figures.entries = of_first(|slot| &slot.entries);
        head.figures.ambiguous_entries = of_first(|slot| &slot.ambiguous);
        head.figures.exit_status = match end {
            End::Program(status) => Some(status),
            End::Gone | End::Signal(_) | End::Observer | End::Unshared => None,
        };
        if let Some(ratios) = &result.cost_ratios {
            head.figures.cost_percent = cost_of(ratios);
            if head.figures.cost_percent.is_none() {
                head.figures.cost_unknown =
                    "there was too little progress in the unobserved phases".to_owned();
            }
        }
        head.samples = result.samples;
        let (median, p99) = result.period_ticks;
        head.period_ns = Periods {
            asked: match self.args.period {
                PeriodChoice::Auto => None,
                PeriodChoice::Max => Some(0),
                PeriodChoice::Every(every) => Some(nanos(every)),
            },
            median: clock.ns(median),
            p99: clock.ns(p99),
        };
        head.figures.missed_switches = result.missed_switches;
        head.ended = self.what_is_wrong(result, head.figures.entries);
        let mut names = Names::of(std::mem::take(&mut self.layout), &head.program);
        let tags = result.tag_signal.and_then(|index| head.signals.get(index));
        let tags = tags.map(|signal| signal.source);
        for rate in &result.rates {
            let name_of =
                |value| tags.map_or_else(String::new, |source| names.value(source, value));
            head.rates.extend(rate.figures(name_of));
            let dte = rate.dte(&clock);
            let all =
                head.figures.dte.get_or_insert(Dte { kept: 0, discarded: 0, shrunk: 0, ..dte });
            all.kept += dte.kept;
            all.discarded += dte.discarded;
            all.shrunk += dte.shrunk;
        }
        let mut found = Recording::of(head, &result.pool)?;
        // With a tally, the pool contains only the last runs, so the recording began before them.
        if result.tally.is_none()
            && let (Some(began), Some((first, _))) = (found.head.began, found.span())
        {
            found.head.began = Some(began.at(first, &clock));
        }
        names.name_values(&mut found);
        Ok(found)
    }

    /// Why the recording ended early or is incomplete. Empty if nothing is wrong.
    fn what_is_wrong(&self, result: &ObserverResult, entries: u64) -> String {
        let target = &self.target;
        let not_shared = target.shared_pages.saturating_sub(self.layout.shared_pages);
        if not_shared > 0 {
            return format!(
                "{not_shared} pages of globals were not shared: the program ended at once, it \
                 loads no preload library (static, setuid), or the pages become read-only at its \
                 start"
            );
        }
        if entries == 0
            && target.reporting.is_some_and(|reporting| reporting != FunctionReporting::Hooks)
        {
            return "no function reported that it runs: an entry has less than five bytes of room, \
                    or the program had threads before its main function"
                .to_owned();
        }
        if result.failed_reads > 0 {
            return format!("{} readings of the process's memory failed", result.failed_reads);
        }
        if crate::reach::saw_truncated_file() {
            return "a watched file was truncated, and its values have been 0 since".to_owned();
        }
        let reason = match result.ended {
            EndReason::Stopped | EndReason::Deadline | EndReason::Until => "",
            EndReason::Full => {
                "its memory is full: set --memory, or keep only the end with --keep-last"
            }
            EndReason::Moved => "the observer was moved off its lane",
            EndReason::Unshared => {
                "the supervisor of the shared pages was killed; the pages are private again"
            }
        };
        reason.to_owned()
    }

    /// The configuration of one observer. Each observer gets an equal part of the memory.
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

    /// The meter of `--measure-cost`, or the reason why it is not available.
    fn cost_meter(&self) -> (Option<CostMeter>, String) {
        if !self.args.measure_cost {
            return (None, String::new());
        }
        let named = self.args.progress.as_ref().map(ToString::to_string);
        let of_global = self.target.globals.iter().find(|(name, _)| Some(name) == named.as_ref());
        let progress = match (&named, of_global) {
            (_, Some((_, place))) => Some(place.word),
            (None, None) => self
                .target
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
}

/// Makes the shared pages private again. Returns how long the process was stopped.
fn make_pages_private(mut supervisor: PageSupervisor) -> Result<StopTimes, Failure> {
    supervisor.end().map_err(|error| {
        let fix = "run the command again: it makes the pages private when it ends";
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
            "{late} of {forked} forked children got the shared pages as they were shortly after \
             the fork, because other threads continued to write to them"
        ));
    }
    Ok(supervisor.stopped)
}

/// What each observer watches. Empty if there is only one observer.
fn observer_heads(parts: &[(u32, CpuSet)], gathered: &[Words]) -> Vec<ObserverHead> {
    let of_one = |((from, on), words): (&(u32, CpuSet), &Words)| ObserverHead {
        from: *from,
        on: on.to_string(),
        signals: words.signals.len(),
    };
    match parts {
        [_] => Vec::new(),
        parts => parts.iter().zip(gathered).map(of_one).collect(),
    }
}

fn cpu_model() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    model.map_or_else(|| "an unknown CPU".to_owned(), |(_, name)| name.trim().to_owned())
}

/// Corrects the source of functions that reported no returns although their file was built for it.
fn correct_sources(signals: &mut [Signal], reporting: Option<FunctionReporting>, returns: u64) {
    if reporting == Some(FunctionReporting::EntriesAndReturns) && returns == 0 {
        let by_entries = |signal: &&mut Signal| signal.source == Source::EntriesAndReturns;
        let signals = signals.iter_mut().filter(by_entries);
        signals.for_each(|signal| signal.source = Source::Entries);
    }
}

/// Bytes per sample and signal with `--keep samples`: distance, count and tag.
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

/// Parses `--until`. Returns the limit, and the index of the observer with the signal.
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
