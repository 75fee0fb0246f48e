//! What `elfen lab bench batch` says: one JSON object, or tables.

use elfen_console::duration::{self, number};
use elfen_console::table;
use elfen_rt::clock::nanos;
use elfen_run::poll_timing::PollReport;
use serde::Serialize;

use crate::bench::batch::{Alone, Case, Compared, GUARD, Measured, Order, Pair, Shared, TOO_SHORT};
use crate::bench::distribution::at;

#[derive(Debug, Serialize)]
pub(super) struct Report {
    program: Vec<String>,
    lanes: String,
    #[serde(flatten)]
    looked: PollReport,
    learn_ns: u64,
    rows: Vec<Row>,
    slowdown: Option<Slowdown>,
    /// Why there is none.
    no_slowdown: Option<String>,
    /// Nothing without runs alone.
    alone: Option<RanAlone>,
    compared: Vec<Outputs>,
}

#[derive(Debug, Serialize)]
struct Row {
    /// As it was asked for, and what that came to.
    inject: String,
    used: String,
    turn_ns: u64,
    turns: usize,
    runs: usize,
    /// Once the program was learned.
    busy_ns: u64,
    overlapped_ns: u64,
    percent: Option<f64>,
    whole_busy_ns: u64,
    whole_overlapped_ns: u64,
    whole_percent: Option<f64>,
    reported_ns: Option<u64>,
    reported_percent: Option<f64>,
    /// What was reported of whole runs is within a tenth of what was traced of them, or a
    /// thousandth of the busy time.
    agrees: Option<bool>,
    reaction_ns: Option<Reaction>,
    /// The batch on its lane again in the middle of a turn.
    let_in: LetIn,
}

#[derive(Debug, Serialize)]
struct LetIn {
    n: usize,
    longest_ns: u64,
}

#[derive(Debug, Serialize)]
struct Reaction {
    p50: f64,
    p90: f64,
    p99: f64,
    n: usize,
}

/// Times of whole runs, each with its neighbour's under the guard as 1.
#[derive(Debug, PartialEq, Serialize)]
struct Slowdown {
    median: f64,
    min: f64,
    max: f64,
    /// The same of the time that the batch itself ran, in the median: what is missing to the
    /// whole was taken from it. Nothing where the kernel counted nothing.
    own: Option<f64>,
    n: usize,
}

#[derive(Debug, Serialize)]
struct RanAlone {
    wall_ns: u64,
    exit_status: u8,
    /// Nothing if two runs were the same.
    differed: Option<String>,
}

#[derive(Debug, Serialize)]
struct Outputs {
    inject: String,
    runs: usize,
    different: usize,
    first_difference: Option<String>,
}

impl Report {
    pub(super) fn of(order: &Order<'_>, looked: PollReport, measured: &Measured) -> Self {
        let words = order.words.iter().map(|word| word.to_string_lossy().into_owned());
        let (request, batch) = order.lanes;
        let slowdown = slowdown(&measured.pairs);
        let alone = measured.alone.as_ref();
        Self {
            program: words.collect(),
            lanes: format!("{request}:{batch}"),
            looked,
            learn_ns: nanos(order.learn),
            rows: measured.cases.iter().map(row).collect(),
            no_slowdown: slowdown.is_none().then(|| no_slowdown(order, alone)),
            slowdown,
            alone: alone.map(|alone| RanAlone {
                wall_ns: nanos(alone.wall),
                exit_status: alone.status,
                differed: alone.unlike.clone(),
            }),
            compared: measured.compared.iter().map(outputs).collect(),
        }
    }

    /// What the user should know besides.
    pub(super) fn doubts(&self) -> Vec<String> {
        let mut doubts = Vec::new();
        if self.rows.iter().any(|row| row.busy_ns == 0) {
            let learn = duration::show(self.learn_ns);
            doubts.push(format!(
                "the program ends within the {learn} that are not counted, or nearly so: see \
                 --learn"
            ));
        }
        doubts
    }

    /// Who did not do the same as alone.
    pub(super) fn different(&self) -> Option<String> {
        let wrong = |outputs: &&Outputs| outputs.different > 0;
        let say = |Outputs { inject, runs, different, first_difference }: &Outputs| {
            let first = first_difference.as_deref().unwrap_or_default();
            format!("--inject {inject}: {different} of {runs} runs differ ({first})")
        };
        let all: Vec<String> = self.compared.iter().filter(wrong).map(say).collect();
        (!all.is_empty()).then(|| all.join("; "))
    }

    pub(super) fn text(&self) -> String {
        let heading = [
            "inject",
            "turn",
            "turns",
            "% traced",
            "% whole",
            "% reported",
            "agree",
            "us to stop",
            "p90",
            "p99",
            "stopped",
            "let in",
            "us at most",
        ];
        let rows: Vec<Vec<String>> = self.rows.iter().map(cells).collect();
        let mut text = table::lines(&heading, &rows);
        text += &format!("\nwhole runs on an idle lane: {}\n", self.slowdown_text());
        text += &format!("output and exit status: {}\n", self.outputs_text());
        text
    }

    fn slowdown_text(&self) -> String {
        match (&self.slowdown, &self.no_slowdown) {
            (Some(Slowdown { median, min, max, own, n }), _) => {
                let own = own.map(|own| format!("; the program itself ran {own:.3} x as long"));
                let own = own.unwrap_or_default();
                format!("{median:.3} x that of the guard ({min:.3} to {max:.3}), {n} pairs{own}")
            }
            (None, why) => why.clone().unwrap_or_default(),
        }
    }

    fn outputs_text(&self) -> String {
        match &self.alone {
            None => "not compared, as --rounds is 0".to_owned(),
            Some(RanAlone { differed: Some(why), .. }) => {
                format!("not compared, as two runs alone differ: {why}")
            }
            Some(_) => {
                let say = |Outputs { inject, runs, different, .. }: &Outputs| match different {
                    0 => format!("as alone in {runs} runs under {inject}"),
                    _ => format!("NOT as alone in {different} of {runs} runs under {inject}"),
                };
                self.compared.iter().map(say).collect::<Vec<_>>().join(", ")
            }
        }
    }
}

fn outputs(compared: &Compared) -> Outputs {
    let Compared { inject, runs, different, first_difference } = compared;
    Outputs {
        inject: inject.clone(),
        runs: *runs,
        different: *different,
        first_difference: first_difference.clone(),
    }
}

fn row(case: &Case) -> Row {
    let Shared { busy_ns, overlapped_ns } = case.seen.learned;
    let whole = case.seen.whole;
    let percent = |part: u64, of: u64| {
        (of > 0).then(|| (number(part) / number(of) * 100_000.0).round() / 1000.0)
    };
    let agrees = |reported_ns: u64| {
        let apart_ns = reported_ns.abs_diff(whole.overlapped_ns);
        apart_ns <= (whole.overlapped_ns / 10).max(whole.busy_ns / 1000)
    };
    Row {
        inject: case.inject.clone(),
        used: case.used.clone(),
        turn_ns: nanos(case.turn),
        turns: case.seen.turns,
        runs: case.runs,
        busy_ns,
        overlapped_ns,
        percent: percent(overlapped_ns, busy_ns),
        whole_busy_ns: whole.busy_ns,
        whole_overlapped_ns: whole.overlapped_ns,
        whole_percent: percent(whole.overlapped_ns, whole.busy_ns),
        reported_ns: case.reported_ns,
        reported_percent: case.reported_ns.and_then(|ns| percent(ns, whole.busy_ns)),
        agrees: case.reported_ns.map(agrees),
        reaction_ns: reaction(&case.seen.reactions_ns),
        let_in: LetIn {
            n: case.seen.let_in_ns.len(),
            longest_ns: case.seen.let_in_ns.iter().copied().max().unwrap_or(0),
        },
    }
}

fn reaction(reactions_ns: &[u64]) -> Option<Reaction> {
    let mut sorted: Vec<f64> = reactions_ns.iter().map(|&ns| number(ns)).collect();
    sorted.sort_unstable_by(f64::total_cmp);
    let [p50, p90, p99] =
        [50, 90, 99].map(|percent| (!sorted.is_empty()).then(|| at(&sorted, percent)));
    Some(Reaction { p50: p50?, p90: p90?, p99: p99?, n: sorted.len() })
}

fn slowdown(pairs: &[Pair]) -> Option<Slowdown> {
    let thousandths = |ratio: f64| (ratio * 1000.0).round() / 1000.0;
    let ratio = |chosen: u64, guard: u64| number(chosen) / number(guard.max(1));
    let walls = pairs.iter().map(|pair| ratio(pair.chosen.wall_ns, pair.guard.wall_ns));
    let (min, median, max) = middle(walls.collect())?;
    let ran = |pair: &Pair| Some(ratio(pair.chosen.ran_ns?, pair.guard.ran_ns?));
    let own = pairs.iter().map(ran).collect::<Option<Vec<f64>>>().and_then(middle);
    let own = own.map(|(_, median, _)| thousandths(median));
    let [median, min, max] = [median, min, max].map(thousandths);
    Some(Slowdown { median, min, max, own, n: pairs.len() })
}

/// The least, the median and the most.
fn middle(mut of: Vec<f64>) -> Option<(f64, f64, f64)> {
    of.sort_unstable_by(f64::total_cmp);
    let (first, last) = (*of.first()?, *of.last()?);
    let middle = &of[(of.len() - 1) / 2..=of.len() / 2];
    Some((first, middle.iter().sum::<f64>() / if middle.len() == 2 { 2.0 } else { 1.0 }, last))
}

fn no_slowdown(order: &Order<'_>, alone: Option<&Alone>) -> String {
    match alone {
        None => "not measured, as --rounds is 0".to_owned(),
        Some(alone) if alone.wall < TOO_SHORT => {
            let wall = duration::show(nanos(alone.wall));
            format!("not measured, as the program is too short for it: {wall} alone")
        }
        Some(_) if order.inject == GUARD => {
            "not measured, as there is the guard alone: give another --inject".to_owned()
        }
        Some(_) => "not measured".to_owned(),
    }
}

fn cells(row: &Row) -> Vec<String> {
    let percent = |part: Option<f64>| part.map_or("-".to_owned(), |part| format!("{part:.2}"));
    let us = |of: fn(&Reaction) -> f64| {
        let times = row.reaction_ns.as_ref();
        times.map_or("-".to_owned(), |times| format!("{:.0}", of(times) / 1000.0))
    };
    let inject = match row.inject == row.used {
        true => row.inject.clone(),
        false => format!("{}: {}", row.inject, row.used),
    };
    let agrees = row.agrees.map_or("-", |agrees| if agrees { "yes" } else { "no" });
    vec![
        inject,
        duration::show(row.turn_ns),
        row.turns.to_string(),
        percent(row.percent),
        percent(row.whole_percent),
        percent(row.reported_percent),
        agrees.to_owned(),
        us(|times| times.p50),
        us(|times| times.p90),
        us(|times| times.p99),
        row.reaction_ns.as_ref().map_or(0, |times| times.n).to_string(),
        row.let_in.n.to_string(),
        format!("{:.0}", number(row.let_in.longest_ns) / 1000.0),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::batch::{Seen, Whole};
    use std::time::Duration;

    fn case() -> Case {
        Case {
            inject: "auto".to_owned(),
            turn: Duration::from_micros(200),
            seen: Seen {
                learned: Shared { busy_ns: 1_000_000, overlapped_ns: 125_000 },
                whole: Shared { busy_ns: 2_000_000, overlapped_ns: 500_000 },
                turns: 5,
                reactions_ns: (1..=100).map(|us| us * 1000).rev().collect(),
                let_in_ns: vec![7_000, 240_000],
                any_request: true,
            },
            used: "patch".to_owned(),
            reported_ns: Some(540_000),
            runs: 1,
        }
    }

    /// Goal: a row says what was measured. Method: figures made up, and their cells.
    #[test]
    fn figures_are_shares_of_the_busy_time() {
        let cells = cells(&row(&case())).join(" ");
        assert_eq!(cells, "auto: patch 200 us 5 12.50 25.00 27.00 yes 50 90 99 100 2 240");
        let far = Case { reported_ns: Some(560_000), ..case() };
        assert_eq!(row(&far).agrees, Some(false));
        let nothing = Case { seen: Seen::default(), reported_ns: None, ..case() };
        let cells = super::cells(&row(&nothing)).join(" ");
        assert_eq!(cells, "auto: patch 200 us 0 - - - - - - - 0 0 0");
    }

    #[test]
    fn a_slowdown_is_the_middle_of_all_pairs() {
        let whole = |wall_ns, ran_ns| Whole { wall_ns, ran_ns };
        let guard = whole(1000, Some(800));
        let pair = |wall_ns| Pair { chosen: whole(wall_ns, Some(wall_ns - 100)), guard };
        assert_eq!(slowdown(&[]), None);
        let of = |median, min, max, own, n| Some(Slowdown { median, min, max, own, n });
        assert_eq!(slowdown(&[1300, 1100, 900].map(pair)), of(1.1, 0.9, 1.3, Some(1.25), 3));
        assert_eq!(slowdown(&[1300, 1100].map(pair)), of(1.2, 1.1, 1.3, Some(1.375), 2));
        let uncounted = Pair { chosen: whole(1300, None), guard };
        assert_eq!(slowdown(&[uncounted]), of(1.3, 1.3, 1.3, None, 1));
    }

    /// Goal: a run that does something else than alone is named. Method: one of two injections
    /// that did.
    #[test]
    fn differences_are_named() {
        let outputs = |inject: &str, different| Compared {
            inject: inject.to_owned(),
            runs: 7,
            different,
            first_difference: (different > 0).then(|| "exit status 2 instead of 0".to_owned()),
        };
        let measured = |different| Measured {
            alone: Some(Alone { wall: Duration::from_secs(1), status: 0, unlike: None }),
            cases: vec![case()],
            pairs: Vec::new(),
            compared: vec![outputs("guard", 0), outputs("auto", different)],
        };
        let order = Order {
            lanes: (0, 1),
            words: &["x".into()],
            inject: "auto",
            options: &[],
            turns: &[],
            seconds: 1,
            learn: Duration::ZERO,
            rounds: 1,
        };
        let report = |different| Report::of(&order, PollReport::default(), &measured(different));
        assert_eq!(report(0).different(), None);
        let why = "--inject auto: 2 of 7 runs differ (exit status 2 instead of 0)";
        assert_eq!(report(2).different().as_deref(), Some(why));
        let text = report(2).text();
        let says = "as alone in 7 runs under guard, NOT as alone in 2 of 7 runs under auto\n";
        assert!(text.ends_with(says), "{text}");
    }
}
