//! `elfen profile report`: prints a profile.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use elfen_console::failure::{Failure, Status, named};
use elfen_console::output;

use super::input::{check_blocks, check_counted, read};
use crate::annotate::{self, AnnotateError, Annotation};
use crate::profile::{Profile, Source};
use crate::report::{ProfileReport, ProfileSums, SortKey};
use crate::source_lines;
use crate::symbols::ProfileSymbols;

const AFTER: &str = "\
Totals need a profile with stacks, and paths one with paths (`record --what`). A path begins \
where a backward branch leads, and ends with the next one; it goes on through calls and returns.

A data stream is a sequence of memory accesses that repeats, with 2 to 100 of them. Its share is \
that of all accesses. An address is a distance in its region of memory.

Lines need the debug information of compilers (-g), in the program or in its debug package.

A profile by samples has functions and instructions. Executions are estimated, and ± is their \
relative error. An instruction of two operations counts twice if the processor samples operations. \
I-miss, ITLB, D-miss, DTLB and mispr. are the parts of the samples with a miss or a wrong \
prediction, of all that know it. `aborted` is the part that did not retire, or was not fetched.

Mean latencies of samples, in cycles:
  done, retire          from issue to completion, and on to retirement
  load                  of a load, from its issue to its completion
  to issue, to retire   since the processor has chosen it
  fetch, refill, TLB    of its fetch, of a miss, and of a translation
  apart                 since the last retirement before it

--annotate takes the name of a function, or a part that only one name has. An instruction without \
a count did not run.

Examples:
  elfen profile report run.elfprof
  elfen profile report run.elfprof --sort call --top 10
  elfen profile report run.elfprof --sort line
  elfen profile report run.elfprof --sort rule --top 10
  elfen profile report run.elfprof --sort instruction
  elfen profile report run.elfprof --sort stream --top 5
  elfen profile report run.elfprof --annotate main | less
  elfen profile report run.elfprof --json | jq '.functions[0]'";

/// Print which functions, calls, lines and instructions of a profile ran most
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER)]
pub(super) struct ReportArgs {
    /// A profile that `elfen profile record -o` wrote
    file: PathBuf,

    /// What to list
    #[arg(long, value_name = "KEY", default_value = "function")]
    sort: SortKey,

    /// The number of rows
    #[arg(long, value_name = "ROWS", default_value_t = 20)]
    top: usize,

    /// Print the instructions of a function with their counts
    #[arg(long, value_name = "FUNCTION", conflicts_with_all = ["sort", "top"])]
    annotate: Option<String>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &ReportArgs, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let profile = read(&args.file)?;
    if args.annotate.is_some() || args.sort == SortKey::Line {
        check_counted(&profile, &args.file)?;
    }
    let is_of_samples = matches!(args.sort, SortKey::Function | SortKey::Instruction);
    if args.annotate.is_some() || !is_of_samples {
        check_blocks(&profile, &args.file)?;
    }
    let missing = match args.sort {
        SortKey::Instruction if profile.by != Source::Samples => Some("instructions"),
        SortKey::Total if profile.stacks.is_empty() => Some("stacks"),
        SortKey::Path if profile.paths.is_empty() => Some("paths"),
        SortKey::Value if profile.values.is_empty() => Some("values"),
        SortKey::Stream if profile.references == 0 => Some("streams"),
        SortKey::Rule if profile.rules.is_empty() => Some("rules"),
        _ => None,
    };
    if let Some(missing) = missing {
        let what = named("the profile", &args.file);
        let why = match args.sort {
            SortKey::Instruction => "it has no samples of instructions".to_owned(),
            _ => format!("it has no {missing}"),
        };
        let fix = match args.sort {
            SortKey::Rule => "record it with `--rules FILE`".to_owned(),
            _ => format!("record it with `--what {missing}`"),
        };
        return Err(Failure::new(Status::Failed, what, why, &fix));
    }
    let (symbols, changed) = ProfileSymbols::read(&profile);
    for path in changed {
        output::warn(&format!("{path} has changed since the profile: its functions have no names"));
    }
    if let Some(name) = &args.annotate {
        let annotation = annotate(name, &profile, &symbols)?;
        output::print(out, args.json, &annotation, || annotation.text())?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut report = ProfileReport::of(&profile, &symbols, args.sort, args.top);
    if args.sort == SortKey::Line {
        let lines = source_lines::hottest(&profile, &symbols, args.top).ok_or_else(|| {
            let what = named("the profile", &args.file);
            let why = "its files have no lines";
            Failure::new(Status::Failed, what, why, "compile with -g, and record it again")
        })?;
        report = report.with_lines(lines);
    }
    output::print(out, args.json, &report, || report.text(args.sort))?;
    Ok(ExitCode::SUCCESS)
}

fn annotate(
    name: &str,
    profile: &Profile,
    symbols: &ProfileSymbols,
) -> Result<Annotation, Failure> {
    let sums = ProfileSums::of(profile, symbols);
    let found = annotate::find(name, &sums, symbols).map_err(|error| failed(name, error))?;
    let annotation =
        Annotation::of(profile, symbols, &sums, &found).map_err(|error| failed(name, error))?;
    if found.others > 0 {
        let file = annotation.file();
        let number = found.others + 1;
        output::warn(&format!(
            "{number} functions match: this is the one that ran most, of {file}"
        ));
    }
    Ok(annotation)
}

fn failed(name: &str, error: AnnotateError) -> Failure {
    let quoted = |names: &[String]| {
        names.iter().map(|one| format!("`{one}`")).collect::<Vec<_>>().join(", ")
    };
    let (why, fix) = match error {
        AnnotateError::Unknown(names) if names.is_empty() => {
            ("no function that ran has a name".to_owned(), "link the program without -s".to_owned())
        }
        AnnotateError::Unknown(names) => {
            let fix = format!("name another one, such as {}", quoted(&names));
            ("no function that ran has this name".to_owned(), fix)
        }
        AnnotateError::Ambiguous(names) => {
            let fix = format!("name one of them, such as {}", quoted(&names));
            ("several functions match".to_owned(), fix)
        }
        AnnotateError::NotRun => {
            let fix = "name one that ran, such as the function that it was inlined in";
            ("none of its own instructions ran".to_owned(), fix.to_owned())
        }
        AnnotateError::Unreadable(path) => {
            (format!("{path} cannot be read"), "restore it, or record the program again".to_owned())
        }
    };
    Failure::new(Status::Failed, format!("the function `{name}`"), why, fix)
}
