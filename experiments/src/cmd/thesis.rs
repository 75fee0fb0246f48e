//! `elfen lab thesis`: every number that the thesis prints next to the number that the model gives.

use std::io::Write;
use std::process::ExitCode;

use elfen_console::failure::Failure;
use elfen_console::output::print;
use elfen_console::table;
use serde::Serialize;

use simulator::thesis::{self, Basis, Claim};

use super::model_args::DEFAULT_REQUESTS;

/// Compare the model with every number that the thesis prints
#[derive(clap::Args, Debug)]
#[command(after_help = "Example:\n  elfen lab thesis --requests 200000 --json")]
pub(super) struct Args {
    /// Requests of each simulation
    #[arg(long, value_name = "N", default_value_t = DEFAULT_REQUESTS,
        value_parser = clap::value_parser!(u64).range(1..))]
    requests: u64,

    /// The same seed gives the same numbers
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct ThesisRow {
    place: &'static str,
    what: String,
    unit: &'static str,
    claim: &'static str,
    published: f64,
    simulated: f64,
    error: f64,
    basis: &'static str,
    remark: &'static str,
}

#[derive(Serialize)]
struct Thesis {
    seed: u64,
    rows: Vec<ThesisRow>,
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let &Args { requests, seed, json } = args;
    let rows: Vec<ThesisRow> = thesis::rows(requests, seed)
        .into_iter()
        .map(|row| ThesisRow {
            error: row.error(),
            place: row.place,
            what: row.what,
            unit: row.unit,
            claim: match row.claim {
                Claim::About => "about",
                Claim::AtLeast => "at least",
                Claim::AtMost => "at most",
            },
            published: row.published,
            simulated: row.simulated,
            basis: row.basis.name(),
            remark: row.remark,
        })
        .collect();
    let thesis = Thesis { seed, rows };
    print(out, json, &thesis, || thesis.text())?;
    Ok(ExitCode::SUCCESS)
}

impl Thesis {
    fn text(&self) -> String {
        let heading = ["place", "what", "thesis", "model", "error", "remark"];
        let rows: Vec<Vec<String>> = self.rows.iter().map(ThesisRow::cells).collect();
        table::lines(&heading, &rows)
    }
}

impl ThesisRow {
    fn cells(&self) -> Vec<String> {
        let claim = if self.claim == "about" { String::new() } else { format!("{} ", self.claim) };
        let basis = match self.basis {
            basis if basis == Basis::Follows.name() => String::new(),
            basis => format!("{basis}; "),
        };
        vec![
            self.place.to_owned(),
            self.what.clone(),
            format!("{claim}{} {}", self.published, self.unit).trim_end().to_owned(),
            four_digits(self.simulated),
            format!("{:+.1} %", self.error * 100.0),
            format!("{basis}{}", self.remark).trim_end_matches("; ").to_owned(),
        ]
    }
}

fn four_digits(value: f64) -> String {
    let decimals = match value {
        1000.0.. => 0,
        100.0.. => 1,
        10.0.. => 2,
        1.0.. => 3,
        _ => 4,
    };
    format!("{value:.decimals$}")
}
