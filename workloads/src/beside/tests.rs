//! Compares the emulated core, under a simulated clock, with a shared core.

use super::*;
use proptest::prelude::*;

fn slowdown(text: &str) -> Slowdown {
    text.parse().expect("a good factor")
}

/// A neighbour that alternately runs and pauses, and a clock that advances by `grain_ns` at each
/// look.
#[derive(Clone, Debug)]
struct Turns {
    /// For how long it runs, pauses, runs, and so on. After the last length it stays in the next
    /// state.
    lengths_ns: Vec<Nanos>,
    now_ns: Nanos,
    grain_ns: Nanos,
}

impl Turns {
    /// How long the neighbour has run until this time.
    fn ran_ns(&self, until_ns: Nanos) -> Nanos {
        let (mut from_ns, mut ran_ns, mut runs) = (0, 0, true);
        for length_ns in self.lengths_ns.iter().copied().chain([Nanos::MAX]) {
            let rest_ns = until_ns - from_ns;
            ran_ns += if runs { length_ns.min(rest_ns) } else { 0 };
            if length_ns >= rest_ns {
                break;
            }
            from_ns += length_ns;
            runs = !runs;
        }
        ran_ns
    }

    /// When a shared core would have done this much work, if it started at 0. This is the first
    /// moment at which the time alone plus 1 / factor of the shared time reaches the work.
    fn done_ns(&self, work_ns: Nanos, factor: f64) -> Nanos {
        let done_by = |now_ns: Nanos| {
            let beside = self.ran_ns(now_ns) as f64;
            now_ns as f64 - beside + beside / factor >= work_ns as f64
        };
        let (mut early, mut late) = (0, work_ns * 11);
        while early < late {
            let middle = early + (late - early) / 2;
            if done_by(middle) { late = middle } else { early = middle + 1 }
        }
        late
    }
}

impl Neighbour for Turns {
    fn look(&mut self) -> Reading {
        let reading = Reading { at_ns: self.now_ns, beside_ns: self.ran_ns(self.now_ns) };
        self.now_ns += self.grain_ns;
        reading
    }
}

/// Does this much work and pays the debt. Returns the time of the end, the tally and the counts.
fn work(turns: &Turns, work_ns: Nanos, slowdown: Slowdown) -> (Nanos, Tally, (u64, u64)) {
    let mut core = Slowed::new(slowdown, turns.clone());
    core.neighbour.now_ns = 0;
    core.pass();
    core.neighbour.now_ns = work_ns;
    core.worked();
    while core.wait() {}
    (core.debt.last.at_ns, core.tally(), core.counts())
}

/// Goal: valid factors are parsed and invalid factors are refused. Method: examples of both.
#[test]
fn factors_are_read() {
    for (text, milli) in [("1", 1_000), ("1.5", 1_500), ("2.0004", 2_000), ("10", 10_000)] {
        assert_eq!(slowdown(text), Slowdown { milli });
    }
    assert_eq!(slowdown("1.5").to_string(), "1.5");
    for text in ["", "0.99", "10.1", "-2", "nan", "inf", "1.5x"] {
        assert!(text.parse::<Slowdown>().is_err(), "{text}");
    }
}

/// Goal: pairs are parsed, found by either lane, and printed as written. Method: a core of four
/// lanes and a core of two.
#[test]
fn pairs_are_read() {
    let lanes: Lanes = "0:1,2,3,8:9".parse().expect("well formed");
    assert_eq!(lanes.batches_of(0), [1, 2, 3]);
    assert_eq!((lanes.batches_of(8), lanes.batches_of(1)), (vec![9], vec![]));
    assert_eq!((lanes.request_of(3), lanes.request_of(0)), (Some(0), None));
    assert_eq!(lanes.pairs().collect::<Vec<_>>(), [(0, 1), (0, 2), (0, 3), (8, 9)]);
    assert_eq!(lanes.to_string(), "0:1,2,3,8:9");
}

/// Goal: invalid pairs are refused, and so is a lane that is named twice. Method: examples of each.
#[test]
fn other_texts_are_refused() {
    for text in ["", "0", "0:", ":1", "0-1", "0:1:2", "1,0:2", "0:x", "0:70000", "-1:0"] {
        let error = text.parse::<Lanes>().expect_err(text);
        assert!(error.contains("as in 0:1"), "{error}");
    }
    for text in ["0:0", "0:1,1:2", "0:1,0:2", "0:1,1"] {
        let error = text.parse::<Lanes>().expect_err(text);
        assert!(error.contains("twice"), "{error}");
    }
}

/// Goal: work takes the time that was computed by hand for three cases. Method: work of 3 ms at a
/// slowdown of 1.5. The neighbour runs always, never, and for the first 1.5 ms.
#[test]
fn work_takes_as_long_as_it_should() {
    let turns =
        |lengths_ns: &[Nanos]| Turns { lengths_ns: lengths_ns.to_vec(), now_ns: 0, grain_ns: 100 };
    let done = |lengths_ns| work(&turns(lengths_ns), 3_000_000, slowdown("1.5")).0;
    assert_eq!(done(&[]), 4_500_000);
    assert_eq!(done(&[0]), 3_000_000);
    assert_eq!(done(&[1_500_000]), 3_500_000);
}

/// Goal: time off the lane neither pays nor adds to the debt. Method: `pass` over a stretch with a
/// running neighbour, while a debt is being paid.
#[test]
fn what_is_passed_over_does_not_count() {
    let at = |ns| Reading { at_ns: ns, beside_ns: ns };
    let mut debt = Debt::begin(slowdown("2"), at(0));
    debt.worked(at(1_000));
    debt.waited(at(1_500));
    assert!(!debt.is_paid());
    debt.pass(at(9_000));
    debt.waited(at(9_499));
    assert!(!debt.is_paid(), "1 us is owed, and half of it beside the neighbour");
    debt.waited(at(10_000));
    assert!(debt.is_paid());
}

/// Goal: if a count restarts at 0 or runs ahead of the clock, the debt stays within what the
/// elapsed time allows. Method: both cases.
#[test]
fn strange_counts_are_bounded() {
    let mut debt = Debt::begin(slowdown("3"), Reading { at_ns: 0, beside_ns: 5_000 });
    let stretch = debt.worked(Reading { at_ns: 100, beside_ns: 0 });
    assert_eq!((stretch.beside_ns, debt.is_paid()), (0, true));
    let stretch = debt.worked(Reading { at_ns: 200, beside_ns: 90_000 });
    assert_eq!(stretch, Stretch { long_ns: 100, beside_ns: 100 });
}

proptest! {
    /// Goal: work ends when it would end on a shared core, within one grain. The added time is the
    /// cost of the overlap, including the overlap during waiting. As many instructions are counted
    /// as without a neighbour. Method: any neighbour, work and slowdown. The expected end is found
    /// by bisection.
    #[test]
    fn work_ends_as_on_a_shared_core(
        lengths_ns in proptest::collection::vec(0u64..2_000_000, 0..20),
        work_ns in 1u64..5_000_000,
        milli in 1_000u32..=10_000,
        grain_ns in 20u64..20_000,
    ) {
        let turns = Turns { lengths_ns, now_ns: 0, grain_ns };
        let slowdown = Slowdown { milli };
        let (done_ns, tally, (instructions, cycles)) = work(&turns, work_ns, slowdown);
        let expected_ns = turns.done_ns(work_ns, slowdown.factor());
        prop_assert!(done_ns + 1 >= expected_ns, "{done_ns} before {expected_ns}");
        prop_assert!(done_ns <= expected_ns + grain_ns, "{done_ns} long after {expected_ns}");
        prop_assert_eq!(tally.added_ns, done_ns - work_ns);
        let cost_ns = tally.all.beside_ns as f64 * (1.0 - 1.0 / slowdown.factor());
        prop_assert!((tally.added_ns as f64 - cost_ns).abs() <= grain_ns as f64 + 1.0);
        prop_assert_eq!(cycles, done_ns);
        prop_assert!(instructions + 1 >= work_ns && instructions <= work_ns + grain_ns);
    }

    /// Goal: additional readings change nothing. Method: the same time, read once and in many
    /// stretches.
    #[test]
    fn cuts_do_not_matter(
        stretches in proptest::collection::vec((0u64..1_000_000, 0u64..1_000_000), 1..40),
        milli in 1_000u32..=10_000,
    ) {
        let begin = || Debt::begin(Slowdown { milli }, Reading::default());
        let (mut cut, mut whole) = (begin(), begin());
        let mut now = Reading::default();
        for (long_ns, beside_ns) in stretches {
            now.at_ns += long_ns;
            now.beside_ns += beside_ns.min(long_ns);
            cut.worked(now);
        }
        whole.worked(now);
        prop_assert_eq!(cut.owed, whole.owed);
    }
}
