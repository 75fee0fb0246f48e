//! What a profile by samples shows: functions or instructions, with estimated executions, mean
//! latencies, and rates of events.

use std::collections::HashMap;
use std::hash::Hash;

use elfen_core_model::estimate::{SiteEstimate, relative_error};
use serde::Serialize;

use crate::precise::UNTRIED;
use crate::profile::{Place, Profile, SampleUnit, SampledEvent};
use crate::sample_table::{EventRates, MeanLatencies, RATE_HEADS, latency_heads, percent};
use crate::sums::{grouped, without_columns};
use crate::symbols::ProfileSymbols;

#[derive(Serialize, Debug)]
pub(crate) struct SamplesReport {
    /// What is not certain about all of this.
    caution: &'static str,
    events: Vec<EventRow>,
    /// Only of what was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    functions: Option<Vec<SampleRow>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    instructions: Option<Vec<SampleRow>>,
    /// Further rows that were left out.
    left_out: usize,
}

/// An event of the processor.
#[derive(Serialize, Debug)]
struct EventRow {
    device: String,
    source: String,
    unit: SampleUnit,
    /// The mean interval that was asked for, and the one that was.
    interval: u64,
    mean_interval: f64,
    samples: u64,
    /// Samples that were lost, at least.
    lost: u64,
}

/// A function, or an instruction.
#[derive(Serialize, Debug)]
struct SampleRow {
    /// As `function+0x12` for an instruction.
    name: String,
    file: String,
    /// Samples of all events, and samples that executions are estimated from.
    samples: u64,
    execution_samples: u64,
    /// Absent if no event samples executions.
    #[serde(skip_serializing_if = "Option::is_none")]
    executions: Option<f64>,
    /// Of all executions, in percent.
    #[serde(skip_serializing_if = "Option::is_none")]
    share_percent: Option<f64>,
    relative_error: Option<f64>,
    /// Absent if the source does not see what aborts.
    #[serde(skip_serializing_if = "Option::is_none")]
    aborted_share: Option<f64>,
    latencies: MeanLatencies,
    #[serde(flatten)]
    rates: EventRates,
}

/// Samples of one row.
#[derive(Clone, Default, Debug)]
struct RowSums {
    all: SiteEstimate,
    execution_samples: u64,
    executions: f64,
    /// Outcomes of events that also see what aborts.
    outcomes: SiteEstimate,
}

impl RowSums {
    #[expect(clippy::cast_precision_loss, reason = "an estimate has few digits")]
    fn add(&mut self, event: &SampledEvent, estimate: &SiteEstimate) {
        self.all.merge(estimate);
        if event.unit.counts_executions() {
            self.execution_samples = self.execution_samples.saturating_add(estimate.samples);
            self.executions += estimate.samples as f64 * event.mean_interval();
        }
        if sees_aborted(event) {
            self.outcomes.merge(estimate);
        }
    }
}

/// Operations of IBS and instructions of PEBS give a sample only if they retire.
fn sees_aborted(event: &SampledEvent) -> bool {
    event.source == "SPE" || event.unit == SampleUnit::Fetches
}

impl SamplesReport {
    /// The `top` largest rows.
    pub(crate) fn of(
        profile: &Profile,
        symbols: &ProfileSymbols,
        by_instruction: bool,
        top: usize,
    ) -> Self {
        let file = |file| symbols.file_name(file).to_owned();
        let (rows, left_out) = if by_instruction {
            rows(profile, top, |place| place, |&place| (symbols.place(place), file(place.file)))
        } else {
            let name = |function: &_| symbols.name(function);
            rows(
                profile,
                top,
                |place| symbols.function_of(place),
                |function| (name(function), file(function.file)),
            )
        };
        let events = profile.sampled_events.iter().map(|event| EventRow {
            device: event.device.clone(),
            source: event.source.clone(),
            unit: event.unit,
            interval: event.interval,
            mean_interval: event.mean_interval(),
            samples: event.samples,
            lost: event.lost,
        });
        let (functions, instructions) =
            if by_instruction { (None, Some(rows)) } else { (Some(rows), None) };
        Self { caution: UNTRIED, events: events.collect(), functions, instructions, left_out }
    }

    /// How the samples were taken, in one line for each event.
    pub(crate) fn how(&self) -> String {
        let line = |event: &EventRow| {
            let EventRow { device, source, unit, samples, lost, .. } = event;
            let lost = match lost {
                0 => String::new(),
                lost => format!("; at least {} were lost", grouped(*lost)),
            };
            format!(
                "{} samples by {source} ({device}), one in {:.0} {}{lost}",
                grouped(*samples),
                event.mean_interval,
                unit.name()
            )
        };
        let caution = [format!("caution: {}", self.caution)];
        self.events.iter().map(line).chain(caution).collect::<Vec<_>>().join("\n")
    }

    pub(crate) fn table(&self) -> String {
        let is_by_instruction = self.instructions.is_some();
        let name = if is_by_instruction { "instruction" } else { "function" };
        let mut head = vec!["share %", "± %", "executions", "samples"];
        head.extend(latency_heads());
        head.extend(RATE_HEADS);
        head.extend(["aborted", name, "file"]);
        let rows: Vec<Vec<String>> = self
            .functions
            .iter()
            .chain(&self.instructions)
            .flatten()
            .map(SampleRow::cells)
            .collect();
        let is_empty = |&column: &usize| rows.iter().all(|row| row[column].is_empty());
        // The last two columns are names.
        let empty: Vec<usize> = (0..head.len() - 2).filter(is_empty).collect();
        let mut text = without_columns(&head, rows, &empty);
        if self.left_out > 0 {
            text += &format!("{} more {name}s have samples: see --top\n", self.left_out);
        }
        text
    }
}

/// The largest rows, by executions, and how many others there are.
fn rows<Key: Clone + Eq + Hash + Ord>(
    profile: &Profile,
    top: usize,
    key: impl Fn(Place) -> Key,
    name: impl Fn(&Key) -> (String, String),
) -> (Vec<SampleRow>, usize) {
    let mut sums: HashMap<Key, RowSums> = HashMap::new();
    for (at, estimate) in &profile.samples {
        let event = usize::try_from(at.event).ok();
        if let Some(event) = event.and_then(|event| profile.sampled_events.get(event)) {
            sums.entry(key(at.place)).or_default().add(event, estimate);
        }
    }
    let has_executions = profile.sampled_events.iter().any(|one| one.unit.counts_executions());
    let all: f64 = sums.values().map(|one| one.executions).sum();
    let mut sorted: Vec<(Key, RowSums)> = sums.into_iter().collect();
    sorted.sort_by(|(a_key, a), (b_key, b)| {
        let by_executions = b.executions.total_cmp(&a.executions);
        by_executions.then(b.all.samples.cmp(&a.all.samples)).then_with(|| a_key.cmp(b_key))
    });
    let left_out = sorted.len().saturating_sub(top);
    sorted.truncate(top);
    let row = |(key, sums): (Key, RowSums)| {
        let (name, file) = name(&key);
        SampleRow {
            name,
            file,
            samples: sums.all.samples,
            execution_samples: sums.execution_samples,
            executions: has_executions.then_some(sums.executions),
            share_percent: (has_executions && all > 0.0).then(|| sums.executions / all * 100.0),
            relative_error: relative_error(sums.execution_samples),
            aborted_share: sums.outcomes.aborted_share(),
            latencies: MeanLatencies::of(&sums.all),
            rates: EventRates::of(&sums.all),
        }
    };
    (sorted.into_iter().map(row).collect(), left_out)
}

impl SampleRow {
    fn cells(&self) -> Vec<String> {
        let number = |value: Option<f64>, digits: usize| {
            value.map_or(String::new(), |value| format!("{value:.digits$}"))
        };
        let mut cells = vec![
            number(self.share_percent, 2),
            number(self.relative_error.map(|error| error * 100.0), 0),
            number(self.executions, 0),
            grouped(self.samples),
        ];
        cells.extend(self.latencies.cells());
        cells.extend(self.rates.cells());
        cells.extend([percent(self.aborted_share), self.name.clone(), self.file.clone()]);
        cells
    }
}

#[cfg(test)]
mod tests {
    use elfen_core_model::sample::{InstructionSample, Outcome, SampleEvents, SampleLatencies};

    use super::*;
    use crate::profile::{SampledPlace, Source};

    fn event(device: &str, source: &str, unit: SampleUnit, samples: u64) -> SampledEvent {
        SampledEvent {
            device: device.into(),
            source: source.into(),
            unit,
            interval: 1000,
            samples,
            ..SampledEvent::default()
        }
    }

    fn load(refill: Option<u32>, outcome: Outcome) -> InstructionSample {
        InstructionSample {
            context: None,
            pc: 0,
            instruction: None,
            address: None,
            events: SampleEvents { dcache_miss: Some(refill.is_some()), ..SampleEvents::default() },
            outcome: Some(outcome),
            history: None,
            latencies: SampleLatencies { dcache_refill: refill, ..SampleLatencies::default() },
        }
    }

    /// Goal: executions come from the event that samples them, at the interval that was; rates and
    /// latencies from samples that have them; columns without values are not printed. Method: two
    /// events of IBS at two instructions.
    #[test]
    fn rows_are_estimated_from_their_events() {
        let mut profile = Profile { by: Source::Samples, ..Profile::default() };
        let file = profile.file("/nowhere/a");
        profile.sampled_events = vec![
            // 8 samples in 16,000 operations: the interval was longer than it was meant to be.
            SampledEvent {
                counted: 16_000,
                lost: 3,
                ..event("ibs_op", "IBS", SampleUnit::Operations, 8)
            },
            event("ibs_fetch", "IBS", SampleUnit::Fetches, 4),
        ];
        let mut add = |offset, event, sample: &InstructionSample, times| {
            let at = SampledPlace { place: Place { file, offset }, event };
            for _ in 0..times {
                profile.samples.entry(at).or_default().add(sample);
            }
        };
        add(0x10, 0, &load(Some(80), Outcome::Retired), 1);
        add(0x10, 0, &load(None, Outcome::Retired), 3);
        add(0x20, 0, &load(None, Outcome::Retired), 1);
        let fetch =
            |outcome| InstructionSample { events: SampleEvents::default(), ..load(None, outcome) };
        add(0x10, 1, &fetch(Outcome::Fetched), 3);
        add(0x10, 1, &fetch(Outcome::Aborted(None)), 1);
        let (symbols, _) = ProfileSymbols::read(&profile);
        let report = SamplesReport::of(&profile, &symbols, true, 9);
        let rows = report.instructions.as_ref().unwrap();
        let [first, second] = &rows[..] else { panic!("{rows:?}") };
        assert_eq!((first.samples, first.execution_samples), (8, 4));
        assert_eq!((first.executions, first.share_percent), (Some(8000.0), Some(80.0)));
        assert_eq!(first.relative_error, Some(0.5));
        assert_eq!(first.rates.dcache_miss_rate, Some(0.25));
        assert_eq!(first.aborted_share, Some(0.25));
        assert_eq!(second.aborted_share, None, "operations that abort give no samples");
        assert_eq!(
            report.how(),
            "8 samples by IBS (ibs_op), one in 2000 operations; at least 3 were lost\n\
             4 samples by IBS (ibs_fetch), one in 1000 fetches\n\
             caution: not tried on such hardware yet: the decoders have seen constructed records \
             only"
        );
        let table = report.table();
        let head = table.lines().next().unwrap();
        let words: Vec<&str> =
            head.split("  ").map(str::trim).filter(|one| !one.is_empty()).collect();
        let expected = [
            "share %",
            "± %",
            "executions",
            "samples",
            "refill",
            "D-miss",
            "aborted",
            "instruction",
            "file",
        ];
        assert_eq!(words, expected, "{table}");
        assert!(table.contains("25.0 %"), "{table}");
        let functions = SamplesReport::of(&profile, &symbols, false, 9);
        let rows = functions.functions.as_ref().unwrap();
        assert_eq!(rows.len(), 1, "the file has no symbols");
        assert_eq!((rows[0].samples, rows[0].executions), (9, Some(10_000.0)));
        let short = SamplesReport::of(&profile, &symbols, true, 1);
        assert!(short.table().ends_with("1 more instructions have samples: see --top\n"));
    }

    /// Goal: without an event that samples executions, none are printed.
    #[test]
    fn loads_alone_have_no_executions() {
        let mut profile = Profile { by: Source::Samples, ..Profile::default() };
        let file = profile.file("/nowhere/a");
        profile.sampled_events = vec![event("cpu", "PEBS", SampleUnit::Loads, 1)];
        let at = SampledPlace { place: Place { file, offset: 1 }, event: 0 };
        profile.samples.entry(at).or_default().add(&load(Some(9), Outcome::Retired));
        let (symbols, _) = ProfileSymbols::read(&profile);
        let report = SamplesReport::of(&profile, &symbols, true, 9);
        let row = &report.instructions.as_ref().unwrap()[0];
        assert_eq!((row.executions, row.share_percent, row.relative_error), (None, None, None));
        assert!(!report.table().contains("executions"));
    }
}
