//! The outcome of a run: the head of its recording, and the file that the recording is written to.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use elfen_console::failure::Failure;

use crate::clock::{Clock, Moment};
use crate::cost::cost_of;
use crate::reach::StopTimes;
use crate::recorder::EndReason;
use crate::recording::{self, Dte, Head, ObserverHead, Periods, Pool, Recording, Signal};
use crate::session::ObserverResult;
use crate::symbols::{Layout, Names, name_value, name_values};

/// The facts about a run that the observers do not know.
pub(super) struct RunFacts {
    pub(super) program: String,
    pub(super) process: u32,
    pub(super) children: bool,
    pub(super) on: String,
    pub(super) from: u32,
    /// Empty if there is only one.
    pub(super) observers: Vec<ObserverHead>,
    pub(super) clock: Clock,
    /// Just before the first sample.
    pub(super) began: Moment,
    pub(super) asked_period_ns: Option<u64>,
    pub(super) line_round_trip_ns: Option<u64>,
    pub(super) steal_ns: u64,
    pub(super) stopped: StopTimes,
    pub(super) refused_threads: u64,
    pub(super) entries: u64,
    pub(super) ambiguous: u64,
    /// Whether functions were to report that they run, and none did.
    pub(super) is_silent: bool,
    pub(super) exit_status: Option<i32>,
    /// Pages of globals that the program was to share, and did not.
    pub(super) not_shared: u64,
    pub(super) layout: Layout,
    pub(super) signals: Vec<Signal>,
    pub(super) keeps_samples: bool,
    pub(super) bridge_ns: u64,
    /// Why no cost was measured.
    pub(super) cost_unknown: String,
}

/// Makes the recording, with the names of all values.
pub(super) fn make_recording(
    facts: RunFacts,
    result: &ObserverResult,
) -> Result<Recording, recording::ReadError> {
    let clock = facts.clock;
    let (median, p99) = result.period_ticks;
    let (median, p99) = (clock.ns(median), clock.ns(p99));
    let mut names = Names::of(facts.layout);
    let own = (facts.process, facts.program.clone());
    let (cost, cost_unknown) = match &result.cost_ratios {
        None => (None, facts.cost_unknown),
        Some(ratios) => match cost_of(ratios) {
            Some(cost) => (Some(cost), String::new()),
            None => (None, "there was too little progress in the unobserved phases".into()),
        },
    };
    let mut head = Head {
        program: facts.program,
        process: facts.process,
        children: facts.children,
        machine: machine(),
        on: facts.on,
        from: facts.from,
        observers: facts.observers,
        clock,
        began: Some(facts.began),
        asked_period_ns: facts.asked_period_ns,
        line_round_trip_ns: facts.line_round_trip_ns,
        signals: facts.signals,
        samples: result.samples,
        period_ns: Periods { asked: facts.asked_period_ns, median, p99 },
        steal_ns: facts.steal_ns,
        stopped_ns: facts.stopped.to_share_ns + facts.stopped.at_end_ns,
        stopped_at_end_ns: facts.stopped.at_end_ns,
        missed_switches: result.missed_switches,
        refused_threads: facts.refused_threads,
        entries: facts.entries,
        ambiguous: facts.ambiguous,
        keeps_samples: facts.keeps_samples,
        bridge_ns: facts.bridge_ns,
        rates: Vec::new(),
        dte: None,
        cost,
        cost_unknown,
        ended: reason_text(result.ended).to_owned(),
        exit_status: facts.exit_status,
    };
    if crate::reach::saw_truncated_file() {
        head.ended = "a watched file was truncated, and its values have been 0 since".to_owned();
    }
    if result.failed_reads > 0 {
        head.ended = format!("{} readings of the process's memory failed", result.failed_reads);
    }
    if facts.is_silent {
        head.ended = "no function reported that it runs: an entry has less than five bytes of \
                      room, or the program had threads before its main function"
            .to_owned();
    }
    if facts.not_shared > 0 {
        head.ended = format!(
            "{} pages of globals were not shared: the program ended at once, it loads no preload \
             library (static, setuid), or the pages become read-only at its start",
            facts.not_shared
        );
    }
    let tags = result.tag_signal.and_then(|index| head.signals.get(index)).cloned();
    for rate in &result.rates {
        let name_of = |value| {
            tags.as_ref().map_or_else(String::new, |tags| name_value(&mut names, tags, value, &own))
        };
        head.rates.extend(rate.figures(name_of));
        let dte = rate.dte(&clock);
        let all = head.dte.get_or_insert(Dte { kept: 0, discarded: 0, shrunk: 0, ..dte });
        all.kept += dte.kept;
        all.discarded += dte.discarded;
        all.shrunk += dte.shrunk;
    }
    let mut found = Recording::of(head, &result.pool)?;
    // With a tally, earlier runs are no longer in the pool, and the recording began before these.
    if result.tally.is_none()
        && let Some((first, _)) = found.span()
    {
        found.head.began = Some(facts.began.at(first, &clock));
    }
    name_values(&mut found, &mut names, &own);
    Ok(found)
}

fn reason_text(ended: EndReason) -> &'static str {
    match ended {
        EndReason::Stopped | EndReason::Deadline | EndReason::Until => "",
        EndReason::Full => "its memory is full: set --memory, or keep only the end with --last",
        EndReason::Moved => "the observer was moved off its lane",
        EndReason::Unshared => {
            "the supervisor of the shared pages was killed; the pages are private again"
        }
    }
}

fn machine() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    model.map_or_else(|| "an unknown CPU".to_owned(), |(_, name)| name.trim().to_owned())
}

/// The file of a recording, which only its owner may read. It is opened before anything runs, so
/// that an unwritable file is an error before the run. Its old content remains until there is a
/// recording.
pub(super) struct RecordingFile<'a> {
    path: &'a Path,
    file: File,
    /// Whether to remove the file if nothing is written.
    is_new: bool,
}

impl<'a> RecordingFile<'a> {
    pub(super) fn open(path: &'a Path) -> Result<Self, Failure> {
        let is_new = path.symlink_metadata().is_err();
        let mut options = OpenOptions::new();
        let file = options.write(true).create(true).truncate(false).mode(0o600).open(path);
        let file = file.map_err(|error| Failure::unwritable("recording", path, error))?;
        Ok(Self { path, file, is_new })
    }

    pub(super) fn write(mut self, head: &Head, pool: &Pool) -> Result<(), Failure> {
        let written = self.write_all(head, pool);
        self.is_new = false;
        written.map_err(|error| Failure::unwritable("recording", self.path, error))
    }

    fn write_all(&self, head: &Head, pool: &Pool) -> io::Result<()> {
        // A device cannot be truncated.
        if self.file.metadata()?.is_file() {
            self.file.set_len(0)?;
        }
        let mut out = BufWriter::new(&self.file);
        recording::write(head, pool, &mut out)?;
        out.flush()
    }
}

impl Drop for RecordingFile<'_> {
    fn drop(&mut self) {
        if self.is_new {
            // The run already failed for another reason, which is printed.
            let _removed = std::fs::remove_file(self.path);
        }
    }
}
