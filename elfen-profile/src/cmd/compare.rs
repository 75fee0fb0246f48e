//! `elfen profile compare`: how well an estimated profile fits an exact one.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use elfen_console::failure::{Failure, Status, named};
use elfen_console::output;

use super::input::{check_blocks, read};
use crate::compare::Comparison;
use crate::profile::Source;
use crate::symbols::ProfileSymbols;

const AFTER: &str = "\
Overlap is the sum of the smaller shares (HPS). Weight match is the weight of the hottest 5 % \
that both profiles name (Shadow Profiling). 1 is the best. Data streams are compared if both \
profiles have them; two are the same if all of their instructions and addresses are.

Examples:
  elfen profile record --by everything -o exact.elfprof -- ./program
  elfen profile record -o bursts.elfprof -- ./program
  elfen profile compare exact.elfprof bursts.elfprof";

/// Compare an estimated profile with an exact one of the same run
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER)]
pub(super) struct CompareArgs {
    /// A profile that `elfen profile record --by everything` wrote
    exact: PathBuf,

    /// The profile to judge
    estimated: PathBuf,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &CompareArgs, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let [exact, estimated] = [&args.exact, &args.estimated].map(|path| read(path));
    let (exact, estimated) = (exact?, estimated?);
    if exact.by != Source::Everything {
        let fix = "name the profile of `record --by everything` first";
        let what = named("the profile", &args.exact);
        return Err(Failure::new(Status::Failed, what, "its counts are estimates", fix));
    }
    check_blocks(&estimated, &args.estimated)?;
    let [(known, _), (found, _)] = [&exact, &estimated].map(ProfileSymbols::read);
    let comparison = Comparison::of((&exact, &known), (&estimated, &found));
    output::print(out, args.json, &comparison, || comparison.text())?;
    Ok(ExitCode::SUCCESS)
}
