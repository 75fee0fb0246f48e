//! The report as a person reads it.

use super::report::{Latency, LatencyCi, Report};
use crate::units::show_us;
use comfy_table::{CellAlignment, Table, presets};

impl Report {
    pub(crate) fn table(&self) -> String {
        let mut text = format!(
            "{} ({}), {} arrivals, {} connections, pipeline {}, {} queries\n",
            self.target,
            self.protocol,
            self.arrivals,
            self.connections,
            self.pipeline,
            self.queries
        );
        text += &format!(
            "rate: {:.1} rps intended, {:.1} rps achieved; {} requests, {} errors; seed {}\n",
            self.intended_rps, self.achieved_rps, self.requests, self.errors, self.seed
        );
        text += &format!("{}\n", self.latencies());
        if self.invocations.len() > 1 {
            text += &format!("{}\n", self.by_invocation());
        }
        let late = self.late_us;
        text += &format!(
            "send schedule's error: p50 {}, p99 {}, max {}\n",
            show_us(late.p50),
            show_us(late.p99),
            show_us(late.max)
        );
        if let Some(search) = &self.search {
            text += &format!("highest rate with {}: {:.1} rps\n", search.slo, search.highest_rps);
            for probe in &search.probes {
                text += &format!(
                    "  {:10.1} rps: {} {} ({:.3} % missed)\n",
                    probe.rps,
                    show_us(probe.latency_us),
                    if probe.met { "met" } else { "missed" },
                    probe.missed_share * 100.0
                );
            }
        }
        for warning in &self.warnings {
            text += &format!("warning: {warning}\n");
        }
        text
    }

    fn latencies(&self) -> Table {
        let mut table = table(&["", "p50", "p90", "p99", "p99.9", "max", "mean"]);
        let one = self.invocations.len() == 1;
        let name = if one { "latency" } else { "latency, median of invocations" };
        table.add_row(row(name.to_owned(), &self.latency_us));
        if let Some(ci) = &self.latency_us_ci95 {
            table.add_row(ci_row(ci));
        }
        if let [only] = self.invocations.as_slice() {
            for (name, reported) in [("in queue", only.queue_us), ("in service", only.service_us)] {
                if let Some(reported) = reported {
                    table.add_row(row(name.to_owned(), &reported));
                }
            }
        }
        table
    }

    fn by_invocation(&self) -> Table {
        let mut table = table(&["invocation, seed", "p50", "p90", "p99", "p99.9", "max", "mean"]);
        for (number, one) in self.invocations.iter().enumerate() {
            table.add_row(row(format!("{number}, {}", one.seed), &one.latency_us));
        }
        table
    }
}

fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(header);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn row(name: String, of: &Latency) -> Vec<String> {
    [name].into_iter().chain(of.figures().map(show_us)).collect()
}

fn ci_row(of: &LatencyCi) -> Vec<String> {
    let shown = of.figures().map(|[low, high]| format!("{} .. {}", show_us(low), show_us(high)));
    ["  95 % confidence".to_owned()].into_iter().chain(shown).collect()
}
