//! Which functions slow requests spend their work in, beyond the usual.
//!
//! A clock has found the service's threads in their code about 251 times a second. What it finds in
//! the work of a request is a sample of that work. Slow requests have more samples in a function
//! than others do: the surplus of all functions is the work that makes them slow.

use std::collections::{BTreeMap, BTreeSet};

use elfen_console::duration::number;
use elfen_rt::signal::event::EventKind;
use serde::Serialize;

use crate::segment::{ExplainedRequest, SegmentKind};
use crate::trace::Trace;

/// A limit on rows.
const FUNCTIONS_MAX: usize = 5;
/// Smaller shares are not listed.
const SHARE_MIN: f64 = 0.03;
/// A surplus counts if it is so many times its standard error.
const ERRORS: f64 = 3.0;
/// The name of a function that the recorder did not find.
const UNKNOWN: &str = "[unknown]";

/// The functions behind `long`.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct LongCode {
    /// How often the clock found the slow requests with `long` at work.
    pub samples: u64,
    /// The largest first. Empty if there are too few samples to tell.
    pub functions: Vec<CodeRow>,
}

/// A function's part of the work beyond the usual.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct CodeRow {
    pub function: String,
    pub share: f64,
    /// The standard error of the share.
    pub error: f64,
    /// The part of the function's samples in which it had called the kernel.
    pub in_kernel: f64,
}

/// Samples by function: all of them, and how many are in the kernel.
type Samples<'a> = BTreeMap<&'a str, (u64, u64)>;

impl LongCode {
    /// `long` are the slow requests with more work than usual. `None` without samples.
    pub(crate) fn of(
        explained: &[ExplainedRequest],
        trace: &Trace,
        long: &BTreeSet<usize>,
    ) -> Option<Self> {
        let clock = Clock::of(trace);
        if clock.0.is_empty() || long.is_empty() {
            return None;
        }
        let [mut slow, mut others] = [Samples::new(), Samples::new()];
        for (at, one) in explained.iter().enumerate() {
            clock.add(one, if long.contains(&at) { &mut slow } else { &mut others });
        }
        let per_other = number(long.len() as u64)
            / number(explained.len().saturating_sub(long.len()).max(1) as u64);
        let names: BTreeSet<&str> = slow.keys().chain(others.keys()).copied().collect();
        let surplus = |name: &str| {
            let (many, usual) = (count(&slow, name), count(&others, name));
            (many - per_other * usual, many + per_other * per_other * usual)
        };
        let all = names.iter().map(|name| surplus(name));
        let (sum, variance) =
            all.fold((0.0, 0.0), |(sum, all), (surplus, variance)| (sum + surplus, all + variance));
        let mut functions = Vec::new();
        if sum > ERRORS * f64::sqrt(variance) {
            functions.extend(names.iter().map(|&name| {
                let (surplus, variance) = surplus(name);
                let (all, in_kernel) = slow.get(name).copied().unwrap_or_default();
                CodeRow {
                    function: name.to_owned(),
                    share: surplus / sum,
                    error: variance.sqrt() / sum,
                    in_kernel: number(in_kernel) / number(all.max(1)),
                }
            }));
        }
        functions.retain(|row| row.share >= SHARE_MIN && row.share > row.error);
        functions.sort_by(|a, b| b.share.total_cmp(&a.share));
        functions.truncate(FUNCTIONS_MAX);
        Some(Self { samples: slow.values().map(|(all, _)| all).sum(), functions })
    }

    /// One sentence for an operator.
    pub fn text(&self) -> String {
        let percent = |share: f64| format!("{:.0}", share * 100.0);
        let one = |row: &CodeRow| {
            let kernel = if row.in_kernel > 0.5 { " (in the kernel)" } else { "" };
            let CodeRow { function, share, error, .. } = row;
            format!("{function}{kernel} {} % \u{b1}{}", percent(*share), percent(*error))
        };
        match &self.functions[..] {
            [] => format!(
                "Too few samples tell where slow requests work for longer than usual: {}.",
                self.samples
            ),
            all => format!(
                "Slow requests work for longer than usual in {}; by {} samples.",
                all.iter().map(one).collect::<Vec<String>>().join(", "),
                self.samples
            ),
        }
    }
}

fn count(samples: &Samples<'_>, name: &str) -> f64 {
    samples.get(name).map_or(0.0, |(all, _)| number(*all))
}

/// What the clock found: by thread, in the order of time.
struct Clock<'a>(BTreeMap<u32, Vec<(u64, &'a str, bool)>>);

impl<'a> Clock<'a> {
    fn of(trace: &'a Trace) -> Self {
        let mut by_thread: BTreeMap<u32, Vec<(u64, &str, bool)>> = BTreeMap::new();
        for event in trace.events.iter().flatten() {
            if let EventKind::Sample { process, address, in_kernel } = event.kind {
                let name = trace.code.get(&(process, address)).map_or(UNKNOWN, |name| name);
                by_thread.entry(event.thread).or_default().push((event.at_ns, name, in_kernel));
            }
        }
        by_thread.values_mut().for_each(|all| all.sort_unstable());
        Self(by_thread)
    }

    /// Adds the samples in the work of a request.
    fn add(&self, one: &ExplainedRequest, to: &mut Samples<'a>) {
        for segment in one.segments.iter().filter(|one| one.kind == SegmentKind::Work) {
            let Some(all) = self.0.get(&segment.thread) else { continue };
            let first = all.partition_point(|(at_ns, ..)| *at_ns < segment.from_ns);
            for &(_, name, in_kernel) in
                all[first..].iter().take_while(|(at_ns, ..)| *at_ns < segment.to_ns)
            {
                let (sum, kernel) = to.entry(name).or_default();
                *sum += 1;
                *kernel += u64::from(in_kernel);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::segment::Segment;
    use elfen_rt::signal::event::Event;

    /// Goal: the function that makes requests long is named, with its share, and not the one in
    /// which all requests spend most of their time. Method: requests of 100 samples in `usual`; one
    /// in ten also has 30 in `rare` and 10 in `other`, half of these in the kernel.
    #[test]
    fn the_surplus_is_named() {
        let mut trace = Trace { events: vec![Vec::new()], ..Trace::default() };
        let names = ["usual", "rare", "other"];
        for (address, name) in (0..).zip(names) {
            trace.code.insert((1, address), name.to_owned());
        }
        let mut explained = Vec::new();
        let mut at_ns = 0;
        let mut long = BTreeSet::new();
        for number in 0..500_usize {
            let from_ns = at_ns;
            let mut add = |address, times| {
                for _ in 0..times {
                    at_ns += 10;
                    let in_kernel = address == 2;
                    let kind = EventKind::Sample { process: 1, address, in_kernel };
                    trace.events[0].push(Event { at_ns, thread: 7, kind });
                }
            };
            add(0, 100);
            if number % 10 == 0 {
                add(1, 30);
                add(2, 10);
                long.insert(number);
            }
            at_ns += 10;
            let work = Segment {
                from_ns,
                to_ns: at_ns,
                kind: SegmentKind::Work,
                thread: 7,
                cpu: Some(0),
                behind: None,
            };
            explained.push(ExplainedRequest {
                connection: 1,
                arrived_ns: from_ns,
                ended_ns: at_ns,
                server: 7,
                class: 0,
                stages: Vec::new(),
                segments: vec![work],
                faults: 0,
                neighbour_spans: Vec::new(),
            });
            // Between requests, the thread works too.
            at_ns += 10;
            let kind = EventKind::Sample { process: 1, address: 2, in_kernel: false };
            trace.events[0].push(Event { at_ns, thread: 7, kind });
            at_ns += 10;
        }
        let found = LongCode::of(&explained, &trace, &long).unwrap();
        assert_eq!(found.samples, 50 * 140);
        let [rare, other] = &found.functions[..] else { panic!("{found:?}") };
        assert_eq!((&*rare.function, &*other.function), ("rare", "other"));
        assert!((rare.share - 0.75).abs() < 0.01 && (other.share - 0.25).abs() < 0.01);
        assert_eq!((rare.in_kernel, other.in_kernel), (0.0, 1.0));
        assert!(found.text().contains("rare 75 % ±"), "{}", found.text());
        assert!(found.text().contains("other (in the kernel) 25 % ±"), "{}", found.text());
        // All requests are alike: no function is behind the slowest.
        let alike: BTreeSet<usize> = (0..500).filter(|number| number % 10 == 1).collect();
        let found = LongCode::of(&explained, &trace, &alike).unwrap();
        assert!(found.functions.is_empty() && found.text().starts_with("Too few"), "{found:?}");
        assert_eq!(LongCode::of(&explained, &Trace::default(), &long), None);
    }
}
