//! `elfen demo`: measures a search service alone, next to an unrestrained batch, and next to a
//! batch under Elfen. It takes about a minute.
//!
//! All runs have the same requests at the same times. On an emulated core, a run is compared with
//! itself: what the batch cost these very requests. This figure is exact also on a noisy machine.
//! The second figure compares runs, and needs no emulation. A figure whose interval is too wide is
//! not printed.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use elfen_console::failure::{Failure, Status, to_stderr};
use elfen_console::output::{print, warn};
use elfen_console::paragraph::wrap;
use elfen_console::{duration, shell, table};
use elfen_machine::lane_args::LaneArgs;
use elfen_run::channels::SourceChoice;
use serde::Serialize;

use super::meter::Meter;
use super::{live_args, live_rows};
use crate::live::experiment::{Experiment, Results};
use crate::live::latencies::count_as_f64;
use crate::live::summary::{self, Figure, Row};
use crate::live::testbed::{Order, STEAL_MAX};
use crate::live::{self, plan};
use crate::record::{Line, Plan, Scenario, runs, setup};

const EXAMPLES: &str = "\
Examples:
  elfen demo                            on the first pair of lanes, or two CPUs
  elfen demo --lanes 2:6 --batch matrix on this pair, with another program
  elfen demo --html /tmp/demo.html --json-out /tmp/demo.json

The demo does not require root. With root, the eBPF task map reports all tasks on a lane; without \
root, only the service reports its requests. It requires elfen-search, elfen-load and elfen-batch; \
`cargo build --release` builds them into the same folder.";

const WHAT: &str = "the demo";

/// Show what Elfen does on this machine, with a search service under load: alone, next to an
/// unrestrained batch, and next to a batch under Elfen
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct DemoArgs {
    #[command(flatten)]
    lanes: LaneArgs,

    /// The load, in percent of the service's capacity
    #[arg(long, value_name = "PERCENT", default_value_t = 30,
        value_parser = clap::value_parser!(u8).range(1..=100))]
    load: u8,

    /// The batch program of elfen-batch
    #[arg(long, value_name = "NAME", default_value = "compress",
        value_parser = clap::builder::PossibleValuesParser::new(plan::BATCHES))]
    batch: String,

    /// How long each run lasts
    #[arg(short, long, value_name = "TIME", value_parser = duration::parse, default_value = "2s")]
    duration: Duration,

    /// How often each scenario is run
    #[arg(long, value_name = "N", default_value_t = 7,
        value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,

    /// Documents of the index
    #[arg(long, value_name = "N", default_value_t = 20_000,
        value_parser = clap::value_parser!(u64).range(100..))]
    docs: u64,

    /// The source of the request lane's state, as in `elfen run`
    #[arg(long, value_enum, default_value = "auto")]
    source: SourceChoice,

    /// Where to write a page with figures
    #[arg(long, value_name = "FILE", default_value = "elfen-demo.html")]
    html: PathBuf,

    /// Also write the JSON object of --json to this file
    #[arg(long, value_name = "FILE")]
    json_out: Option<PathBuf>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct DemoReport {
    lanes: String,
    /// Whether the lanes share a core.
    smt: bool,
    capacity_rps: f64,
    /// What the runs show, in a sentence; `None` if they show nothing clearly.
    verdict: Option<String>,
    why_no_verdict: Option<String>,
    rows: Vec<Row>,
    remarks: Vec<String>,
    html: PathBuf,
}

pub(crate) fn run(args: &DemoArgs, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    live::install_signal_handlers().map_err(|error| live_args::failure(WHAT, &error))?;
    let experiment = experiment(args)?;
    live_args::writable(&args.html)?;
    args.json_out.as_deref().map_or(Ok(()), live_args::writable)?;
    let lines = measure(&experiment)?;
    let rows = summary::rows(&lines);
    let (verdict, why_no_verdict) = match verdict(&lines, &rows) {
        Ok(verdict) => (Some(verdict), None),
        Err(why) => (None, Some(why)),
    };
    let report = DemoReport {
        verdict,
        why_no_verdict,
        lanes: experiment.order.machine.lanes(),
        smt: experiment.order.machine.smt,
        capacity_rps: setup(&lines).map_or(0.0, |setup| setup.capacity_rps),
        remarks: live_rows::remarks(&lines, &rows),
        rows,
        html: args.html.clone(),
    };
    live_args::write_page(&args.html, "Elfen: demo", &[&report.conclusion()], &lines)?;
    if let Some(file) = &args.json_out {
        live_args::write_report(file, &report)?;
    }
    print(out, args.json, &report, || report.text())?;
    Ok(if live_rows::all_right(&report.rows) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn experiment(args: &DemoArgs) -> Result<Experiment, Failure> {
    let plan = Plan {
        loads: vec![f64::from(args.load) / 100.0],
        rates: Vec::new(),
        scenarios: ["none", "unrestrained", "borrow-idle"].map(str::to_owned).to_vec(),
        batches: vec![args.batch.clone()],
        runs: args.runs,
        duration_s: args.duration.as_secs_f64(),
        warmup_s: 0.3,
        seed: 1,
        source: live_args::signal_word(args.source),
        ..Plan::default()
    };
    let specs = plan::check(&plan)
        .map_err(|why| Failure::new(Status::Usage, WHAT, why, "change the options"))?;
    let mut machine = live_args::machine(&args.lanes, WHAT)?;
    if !machine.smt {
        machine.emulated = emulated(args.source);
    }
    let emulate_smt = machine.emulated;
    let limits: Vec<String> = machine.emulation().into_iter().collect();
    let plan = Plan { emulate_smt, ..plan };
    let order = Order { machine, documents: args.docs, ..Order::default() };
    let command = shell::command_line("elfen lab");
    Ok(Experiment { order, plan, specs, capacity_rps: None, limits, command })
}

/// Returns the factor of the emulated core, or `None` if the core cannot be emulated.
///
/// On CPUs that do not share a core, a batch takes no resources from the service, so the demo would
/// show nothing. There, the programs of the demo slow each other down. They use the kernel's record
/// of the tasks that ran at the same time.
fn emulated(source: SourceChoice) -> Option<f64> {
    /// The slowdown of a request next to a batch in the thesis's model.
    const SLOWDOWN: f64 = 1.5;
    if matches!(source, SourceChoice::Service | SourceChoice::Module) {
        return None;
    }
    match elfen_kernel::task_map::open() {
        Ok(_) => Some(SLOWDOWN),
        Err(why) => {
            warn(&format!(
                "no shared core is emulated, so a batch does not slow requests here: {why}"
            ));
            None
        }
    }
}

fn measure(experiment: &Experiment) -> Result<Vec<Line>, Failure> {
    to_stderr("measuring a service with and without a batch: this takes about a minute");
    let mut results = Results::default();
    let meter = Meter::new();
    let done = experiment.run(&mut results, &mut |progress| meter.show_progress(progress));
    done.map_err(|error| live_args::failure(WHAT, &error))?;
    Ok(results.lines)
}

/// The column that compares runs, which is left out if all figures are unclear.
const P99_TO_ALONE: usize = 2;
/// The width of the verdict.
const COLUMNS: usize = 88;
/// An interval that is wider than this part of its figure says too little about the figure.
const WIDEST: f64 = 0.4;
/// The part of the runs that may have lost more than [`STEAL_MAX`] to other machines.
const STOLEN_RUNS_MAX: f64 = 0.25;

/// Returns what the runs show, in a sentence. Fails with the reason if the machine is too noisy.
fn verdict(lines: &[Line], rows: &[Row]) -> Result<String, String> {
    let all = || runs(lines);
    let stolen = all().filter(|run| run.steal > STEAL_MAX).count();
    if count_as_f64(stolen) > count_as_f64(all().count()) * STOLEN_RUNS_MAX {
        return Err(format!(
            "this machine is too noisy: in {stolen} of {} runs, other machines had more than 1 % \
             of the CPU time; try again later",
            all().count()
        ));
    }
    let row = |scenario| rows.iter().find(|row| row.scenario == scenario);
    let (Some(unrestrained), Some(elfen)) =
        (row(Scenario::Unrestrained), row(Scenario::BorrowIdle))
    else {
        return Err("a scenario has no runs".to_owned());
    };
    let [harm, cost] = [unrestrained, elfen].map(|row| row.p99_cost.or(row.p99_ratio));
    let (Some(harm), Some(cost)) = (clear(harm), clear(cost)) else {
        return Err("this machine is too noisy, or the runs are too few: the same requests took \
                    very different times; end other programs, or give a higher --runs"
            .to_owned());
    };
    let work = elfen.batch_relative.map_or_else(String::new, |work| {
        let percent = work.median * 100.0;
        format!(", and the batch did {percent:.0} % of the work that it does without requests")
    });
    Ok(format!(
        "unrestrained, the batch made the p99 of the requests {:.2} times as long; under Elfen, \
         {:.2} times{work}",
        harm.median, cost.median
    ))
}

/// Returns the figure if its interval is narrow enough. A figure of less than three runs has none,
/// and says nothing.
fn clear(figure: Option<Figure>) -> Option<Figure> {
    let is_narrow = |figure: &Figure| {
        figure.ci95.is_some_and(|[low, high]| high - low <= figure.median * WIDEST)
    };
    figure.filter(is_narrow)
}

impl DemoReport {
    fn conclusion(&self) -> String {
        let no_verdict = || self.why_no_verdict.as_ref().map(|why| format!("no verdict: {why}"));
        self.verdict.clone().or_else(no_verdict).unwrap_or_default()
    }

    fn text(&self) -> String {
        let rps = self.rows.first().map_or(0.0, |row| row.rps);
        let load = rps / self.capacity_rps.max(1.0) * 100.0;
        let costs = self.rows.iter().any(|row| row.p99_cost.is_some());
        let core = if costs && !self.smt { " of an emulated core" } else { "" };
        let mut text = format!(
            "search service, lanes {}{core}: {rps:.0} requests a second, {load:.0} % of \
             capacity\n\n",
            self.lanes
        );
        // Shown if it says something of any scenario.
        let compares = self.rows.iter().any(|row| clear(row.p99_ratio).is_some());
        let shown = |mut cells: Vec<String>| {
            if !compares {
                cells.remove(P99_TO_ALONE);
            }
            cells
        };
        let heading = ["", "cost to the p99", "p99 to alone", "batch work", "overlap", "reaction"];
        let heading = shown(heading.map(str::to_owned).to_vec());
        let heading: Vec<&str> = heading.iter().map(String::as_str).collect();
        let rows: Vec<Vec<String>> = self.rows.iter().map(|row| shown(cells(row))).collect();
        text += &table::lines(&heading, &rows);
        text += &format!("\n{}\n\n", wrap(&self.conclusion(), COLUMNS).join("\n"));
        if costs {
            text += "cost to the p99: of the same requests, with and without what the batch added \
                     to each\n";
        }
        text += if compares {
            "p99 to alone: of the median of each request over all runs\n"
        } else {
            "the p99 of runs cannot be compared here: it varies too much; \
             a higher --runs may help\n"
        };
        text += "in brackets: 95 % intervals\n";
        self.remarks.iter().for_each(|remark| text += &format!("{remark}\n"));
        text + &format!("page: {}\n", self.html.display())
    }
}

fn cells(row: &Row) -> Vec<String> {
    let dash = || "-".to_owned();
    let ratio = |figure: Option<Figure>| match (figure, clear(figure)) {
        (None, _) => dash(),
        (_, None) => "unclear".to_owned(),
        (_, Some(clear)) => live_rows::interval(&clear),
    };
    let name = match row.scenario {
        Scenario::None => "service alone".to_owned(),
        Scenario::Unrestrained => "unrestrained batch".to_owned(),
        _ => "batch under Elfen".to_owned(),
    };
    let [_, .., overlap, reaction] = live_rows::cells(row);
    vec![name, ratio(row.p99_cost), ratio(row.p99_ratio), live_rows::work(row), overlap, reaction]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Run;

    fn row(scenario: Scenario, [low, median, high]: [f64; 3]) -> Row {
        let lines = [Line::Run(Run {
            scenario,
            batch: (scenario != Scenario::None).then(|| "loop".to_owned()),
            ..Run::default()
        })];
        let cost = Figure { median, ci95: Some([low, high]) };
        Row { p99_cost: Some(cost), ..summary::rows(&lines).remove(0) }
    }

    /// Goal: the demo gives a verdict on clear figures, and none on a noisy machine. Method: narrow
    /// and wide intervals, and runs that lost time to other machines.
    #[test]
    fn a_noisy_machine_gets_no_verdict() {
        let rows =
            |harm, cost| [row(Scenario::Unrestrained, harm), row(Scenario::BorrowIdle, cost)];
        let run = |steal| Line::Run(Run { steal, ..Run::default() });
        let quiet = [run(0.0), run(0.009), run(0.011), run(0.0)];
        let clear = rows([1.9, 2.0, 2.1], [1.0, 1.01, 1.02]);
        let said = verdict(&quiet, &clear).unwrap();
        assert!(said.contains("2.00 times") && said.contains("1.01 times"), "{said}");
        // A clear cost is reported, however high it is.
        assert!(verdict(&quiet, &rows([1.9, 2.0, 2.1], [2.9, 3.0, 3.1])).is_ok());
        let noisy = verdict(&quiet, &rows([1.9, 2.0, 2.1], [0.7, 1.0, 1.2])).unwrap_err();
        assert!(noisy.contains("too noisy"), "{noisy}");
        let stolen = [run(0.02), run(0.02), run(0.0)];
        let noisy = verdict(&stolen, &clear).unwrap_err();
        assert!(noisy.contains("in 2 of 3 runs"), "{noisy}");
    }

    /// Goal: a column without any clear figure is left out, with a remark. Method: runs
    /// whose comparison has a wide interval, and a narrow one.
    #[test]
    fn an_unclear_column_is_left_out() {
        let text = |ci95| {
            let cost =
                [row(Scenario::None, [1.0; 3]), row(Scenario::BorrowIdle, [1.0, 1.01, 1.02])];
            let ratio = Some(Figure { median: 1.0, ci95: Some(ci95) });
            let report = DemoReport {
                lanes: "0:1".to_owned(),
                smt: false,
                capacity_rps: 2000.0,
                verdict: Some("a verdict".to_owned()),
                why_no_verdict: None,
                rows: cost.map(|row| Row { p99_ratio: ratio, ..row }).to_vec(),
                remarks: Vec::new(),
                html: PathBuf::from("demo.html"),
            };
            report.text()
        };
        let clear = text([0.9, 1.1]);
        assert!(clear.contains("  p99 to alone  ") && clear.contains("[0.900, 1.100]"), "{clear}");
        let unclear = text([0.5, 1.5]);
        assert!(!unclear.contains("p99 to alone"), "{unclear}");
        assert!(unclear.contains("lanes 0:1 of an emulated core"), "{unclear}");
        assert!(unclear.contains("cannot be compared here"), "{unclear}");
    }
}
