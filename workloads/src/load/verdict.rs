//! What the self-check says of its runs: each measured figure beside what it should be, and beside
//! theory.

use super::record::Distribution;
use super::theory::{Model, response_mean, response_quantile};
use crate::units::{Nanos, micros};
use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

const TOLERANCE_SHARE: f64 = 0.02;
const TOLERANCE_US: f64 = 20.0;

const QUANTILES: [(&str, f64); 4] = [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p999", 0.999)];
/// The quantiles, and the mean.
const FIGURES: usize = QUANTILES.len() + 1;

/// The figures of one distribution, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Figures([f64; FIGURES]);

impl Figures {
    pub(super) fn of(distribution: &Distribution) -> Self {
        Self::new(|quantile| match quantile {
            Some(quantile) => micros(distribution.quantile_ns(quantile)),
            None => distribution.mean_ns() / 1e3,
        })
    }

    pub(super) fn in_theory(model: Model, load: f64, service_ns: Nanos) -> Self {
        let services = |quantile: Option<f64>| match quantile {
            Some(quantile) => response_quantile(model, load, quantile),
            None => response_mean(model, load),
        };
        Self::new(|quantile| services(quantile) * micros(service_ns))
    }

    fn new(figure: impl Fn(Option<f64>) -> f64) -> Self {
        let quantiles = QUANTILES.iter().map(|(_, quantile)| Some(*quantile));
        let mut figures = [0.0; FIGURES];
        for (slot, quantile) in figures.iter_mut().zip(quantiles.chain([None])) {
            *slot = figure(quantile);
        }
        Self(figures)
    }

    /// How far others are from these, as a rule: the root of the mean square.
    pub(super) fn spread(&self, others: &[Self]) -> Self {
        let mut squares = [0.0; FIGURES];
        for other in others {
            for ((square, this), that) in squares.iter_mut().zip(self.0).zip(other.0) {
                *square += (that - this).powi(2) / others.len() as f64;
            }
        }
        Self(squares.map(f64::sqrt))
    }
}

/// One run, as its rows need it.
#[derive(Debug)]
pub(super) struct Compared {
    pub(super) model: &'static str,
    pub(super) load: f64,
    pub(super) rps: f64,
    pub(super) requests: usize,
    pub(super) theory: Figures,
    /// How far plans of this length are from theory by chance.
    pub(super) chance: Figures,
    pub(super) plan: Figures,
    /// The plan, with the pauses in it.
    pub(super) expected: Figures,
    pub(super) measured: Figures,
}

#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    pub(super) model: &'static str,
    pub(super) load: f64,
    pub(super) rps: f64,
    pub(super) requests: usize,
    pub(super) what: &'static str,
    pub(super) theory_us: f64,
    pub(super) chance_us: f64,
    pub(super) plan_us: f64,
    pub(super) expected_us: f64,
    pub(super) measured_us: f64,
    pub(super) within: bool,
}

impl Compared {
    pub(super) fn rows(&self) -> impl Iterator<Item = Row> {
        let names = QUANTILES.iter().map(|(name, _)| *name).chain(["mean"]);
        names.enumerate().map(|(at, what)| {
            let (expected_us, measured_us) = (self.expected.0[at], self.measured.0[at]);
            let tolerance = (expected_us * TOLERANCE_SHARE).max(TOLERANCE_US);
            Row {
                model: self.model,
                load: self.load,
                rps: self.rps,
                requests: self.requests,
                what,
                theory_us: self.theory.0[at],
                chance_us: self.chance.0[at],
                plan_us: self.plan.0[at],
                expected_us,
                measured_us,
                within: (measured_us - expected_us).abs() <= tolerance,
            }
        })
    }
}

impl Row {
    /// Whether chance explains how far the plan is from theory.
    fn as_in_theory(&self) -> bool {
        // The last term is what the histograms round.
        let explained = 3.0 * self.chance_us + 0.001 * self.theory_us;
        (self.plan_us - self.theory_us).abs() <= explained
    }
}

#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Outcome {
    pub(super) rows: Vec<Row>,
    /// Worst of the six runs.
    pub(super) late_p50_us: f64,
    pub(super) late_p99_us: f64,
    pub(super) late_max_us: f64,
    /// How often and how long generator or service was kept from running, over all six runs.
    pub(super) pauses: usize,
    pub(super) paused_ms: f64,
    pub(crate) passed: bool,
}

impl Outcome {
    pub(super) fn add(&mut self, compared: &Compared, late: &Distribution) {
        let worst = |sofar: &mut f64, ns| *sofar = sofar.max(micros(ns));
        worst(&mut self.late_p50_us, late.quantile_ns(0.5));
        worst(&mut self.late_p99_us, late.quantile_ns(0.99));
        worst(&mut self.late_max_us, late.max_ns());
        self.rows.extend(compared.rows());
        self.passed = self.rows.iter().all(|row| row.within);
    }

    pub(crate) fn table(&self) -> String {
        let mut table = Table::new();
        table.load_style(presets::NOTHING);
        table.set_header([
            "model",
            "load",
            "requests",
            "",
            "theory us",
            "+- us",
            "plan us",
            "with pauses",
            "measured us",
            "off us",
            "",
        ]);
        for row in &self.rows {
            table.add_row([
                row.model.to_owned(),
                format!("{:.0} %", row.load * 100.0),
                row.requests.to_string(),
                row.what.to_owned(),
                format!("{:.0}", row.theory_us),
                format!("{:.0}", row.chance_us),
                format!("{:.0}", row.plan_us),
                format!("{:.0}", row.expected_us),
                format!("{:.0}", row.measured_us),
                format!("{:+.0}", row.measured_us - row.expected_us),
                if row.within { "ok" } else { "OFF" }.to_owned(),
            ]);
        }
        for column in [1, 2, 4, 5, 6, 7, 8, 9] {
            if let Some(column) = table.column_mut(column) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        format!("{table}\n{}", self.summary())
    }

    fn summary(&self) -> String {
        let as_in_theory = self.rows.iter().filter(|row| row.as_in_theory()).count();
        let verdict = if self.passed {
            "passed: every figure is within 2 % or 20 us of its plan with the pauses"
        } else {
            "FAILED: a figure is off by more than 2 % and 20 us"
        };
        format!(
            "send schedule's error (worst run): p50 {:.1} us, p99 {:.1} us, max {:.1} us\n\
             generator or service was kept from running {} times, {:.0} ms in all\n\
             of {} figures of the plans, {as_in_theory} are as close to theory as chance allows (3 \
             times +-)\n{verdict}",
            self.late_p50_us,
            self.late_p99_us,
            self.late_max_us,
            self.pauses,
            self.paused_ms,
            self.rows.len(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compared(expected: f64, measured: f64) -> Vec<bool> {
        let all = |figure| Figures([figure; FIGURES]);
        let compared = Compared {
            model: "M/D/1",
            load: 0.3,
            rps: 75.0,
            requests: 1,
            theory: all(0.0),
            chance: all(0.0),
            plan: all(0.0),
            expected: all(expected),
            measured: all(measured),
        };
        compared.rows().map(|row| row.within).collect()
    }

    /// Goal: a figure is off beyond 2 % and 20 us, to either side. Method: at the borders of both.
    #[test]
    fn tolerances_hold() {
        for (expected, measured, within) in [
            (4_000.0, 4_080.0, true),
            (4_000.0, 4_081.0, false),
            (4_000.0, 3_919.0, false),
            (500.0, 520.0, true),
            (500.0, 521.0, false),
        ] {
            assert_eq!(compared(expected, measured), [within; FIGURES], "{measured}/{expected}");
        }
    }

    /// Goal: spread and figures are what they say. Method: known ones.
    #[test]
    fn figures_are_those_of_the_distribution() {
        let mut distribution = Distribution::default();
        (1..=1_000).for_each(|us| distribution.record(us * 1_000));
        let figures = Figures::of(&distribution);
        for (got, expected) in figures.0.into_iter().zip([500.0, 900.0, 990.0, 999.0, 500.5]) {
            assert!((got / expected - 1.0).abs() < 0.001, "{got} for {expected}");
        }
        let zero = Figures([0.0; FIGURES]);
        let spread = zero.spread(&[Figures([3.0; FIGURES]), Figures([1.0; FIGURES])]);
        assert!(spread.0.iter().all(|spread| (spread - 5.0_f64.sqrt()).abs() < 1e-9));
    }
}
