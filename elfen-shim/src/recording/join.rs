//! Joins runs through gaps in which nothing changed.
//!
//! The timer interrupts of the observer's own CPU cut each long run into pieces. Two pieces belong
//! to the same run if one of these facts proves it:
//!
//! - for the task of a lane: the lane's count of switches, which the observer compares;
//! - for a number that never decreases: the same number on both sides of the gap.
//!
//! Equal tags on both sides prove nothing, because another tag may lie between them. With
//! `--bridge`, the user declares that no change fits into a gap of some length.

use super::file::Recording;
use super::form::{Head, Kind, Run, Signal, State};

/// The `samples` of a gap in which, as the observer has proven, nothing changed.
pub(super) const PROVEN: u64 = 1;

/// When to join the runs of a signal.
#[derive(Clone, Copy, Debug)]
struct Rule {
    joins: bool,
    never_shrinks: bool,
    bridge_ticks: u64,
}

impl Rule {
    fn of(head: &Head, signal: &Signal, runs: &[Run]) -> Self {
        let numbers = runs.iter().filter_map(|run| match run.state {
            State::Value(value) => Some(signal.number(value)),
            State::Gap | State::NotRunning | State::Other => None,
        });
        Self {
            joins: !head.keeps_samples,
            never_shrinks: signal.kind == Kind::Values && numbers.is_sorted(),
            bridge_ticks: head.clock.ticks(head.bridge_ns),
        }
    }

    /// Returns whether a signal with `state` on both sides of a gap also had it in the gap.
    fn spans(self, gap: &Gap, state: State) -> bool {
        let is_proven = gap.proven || (self.never_shrinks && matches!(state, State::Value(_)));
        self.joins && (is_proven || gap.ticks <= self.bridge_ticks)
    }
}

/// Adjacent gaps. A single sample between two of them proves nothing, because the observer may have
/// been delayed before or after it read the words.
#[derive(Clone, Copy, Debug)]
struct Gap {
    proven: bool,
    ticks: u64,
}

/// Takes all consecutive gaps, and the run after them with its end. Returns `None` if no gap or no
/// run follows.
fn behind_gaps(ahead: &mut impl Iterator<Item = (Run, u64)>) -> Option<(Gap, Run, u64)> {
    let mut gaps: Option<Gap> = None;
    loop {
        let (run, end) = ahead.next()?;
        if run.state != State::Gap {
            return gaps.map(|gaps| (gaps, run, end));
        }
        let before = gaps.unwrap_or(Gap { proven: true, ticks: 0 });
        gaps = Some(Gap {
            proven: before.proven && run.samples == PROVEN,
            ticks: before.ticks.saturating_add(end.saturating_sub(run.start_ticks)),
        });
    }
}

/// A joined run, with times in nanoseconds from the start of the recording.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    pub start_ns: u64,
    pub end_ns: u64,
    pub state: State,
    pub samples: u64,
}

impl Recording {
    /// A signal's joined runs, as exports write them.
    pub fn rows(&self, signal: usize) -> impl Iterator<Item = Row> {
        let first = self.span().map_or(0, |(first, _)| first);
        self.joined(signal).map(move |(run, end)| Row {
            start_ns: self.head.clock.ns(run.start_ticks.saturating_sub(first)),
            end_ns: self.head.clock.ns(end.saturating_sub(first)),
            state: run.state,
            samples: run.samples,
        })
    }

    /// A signal's runs with their ends, joined through gaps in which nothing changed.
    pub fn joined(&self, signal: usize) -> impl Iterator<Item = (Run, u64)> + Clone {
        let mut rest = self.runs_with_ends(signal);
        let runs = self.runs.get(signal).map_or(&[][..], Vec::as_slice);
        let rule = self.head.signals.get(signal).map(|signal| Rule::of(&self.head, signal, runs));
        let joined = move || {
            let (mut run, mut end) = rest.next()?;
            while run.state != State::Gap {
                let mut ahead = rest.clone();
                match (behind_gaps(&mut ahead), rule) {
                    (Some((gaps, next, next_end)), Some(rule))
                        if next.state == run.state && rule.spans(&gaps, run.state) =>
                    {
                        run.samples = run.samples.saturating_add(next.samples);
                        end = next_end;
                        rest = ahead;
                    }
                    _ => break,
                }
            }
            Some((run, end))
        };
        std::iter::from_fn(joined)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Clock;
    use crate::recording::Source;

    fn recording(kind: Kind, signed: bool, runs: &[(u64, State, u64)]) -> Recording {
        let signal = Signal { signed, ..Signal::new("a", Source::Mapped, kind) };
        let clock = Clock { ticks_per_second: 1_000_000_000, step_ticks: 1, unit_ticks: 0 };
        let head = Head { clock, signals: vec![signal], ..Head::default() };
        let run = |&(start_ticks, state, samples)| Run { start_ticks, state, samples };
        Recording { head, runs: vec![runs.iter().map(run).collect()], cut: false }
    }

    fn rows(recording: &Recording) -> Vec<(u64, u64, State)> {
        recording.joined(0).map(|(run, end)| (run.start_ticks, end, run.state)).collect()
    }

    /// Goal: only pieces with a proof are joined. Method: the same pieces as tags with a proof, as
    /// tags without a proof, as an increasing number, and as a number that decreases later.
    #[test]
    fn only_pieces_with_a_proof_are_joined() {
        use State::{Gap, Value};
        let pieces = |proven, last| {
            [
                (0, Value(3), 5),
                (10, Gap, proven),
                (12, Value(3), 5),
                (20, Gap, proven),
                (22, Value(last), 5),
                (30, Gap, 0),
            ]
        };
        let cut = |last| {
            let values = [(0, 10, Value(3)), (12, 20, Value(3)), (22, 30, Value(last))];
            let gaps = [(10, 12, Gap), (20, 22, Gap)];
            vec![values[0], gaps[0], values[1], gaps[1], values[2]]
        };
        let of = |kind, signed, proven, last| recording(kind, signed, &pieces(proven, last));
        let whole = |last| vec![(0, 20, Value(3)), (20, 22, Gap), (22, 30, Value(last))];
        assert_eq!(rows(&of(Kind::Tags, false, PROVEN, 4)), whole(4));
        assert_eq!(rows(&of(Kind::Tags, false, PROVEN, 3)), [(0, 30, Value(3))]);
        assert_eq!(rows(&of(Kind::Tags, false, 0, 4)), cut(4));
        assert_eq!(rows(&of(Kind::Values, false, 0, 4)), whole(4));
        assert_eq!(rows(&of(Kind::Values, false, 0, 2)), cut(2));
        // -1 is less than 3, although its 64 bits are greater as an unsigned number.
        assert_eq!(rows(&of(Kind::Values, true, 0, u64::MAX)), cut(u64::MAX));
        let twice = |second| {
            let gaps = [(10, Gap, PROVEN), (11, Gap, second)];
            let pieces = [&[(0, Value(3), 5)][..], &gaps, &[(12, Value(3), 5), (20, Gap, 0)]];
            recording(Kind::Tags, false, &pieces.concat())
        };
        assert_eq!(rows(&twice(PROVEN)), [(0, 20, Value(3))]);
        let cut_twice = [(0, 10, Value(3)), (10, 11, Gap), (11, 12, Gap), (12, 20, Value(3))];
        assert_eq!(rows(&twice(0)), cut_twice);
        let mut bridged = of(Kind::Tags, false, 0, 4);
        for (bridge_ns, expected) in [(1, cut(4)), (2, whole(4))] {
            bridged.head.bridge_ns = bridge_ns;
            assert_eq!(rows(&bridged), expected);
        }
        bridged.head.keeps_samples = true;
        assert_eq!(rows(&bridged), cut(4));
    }
}
