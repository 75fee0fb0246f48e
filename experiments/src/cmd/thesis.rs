//! `elfen lab thesis`: compares every number that the thesis prints with the number that the model
//! gives.

use std::io::Write;
use std::process::ExitCode;

use elfen_console::failure::Failure;
use elfen_console::output::print;
use elfen_console::table;
use serde::Serialize;

use simulator::thesis;

use super::model_args::DEFAULT_REQUESTS;

/// Compare the model with every number that the thesis prints
#[derive(clap::Args, Debug)]
#[command(after_help = "Example:\n  elfen lab thesis --requests 200000 --json")]
pub(super) struct ThesisArgs {
    /// The number of requests in each simulation
    #[arg(long, value_name = "N", default_value_t = DEFAULT_REQUESTS,
        value_parser = clap::value_parser!(u64).range(1..))]
    requests: u64,

    /// The seed: the same seed gives the same numbers
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct ThesisRow {
    #[serde(flatten)]
    row: thesis::Row,
    error: f64,
}

#[derive(Serialize)]
struct Thesis {
    seed: u64,
    rows: Vec<ThesisRow>,
}

pub(crate) fn run(args: &ThesisArgs, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let &ThesisArgs { requests, seed, json } = args;
    let rows = thesis::rows(requests, seed).into_iter();
    let rows = rows.map(|row| ThesisRow { error: row.error(), row }).collect();
    let thesis = Thesis { seed, rows };
    let cells = |rows: &[ThesisRow]| rows.iter().map(|one| one.row.cells()).collect::<Vec<_>>();
    print(out, json, &thesis, || table::lines(&thesis::HEADING, &cells(&thesis.rows)))?;
    Ok(ExitCode::SUCCESS)
}
