//! A picture of the pipeline: instructions in rows, cycles in columns.

use elfen_core_model::machine::Machine;
use elfen_core_model::pipeline::{self, Fetched, NEVER};
use elfen_core_model::trace::Trace;
use elfen_core_model::truth::{Sites, Truth};
use serde::Serialize;

use crate::core_report::TraceNames;

/// Rows and columns of a picture.
const ROWS_MAX: usize = 60;
const COLUMNS: u64 = 66;
const LABEL_COLUMNS: usize = 30;
/// Executions of the chosen instruction that are drawn.
const ITERATIONS: u64 = 2;

/// Why nothing can be drawn.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum PictureError {
    /// No instruction that ran is at this address or in this function.
    Unknown,
}

#[derive(Serialize, Debug)]
pub(crate) struct Picture {
    machine: String,
    /// The instruction that begins an iteration.
    from: String,
    /// Cycles that one column stands for.
    cycles_per_column: u64,
    rows: Vec<PictureRow>,
    /// There were more instructions in the last iteration.
    is_cut: bool,
}

#[derive(Serialize, Debug)]
struct PictureRow {
    address: u64,
    name: String,
    aborted: bool,
    cells: String,
}

impl Picture {
    /// Draws the executions of an instruction from the middle of the trace, or of the one in a
    /// function that is in progress longest.
    pub(crate) fn of(
        trace: &Trace,
        machine: &Machine,
        names: &TraceNames,
        wanted: &str,
    ) -> Result<Self, PictureError> {
        let sites = Sites::new(trace);
        let mut truth = Truth::new(&sites);
        pipeline::run(trace, machine, |fetched| truth.see(fetched));
        let truth = truth.finish();
        let address = wanted.strip_prefix("0x").and_then(|hex| u64::from_str_radix(hex, 16).ok());
        let is_meant = |site: &usize| {
            let Some(found) = sites.site(*site) else { return false };
            match address {
                Some(address) => found.pc == address,
                None => names.function(trace, found).as_deref() == Some(wanted),
            }
        };
        let ran = (0..sites.len()).filter(|&site| truth[site].retired > 0);
        let chosen = ran.filter(is_meant).max_by_key(|&site| truth[site].in_progress);
        let chosen = chosen.ok_or(PictureError::Unknown)?;
        let first = truth[chosen].retired / 2;
        let mut seen = 0;
        let mut drawn: Vec<Fetched> = Vec::new();
        let mut is_cut = false;
        pipeline::run(trace, machine, |fetched| {
            let is_start = fetched.abort.is_none() && sites.of(fetched.instruction) == chosen;
            seen += u64::from(is_start);
            if seen > first && seen <= first + ITERATIONS {
                is_cut |= drawn.len() == ROWS_MAX;
                if drawn.len() < ROWS_MAX {
                    drawn.push(*fetched);
                }
            }
        });
        let start = drawn.iter().map(|one| one.times.fetch).min().unwrap_or(0);
        let last = |one: &Fetched| match one.abort {
            Some((_, at)) => at,
            None => one.times.retire,
        };
        let end = drawn.iter().map(last).max().unwrap_or(start);
        let scale = (end - start + 1).div_ceil(COLUMNS).max(1);
        let row = |one: &Fetched| {
            let site = sites.site(sites.of(one.instruction));
            PictureRow {
                address: one.pc,
                name: site.map_or(String::new(), |site| names.of(trace, site)),
                aborted: one.abort.is_some(),
                cells: cells(one, start, scale),
            }
        };
        let from = sites.site(chosen).map_or(String::new(), |site| names.of(trace, site));
        Ok(Self {
            machine: machine.name.clone(),
            from,
            cycles_per_column: scale,
            rows: drawn.iter().map(row).collect(),
            is_cut,
        })
    }

    pub(crate) fn text(&self) -> String {
        let cycles = match self.cycles_per_column {
            1 => "a column is one cycle".to_owned(),
            cycles => format!("a column is {cycles} cycles"),
        };
        let mut text = format!(
            "{} on the core {}: {cycles}\n\
             F fetch  M map  I issue  C completion  R retire  x abort  . waits  = executes\n\n",
            self.from, self.machine,
        );
        for row in &self.rows {
            let name = shortened(&row.name);
            text += format!("{name:LABEL_COLUMNS$} {}", row.cells).trim_end();
            text.push('\n');
        }
        if self.is_cut {
            text += &format!("only the first {ROWS_MAX} instructions are drawn\n");
        }
        text
    }
}

/// The end of a name tells more: it has the distance from the start of the function.
fn shortened(name: &str) -> String {
    let letters = name.chars().count();
    match letters.checked_sub(LABEL_COLUMNS) {
        None | Some(0) => name.to_owned(),
        Some(more) => "…".chars().chain(name.chars().skip(more + 1)).collect(),
    }
}

fn cells(one: &Fetched, start: u64, scale: u64) -> String {
    let column = |at: u64| usize::try_from((at - start) / scale).unwrap_or(usize::MAX);
    let times = &one.times;
    let end = match one.abort {
        Some((_, at)) => at,
        None => times.retire,
    };
    let mut cells = vec![' '; column(end) + 1];
    let executes = if times.issue == NEVER { end } else { times.issue };
    let completes = times.completion.min(end);
    for (from, to, letter) in
        [(times.fetch, executes, '.'), (executes, completes, '='), (completes, end, '.')]
    {
        if from <= to {
            cells[column(from)..=column(to)].fill(letter);
        }
    }
    let last = if one.abort.is_some() { 'x' } else { 'R' };
    for (at, letter) in [
        (end, last),
        (times.completion, 'C'),
        (times.issue, 'I'),
        (times.map, 'M'),
        (times.fetch, 'F'),
    ] {
        // Loads can retire before their data is there.
        if at <= end {
            cells[column(at)] = letter;
        }
    }
    cells.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use elfen_core_model::synthetic::three_loops;

    #[test]
    fn a_loop_is_drawn_in_columns() {
        let trace = three_loops(50, 1);
        let machine = Machine::built_in("21264").unwrap();
        let names = TraceNames::read(&trace);
        let picture = Picture::of(&trace, &machine, &names, "0x410000").unwrap();
        // Two iterations of seven instructions.
        assert_eq!(picture.rows.len(), 14);
        let text = picture.text();
        assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
        for row in &picture.rows {
            let order: Vec<usize> =
                "FMIR".chars().filter_map(|letter| row.cells.find(letter)).collect();
            assert!(order.is_sorted() && order.len() >= 3, "{}", row.cells);
        }
        assert_eq!(
            Picture::of(&trace, &machine, &names, "nothing").unwrap_err(),
            PictureError::Unknown
        );
    }

    #[test]
    fn long_names_keep_their_ends() {
        let name = "a_function_with_a_long_name_in_a_library+0x123";
        assert_eq!(shortened(name).chars().count(), LABEL_COLUMNS);
        assert!(shortened(name).ends_with("+0x123"));
        assert_eq!(shortened("main"), "main");
    }
}
