//! What the two programs noted, and what their notes have in common.

use std::fs;
use std::io;
use std::path::Path;

use elfen_console::duration::number;

/// A stretch of time, from and to.
pub(super) type Stretch = (u64, u64);

/// Pairs of words, as the programs write them.
pub(super) fn read(file: &Path) -> io::Result<Vec<Stretch>> {
    let bytes = fs::read(file)?;
    let words: Vec<u64> =
        bytes.as_chunks().0.iter().map(|word| u64::from_ne_bytes(*word)).collect();
    Ok(words.as_chunks().0.iter().map(|&[from, to]| (from, to)).collect())
}

/// In their order, and those that have a part in common as one.
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

/// What is seen of all turns from outside.
#[derive(Clone, Default, Debug)]
pub(super) struct Seen {
    /// Of the lane, with others' time.
    pub(super) busy_ns: u64,
    /// How long the batch ran in that.
    pub(super) overlapped_ns: u64,
    /// From the start of a turn to the batch off its lane for the rest of it; all of the turn if it
    /// was not.
    pub(super) stops_ns: Vec<f64>,
    /// From the end of a turn that the batch was off for to the batch back.
    pub(super) resumes_ns: Vec<f64>,
}

/// All are in their order. While others keep the request lane busy the batch is to be off its lane
/// as well, and overlaps if it is not.
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
        // A moment off its lane in the middle of the second turn is no stop, nor is one in the
        // third.
        let pauses = [(110, 205), (340, 345), (510, 520), (590, 640)];
        let seen = compare(&turns, &[(700, 710)], &pauses);
        assert_eq!(seen.stops_ns, [10.0, 100.0, 90.0]);
        assert_eq!(seen.resumes_ns, [5.0, 40.0]);
        assert_eq!(seen.busy_ns, 310, "others' time is no turn");
        assert_eq!(seen.overlapped_ns, 10 + 95 + 80 + 10);
    }
}
