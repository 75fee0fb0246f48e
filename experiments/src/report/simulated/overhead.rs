//! What borrowing costs the batch (Figure 5.12): its time, its share of its lane, and what it gets
//! done in that.

use super::super::figure::{Across, Axis, Figure, Mark, Point, Series};
use super::super::scale::said;
use super::lab::{Lab, panel};
use crate::record::Scenario;
use simulator::outcome::Outcome;

/// The load among the rates of one core: 80 of the thesis's RPS.
const AT: usize = 7;
/// borrow-idle among the rows.
const BORROW_IDLE: usize = 1;

const ROWS: [Scenario; 6] = [
    Scenario::Unrestrained,
    Scenario::BorrowIdle,
    Scenario::FixedBudget,
    Scenario::RefreshBudget,
    Scenario::DynamicBudget,
    Scenario::SloBudget,
];

pub(super) fn figure(lab: &Lab<'_>) -> Figure {
    let (name, batch) = lab.batch();
    let rps = lab.one.rates[AT];
    let outcomes = ROWS.map(|scenario| lab.one.with(scenario, batch, lab.slo()).swap_remove(AT));
    let share = |outcome: &Outcome| outcome.borrowed_fraction() + outcome.overlapped_fraction();
    let work = |outcome: &Outcome| outcome.batch_work(batch);
    // A batch that gets nothing done takes for ever, which no axis has room for.
    let time = |outcome: &Outcome| (work(outcome) > 0.0).then(|| 1.0 / work(outcome));
    let pace = |outcome: &Outcome| (share(outcome) > 0.0).then(|| work(outcome) / share(outcome));
    let bars = |value: &dyn Fn(&Outcome) -> Option<f64>| {
        let points = outcomes.iter().enumerate();
        let point = |(index, outcome)| Some(Point::at(index as f64, value(outcome)?));
        let style = Scenario::BorrowIdle.style();
        Series::new("simulated", Mark::Bars, style, points.filter_map(point).collect())
    };
    let names = ROWS.map(|scenario| scenario.title().to_owned()).to_vec();
    let x = Across::Names { quantity: "policy".to_owned(), names, one_scale: false };
    let mut figure = lab.figure("overhead", "What borrowing costs the batch", x);
    let published = |value: f64| lab.rings(&[(BORROW_IDLE as f64, value)]);
    let measures: [(&str, &str, Series, Option<Series>); 3] = [
        ("time for the same work", "times that alone", bars(&time), published(1.49)),
        ("part of the lane's time", "", bars(&|outcome| Some(share(outcome))), published(0.5)),
        ("work in a second on the lane", "1: as alone", bars(&pace), published(0.99)),
    ];
    figure.panels = measures
        .into_iter()
        .map(|(what, unit, bars, ring)| {
            panel(Axis::new(what, unit), std::iter::once(bars).chain(ring).collect())
        })
        .collect();
    figure.reading = format!(
        "At {} RPS {name:?} under borrow-idle takes {} times as long as with a lane of its own; \
         budgets bring it nearer, at some loss of pace beside requests.",
        said(rps),
        time(&outcomes[BORROW_IDLE]).map_or("ever".to_owned(), said),
    );
    if lab.parameters().are_of_thesis {
        figure.made_with += " The thesis's 1.49 is the mean of ten programs, some of which left a \
            part of their lane idle when they ran alone; the model's never do.";
    }
    figure.command = lab.command(&format!("--rps {rps} --policy borrow-idle"));
    figure
}
