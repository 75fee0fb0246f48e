//! The records of the two programs, and how long they overlap.

use std::fs;
use std::io;
use std::path::Path;

use elfen_console::duration::number;

/// A period of time: its start and its end.
pub(super) type Stretch = (u64, u64);

/// Reads pairs of 64-bit words, as the programs write them.
pub(super) fn read(file: &Path) -> io::Result<Vec<Stretch>> {
    let bytes = fs::read(file)?;
    let words: Vec<u64> =
        bytes.as_chunks().0.iter().map(|word| u64::from_ne_bytes(*word)).collect();
    Ok(words.as_chunks().0.iter().map(|&[from, to]| (from, to)).collect())
}

/// Sorts the periods, and merges periods that overlap or touch.
pub(super) fn joined(mut stretches: Vec<Stretch>) -> Vec<Stretch> {
    stretches.sort_unstable();
    stretches.dedup_by(|next, before| {
        let joins = next.0 <= before.1;
        if joins {
            before.1 = before.1.max(next.1);
        }
        joins
    });
    stretches
}

/// The overlap, measured from outside of Elfen.
#[derive(Clone, Default, Debug)]
pub(super) struct Seen {
    /// How long the request lane was busy, including with other tasks.
    pub(super) busy_ns: u64,
    /// How long the batch ran while the request lane was busy.
    pub(super) overlapped_ns: u64,
    /// For each turn: the time from its start until the batch left its lane for the rest of the
    /// turn. It is the whole turn if the batch did not.
    pub(super) stops_ns: Vec<f64>,
    /// For each turn at whose end the batch was off its lane: the time until the batch was back.
    pub(super) resumes_ns: Vec<f64>,
}

/// Compares the periods, which must be sorted. While other tasks keep the request lane busy, the
/// batch must be off its lane as well. If it is not, that time is overlap too.
pub(super) fn compare(turns: &[Stretch], others: &[Stretch], pauses: &[Stretch]) -> Seen {
    let mut seen = of_turns(turns, pauses);
    let beside_others = of_turns(others, pauses);
    seen.busy_ns += beside_others.busy_ns;
    seen.overlapped_ns += beside_others.overlapped_ns;
    seen
}

fn of_turns(turns: &[Stretch], pauses: &[Stretch]) -> Seen {
    let mut first = 0;
    let mut seen = Seen::default();
    for &(from, to) in turns {
        while pauses.get(first).is_some_and(|&(_, end)| end <= from) {
            first += 1;
        }
        let during = pauses[first..].iter().take_while(|&&(begin, _)| begin < to);
        let paused = during.clone().map(|&(begin, end)| end.min(to) - begin.max(from));
        seen.busy_ns += to - from;
        seen.overlapped_ns += (to - from).saturating_sub(paused.sum());
        match during.last().filter(|&&(_, end)| end >= to) {
            Some(&(begin, end)) => {
                seen.stops_ns.push(number(begin.saturating_sub(from)));
                seen.resumes_ns.extend((end != u64::MAX).then(|| number(end - to)));
            }
            None => seen.stops_ns.push(number(to - from)),
        }
    }
    seen
}

#[cfg(test)]
mod tests {
    use super::*;

    fn overlapped(turns: &[Stretch], pauses: &[Stretch]) -> u64 {
        compare(turns, &[], pauses).overlapped_ns
    }

    #[test]
    fn a_switch_within_a_nap_is_of_the_nap() {
        let pauses = vec![(100, 200), (10, 50), (120, 130), (190, 220), (220, 230), (300, 400)];
        assert_eq!(joined(pauses), [(10, 50), (100, 230), (300, 400)]);
    }

    #[test]
    fn what_is_in_no_pause_is_overlap() {
        let turns = [(100, 200), (300, 400), (500, 600)];
        assert_eq!(overlapped(&turns, &[]), 300);
        assert_eq!(overlapped(&turns, &[(0, 1000)]), 0, "one pause over all turns");
        assert_eq!(overlapped(&turns, &[(10, 90), (110, 250), (290, 390)]), 10 + 10 + 100);
        assert_eq!(overlapped(&turns, &[(150, 350), (550, 560), (570, 700)]), 50 + 50 + 60);
    }

    #[test]
    fn a_batch_stops_when_it_is_off_for_the_rest_of_the_turn() {
        let turns = [(100, 200), (300, 400), (500, 600)];
        // The batch leaves its lane for a moment in the middle of the second and third turns.
        // Neither counts as a stop.
        let pauses = [(110, 205), (340, 345), (510, 520), (590, 640)];
        let seen = compare(&turns, &[(700, 710)], &pauses);
        assert_eq!(seen.stops_ns, [10.0, 100.0, 90.0]);
        assert_eq!(seen.resumes_ns, [5.0, 40.0]);
        assert_eq!(seen.busy_ns, 310, "others' time is no turn");
        assert_eq!(seen.overlapped_ns, 10 + 95 + 80 + 10);
    }
}
