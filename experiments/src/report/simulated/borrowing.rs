//! Tails and utilisation over load: alone (Figure 5.2), beside an unrestrained batch (5.4), under
//! borrow-idle (5.10) and under all policies (5.11).

use super::super::figure::{Across, Axis, Figure, Mark, Point, Series, Style};
use super::super::scale::{percent, said};
use super::lab::{Lab, panel};
use super::sweep::Sweep;
use crate::record::Scenario;
use simulator::outcome::Outcome;

/// A line in a figure: its name, its look, its outcomes.
struct Line<'a> {
    name: String,
    style: Style,
    outcomes: &'a [Outcome],
}

impl<'a> Line<'a> {
    fn new(name: impl Into<String>, style: Style, outcomes: &'a [Outcome]) -> Self {
        Self { name: name.into(), style, outcomes }
    }

    fn series(&self, sweep: &Sweep<'_>, value: impl Fn(&Outcome) -> f64) -> Series {
        let drawn = sweep.drawable(self.outcomes);
        let points = sweep.rates.iter().zip(&self.outcomes[..drawn]);
        let points = points.map(|(&rps, outcome)| Point::at(rps, value(outcome))).collect();
        Series::new(self.name.clone(), Mark::Line, self.style, points)
    }
}

fn of(scenario: Scenario, outcomes: &[Outcome]) -> Line<'_> {
    Line::new(scenario.title(), scenario.style(), outcomes)
}

fn tail_ms(outcome: &Outcome) -> f64 {
    outcome.quantile_ms(0.99)
}

fn load() -> Across {
    Across::Number(Axis::new("load", "requests a second"))
}

/// p99 above, the core's utilisation below, and what the thesis prints of either.
fn figure(
    lab: &Lab<'_>,
    sweep: &Sweep<'_>,
    (id, title): (&str, &str),
    lines: &[Line<'_>],
    published: [&[(f64, f64)]; 2],
) -> Figure {
    let series = |value: fn(&Outcome) -> f64| -> Vec<Series> {
        lines.iter().map(|line| line.series(sweep, value)).collect()
    };
    let mut figure = lab.figure(id, title, load());
    let mut tails = panel(Axis::new("p99 latency", "ms"), series(tail_ms));
    tails.rules.push(lab.slo_rule());
    let core = Axis::new("utilisation of the core", "2.0 is both lanes always busy");
    figure.panels = vec![tails, panel(core, series(Outcome::utilisation))];
    for (panel, published) in figure.panels.iter_mut().zip(published) {
        if !published.is_empty() {
            panel.series.extend(lab.rings(published));
        }
    }
    let cut = lines.iter().any(|line| sweep.drawable(line.outcomes) < sweep.rates.len());
    if cut {
        figure.made_with += " A line ends where its p99 passes two SLOs.";
    }
    figure
}

/// Figure 5.2.
pub(super) fn percentiles(lab: &Lab<'_>) -> Figure {
    let sweep = &lab.one;
    let alone = |name: &str, style| Line::new(name, style, &sweep.alone);
    let quantiles =
        [("p50", Style::Aqua, 0.5), ("p95", Style::Ochre, 0.95), ("p99", Style::Ink, 0.99)];
    let title = "Alone: the tail turns up long before the lane is full";
    let mut figure = lab.figure("percentiles", title, load());
    let tails = quantiles.map(|(name, style, share)| {
        alone(name, style).series(sweep, |outcome| outcome.quantile_ms(share))
    });
    let mut tails = panel(Axis::new("latency", "ms"), tails.to_vec());
    tails.rules.push(lab.slo_rule());
    tails.series.extend(lab.rings(&[(70.0, 60.0), (100.0, 76.0), (120.0, 100.0)]));
    let busy = alone("request lane", Style::Ink).series(sweep, Outcome::request_lane_utilisation);
    let axis = Axis::new("utilisation of the core", "2.0 is both lanes always busy");
    let mut busy = panel(axis, vec![busy]);
    busy.series.extend(lab.rings(&[(120.0, 0.7)]));
    figure.panels = vec![tails, busy];
    let slo_ns = lab.slo().latency_ns;
    let kept = sweep.alone.iter().take_while(|outcome| outcome.tail_ns(&lab.slo()) <= slo_ns);
    let wall = kept.count().saturating_sub(1);
    figure.reading = format!(
        "The SLO of {} ms holds at {} RPS and no longer at the next point; there the request lane \
         is busy for {} of the time, and the other lane of the core never.",
        lab.parameters().slo_ms,
        said(sweep.rates[wall]),
        percent(sweep.alone[wall].request_lane_utilisation()),
    );
    figure.command = lab.command(&format!("--rps {}", sweep.rates[wall]));
    figure
}

/// Figure 5.4.
pub(super) fn unrestrained(lab: &Lab<'_>) -> Figure {
    let sweep = &lab.one;
    let beside: Vec<(&str, Vec<Outcome>)> = lab
        .parameters()
        .batches
        .iter()
        .map(|(name, batch)| (name.as_str(), sweep.with(Scenario::Unrestrained, batch, lab.slo())))
        .collect();
    // Neither that of the service alone nor that of borrow-idle.
    let styles = Style::ALL.into_iter().skip(2).cycle();
    let mut lines = vec![Line::new(Scenario::None.title(), Style::Ink, &sweep.alone)];
    for ((name, outcomes), style) in beside.iter().zip(styles) {
        lines.push(Line::new(format!("beside {name}"), style, outcomes));
    }
    let names = ("unrestrained", "An unrestrained batch moves the wall");
    let mut figure = figure(lab, sweep, names, &lines, [&[(40.0, 76.0)], &[]]);
    let held = |outcomes: &[Outcome]| {
        let held = outcomes
            .iter()
            .take_while(|outcome| outcome.tail_ns(&lab.slo()) <= lab.slo().latency_ns);
        held.count().checked_sub(1).map_or(0.0, |index| sweep.rates[index])
    };
    let each = beside.iter().map(|(name, outcomes)| match held(outcomes) {
        0.0 => format!("at no point beside {name:?}"),
        rps => format!("up to {} beside {name:?}", said(rps)),
    });
    figure.reading = format!(
        "The service alone keeps the SLO up to {} RPS; with a batch program that nobody restrains \
         {}.",
        said(held(&sweep.alone)),
        each.collect::<Vec<_>>().join(", "),
    );
    figure.command = lab.command(&format!("--rps {} --policy unrestrained", sweep.rates[3]));
    figure
}

/// Figure 5.10: borrow-idle on one core (a) and on seven (b), dynamic-budget on seven (c).
pub(super) fn borrow_idle(lab: &Lab<'_>) -> [Figure; 3] {
    let (name, batch) = lab.batch();
    let with = |sweep: &Sweep<'_>, scenario| sweep.with(scenario, batch, lab.slo());
    let (one, seven) =
        (with(&lab.one, Scenario::BorrowIdle), with(&lab.seven, Scenario::BorrowIdle));
    let dynamic = with(&lab.seven, Scenario::DynamicBudget);
    let names = ("borrow-idle", "borrow-idle on one core: the idle time, and nothing else");
    let mut a = figure(
        lab,
        &lab.one,
        names,
        &[of(Scenario::None, &lab.one.alone), of(Scenario::BorrowIdle, &one)],
        [&[], &[]],
    );
    a.reading = sameness(&lab.one, &one, name);
    a.command = lab.command(&format!("--rps {} --policy borrow-idle", lab.one.rates[7]));
    let names = ("borrow-idle-7", "borrow-idle on seven cores that share a queue");
    let published: [&[(f64, f64)]; 2] = [&[(1000.0, 60.0)], &[]];
    let mut b = figure(
        lab,
        &lab.seven,
        names,
        &[of(Scenario::None, &lab.seven.alone), of(Scenario::BorrowIdle, &seven)],
        published,
    );
    b.reading = sameness(&lab.seven, &seven, name);
    let seven_at = |index: usize, policy: &str| {
        lab.command(&format!("--cores 7 --rps {} {policy}", lab.seven.rates[index]))
    };
    b.command = seven_at(5, "--policy borrow-idle");
    let names = ("dynamic-7", "dynamic-budget on seven cores");
    let lines = [
        of(Scenario::None, &lab.seven.alone),
        of(Scenario::BorrowIdle, &seven),
        of(Scenario::DynamicBudget, &dynamic),
    ];
    let mut c = figure(lab, &lab.seven, names, &lines, [&[], &[(600.0, 1.75)]]);
    let best = peak(&lab.seven, &dynamic);
    c.reading = format!(
        "Lending the tail's headroom as well, each core is used up to {} times, at {} RPS, for {} \
         ms more in p99.",
        said(dynamic[best].utilisation()),
        said(lab.seven.rates[best]),
        said(tail_ms(&dynamic[best]) - tail_ms(&lab.seven.alone[best])),
    );
    c.command = seven_at(
        best,
        &format!("--policy dynamic-budget --budget {}", budget(lab, &lab.seven, best)),
    );
    [a, b, c]
}

fn sameness(sweep: &Sweep<'_>, outcomes: &[Outcome], batch: &str) -> String {
    let drawn = sweep.drawable(outcomes).min(sweep.drawable(&sweep.alone));
    let ratio = |(alone, with): (&Outcome, &Outcome)| tail_ms(with) / tail_ms(alone);
    let worst = sweep.alone.iter().zip(outcomes).take(drawn).map(ratio).fold(0.0, f64::max);
    let least = outcomes[..drawn].iter().map(Outcome::utilisation).fold(2.0, f64::min);
    format!(
        "Beside {batch:?} that naps while requests run, p99 is at most {} times that of the \
         service alone, and the core is used for {} of one lane's time or more.",
        said(worst),
        percent(least),
    )
}

fn peak(sweep: &Sweep<'_>, outcomes: &[Outcome]) -> usize {
    let drawn = 0..sweep.drawable(outcomes).max(1);
    drawn
        .max_by(|&a, &b| outcomes[a].utilisation().total_cmp(&outcomes[b].utilisation()))
        .unwrap_or(0)
}

/// The thesis's budget at a rate, as `--budget` takes it.
fn budget(lab: &Lab<'_>, sweep: &Sweep<'_>, index: usize) -> String {
    let slo = lab.slo();
    format!("{}ns", slo.latency_ns.saturating_sub(sweep.alone[index].tail_ns(&slo)))
}

/// Figure 5.11, with slo-budget.
pub(super) fn policies(lab: &Lab<'_>) -> Figure {
    let (name, batch) = lab.batch();
    let sweep = &lab.one;
    let all = [
        Scenario::None,
        Scenario::BorrowIdle,
        Scenario::FixedBudget,
        Scenario::RefreshBudget,
        Scenario::DynamicBudget,
        Scenario::SloBudget,
    ];
    let outcomes = all.map(|scenario| sweep.with(scenario, batch, lab.slo()));
    let lines: Vec<Line<'_>> =
        all.iter().zip(&outcomes).map(|(&scenario, outcomes)| of(scenario, outcomes)).collect();
    let names = ("policies", "Policies: what the tail's headroom buys");
    let mut figure = figure(lab, sweep, names, &lines, [&[], &[]]);
    let most = |at: usize| said(outcomes[at][peak(sweep, &outcomes[at])].utilisation());
    figure.reading = format!(
        "Beside {name:?} budgets take the core to {} (fixed), {} (refresh) and {} (dynamic) where \
         borrow-idle stops at 1; slo-budget, which is told the SLO and no budget, reaches {}.",
        most(2),
        most(3),
        most(4),
        most(5),
    );
    figure.made_with += " Budgets: the SLO less the p99 without a batch at that load, the thesis's \
        rule; slo-budget finds its own.";
    let at = sweep.rates[7];
    let headroom = budget(lab, sweep, 7);
    figure.command =
        lab.command(&format!("--rps {at} --policy refresh-budget --budget {headroom}"));
    figure
}
