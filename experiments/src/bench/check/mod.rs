//! What a check costs, for each way to have one: small programs with and without, on one CPU, in
//! turns.
//!
//! The programs are built here and now, as users build theirs. They run as the batch of a run whose
//! request lane idles all the time, by a page of a service that no other process knows; so what is
//! measured is the fast path. Each round runs every kind once, and a kind is held against the plain
//! program of the same round, because a shared machine drifts more than a check costs.

mod built;
mod error;
mod kind;
mod run;

use elfen_console::duration::number;

use built::{Built, Folder, PROGRAMS, Printed};
pub(crate) use error::Error;
pub(crate) use kind::{KINDS, Kind};
use run::Run;

/// What a kind of check adds to a program.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cost {
    pub(crate) program: &'static str,
    pub(crate) kind: &'static Kind,
    pub(crate) added_ns_per_call: f64,
    /// Its time by that of the plain program.
    pub(crate) slowdown: f64,
    /// Exact, where callgrind counted them.
    pub(crate) added_instructions_per_call: Option<f64>,
}

#[derive(Debug)]
pub(crate) struct Costs {
    pub(crate) checks: Vec<Cost>,
    /// Kinds that this compiler can't build, and why.
    pub(crate) skipped: Vec<(&'static Kind, String)>,
    /// Why there are no instruction counts, if so.
    pub(crate) not_counted: Option<String>,
}

/// Instructions are counted in this program alone: a run under callgrind takes half a second.
const COUNTED: &str = "calls";

/// Builds everything, then measures on `cpu`.
pub(crate) fn measure(cpu: u32, rounds: u32) -> Result<Costs, Error> {
    let library = elfen_instrument::find_library()?;
    let folder = Folder::new().map_err(Error::Folder)?;
    let plain = Built::plain(&folder)?;
    let checks = Built::counting(&folder)?;
    let (mut built, mut skipped) = (Vec::new(), Vec::new());
    for kind in &KINDS {
        match Built::new(&folder, kind) {
            Ok(program) => built.push((kind, program)),
            Err(Error::Compiler { message, .. }) => skipped.push((kind, message)),
            Err(error) => return Err(error),
        }
    }
    let run = Run::new(cpu, library, folder.returning()?)?;
    let mut costs = Vec::new();
    for program in PROGRAMS {
        let calls = checks.run(&run, program, None)?.checks;
        costs.extend(of_program(&run, program, calls, rounds, &plain, &built)?);
    }
    let not_counted = count_instructions(&run, &mut costs, &plain, &built, &checks)?;
    Ok(Costs { checks: costs, skipped, not_counted })
}

/// Every kind of one program, in turns with the plain one.
fn of_program(
    run: &Run,
    program: &'static str,
    calls: u64,
    rounds: u32,
    plain: &Built,
    built: &[(&'static Kind, Built)],
) -> Result<Vec<Cost>, Error> {
    let expected = plain.run(run, program, None)?.computed;
    let mut pairs: Vec<Vec<(u64, u64)>> = vec![Vec::new(); built.len()];
    for _ in 0..rounds {
        for ((kind, with), pairs) in built.iter().zip(&mut pairs) {
            let without = plain.run(run, program, None)?;
            let with = with.run(run, program, Some(kind))?;
            if with.computed != expected {
                let what = format!("it computed {:?}, not {expected:?}", with.computed);
                return Err(Error::Program { program, kind: kind.name, what });
            }
            pairs.push((without.best_ns, with.best_ns));
        }
    }
    let cost = |(&(kind, _), pairs): (&(&'static Kind, Built), &Vec<(u64, u64)>)| {
        let added = |&(without, with): &(u64, u64)| number(with) - number(without);
        let ratio = |&(without, with): &(u64, u64)| number(with) / number(without);
        Cost {
            program,
            kind,
            added_ns_per_call: median(pairs.iter().map(added)) / number(calls),
            slowdown: median(pairs.iter().map(ratio)),
            added_instructions_per_call: None,
        }
    };
    Ok(built.iter().zip(&pairs).map(cost).collect())
}

/// Fills in what each kind adds to [`COUNTED`]; or says why not.
fn count_instructions(
    run: &Run,
    costs: &mut [Cost],
    plain: &Built,
    built: &[(&'static Kind, Built)],
    checks: &Built,
) -> Result<Option<String>, Error> {
    let calls = checks.run(run, COUNTED, None)?.checks;
    let without = match plain.instructions(run, COUNTED, None) {
        Ok(without) => without,
        Err(Error::Program { what, .. }) => return Ok(Some(what)),
        Err(error) => return Err(error),
    };
    for (kind, program) in built {
        let with = program.instructions(run, COUNTED, Some(kind))?;
        let added = (number(with) - number(without)) / number(calls);
        let counted = costs.iter_mut().filter(|cost| cost.program == COUNTED);
        for cost in counted.filter(|cost| cost.kind.name == kind.name) {
            cost.added_instructions_per_call = Some(added);
        }
    }
    Ok(None)
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

impl Printed {
    /// `NANOSECONDS RESULT CHECKS`.
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_ascii_whitespace();
        let mut next = || words.next();
        let best_ns = next()?.parse().ok()?;
        let computed = next()?.to_owned();
        Some(Self { best_ns, computed, checks: next()?.parse().ok()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_programs_line_is_read_whole() {
        let read = Printed::parse("120 4a883d1 7\n").unwrap();
        assert_eq!((read.best_ns, read.computed.as_str(), read.checks), (120, "4a883d1", 7));
        for line in ["", "120", "120 4a", "x 4a 7", "-1 4a 7"] {
            assert!(Printed::parse(line).is_none(), "{line:?}");
        }
    }

    #[test]
    fn the_median_is_a_value_of_the_middle() {
        assert!((median([5.0, 1.0, 3.0].into_iter()) - 3.0).abs() < f64::EPSILON);
        assert!(median([].into_iter()).is_nan());
    }
}
