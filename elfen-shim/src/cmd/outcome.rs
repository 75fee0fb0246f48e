//! The outcome of a run: the head of its recording, and the file that the recording is written to.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use elfen_console::failure::Failure;

use crate::cost::cost_of;
use crate::recording::{self, Dte, Head, Periods, Pool, Recording};
use crate::session::EndReason;
use crate::session::ObserverResult;
use crate::symbols::{Layout, Names, name_value, name_values};

/// The facts about a run that the observers do not know.
pub(super) struct RunFacts {
    /// The head of the recording, without what the observers find out.
    pub(super) head: Head,
    /// Whether functions were to report that they run, and none did.
    pub(super) is_silent: bool,
    /// Pages of globals that the program was to share, and did not.
    pub(super) not_shared: u64,
    pub(super) layout: Layout,
}

/// Makes the recording, with the names of all values.
pub(super) fn make_recording(
    facts: RunFacts,
    result: &ObserverResult,
) -> Result<Recording, recording::ReadError> {
    let mut head = facts.head;
    let clock = head.clock;
    let (median, p99) = result.period_ticks;
    let mut names = Names::of(facts.layout);
    let own = (head.process, head.program.clone());
    if let Some(ratios) = &result.cost_ratios {
        head.cost = cost_of(ratios);
        if head.cost.is_none() {
            head.cost_unknown = "there was too little progress in the unobserved phases".to_owned();
        }
    }
    head.machine = machine();
    head.samples = result.samples;
    head.period_ns =
        Periods { asked: head.asked_period_ns, median: clock.ns(median), p99: clock.ns(p99) };
    head.missed_switches = result.missed_switches;
    head.ended = reason_text(result.ended).to_owned();
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
        && let (Some(began), Some((first, _))) = (found.head.began, found.span())
    {
        found.head.began = Some(began.at(first, &clock));
    }
    name_values(&mut found, &mut names, &own);
    Ok(found)
}

fn reason_text(ended: EndReason) -> &'static str {
    match ended {
        EndReason::Stopped | EndReason::Deadline | EndReason::Until => "",
        EndReason::Full => {
            "its memory is full: set --memory, or keep only the end with --keep-last"
        }
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
