//! `elfen lab profileme`: repeats the experiments of ProfileMe on a modelled core, and prints the
//! published figures beside ours.

use std::fmt::Write as _;
use std::io::Write;
use std::process::ExitCode;

use elfen_console::failure::{Failure, Status};
use elfen_console::output::print;
use elfen_console::table;
use elfen_core_model::branch_paths::PathAccuracy;
use elfen_core_model::elftrace::EXECUTED_MAX;
use elfen_core_model::estimate::Envelope;
use elfen_core_model::machine::Machine;
use elfen_core_model::window::WindowedIpc;
use serde::Serialize;

use super::bench::failure;
use super::laboratory::Laboratory;
use super::meter::Meter;
use crate::profile::profileme::{
    self, CounterOutcome, Experiment, HISTORY_OF_PROGRAMS, IN_ORDER, INTERRUPT_DELAYS, Plan,
    ProgramOutcome, SkidSummary,
};
use crate::profile::programs;

const EXAMPLE: &str = "\
`elfen profile trace` records the first instructions of each program, and a model of a core runs \
them. A program takes about ten seconds for 20 million instructions.

The estimates agree if 60 to 75 % of them are within one standard deviation. Fewer than 100 points \
are not judged. The mean deviation of IPC agrees from 26 to 36 %.

Columns:
  within        estimates within one standard deviation
  points        instructions of which ten samples are expected
  wasted        wasted issue slots: estimated by pairs / true number
  worst, pairs  of the 20 instructions that waste most, how many pairs name
  latency       how many of them have one of the 20 highest latencies

Examples:
  elfen lab profileme --program lua,gzip
  elfen lab profileme --instructions 100M --every 1000,10000 --seed 2
  elfen lab profileme --machine wide --json";

/// Repeat the experiments of ProfileMe (MICRO 1997) with programs of this machine
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLE)]
pub(super) struct ProfileMeArgs {
    /// Programs [default: all that are installed]
    #[arg(long, value_name = "NAMES", value_delimiter = ',',
          value_parser = clap::builder::PossibleValuesParser::new(programs::names()))]
    program: Vec<String>,

    /// How many instructions of each program are recorded
    #[arg(long, value_name = "COUNT", default_value = "20M", value_parser = instructions)]
    instructions: u64,

    /// The mean number of fetched instructions between samples
    #[arg(long, value_name = "COUNTS", value_delimiter = ',', default_value = "500,5000",
          value_parser = clap::value_parser!(u64).range(100..=1_000_000))]
    every: Vec<u64>,

    /// The modelled core
    #[arg(long, value_name = "MACHINE", default_value = "21264",
          value_parser = clap::builder::PossibleValuesParser::new(Machine::BUILT_IN))]
    machine: String,

    /// Of the random intervals, of all runs
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    seed: u64,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

fn instructions(text: &str) -> Result<u64, String> {
    let (digits, unit) = match text.strip_suffix(['k', 'K']) {
        Some(digits) => (digits, 1_000),
        None => text.strip_suffix('M').map_or((text, 1), |digits| (digits, 1_000_000)),
    };
    let count: Option<u64> = digits.parse().ok().and_then(|count: u64| count.checked_mul(unit));
    let count = count.ok_or_else(|| "it is not a count, as in 20M".to_owned())?;
    let range = 100_000..=EXECUTED_MAX;
    let is_valid = range.contains(&count);
    is_valid
        .then_some(count)
        .ok_or_else(|| format!("it must be 100k to {}M", EXECUTED_MAX / 1_000_000))
}

/// A published figure, and ours.
#[derive(Serialize, Debug)]
struct Figure {
    figure: &'static str,
    paper: &'static str,
    ours: String,
    /// Absent if the paper prints no figure.
    agrees: Option<bool>,
    /// Why the figures differ.
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<&'static str>,
}

#[derive(Serialize, Debug)]
struct Printed<'a> {
    figures: Vec<Figure>,
    #[serde(flatten)]
    experiment: &'a Experiment,
}

pub(super) fn run(args: &ProfileMeArgs, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let command = "elfen lab profileme";
    let machine = Machine::built_in(&args.machine).ok_or_else(|| {
        let fix = "name one that --help lists";
        Failure::new(Status::Usage, command, "no such core", fix)
    })?;
    let Laboratory { elfen, folder, programs, missing, .. } =
        &Laboratory::of(command, &args.program)?;
    let mut every = args.every.clone();
    every.sort_unstable();
    every.dedup();
    let plan = Plan { instructions: args.instructions, every, machine, seed: args.seed };
    let meter = Meter::new();
    let done = profileme::run((elfen, folder), programs, &plan, &mut |what| meter.show(what));
    drop(meter);
    let experiment = done.map_err(|error| failure(command, error))?;
    let experiment = Experiment { missing: missing.clone(), ..experiment };
    let printed = Printed { figures: figures(&experiment, &plan), experiment: &experiment };
    print(out, args.json, &printed, || text(&printed, &plan))?;
    Ok(ExitCode::SUCCESS)
}

/// The smallest and the largest value.
fn range(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    values.fold(None, |found, value| {
        let (low, high) = found.unwrap_or((value, value));
        Some((low.min(value), high.max(value)))
    })
}

/// All figures that the paper prints or draws.
fn figures(experiment: &Experiment, plan: &Plan) -> Vec<Figure> {
    let mut figures = envelopes(experiment, plan);
    figures.extend(paths(experiment));
    figures.push(loops(experiment));
    figures.extend(counters(experiment));
    figures.extend(windows(experiment));
    figures
}

fn new(
    figure: &'static str,
    paper: &'static str,
    ours: String,
    agrees: Option<bool>,
    why: &'static str,
) -> Figure {
    Figure { figure, paper, ours, agrees, why: (agrees == Some(false)).then_some(why) }
}

/// Whether the share of points is 60 to 75 %. Absent if that could be chance.
fn near_two_thirds(found: Envelope) -> Option<bool> {
    /// The share of that number of points has a standard deviation of 4.7 %.
    const POINTS_MIN: u64 = 100;
    let share = found.share().filter(|_| found.points >= POINTS_MIN)?;
    Some((0.60..=0.75).contains(&share))
}

const ENVELOPE: &str = "Counts are whole numbers: of Poisson counts around 10, 73 % lie within one \
                        deviation. Instructions with a large part of all samples vary less. A \
                        smaller share is chance, or an interval that fits a period of the program.";

fn envelopes(experiment: &Experiment, plan: &Plan) -> Vec<Figure> {
    let mut figures = Vec::new();
    for &every in &plan.every {
        let retired = experiment.points(every, |fit| fit.retired);
        let misses = experiment.points(every, |fit| fit.dcache_misses);
        for (what, found) in [
            ("Figure 3: executions within one deviation", retired),
            ("Figure 3: D-cache misses within one deviation", misses),
        ] {
            let Some(share) = found.share() else { continue };
            let ours = format!("{} of {} points, S = {every}", percent(share), found.points);
            figures.push(new(what, "two thirds", ours, near_two_thirds(found), ENVELOPE));
        }
    }
    for &every in &plan.every {
        let ratios = experiment.at(every).map(|one| one.fit.wasted / one.fit.wasted_truly);
        if let Some((low, high)) = range(ratios) {
            let ours = format!("{low:.3} to {high:.3} of the true number, S = {every}");
            figures.push(new("Section 5.2.3: wasted slots", "no figure", ours, None, ""));
        }
        let count: usize = experiment.at(every).map(|one| one.fit.worst).sum();
        let pairs: usize = experiment.at(every).map(|one| one.fit.worst_named).sum();
        let latency: usize = experiment.at(every).map(|one| one.worst_by_latency).sum();
        let ours = format!("{pairs} of {count} by pairs, {latency} by latency, S = {every}");
        figures.push(new("Section 6: worst instructions named", "no figure", ours, None, ""));
    }
    figures
}

fn paths(experiment: &Experiment) -> Vec<Figure> {
    let means = experiment.paths();
    let ordered = |[counts, history, pairs]: [f64; 3]| counts < history && history < pairs;
    let order = |what, lengths: String, agrees, why| {
        new(what, "counts < history < pairs", lengths, Some(agrees), why)
    };
    let lengths = |of: &dyn Fn(usize) -> [f64; 3]| {
        let holds = |index: usize| if ordered(of(index)) { "yes" } else { "no" };
        let each = means.iter().enumerate();
        let each = each.map(|(index, one)| format!("n = {}: {}", one.length, holds(index)));
        each.collect::<Vec<_>>().join(", ")
    };
    let within = |index: usize| means[index].within_functions;
    let through = |index: usize| means[index].through_calls;
    let all = |of: &dyn Fn(usize) -> [f64; 3]| (0..means.len()).all(|index| ordered(of(index)));
    let why = "Counts always name one path, and are right where one path is much more frequent. \
               History must leave a single path, however rare the others are. Other paths fit \
               where a loop is entered by a jump past its condition, where branches of the same \
               direction lead to one block, and where functions have several callers or returns.";
    vec![
        order("Figure 6: paths within functions", lengths(&within), all(&within), why),
        order("Figure 6: paths through calls", lengths(&through), all(&through), why),
    ]
}

fn loops(experiment: &Experiment) -> Figure {
    let loops = &experiment.loops;
    let first = loops.instructions.iter().position(|one| one.latency_rank == 1);
    let ours = first.map_or_else(String::new, |at| {
        format!(
            "the highest latency: rank {} of waste; correlation {:.2} by latency, {:.2} by pairs",
            at + 1,
            loops.latency_correlation,
            loops.pairs_correlation
        )
    });
    let agrees = first.is_some_and(|at| at > 0)
        && loops.pairs_correlation > 0.9
        && loops.latency_correlation < loops.pairs_correlation;
    let why = "The loops are made for the core 21264. On another core, they may be bound by \
               something else.";
    let paper = "latency ranks wrongly, pairs rightly";
    new("Figure 7: three loops", paper, ours, Some(agrees), why)
}

fn counters(experiment: &Experiment) -> Vec<Figure> {
    let mut figures = Vec::new();
    for one in &experiment.counters {
        let SkidSummary { exact, peak, peak_share, p10, p90, .. } = one.skid;
        let is_in_order = one.machine == IN_ORDER;
        // The paper gives the delay in order only.
        if is_in_order && one.delay != INTERRUPT_DELAYS[0] {
            continue;
        }
        if !is_in_order && (one.machine != experiment.machine || one.delay == INTERRUPT_DELAYS[0]) {
            continue;
        }
        let ours = format!(
            "{}: {} at instruction {peak}, 80 % at {p10} to {p90}, {} at the load",
            one.machine,
            percent(peak_share),
            percent(exact)
        );
        let (paper, agrees, why) = if is_in_order {
            let why = "Here, up to four nops retire in a cycle, and the load is at different \
                       places of its fetch block. So the number of instructions in six cycles \
                       varies.";
            ("in order: one large peak, at instruction 7", peak == 7 && peak_share > 0.5, why)
        } else {
            let why = "The model interrupts a fixed number of cycles after the event, and nops \
                       retire evenly. Table 2 shows the spread in programs, which have misses.";
            ("out of order: spread over 25 instructions", p90 - p10 >= 10 && p90 <= 50, why)
        };
        figures.push(new("Figure 2: interrupts of counters", paper, ours, Some(agrees), why));
    }
    let programs = || experiment.programs.iter();
    let wider = programs().filter(|one| {
        one.skid_in_order.is_some_and(|in_order| one.skid.spread() > in_order.spread())
    });
    if experiment.machine != IN_ORDER {
        let (wider, all) = (wider.count(), programs().count());
        let ours = format!("wider in {wider} of {all} programs");
        let paper = "wider out of order than in order";
        let why = "In these programs, misses stop an in-order core as well.";
        figures.push(new("Figure 2: interrupts in programs", paper, ours, Some(wider == all), why));
    }
    figures
}

fn windows(experiment: &Experiment) -> Vec<Figure> {
    let found = || experiment.programs.iter().filter_map(|one| one.windows.as_ref());
    let Some((low, high)) = range(found().map(|one| one.max / one.min)) else { return Vec::new() };
    let Some((least, most)) = range(found().map(|one| one.deviation)) else { return Vec::new() };
    #[expect(clippy::cast_precision_loss, reason = "there are a few programs")]
    let mean = found().map(|one| one.deviation).sum::<f64>() / found().count() as f64;
    let memory = "Some windows retire a single instruction: a miss to memory takes longer than a \
                  window. The paper does not say how it counts windows that are almost empty.";
    let deviation = "The programs differ. One steady loop has windows that are almost equal. Many \
                     misses give windows that are almost empty, and full ones.";
    vec![
        new(
            "Section 6: IPC in 30 cycles, highest / lowest",
            "3 to 30",
            format!("{low:.0} to {high:.0}"),
            Some(low >= 2.5 && high < 30.5),
            memory,
        ),
        new(
            "Section 6: deviation of that IPC",
            "20 to 42 %",
            format!("{} to {}", percent(least), percent(most)),
            Some(least >= 0.195 && most < 0.425),
            deviation,
        ),
        new(
            "Section 6: deviation of that IPC, in the mean",
            "31 %",
            percent(mean),
            Some((0.26..0.36).contains(&mean)),
            deviation,
        ),
    ]
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

fn text(printed: &Printed<'_>, plan: &Plan) -> String {
    let experiment = printed.experiment;
    let mut text = format!(
        "The core {}, seed {} in all runs, the first {} instructions of each program\n\n",
        experiment.machine, experiment.seed, plan.instructions
    );
    let row = |one: &Figure| {
        let agrees = one.agrees.map_or("", |agrees| if agrees { "yes" } else { "no" });
        vec![one.figure.to_owned(), one.paper.to_owned(), one.ours.clone(), agrees.to_owned()]
    };
    let rows: Vec<Vec<String>> = printed.figures.iter().map(row).collect();
    text += &table::lines(&["experiment", "paper", "here", "agrees"], &rows);
    text += "\nTable 1. Estimates (Figure 3, section 5.2.3). Worst: of the 20 that waste most, \
             how many are named\n\n";
    text += &estimates(experiment);
    text += "\nTable 2. Instructions per cycle, also in windows of 30 cycles (section 6); \
             interrupts of a\n";
    let [delay, _] = INTERRUPT_DELAYS;
    let _written = writeln!(
        text,
        "counter of data accesses, {delay} cycles late: distances from the access in instructions, \
         here and on\nthe core {IN_ORDER} (Figure 2)\n"
    );
    text += &by_program(experiment);
    text += "\nTable 3. Paths that are found, in percent (Figure 6): means of all programs\n\n";
    text += &path_rows(experiment.paths().iter().map(|one| (one.length.to_string(), one)));
    let _written = writeln!(text, "\nTable 4. Paths of {HISTORY_OF_PROGRAMS} branches\n");
    text += &path_rows(experiment.programs.iter().filter_map(|one| {
        let found = one.paths.iter().find(|path| path.length == HISTORY_OF_PROGRAMS)?;
        Some((one.program.to_owned(), found))
    }));
    text += "\nTable 5. Three loops (Figure 7): the instructions that waste most, and those with \
             the highest latency\n\n";
    text += &loop_rows(experiment);
    text += "\nTable 6. A loop of a load and 300 nops (Figure 2): interrupts some cycles late, and \
             their distance\nfrom the load in instructions\n\n";
    text += &counter_rows(experiment);
    if !experiment.missing.is_empty() {
        let _written = writeln!(text, "\nnot installed: {}", experiment.missing.join(", "));
    }
    text += "\nWhy figures differ:\n";
    let mut said: Vec<&str> = Vec::new();
    for figure in &printed.figures {
        let Some(why) = figure.why.filter(|why| !said.contains(why)) else { continue };
        let _written = writeln!(text, "- {}: {why}", figure.figure);
        said.push(why);
    }
    text += "\
- All: the paper ran SPEC95 compiled for Alpha. Here, the programs are those of Debian, an
  instruction of x86 does more, and a trace begins with the start of the program.
- Each recording differs, also with the same seed: addresses and some hash tables are random.
- Figure 3: the paper chooses points by the number of samples. Here, ten samples must be expected:
  points that are chosen by the number found are too high.
- Figure 6: the paper has a graph without numbers, for lengths of 1 to 11. Only its order compares.
";
    text
}

fn estimates(experiment: &Experiment) -> String {
    let heading = [
        "program",
        "S",
        "samples",
        "points",
        "within",
        "D-misses",
        "within",
        "pairs",
        "wasted",
        "worst, pairs",
        "latency",
    ];
    let mut rows = Vec::new();
    for program in &experiment.programs {
        for one in &program.intervals {
            let fit = &one.fit;
            let share = |share: Option<f64>| share.map_or(String::new(), percent);
            rows.push(vec![
                program.program.to_owned(),
                one.every.to_string(),
                one.samples.to_string(),
                fit.retired.points.to_string(),
                share(fit.retired.share()),
                fit.dcache_misses.points.to_string(),
                share(fit.dcache_misses.share()),
                one.pairs.to_string(),
                format!("{:.3}", fit.wasted / fit.wasted_truly),
                format!("{} of {}", fit.worst_named, fit.worst),
                one.worst_by_latency.to_string(),
            ]);
        }
    }
    table::lines(&heading, &rows)
}

fn by_program(experiment: &Experiment) -> String {
    let heading = [
        "program",
        "instructions",
        "IPC",
        "lowest",
        "highest",
        "deviation",
        "exact",
        "80 % at",
        "in order: exact",
        "80 % at",
    ];
    let row = |one: &ProgramOutcome| {
        let window =
            |of: &dyn Fn(&WindowedIpc) -> String| one.windows.as_ref().map_or(String::new(), of);
        let skid = |found: Option<&SkidSummary>| {
            found.map_or_else(Default::default, |found| {
                [percent(found.exact), format!("{} to {}", found.p10, found.p90)]
            })
        };
        let mut cells = vec![
            one.program.to_owned(),
            one.instructions.to_string(),
            format!("{:.2}", one.ipc),
            window(&|found| format!("{:.2}", found.min)),
            window(&|found| format!("{:.2}", found.max)),
            window(&|found| percent(found.deviation)),
        ];
        cells.extend(skid(Some(&one.skid)));
        cells.extend(skid(one.skid_in_order.as_ref()));
        cells
    };
    let rows: Vec<Vec<String>> = experiment.programs.iter().map(row).collect();
    table::lines(&heading, &rows)
}

fn counter_rows(experiment: &Experiment) -> String {
    let heading = ["core", "delay", "exact", "peak", "its share", "80 % at"];
    let row = |one: &CounterOutcome| {
        let skid = &one.skid;
        vec![
            one.machine.clone(),
            one.delay.to_string(),
            percent(skid.exact),
            skid.peak.to_string(),
            percent(skid.peak_share),
            format!("{} to {}", skid.p10, skid.p90),
        ]
    };
    let rows: Vec<Vec<String>> = experiment.counters.iter().map(row).collect();
    table::lines(&heading, &rows)
}

fn path_rows<'a>(rows: impl Iterator<Item = (String, &'a PathAccuracy)>) -> String {
    let heading = ["", "counts", "history", "with pairs", "calls: counts", "history", "with pairs"];
    let rows: Vec<Vec<String>> = rows
        .map(|(name, one)| {
            let shares = one.within_functions.iter().chain(&one.through_calls);
            let cells = shares.map(|share| format!("{:.1}", share * 100.0));
            [name].into_iter().chain(cells).collect()
        })
        .collect();
    table::lines(&heading, &rows)
}

fn loop_rows(experiment: &Experiment) -> String {
    /// How many are printed by each ranking.
    const TOP: usize = 5;
    let heading =
        ["instruction", "loop", "latency", "rank", "wasted by pairs", "rank", "truly", "rank"];
    let ranked = (1..).zip(&experiment.loops.instructions);
    let rows: Vec<Vec<String>> = ranked
        .filter(|(rank, one)| [*rank, one.latency_rank, one.pairs_rank].iter().any(|&r| r <= TOP))
        .map(|(rank, one)| {
            vec![
                format!("{:#x}", one.address),
                one.of.to_owned(),
                format!("{:.0}", one.latency),
                one.latency_rank.to_string(),
                format!("{:.0}", one.wasted),
                one.pairs_rank.to_string(),
                one.wasted_truly.to_string(),
                rank.to_string(),
            ]
        })
        .collect();
    table::lines(&heading, &rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_are_counts_with_units() {
        assert_eq!(instructions("20M"), Ok(20_000_000));
        assert_eq!(instructions("500k"), Ok(500_000));
        for wrong in ["", "M", "-1", "1G", "99999", "201M", "99999999999999999999M"] {
            assert!(instructions(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn only_figures_that_differ_have_a_reason() {
        let of = |agrees| new("1", "2", "3".to_owned(), agrees, "why").why;
        assert_eq!([of(Some(true)), of(None), of(Some(false))], [None, None, Some("why")]);
        assert_eq!(range([2.0, 1.0, 3.0].into_iter()), Some((1.0, 3.0)));
        assert_eq!(range(std::iter::empty()), None);
    }
}
