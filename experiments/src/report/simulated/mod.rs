//! The figures of the thesis's chapter 5, from the simulator.
//!
//! Each figure is made anew from the parameters and the seed; the same two give the same figures.
//! Numbers that the thesis prints stand beside them as rings, as long as the parameters are its.

mod borrowing;
mod histograms;
mod lab;
mod overhead;
mod parameters;
mod sweep;

pub use parameters::{Impossible, Parameters, Simulation};

use super::{Report, Table};
use lab::Lab;
use simulator::thesis;

impl Simulation {
    /// All figures that can be simulated, and how near the model is to the thesis.
    pub fn report(&self) -> Result<Report, Impossible> {
        let lab = Lab::new(self)?;
        let mut figures = vec![histograms::demand(&lab), borrowing::percentiles(&lab)];
        figures.push(borrowing::unrestrained(&lab));
        figures.push(histograms::pauses(&lab));
        figures.extend(borrowing::borrow_idle(&lab));
        figures.push(borrowing::policies(&lab));
        figures.push(overhead::figure(&lab));
        let tables = if self.parameters.are_of_thesis { vec![published(self)] } else { Vec::new() };
        Ok(Report {
            title: "Elfen: the thesis's figures, simulated".to_owned(),
            command: self.command.clone(),
            notes: vec![lab.made_with()],
            tables,
            figures,
            appendix: Vec::new(),
        })
    }
}

/// Every number that the thesis prints, against the model's.
fn published(simulation: &Simulation) -> Table {
    let Simulation { requests, seed, .. } = *simulation;
    let row = |row: thesis::Row| {
        let claim = match row.claim {
            thesis::Claim::About => "",
            thesis::Claim::AtLeast => "≥ ",
            thesis::Claim::AtMost => "≤ ",
        };
        let star = if row.basis == thesis::Basis::Follows { "" } else { "*" };
        vec![
            row.place.to_owned(),
            row.what.clone(),
            format!("{claim}{} {}", row.published, row.unit).trim_end().to_owned(),
            super::scale::short(row.simulated) + star,
            format!("{:+.1} %", row.error() * 100.0),
            row.remark.to_owned(),
        ]
    };
    let head = ["place", "what", "thesis", "simulated", "error", "remark"];
    Table {
        title: "Published and simulated".to_owned(),
        head: head.map(str::to_owned).to_vec(),
        rows: thesis::rows(requests, seed).into_iter().map(row).collect(),
        note: format!(
            "* No evidence: a parameter of the model was fitted to it, or it is built in. Made by \
             elfen lab thesis --requests {requests} --seed {seed}, which says more."
        ),
    }
}
