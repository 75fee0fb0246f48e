//! What a run leaves: the head of its recording, the file, the summary.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use elfen_console::duration::number;
use elfen_console::failure::Failure;

use crate::clock::{Clock, Moment};
use crate::naming::{name, name_all};
use crate::reach::Stopped;
use crate::recorder::Ended;
use crate::recording::{self, Cost, Dte, Head, Observing, Periods, Pool, Recording, Signal};
use crate::session::Seen;
use crate::symbols::{Layout, Names};

/// What the front knows of a run.
pub(super) struct Known {
    pub(super) program: String,
    pub(super) process: u32,
    pub(super) children: bool,
    pub(super) on: String,
    pub(super) from: u32,
    /// If there are several.
    pub(super) observers: Vec<Observing>,
    pub(super) clock: Clock,
    /// Just before the first sample.
    pub(super) began: Moment,
    pub(super) asked_period_ns: Option<u64>,
    pub(super) line_round_trip_ns: Option<u64>,
    pub(super) steal_ns: u64,
    pub(super) stopped: Stopped,
    pub(super) refused_threads: u64,
    pub(super) entries: u64,
    pub(super) ambiguous: u64,
    /// Functions were to say that they run, and none does.
    pub(super) is_silent: bool,
    pub(super) exit_status: Option<i32>,
    /// Pages of globals that the program was not seen to share.
    pub(super) not_shared: u64,
    pub(super) layout: Layout,
    pub(super) signals: Vec<Signal>,
    pub(super) keeps_samples: bool,
    pub(super) bridge_ns: u64,
    /// Why no cost was measured.
    pub(super) cost_unknown: String,
}

/// The recording with all names in it.
pub(super) fn recording(known: Known, seen: &Seen) -> Result<Recording, recording::ReadError> {
    let clock = known.clock;
    let (median, p99) = seen.period_ticks;
    let (median, p99) = (clock.ns(median), clock.ns(p99));
    let mut names = Names::of(known.layout);
    let own = (known.process, known.program.clone());
    let (cost, cost_unknown) = match &seen.cost_ratios {
        None => (None, known.cost_unknown),
        Some(ratios) => match cost(ratios) {
            Some(cost) => (Some(cost), String::new()),
            None => (None, "too little progressed in the stretches that were left alone".into()),
        },
    };
    let mut head = Head {
        program: known.program,
        process: known.process,
        children: known.children,
        machine: machine(),
        on: known.on,
        from: known.from,
        observers: known.observers,
        clock,
        began: Some(known.began),
        asked_period_ns: known.asked_period_ns,
        line_round_trip_ns: known.line_round_trip_ns,
        signals: known.signals,
        samples: seen.samples,
        period_ns: Periods { asked: known.asked_period_ns, median, p99 },
        steal_ns: known.steal_ns,
        stopped_ns: known.stopped.to_share_ns + known.stopped.at_end_ns,
        stopped_at_end_ns: known.stopped.at_end_ns,
        missed_switches: seen.missed_switches,
        refused_threads: known.refused_threads,
        entries: known.entries,
        ambiguous: known.ambiguous,
        keeps_samples: known.keeps_samples,
        bridge_ns: known.bridge_ns,
        rates: Vec::new(),
        dte: None,
        cost,
        cost_unknown,
        ended: ended(seen.ended).to_owned(),
        exit_status: known.exit_status,
    };
    if crate::reach::CutFile::was_seen() {
        head.ended = "a file that was looked at was cut; what was seen of it since is 0".to_owned();
    }
    if seen.failed_reads > 0 {
        head.ended = format!("{} readings of its memory were refused", seen.failed_reads);
    }
    if known.is_silent {
        head.ended =
            "no function said that it runs: there are less than five bytes of room at one \
                      of its entries, or it had threads before it started"
                .to_owned();
    }
    if known.not_shared > 0 {
        head.ended = format!(
            "{} pages of globals were not seen to be shared: the program ended at once, takes no \
             library from us (static, setuid), or they lie in data that is closed at its start",
            known.not_shared
        );
    }
    let tags = seen.tag_signal.and_then(|index| head.signals.get(index)).cloned();
    for rate in &seen.rates {
        let name_of = |value| {
            tags.as_ref().map_or_else(String::new, |tags| name(&mut names, tags, value, &own))
        };
        head.rates.extend(rate.figures(name_of));
        let dte = rate.dte(&clock);
        let all = head.dte.get_or_insert(Dte { kept: 0, discarded: 0, shrunk: 0, ..dte });
        all.kept += dte.kept;
        all.discarded += dte.discarded;
        all.shrunk += dte.shrunk;
    }
    let mut found = Recording::of(head, &seen.pool)?;
    // What was added up before is not in these runs.
    if seen.tally.is_none()
        && let Some((first, _)) = found.span()
    {
        found.head.began = Some(known.began.at(first, &clock));
    }
    name_all(&mut found, &mut names, &own);
    Ok(found)
}

fn ended(ended: Ended) -> &'static str {
    match ended {
        Ended::Told | Ended::Time | Ended::Until => "",
        Ended::Full => {
            "the memory for it is full; give it more by --memory, or keep the end by \
                        --last"
        }
        Ended::Moved => "the observer was taken off its lane",
        Ended::Unshared => {
            "the keeper of the shared pages was killed; the pages are the program's own again"
        }
    }
}

fn machine() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    model.map_or_else(|| "an unknown CPU".to_owned(), |(_, name)| name.trim().to_owned())
}

/// Of pairs of stretches, how much faster it went unobserved; with the interval that holds the
/// median in 95 of 100 cases.
fn cost(ratios: &[f64]) -> Option<Cost> {
    const LEAST: usize = 8;
    let mut sorted = ratios.to_vec();
    sorted.sort_by(f64::total_cmp);
    if sorted.len() < LEAST {
        return None;
    }
    let percent = |index: usize| (sorted[index.min(sorted.len() - 1)] - 1.0) * 100.0;
    let half = number(sorted.len() as u64) / 2.0;
    let apart = 0.98 * number(sorted.len() as u64).sqrt();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at least 0")]
    let rank = |at: f64| at.max(0.0) as usize;
    Some(Cost {
        median: percent(sorted.len() / 2),
        low: percent(rank((half - apart).floor())),
        high: percent(rank((half + apart).ceil())),
    })
}

/// The file of a recording, which only its owner may read. It is opened before anything runs, so a
/// run whose recording could not be written does not begin. What was in it stays until there is a
/// recording.
pub(super) struct Target<'a> {
    path: &'a Path,
    file: File,
    /// To be removed if nothing is written.
    is_new: bool,
}

impl<'a> Target<'a> {
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
        // Devices have no length.
        if self.file.metadata()?.is_file() {
            self.file.set_len(0)?;
        }
        let mut out = BufWriter::new(&self.file);
        recording::write(head, pool, &mut out)?;
        out.flush()
    }
}

impl Drop for Target<'_> {
    fn drop(&mut self) {
        if self.is_new {
            // Another failure ends this run, and is printed.
            let _removed = std::fs::remove_file(self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_are_medians_with_an_interval() {
        assert_eq!(cost(&[1.0; 7]), None);
        let ratios: Vec<f64> = (0..=100).map(|n| 1.0 + f64::from(n) / 1000.0).collect();
        let cost = cost(&ratios).unwrap();
        assert!((cost.median - 5.0).abs() < 1e-9, "{cost:?}");
        assert!(cost.low > 3.9 && cost.low < 4.2 && cost.high > 5.9 && cost.high < 6.2, "{cost:?}");
    }
}
