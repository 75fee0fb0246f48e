//! The published numbers of sections 5.2 and 5.5 of the thesis, next to the model's.
//!
//! This module fits no parameter. The demand and two slowdowns are fitted, in `demand` and
//! `batches`, and the rows that they were fitted to are marked. Rows that any model of this kind
//! meets are marked too. If the model and the thesis differ, the row gives the reason as far as we
//! know it.

use elfen_rt::policy::Policy;
use elfen_rt::policy::slo::Slo;
use serde::Serialize;

use crate::batches::KINDS;
use crate::demand::Demand;
use crate::load::Load;
use crate::outcome::Outcome;
use crate::pair::{Control, PrintedFixedBudget};
use crate::plan::{self, Budgeted};
use crate::source::{Requests, Until};
use crate::time::{MS, milliseconds, real};
use crate::trace::Served;
use crate::{Model, Queue};

/// The SLO of all experiments in the thesis.
const SLO: Slo = Slo { per_million: 990_000, latency_ns: 100 * MS };

/// Whether the thesis gives a value or a bound.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub enum Claim {
    #[serde(rename = "about")]
    About,
    #[serde(rename = "at least")]
    AtLeast,
    #[serde(rename = "at most")]
    AtMost,
}

/// How much a row supports the model, if the model meets the published number.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub enum Basis {
    /// The row supports the model: the result could have been different.
    #[serde(rename = "follows")]
    Follows,
    /// The row supports nothing: a parameter was chosen to meet this number.
    #[serde(rename = "fitted")]
    Fitted,
    /// The row supports nothing: the number results from any parameters.
    #[serde(rename = "built in")]
    BuiltIn,
}

pub const HEADING: [&str; 6] = ["section", "quantity", "thesis", "model", "error", "remark"];

/// One published number.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The section or the figure.
    pub place: &'static str,
    pub what: String,
    pub unit: &'static str,
    pub claim: Claim,
    pub published: f64,
    pub simulated: f64,
    pub basis: Basis,
    /// Why the two numbers differ, or what a reader has to know to compare them.
    pub remark: &'static str,
}

impl Row {
    /// Returns the relative error of the simulation, or 0 within a published bound.
    pub fn error(&self) -> f64 {
        let error = self.simulated / self.published - 1.0;
        match self.claim {
            Claim::About => error,
            Claim::AtLeast => error.min(0.0),
            Claim::AtMost => error.max(0.0),
        }
    }

    /// Returns the cells of this row, in the columns of [`HEADING`].
    pub fn cells(&self) -> Vec<String> {
        let claim = match self.claim {
            Claim::About => "",
            Claim::AtLeast => "at least ",
            Claim::AtMost => "at most ",
        };
        let basis = match self.basis {
            Basis::Follows => "",
            Basis::Fitted => "fitted; ",
            Basis::BuiltIn => "built in; ",
        };
        let decimals = match self.simulated {
            1000.0.. => 0,
            100.0.. => 1,
            10.0.. => 2,
            1.0.. => 3,
            _ => 4,
        };
        vec![
            self.place.to_owned(),
            self.what.clone(),
            format!("{claim}{} {}", self.published, self.unit).trim_end().to_owned(),
            format!("{:.decimals$}", self.simulated),
            format!("{:+.1} %", self.error() * 100.0),
            format!("{basis}{}", self.remark).trim_end_matches("; ").to_owned(),
        ]
    }

    fn fitted(self) -> Self {
        Self { basis: Basis::Fitted, ..self }
    }

    fn built_in(self) -> Self {
        Self { basis: Basis::BuiltIn, ..self }
    }

    fn at_least(self) -> Self {
        Self { claim: Claim::AtLeast, ..self }
    }

    fn at_most(self) -> Self {
        Self { claim: Claim::AtMost, ..self }
    }
}

/// Computes all rows. Each simulation has this number of requests.
pub fn rows(requests: u64, seed: u64) -> Vec<Row> {
    let lab = Lab { requests, seed };
    let mut rows = lab.service_alone();
    rows.extend(lab.interference());
    rows.extend(lab.borrow_idle());
    rows.extend(lab.budgets());
    rows.extend(lab.seven_cores());
    rows
}

struct Lab {
    requests: u64,
    seed: u64,
}

const TYPICAL: usize = 0;
const PAUSE: usize = 1;

/// The loads that the thesis calls moderate. They lie above 40 RPS and below 100 RPS; the wall is
/// at about 120 RPS.
const MODERATE_RPS: [f64; 4] = [50.0, 60.0, 70.0, 80.0];

impl Lab {
    fn model(&self, rps: f64, control: Control) -> Model {
        Model {
            machines: 1,
            cores: 1,
            queue: Queue::Shared,
            requests: Requests::Drawn { load: Load::steady(rps), demand: Demand::Search },
            until: Until::Requests(self.requests),
            batch: KINDS[TYPICAL].batch(),
            control,
            watch: None,
            seed: self.seed,
        }
    }

    fn alone(&self, rps: f64) -> Outcome {
        self.model(rps, Control::NoBatch).run()
    }

    fn p99_ms(&self, rps: f64) -> f64 {
        milliseconds(self.alone(rps).tail_ns(&SLO))
    }

    /// Searches for the highest rate at which p99 is at most `p99_ms`.
    fn rate_at(&self, model: &Model, most_rps: f64, p99_ms: f64) -> f64 {
        let met = |outcome: &Outcome| milliseconds(outcome.tail_ns(&SLO)) <= p99_ms;
        let mut unit = model.clone();
        if let Requests::Drawn { load, .. } = &mut unit.requests {
            *load = Load::steady(1.0);
        }
        plan::highest_load(&unit, most_rps, met).expect("its requests are drawn")
    }

    fn service_alone(&self) -> Vec<Row> {
        let one = self.model(1.0, Control::NoBatch);
        let (mut idle_ns, mut short_ns, mut free_ns) = (0, 0, 0);
        let busy = self.model(120.0, Control::NoBatch).run_into(&mut |served: &Served| {
            let pause_ns = served.started_ns - free_ns;
            idle_ns += pause_ns;
            short_ns += if pause_ns <= 15 * MS { pause_ns } else { 0 };
            free_ns = served.ended_ns;
        });
        let short_part = real(short_ns) / real(idle_ns);
        let (at_60, at_100) = (self.rate_at(&one, 160.0, 60.0), self.rate_at(&one, 160.0, 100.0));
        vec![
            row("5.2", "p99 at 100 RPS", "ms", 76.0, self.p99_ms(100.0), "").fitted(),
            row("5.5", "rate at p99 = 60 ms", "RPS", 70.0, at_60, "").fitted(),
            row("5.2", "wall: rate at p99 = 100 ms", "RPS", 120.0, at_100, ENDLESS).fitted(),
            row("5.4", "wall in 20 runs of 5705", "RPS", 120.0, self.published_wall(), "").fitted(),
            row("Fig. 5.5", "lane busy at 120 RPS", "", 0.71, busy.request_lane_utilisation(), "")
                .fitted(),
            row("Fig. 5.5", "idle time in pauses <= 15 ms", "", 0.53, short_part, ANY_DEMAND)
                .built_in(),
        ]
    }

    /// Searches for the rate at which the median p99 of 20 short runs reaches the SLO.
    fn published_wall(&self) -> f64 {
        let median_p99 = |rps: f64| {
            let run = |seed| {
                let mut model = self.model(rps, Control::NoBatch);
                (model.until, model.seed) = (Until::Requests(5705), self.seed + seed);
                model.run_on(1).tail_ns(&SLO)
            };
            let mut tails: Vec<u64> = (0..20).map(run).collect();
            tails.sort_unstable();
            tails[10]
        };
        let (mut low, mut high) = (80.0, 160.0);
        while high - low > 0.25 {
            let middle = (low + high) / 2.0;
            if median_p99(middle) <= SLO.latency_ns { low = middle } else { high = middle }
        }
        low
    }

    fn interference(&self) -> Vec<Row> {
        let mut shared = self.model(1.0, Control::Unrestrained);
        shared.batch = KINDS[PAUSE].batch();
        let rps = self.rate_at(&shared, 120.0, 76.0);
        let what = "rate at p99 = 76 ms, batch of IPC 0.01";
        vec![row("5.2", what, "RPS", 40.0, rps, "unrestrained").fitted()]
    }

    fn borrow_idle(&self) -> Vec<Row> {
        let borrow = |rps| self.model(rps, Control::Policy(Policy::BorrowIdle)).run();
        let rates = [10.0, 40.0, 80.0, 100.0, 120.0];
        let worst_ms = |rps: f64| milliseconds(borrow(rps).tail_ns(&SLO)) / self.p99_ms(rps);
        let worst = rates.iter().map(|&rps| worst_ms(rps)).fold(0.0, f64::max);
        let least = rates.iter().map(|&rps| borrow(rps).utilisation()).fold(2.0, f64::min);
        let gain = |rps| borrow(rps).utilisation() - self.alone(rps).utilisation();
        let batch = self.model(1.0, Control::NoBatch).batch;
        let slower = 1.0 / borrow(80.0).batch_work(&batch);
        vec![
            row("5.5", "borrow-idle: p99 / p99 alone", "x", 1.0, worst, NOTHING_ELSE).built_in(),
            row("5.5", "borrow-idle: utilisation", "", 0.97, least, ALWAYS_RUNS)
                .at_least()
                .built_in(),
            row("5.5", "borrow-idle: gain at 10 RPS", "", 0.90, gain(10.0), "at low load"),
            row("5.5", "borrow-idle: gain at 120 RPS", "", 0.25, gain(120.0), WON),
            row("Fig. 5.12", "borrow-idle: batch time, 80 RPS", "x", 1.49, slower, BATCH_TIME),
        ]
    }

    /// Returns the highest and the lowest utilisation and the highest p99. The budget is the
    /// thesis's: the SLO minus the p99 without a batch.
    fn highest_utilisation(&self, control: impl Fn(u64) -> Control) -> (f64, f64, f64) {
        let at = |rps: f64| {
            let headroom_ns = SLO.latency_ns.saturating_sub(self.alone(rps).tail_ns(&SLO));
            let outcome = self.model(rps, control(headroom_ns)).run();
            (outcome.utilisation(), milliseconds(outcome.tail_ns(&SLO)))
        };
        let all: Vec<(f64, f64)> = MODERATE_RPS.iter().map(|&rps| at(rps)).collect();
        let most = all.iter().map(|one| one.0).fold(0.0, f64::max);
        let least = all.iter().map(|one| one.0).fold(2.0, f64::min);
        (most, least, all.iter().map(|one| one.1).fold(0.0, f64::max))
    }

    fn budgets(&self) -> Vec<Row> {
        let policy = |kind: Budgeted| move |budget_ns| Control::Policy(kind.with(budget_ns));
        let fixed = self.highest_utilisation(policy(Budgeted::Fixed));
        let refresh = self.highest_utilisation(policy(Budgeted::Refresh));
        let dynamic = self.highest_utilisation(policy(Budgeted::Dynamic));
        let printed = self
            .highest_utilisation(|budget_ns| Control::Printed(PrintedFixedBudget { budget_ns }));
        let least = fixed.1.min(refresh.1).min(dynamic.1);
        let used =
            |what, least, found, remark| row("5.5", what, "", least, found, remark).at_least();
        let tail = |what, found, remark| row("5.5", what, "ms", 100.0, found, remark).at_most();
        vec![
            used("fixed-budget: utilisation", 1.4, fixed.0, FIRST_ALONE),
            used(
                "fixed-budget as printed: utilisation",
                1.4,
                printed.0,
                "exactly the code of Figure 5.9(b)",
            ),
            used("dynamic-budget: utilisation", 1.5, dynamic.0, NO_IPC),
            used("every budget policy: utilisation", 1.2, least, "at 50 to 80 RPS"),
            tail("fixed-budget: p99", fixed.2, ""),
            tail("refresh-budget: p99", refresh.2, ""),
            tail("dynamic-budget: p99", dynamic.2, NO_IPC),
        ]
    }

    fn seven_cores(&self) -> Vec<Row> {
        let seven = |rps, control| Model { cores: 7, ..self.model(rps, control) };
        let dynamic = |rps: f64| {
            let headroom_ns =
                SLO.latency_ns.saturating_sub(seven(rps, Control::NoBatch).run().tail_ns(&SLO));
            seven(rps, Control::Policy(Budgeted::Dynamic.with(headroom_ns))).run()
        };
        let added_ms = |rps: f64| {
            milliseconds(dynamic(rps).tail_ns(&SLO))
                - milliseconds(seven(rps, Control::NoBatch).run().tail_ns(&SLO))
        };
        let rates: Vec<f64> = (4..=11).map(|hundreds| f64::from(hundreds) * 100.0).collect();
        let peak = rates.iter().map(|&rps| (dynamic(rps).utilisation(), rps));
        let peak = peak.fold((0.0, 0.0), |best, one| if one.0 > best.0 { one } else { best });
        let sustained = self.rate_at(&seven(1.0, Control::NoBatch), 1400.0, 60.0);
        let used = dynamic(600.0).utilisation();
        vec![
            row("5.5", "7 cores: rate at p99 = 60 ms", "RPS", 1000.0, sustained, FREE_QUEUE),
            row("5.5", "7 cores, dynamic: utilisation", "", 1.75, used, "at 600 RPS").fitted(),
            row("5.5", "7 cores, dynamic: best rate", "RPS", 600.0, peak.1, LATER),
            row("5.5", "7 cores, dynamic: p99 added", "ms", 20.0, added_ms(600.0), TO_ITS_END),
        ]
    }
}

// The remarks of the rows.
const ANY_DEMAND: &str =
    "random arrivals at 120 RPS result in 1 - 2.8 exp(-1.8) = 0.537 for any demand";
const NOTHING_ELSE: &str =
    "\"essentially the same\"; in the model, a napping batch does not slow requests";
const ALWAYS_RUNS: &str = "0.97 to 1.0; in the model, the batch itself never idles";
const NO_IPC: &str = "refresh-budget with 3 times the budget: in the model, the IPC is exact, \
    constant and known immediately";
const ENDLESS: &str = "over an unlimited number of requests; the thesis measured runs of 5705 \
requests, as in the next row";
const WON: &str = "a gain of 0.25 requires a busy fraction of 0.75; at the wall of section 5.2 it \
is 0.70";
const BATCH_TIME: &str =
    "with half of a core, a batch takes twice the time; so DaCapo alone did not use a whole core";
const FIRST_ALONE: &str = "lends only during the first request of a busy period, as in section \
    5.3.4; with this rule, 1.4 requires a slowdown of 3.5. The code of Figure 5.9(b), in the next \
    row, also lends during requests that waited";
const FREE_QUEUE: &str = "\"as much as 1000\"; the queue costs time in the thesis, but not in the \
model";
const LATER: &str = "cores disturb each other in the thesis, but not in the model";
const TO_ITS_END: &str = "requests of 53 ms run next to the batch until they end, and take 1.5 \
times as long";

fn row(
    place: &'static str,
    what: impl Into<String>,
    unit: &'static str,
    published: f64,
    simulated: f64,
    remark: &'static str,
) -> Row {
    Row {
        place,
        what: what.into(),
        unit,
        claim: Claim::About,
        published,
        simulated,
        basis: Basis::Follows,
        remark,
    }
}
