//! `elfen lab hps`: the evaluation of Hybrid Profiling Support, with programs of this machine.

use std::io::Write;
use std::process::ExitCode;

use elfen_console::failure::{Failure, Status};
use elfen_console::output::print;
use elfen_console::table;
use elfen_profile::everything::{StartError, TraceError};
use serde::Serialize;

use super::meter::Meter;
use crate::live::scratch::Scratch;
use crate::profile::hps::cost::Executed;
use crate::profile::hps::programs::{PROGRAMS, StudyProgram, write_text};
use crate::profile::hps::published::{PublishedRow, rows};
use crate::profile::hps::study::{
    BURSTS, Compared, PERIODS, Sampled, SampledStreams, Studied, StudyError, mean, rule_sets, study,
};

const EXAMPLES: &str = "\
Accuracy is that of the paper: of the members that make 90 % of each profile, the sum of the \
smaller of both shares. `drawn` is the accuracy of as many independent samples. The overhead is by \
the paper's model: one cycle for each replaced instruction, and the instructions of the handler; \
each other instruction takes one cycle too. Data streams are sequences of 2 to 100 memory accesses \
that repeat. `missing` is the part of the exact profile in streams that the sampled one lacks.

Examples:
  elfen lab hps                          all programs; takes some 15 minutes
  elfen lab hps --program lua,gzip       two of them
  elfen lab hps --json > hps.json";

/// Repeat the evaluation of Hybrid Profiling Support (HPS)
///
/// Each program runs once in the code cache of `elfen profile`. Its instructions go through the
/// paper's productions at once for all burst lengths and frequencies, with fixed and with random
/// intervals, and through productions that count everything. The tables compare the results with
/// the figures of the paper.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct HpsArgs {
    /// Programs [default: all that are installed]
    #[arg(long, value_name = "NAMES", value_delimiter = ',',
        value_parser = clap::builder::PossibleValuesParser::new(PROGRAMS.map(|one| one.name)))]
    program: Vec<String>,

    /// The instructions of a handler
    #[arg(long, value_name = "N", default_value_t = 20,
        value_parser = clap::value_parser!(u64).range(1..=10_000))]
    handler: u64,

    /// The seed: the same seed gives the same inputs and intervals
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Hps {
    seed: u64,
    handler_instructions: u64,
    programs: Vec<ProgramRow>,
    /// Each program with each setting.
    sampling: Vec<SamplingRow>,
    overheads: Vec<OverheadRow>,
    published: Vec<PublishedRow>,
    /// Programs without a result, and why.
    left_out: Vec<String>,
}

#[derive(Serialize)]
struct ProgramRow {
    program: &'static str,
    #[serde(flatten)]
    executed: Executed,
    hot_pairs: usize,
    hot_methods: usize,
    hot_streams: usize,
    covered_percent: f64,
    left: Vec<String>,
}

#[derive(Serialize)]
struct SamplingRow {
    program: &'static str,
    burst: u32,
    period: u32,
    random: bool,
    pairs: Sampled,
    methods: Sampled,
    streams: SampledStreams,
}

#[derive(Serialize)]
struct OverheadRow {
    program: &'static str,
    pairs: Compared,
    methods: Compared,
    streams: Compared,
}

pub(crate) fn run(args: &HpsArgs, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let failed = |why: &dyn std::fmt::Display, fix: &str| {
        Failure::new(Status::Failed, "elfen lab hps", why, fix)
    };
    let sets = rule_sets(args.seed).map_err(|error| failed(&error, "report this error"))?;
    let scratch = Scratch::new(1).map_err(|error| failed(&error, "set TMPDIR"))?;
    let folder = scratch.path("");
    write_text(&folder, args.seed).map_err(|error| failed(&error, "free space in TMPDIR"))?;
    let is_chosen = |one: &&StudyProgram| {
        args.program.is_empty() || args.program.iter().any(|name| name == one.name)
    };
    let (mut names, mut studied, mut left_out) = (Vec::new(), Vec::new(), Vec::new());
    let meter = Meter::new();
    for program in PROGRAMS.iter().filter(is_chosen) {
        meter.show(&format!("runs {}", program.name));
        let words =
            program.words(&folder).map_err(|error| failed(&error, "free space in TMPDIR"))?;
        let Some(words) = words else {
            left_out.push(format!("{}: install {}", program.name, program.package));
            continue;
        };
        match study(&words, &scratch.path("output"), sets, args.handler, args.seed) {
            Ok(one) => {
                names.push(program.name);
                studied.push(one);
            }
            Err(StudyError::Trace(TraceError::Start(StartError::Trace(error)))) => {
                let fix = "allow ptrace, as with --cap-add=SYS_PTRACE in a container";
                return Err(Failure::new(Status::Unsupported, "elfen lab hps", error, fix));
            }
            Err(error) => left_out.push(format!("{}: {error}", program.name)),
        }
    }
    drop(meter);
    if studied.is_empty() {
        let why = format!("no program has run: {}", left_out.join("; "));
        return Err(failed(&why, "install one of the programs"));
    }
    let result = of(args, &names, &studied, left_out);
    print(out, args.json, &result, || text(&result))?;
    Ok(ExitCode::SUCCESS)
}

fn of(args: &HpsArgs, names: &[&'static str], all: &[Studied], left_out: Vec<String>) -> Hps {
    let named = || names.iter().copied().zip(all);
    let programs = named().map(|(program, one)| ProgramRow {
        program,
        executed: one.executed,
        hot_pairs: one.hot_pairs,
        hot_methods: one.hot_methods,
        hot_streams: one.hot_streams,
        covered_percent: one.covered_percent,
        left: one.left.clone(),
    });
    let sampling = named().flat_map(|(program, one)| {
        one.judged.iter().map(move |one| SamplingRow {
            program,
            burst: one.setting.burst,
            period: one.setting.period,
            random: one.setting.is_random,
            pairs: one.pairs,
            methods: one.methods,
            streams: one.streams,
        })
    });
    let overheads = named().map(|(program, one)| OverheadRow {
        program,
        pairs: one.pairs,
        methods: one.methods,
        streams: one.streams,
    });
    Hps {
        seed: args.seed,
        handler_instructions: args.handler,
        programs: programs.collect(),
        sampling: sampling.collect(),
        overheads: overheads.collect(),
        published: rows(all, args.handler),
        left_out,
    }
}

fn text(result: &Hps) -> String {
    let mut text = programs(result)
        + "\n"
        + &sampling(result)
        + "\n"
        + &streams(result)
        + "\n"
        + &overheads(result)
        + "\n";
    for row in &result.published {
        let ours = row.ours.as_deref().unwrap_or("not measured");
        text += &format!("{}: published {}, here {ours}\n", row.what, row.published);
        text += &format!("  {}\n", row.reason);
    }
    for why in &result.left_out {
        text += &format!("not measured: {why}\n");
    }
    text
}

fn programs(result: &Hps) -> String {
    let per_thousand = |part: u64, one: &ProgramRow| {
        let number = elfen_console::duration::number;
        format!("{:.1}", number(part) * 1e3 / number(one.executed.instructions.max(1)))
    };
    let rows: Vec<Vec<String>> = result
        .programs
        .iter()
        .map(|one| {
            let Executed { instructions, calls, events, accesses } = one.executed;
            vec![
                one.program.to_owned(),
                format!("{:.0}", elfen_console::duration::number(instructions) / 1e6),
                per_thousand(calls, one),
                per_thousand(events, one),
                per_thousand(accesses, one),
                one.hot_pairs.to_string(),
                one.hot_methods.to_string(),
                one.hot_streams.to_string(),
                format!("{:.1}", one.covered_percent),
            ]
        })
        .collect();
    let head = [
        "program",
        "instructions, M",
        "calls/1000",
        "events/1000",
        "accesses/1000",
        "hot pairs",
        "hot methods",
        "hot streams",
        "accesses in streams, %",
    ];
    table::lines(&head, &rows)
}

/// Means over the programs.
fn sampling(result: &Hps) -> String {
    let mut rows = Vec::new();
    for burst in BURSTS {
        for period in PERIODS {
            let of = |random: bool, of: fn(&SamplingRow) -> f64| {
                let rows = result
                    .sampling
                    .iter()
                    .filter(|row| (row.burst, row.period, row.random) == (burst, period, random));
                mean(rows.map(of))
            };
            rows.push(vec![
                burst.to_string(),
                format!("1/{period}"),
                format!("{:.1}", of(false, |row| row.pairs.accuracy_percent)),
                format!("{:.1}", of(true, |row| row.pairs.accuracy_percent)),
                format!("{:.1}", of(false, |row| row.pairs.drawn_percent)),
                format!("{:.3}", of(false, |row| row.pairs.overhead_percent)),
                format!("{:.1}", of(false, |row| row.methods.accuracy_percent)),
                format!("{:.1}", of(true, |row| row.methods.accuracy_percent)),
                format!("{:.1}", of(false, |row| row.methods.drawn_percent)),
                format!("{:.3}", of(false, |row| row.methods.overhead_percent)),
            ]);
        }
    }
    let head = [
        "burst",
        "frequency",
        "pairs, % ↑",
        "random, % ↑",
        "drawn, % ↑",
        "overhead, % ↓",
        "methods, % ↑",
        "random, % ↑",
        "drawn, % ↑",
        "overhead, % ↓",
    ];
    table::lines(&head, &rows)
}

/// Means over the programs, of data streams.
fn streams(result: &Hps) -> String {
    let mut rows = Vec::new();
    for burst in BURSTS {
        for period in PERIODS {
            let of = |random: bool, of: fn(&SampledStreams) -> f64| {
                let rows = result
                    .sampling
                    .iter()
                    .filter(|row| (row.burst, row.period, row.random) == (burst, period, random));
                mean(rows.map(|row| of(&row.streams)))
            };
            let per_burst = of(false, SampledStreams::per_burst);
            rows.push(vec![
                burst.to_string(),
                format!("1/{period}"),
                format!("{:.1}", of(false, |one| one.accuracy_percent)),
                format!("{:.1}", of(true, |one| one.accuracy_percent)),
                format!("{:.1}", of(false, |one| one.missing_percent)),
                format!("{per_burst:.1}"),
                format!("{:.3}", of(false, |one| one.overhead_percent)),
            ]);
        }
    }
    let head = [
        "burst",
        "frequency",
        "streams, % ↑",
        "random, % ↑",
        "missing, % ↓",
        "accesses/burst",
        "overhead, % ↓",
    ];
    table::lines(&head, &rows)
}

fn overheads(result: &Hps) -> String {
    let mut rows = Vec::new();
    for row in &result.overheads {
        for (profile, one) in
            [("pairs", row.pairs), ("methods", row.methods), ("streams", row.streams)]
        {
            let shown = |percent: f64| format!("{percent:.2}");
            rows.push(vec![
                row.program.to_owned(),
                profile.to_owned(),
                shown(one.hps.all()),
                shown(one.dise.basic_percent),
                shown(one.dise.checks_percent),
                shown(one.dise.profiling_percent),
                shown(one.two_copies.basic_percent),
                shown(one.two_copies.profiling_percent),
            ]);
        }
    }
    let head = [
        "program",
        "profile, 1/100",
        "HPS, % ↓",
        "DISE basic, % ↓",
        "checks, % ↓",
        "profiling, % ↓",
        "two copies basic, % ↓",
        "profiling, % ↓",
    ];
    table::lines(&head, &rows)
}
