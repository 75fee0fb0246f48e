//! The figures of the thesis's chapter 5, from the simulator, and the times of its naps.
//!
//! The parameters and the seed determine each figure. Numbers that the thesis prints are shown as
//! rings, if the parameters are those of the thesis.

use elfen_console::page::Table;
use elfen_rt::policy::slo::Slo;
use rayon::iter::{IntoParallelRefIterator, ParallelIterator};
use serde::Deserialize;
use simulator::batches::KINDS;
use simulator::demand::Demand;
use simulator::load::Load;
use simulator::outcome::Outcome;
use simulator::pair::{Batch, Control, REF_IPC_MILLI};
use simulator::random::{Purpose, stream};
use simulator::source::{Requests, Until};
use simulator::thesis;
use simulator::time::{MS, S, milliseconds, real};
use simulator::trace::Served;
use simulator::windows::Watch;
use simulator::{Model, ModelError, Queue};

use super::figure::{Across, Axis, Figure, HtmlReport, Mark, Panel, Point, Rule, Scale, Series};
use super::figure::{Source, Style};

use crate::expected::control;
use crate::record::Scenario;

/// The parameters of the model.
#[derive(Clone, Debug)]
pub struct Parameters {
    /// Where the parameters come from, as every figure prints it.
    pub origin: String,
    pub demand: Demand,
    /// Batch programs by name. The policies are shown with the first one.
    pub batches: Vec<(String, Batch)>,
    /// The limit of the 99th percentile.
    pub slo_ms: u64,
    /// The options of `elfen lab simulate` that select these parameters; empty for its defaults.
    pub options: String,
    /// Whether the thesis's published numbers are shown as well.
    pub are_of_thesis: bool,
}

impl Default for Parameters {
    fn default() -> Self {
        let batches = KINDS.iter().map(|kind| (kind.name.to_owned(), kind.batch())).collect();
        Self {
            origin: "the parameters of the thesis, as far as it prints them".to_owned(),
            demand: Demand::Search,
            batches,
            slo_ms: 100,
            options: String::new(),
            are_of_thesis: true,
        }
    }
}

/// What to simulate for a report.
#[derive(Clone, Debug)]
pub struct Simulation {
    pub parameters: Parameters,
    /// The number of requests for each point of each figure.
    pub requests: u64,
    pub seed: u64,
    /// The command that makes the report.
    pub command: String,
}

/// The figures of single requests keep all of them in memory.
const MOST_REQUESTS: u64 = 10_000_000;

/// Why a report cannot be simulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Impossible {
    #[error("the parameters contain no batch program")]
    NoBatch,
    #[error("a point of a figure may have at most {MOST_REQUESTS} requests")]
    Requests,
    #[error(transparent)]
    Model(#[from] ModelError),
}

impl Simulation {
    fn slo(&self) -> Slo {
        Slo { per_million: 990_000, latency_ns: self.parameters.slo_ms * MS }
    }

    /// Simulates all figures, and compares the model with the thesis.
    pub fn report(&self) -> Result<HtmlReport, Impossible> {
        let lab = Lab::new(self)?;
        let mut figures: Vec<Figure> = OVER_LOAD.iter().map(|spec| lab.over_load(spec)).collect();
        // The order of the thesis.
        figures.insert(2, lab.pauses());
        figures.insert(0, lab.demand());
        figures.push(lab.overhead());
        let tables = if self.parameters.are_of_thesis { vec![published(self)] } else { Vec::new() };
        Ok(HtmlReport {
            title: "Elfen: simulations of the thesis's figures".to_owned(),
            command: self.command.clone(),
            notes: vec![lab.made_with()],
            tables,
            figures,
            appendix: Vec::new(),
        })
    }
}

/// Returns every number that the thesis prints, next to the model's number.
fn published(simulation: &Simulation) -> Table {
    let Simulation { requests, seed, .. } = *simulation;
    let rows = thesis::rows(requests, seed).iter().map(thesis::Row::cells).collect();
    Table::new("Published and simulated", &thesis::HEADING, rows).noted(format!(
        "Rows with \"built in\" or \"fitted\" are no evidence for the model: such a number results \
         from any parameters, or a parameter was fitted to it. Made by elfen lab thesis --requests \
         {requests} --seed {seed}."
    ))
}

/// Equally spaced loads, and the results of the service alone at each load.
struct Sweep<'a> {
    simulation: &'a Simulation,
    cores: u64,
    rates: Vec<f64>,
    alone: Vec<Outcome>,
}

/// A line ends where its tail exceeds this many SLOs. Higher points would make the rest of the line
/// flat.
const TAIL_SLOS: u64 = 2;

impl<'a> Sweep<'a> {
    /// Chooses `steps` loads, up to about the fraction `part` of what the cores can serve.
    fn new(
        simulation: &'a Simulation,
        cores: u64,
        (steps, part): (u32, f64),
        slo: Slo,
    ) -> Result<Self, ModelError> {
        let capacity = real(cores) * 1e9 / simulation.parameters.demand.mean_ns();
        let step = one_digit(capacity * part / f64::from(steps));
        let rates: Vec<f64> = (1..=steps).map(|index| step * f64::from(index)).collect();
        let mut sweep = Self { simulation, cores, rates, alone: Vec::new() };
        for (_, batch) in &simulation.parameters.batches {
            let model = |&rps: &f64| sweep.model(rps, batch, Control::NoBatch);
            sweep.rates.iter().try_for_each(|rps| model(rps).validate())?;
        }
        let (_, batch) = &simulation.parameters.batches[0];
        sweep.alone = sweep.with(Scenario::None, batch, slo);
        Ok(sweep)
    }

    fn model(&self, rps: f64, batch: &Batch, control: Control) -> Model {
        let demand = self.simulation.parameters.demand.clone();
        Model {
            machines: 1,
            cores: self.cores,
            queue: Queue::Shared,
            requests: Requests::Drawn { load: Load::steady(rps), demand },
            until: Until::Requests(self.simulation.requests),
            batch: *batch,
            control,
            watch: None,
            seed: self.simulation.seed,
        }
    }

    /// Simulates all rates next to a batch in this scenario, in parallel.
    ///
    /// slo-budget is judged every minute and adjusted every second, which is the default of `elfen
    /// lab simulate`.
    fn with(&self, scenario: Scenario, batch: &Batch, slo: Slo) -> Vec<Outcome> {
        let is_steered = scenario == Scenario::SloBudget;
        let watch = is_steered.then_some(Watch { slo, judge_ns: 60 * S, control_ns: Some(S) });
        let model = |(index, &rps): (usize, &f64)| {
            // The service alone comes first: the budget of the others is the SLO minus its tail.
            let alone_ns = self.alone.get(index).map_or(0, |alone| alone.tail_ns(&slo));
            let budget_ns = Some(slo.latency_ns.saturating_sub(alone_ns));
            let control = control(scenario, budget_ns, REF_IPC_MILLI);
            let control = control.unwrap_or(Control::Unrestrained);
            Model { watch, ..self.model(rps, batch, control) }
        };
        let models: Vec<Model> = self.rates.iter().enumerate().map(model).collect();
        models.par_iter().map(|model| model.run_on(1)).collect()
    }

    /// Returns the thesis's budget: the SLO minus the tail of the service alone.
    fn headroom_ns(&self, index: usize, slo: &Slo) -> u64 {
        slo.latency_ns.saturating_sub(self.alone[index].tail_ns(slo))
    }

    /// Returns how many of the outcomes fit into the figure, from the lowest load on.
    fn drawable(&self, outcomes: &[Outcome]) -> usize {
        let most_ns = self.simulation.parameters.slo_ms * MS * TAIL_SLOS;
        let fits = |outcome: &&Outcome| outcome.quantile_ns(0.99) <= most_ns;
        outcomes.iter().take_while(fits).count()
    }
}

/// Rounds to one significant digit.
fn one_digit(value: f64) -> f64 {
    let power = 10_f64.powf(value.log10().floor());
    (value / power).round() * power
}

/// A line over the loads: a quantile of the latency, and the utilisation.
#[derive(Clone)]
struct Line {
    name: String,
    style: Style,
    share: f64,
    outcomes: Vec<Outcome>,
}

impl Line {
    fn p99(name: impl Into<String>, style: Style, outcomes: Vec<Outcome>) -> Self {
        Self { name: name.into(), style, share: 0.99, outcomes }
    }

    fn series(&self, sweep: &Sweep<'_>, value: impl Fn(&Outcome) -> f64) -> Series {
        let points = sweep.rates.iter().zip(&self.outcomes[..sweep.drawable(&self.outcomes)]);
        let points = points.map(|(&rps, outcome)| Point::at(rps, value(outcome))).collect();
        Series::new(self.name.clone(), Mark::Line, self.style, points)
    }
}

/// Points that the thesis prints.
type Rings = &'static [(f64, f64)];

/// A figure over the loads of one sweep: latency above, utilisation of the core below.
struct OverLoad {
    id: &'static str,
    title: &'static str,
    reading: &'static str,
    /// Whether seven cores share a queue, or there is only one core.
    seven: bool,
    lines: Lines,
    /// The published points of the latency, and of the utilisation.
    rings: [Rings; 2],
    /// An example point: the index of its rate, and the options of `elfen lab simulate`. A budget
    /// is appended if needed.
    point: (usize, &'static str),
}

#[derive(Clone, Copy)]
enum Lines {
    /// Quantiles of the service alone.
    Alone,
    /// The service alone, and next to each batch program without restrictions.
    Unrestrained,
    /// Next to the first batch program, in each of these scenarios.
    Scenarios(&'static [Scenario]),
}

const QUANTILES: [(&str, Style, f64); 3] =
    [("p50", Style::AQUA, 0.5), ("p95", Style::OCHRE, 0.95), ("p99", Style::INK, 0.99)];

const SAMENESS: &str = "A batch that naps while requests run does not change p99, and the \
    utilisation of the core rises to that of one lane that is always busy.";

/// Figures 5.2, 5.4, 5.10 (a), (b) and (c), and 5.11 with slo-budget.
const OVER_LOAD: [OverLoad; 6] = [
    OverLoad {
        id: "percentiles",
        title: "The service alone: the tail rises long before the lane is fully busy",
        reading: "p99 reaches the SLO although the request lane still idles for a large part of \
            the time, and the other lane of the core idles all the time.",
        seven: false,
        lines: Lines::Alone,
        rings: [&[(70.0, 60.0), (100.0, 76.0), (120.0, 100.0)], &[(120.0, 0.7)]],
        point: (9, ""),
    },
    OverLoad {
        id: "unrestrained",
        title: "An unrestrained batch lowers the maximum load",
        reading: "Next to an unrestrained batch, p99 reaches the SLO at a lower load.",
        seven: false,
        lines: Lines::Unrestrained,
        rings: [&[(40.0, 76.0)], &[]],
        point: (3, " --policy unrestrained"),
    },
    OverLoad {
        id: "borrow-idle",
        title: "borrow-idle on one core: the batch uses only idle time",
        reading: SAMENESS,
        seven: false,
        lines: Lines::Scenarios(&[Scenario::None, Scenario::BorrowIdle]),
        rings: [&[], &[]],
        point: (7, " --policy borrow-idle"),
    },
    OverLoad {
        id: "borrow-idle-7",
        title: "borrow-idle on seven cores that share a queue",
        reading: SAMENESS,
        seven: true,
        lines: Lines::Scenarios(&[Scenario::None, Scenario::BorrowIdle]),
        rings: [&[(1000.0, 60.0)], &[]],
        point: (5, " --cores 7 --policy borrow-idle"),
    },
    OverLoad {
        id: "dynamic-7",
        title: "dynamic-budget on seven cores",
        reading: "The batch also runs next to requests, as far as the SLO permits. The utilisation \
            of each core is higher, and p99 stays within the SLO.",
        seven: true,
        lines: Lines::Scenarios(&[Scenario::None, Scenario::BorrowIdle, Scenario::DynamicBudget]),
        rings: [&[], &[(600.0, 1.75)]],
        point: (5, " --cores 7 --policy dynamic-budget"),
    },
    OverLoad {
        id: "policies",
        title: "Policies: utilisation gained from the SLO's headroom",
        reading: "With borrow-idle the utilisation is at most 1.0; with budgets it is higher. As \
            in the thesis, each budget is the SLO minus the p99 without a batch at that load; \
            slo-budget gets the SLO and controls its budget itself.",
        seven: false,
        lines: Lines::Scenarios(&[
            Scenario::None,
            Scenario::BorrowIdle,
            Scenario::FixedBudget,
            Scenario::RefreshBudget,
            Scenario::DynamicBudget,
            Scenario::SloBudget,
        ]),
        rings: [&[], &[]],
        point: (7, " --policy refresh-budget"),
    },
];

/// The loads of Figures 5.12 and 5.5, as indices of the rates of one core: 80 and 120 requests per
/// second in the thesis.
const OVERHEAD_AT: usize = 7;
const PAUSES_AT: usize = 11;

/// The simulations that several figures share.
struct Lab<'a> {
    simulation: &'a Simulation,
    /// A single core, and seven cores that share a queue.
    one: Sweep<'a>,
    seven: Sweep<'a>,
}

impl<'a> Lab<'a> {
    fn new(simulation: &'a Simulation) -> Result<Self, Impossible> {
        if simulation.parameters.batches.is_empty() {
            return Err(Impossible::NoBatch);
        }
        if simulation.requests > MOST_REQUESTS {
            return Err(Impossible::Requests);
        }
        let slo = simulation.slo();
        Ok(Self {
            simulation,
            one: Sweep::new(simulation, 1, (13, 0.78), slo)?,
            seven: Sweep::new(simulation, 7, (11, 0.93), slo)?,
        })
    }

    /// Returns the batch program with which the policies are shown.
    fn batch(&self) -> &Batch {
        &self.simulation.parameters.batches[0].1
    }

    /// Returns the thesis's published numbers as a series, if there are any and the parameters are
    /// those of the thesis.
    fn rings(&self, points: &[(f64, f64)]) -> Option<Series> {
        let belongs = self.simulation.parameters.are_of_thesis && !points.is_empty();
        let points = points.iter().map(|&(x, y)| Point::at(x, y)).collect();
        belongs.then(|| Series::new("published in the thesis", Mark::Rings, Style::INK, points))
    }

    fn made_with(&self) -> String {
        let Simulation { parameters, requests, seed, .. } = self.simulation;
        let batch = self.batch();
        let slowdown = |(name, batch): &(String, Batch)| {
            format!("{} times as long next to {name:?}", real(batch.request_slowdown_milli) / 1e3)
        };
        let slower: Vec<String> = parameters.batches.iter().map(slowdown).collect();
        format!(
            "Simulated with {}: a request takes {}, and {} times as long next to a nap; a batch \
             takes {} times as long next to a request; {} µs to sleep, {} µs to wake, a check \
             every {} µs. {requests} requests per point, seed {seed}.",
            parameters.origin,
            slower.join(", "),
            real(batch.nap_slowdown_milli) / 1e3,
            real(batch.batch_slowdown_milli) / 1e3,
            real(batch.sleep_ns) / 1e3,
            real(batch.wake_ns) / 1e3,
            real(batch.polling.every_ns()) / 1e3,
        )
    }

    /// Returns the report's command, followed by a command for a single point.
    fn command(&self, point: &str) -> String {
        let Simulation { command, requests, seed, .. } = self.simulation;
        let options = match self.simulation.parameters.options.as_str() {
            "" => String::new(),
            options => format!(" {options}"),
        };
        format!(
            "{command}\n# one point of the figure:\n\
             elfen lab simulate {point}{options} --requests {requests} --seed {seed}"
        )
    }

    fn figure(&self, id: &str, title: &str, reading: &str, x: Across) -> Figure {
        Figure {
            id: format!("simulated-{id}"),
            title: title.to_owned(),
            reading: reading.to_owned(),
            source: Source::Simulated,
            made_with: self.made_with(),
            command: self.simulation.command.clone(),
            x,
            ..Figure::default()
        }
    }

    fn lines(&self, lines: Lines, sweep: &Sweep<'_>) -> Vec<Line> {
        let batches = &self.simulation.parameters.batches;
        let with = |scenario, batch| sweep.with(scenario, batch, self.simulation.slo());
        match lines {
            Lines::Alone => {
                let line = |(name, style, share)| {
                    let line = Line::p99(name, style, sweep.alone.clone());
                    Line { share, ..line }
                };
                QUANTILES.map(line).to_vec()
            }
            Lines::Unrestrained => {
                let alone = Line::p99(Scenario::None.title(), Style::INK, sweep.alone.clone());
                // Skip the styles of the service alone and of borrow-idle.
                let styles = Style::ALL.into_iter().skip(2).cycle();
                let beside = batches.iter().zip(styles).map(|((name, batch), style)| {
                    Line::p99(format!("next to {name}"), style, with(Scenario::Unrestrained, batch))
                });
                std::iter::once(alone).chain(beside).collect()
            }
            Lines::Scenarios(scenarios) => {
                let batch = self.batch();
                let line = |&of: &Scenario| Line::p99(of.title(), of.style(), with(of, batch));
                scenarios.iter().map(line).collect()
            }
        }
    }

    fn over_load(&self, spec: &OverLoad) -> Figure {
        let sweep = if spec.seven { &self.seven } else { &self.one };
        let lines = self.lines(spec.lines, sweep);
        let latency = |line: &Line| line.series(sweep, |of| of.quantile_ms(line.share));
        let utilisation = |line: &Line| line.series(sweep, Outcome::utilisation);
        let latencies = lines.iter().map(latency).collect();
        let utilisations: Vec<Series> = lines.iter().map(utilisation).collect();
        let (quantity, utilisations) = match spec.lines {
            // All quantiles belong to the same requests, so they have the same utilisation.
            Lines::Alone => {
                let name = "request lane".to_owned();
                ("latency", vec![Series { name, ..utilisations[2].clone() }])
            }
            _ => ("p99 latency", utilisations),
        };
        let used = Axis::new("utilisation of the core", "2.0: both lanes always busy");
        let x = Across::number("load", "requests per second");
        let mut figure = self.figure(spec.id, spec.title, spec.reading, x);
        figure.panels =
            vec![Panel::new(Axis::new(quantity, "ms"), latencies), Panel::new(used, utilisations)];
        let slo_ms = self.simulation.parameters.slo_ms;
        let rule = Rule { y: real(slo_ms), name: format!("SLO {slo_ms} ms") };
        figure.panels[0].rules.push(rule);
        for (panel, rings) in figure.panels.iter_mut().zip(spec.rings) {
            panel.series.extend(self.rings(rings));
        }
        let is_cut = |line: &Line| sweep.drawable(&line.outcomes) < sweep.rates.len();
        if lines.iter().any(is_cut) {
            figure.made_with += " A line ends where its p99 exceeds twice the SLO.";
        }
        let (at, options) = spec.point;
        let budget = if options.ends_with("-budget") {
            format!(" --budget {}ns", sweep.headroom_ns(at, &self.simulation.slo()))
        } else {
            String::new()
        };
        figure.command = self.command(&format!("--rps {}{options}{budget}", sweep.rates[at]));
        figure
    }

    /// Draws what borrowing costs the batch (Figure 5.12): its time, its share of its lane, and its
    /// pace while it has the lane.
    fn overhead(&self) -> Figure {
        const ROWS: [Scenario; 6] = [
            Scenario::Unrestrained,
            Scenario::BorrowIdle,
            Scenario::FixedBudget,
            Scenario::RefreshBudget,
            Scenario::DynamicBudget,
            Scenario::SloBudget,
        ];
        const BORROW_IDLE: usize = 1;
        let batch = self.batch();
        let rps = self.one.rates[OVERHEAD_AT];
        let at = |scenario| {
            self.one.with(scenario, batch, self.simulation.slo()).swap_remove(OVERHEAD_AT)
        };
        let outcomes = ROWS.map(at);
        let share = Outcome::batch_lane_utilisation;
        let work = |outcome: &Outcome| outcome.batch_work(batch);
        // A batch that makes no progress would take infinite time, so it has no bar.
        let time = |outcome: &Outcome| (work(outcome) > 0.0).then(|| 1.0 / work(outcome));
        let pace =
            |outcome: &Outcome| (share(outcome) > 0.0).then(|| work(outcome) / share(outcome));
        let names = ROWS.map(|scenario| scenario.title().to_owned()).to_vec();
        let x = Across::names("policy", names, false);
        let reading = "The same work takes longer than with a lane of its own. With budgets it \
            takes less time, although the batch runs more slowly next to requests.";
        let mut figure = self.figure("overhead", "Cost of borrowing for the batch", reading, x);
        type Value<'v> = &'v dyn Fn(&Outcome) -> Option<f64>;
        let panels: [(&str, &str, Value<'_>, f64); 3] = [
            ("time for the same work", "multiple of the time alone", &time, 1.49),
            ("fraction of the lane's time", "", &|outcome| Some(share(outcome)), 0.5),
            ("work per second on the lane", "1: as alone", &pace, 0.99),
        ];
        figure.panels = panels
            .map(|(quantity, unit, value, published)| {
                let points = outcomes.iter().enumerate();
                let point = |(index, outcome)| Some(Point::at(index as f64, value(outcome)?));
                let style = Scenario::BorrowIdle.style();
                let points = points.filter_map(point).collect();
                let bars = Series::new("simulated", Mark::Bars, style, points);
                let rings = self.rings(&[(BORROW_IDLE as f64, published)]);
                let series = std::iter::once(bars).chain(rings).collect();
                Panel::new(Axis::new(quantity, unit), series)
            })
            .to_vec();
        if self.simulation.parameters.are_of_thesis {
            figure.made_with += " The thesis's 1.49 is the mean of ten programs. Some of them left \
                a part of their lane idle when they ran alone; the model's batch never does.";
        }
        figure.command = self.command(&format!("--rps {rps} --policy borrow-idle"));
        figure
    }

    /// Draws the distribution of the demand (Figure 5.1).
    fn demand(&self) -> Figure {
        let demand = &self.simulation.parameters.demand;
        let mut random = stream(self.simulation.seed, Purpose::Demand, 0);
        let mut times: Vec<u64> =
            (0..self.simulation.requests).map(|_| demand.sample(&mut random)).collect();
        times.sort_unstable();
        let x = Across::number("service time of a request alone", "ms");
        let title = "Demand: most requests are short, a few are long";
        let reading = "A request that waits behind a long request waits for a long time.";
        let mut figure = self.figure("demand", title, reading, x);
        figure.panels =
            distribution(&times, 0.999, |_| 1.0, ("fraction of all requests", "requests"));
        if self.simulation.parameters.are_of_thesis {
            figure.made_with += " Figure 5.1 prints no numbers: this is the simplest demand that \
                matches the numbers printed elsewhere.";
        }
        figure
    }

    /// Draws the distribution of the pauses (Figure 5.5).
    fn pauses(&self) -> Figure {
        let (rps, batch) = (self.one.rates[PAUSES_AT], self.batch());
        let mut pauses: Vec<u64> = Vec::new();
        let mut free_ns = 0;
        let model = self.one.model(rps, batch, Control::NoBatch);
        model.run_into(&mut |served: &Served| {
            pauses.push(served.started_ns - free_ns);
            free_ns = served.ended_ns;
        });
        pauses.sort_unstable();
        let x = Across::number("length of a pause", "ms");
        let reading = "Most pauses are too short to be used by a scheduler, but long enough for \
            naps that take microseconds.";
        let title = "Idle time comes in short pauses";
        let mut figure = self.figure("pauses", title, reading, x);
        figure.command = self.command(&format!("--rps {rps} --trace-out pauses.csv"));
        figure.panels =
            distribution(&pauses, 0.99, real, ("fraction of the idle time", "idle time"));
        figure.panels[0].series.extend(self.rings(&[(15.0, 0.023)]));
        figure.panels[1].series.extend(self.rings(&[(15.0, 0.53)]));
        figure
    }
}

/// The number of buckets in a figure. Longer times are counted but not drawn.
const BUCKETS: usize = 70;

/// Draws a distribution: columns above, and their cumulative sum below. The times are sorted and
/// weighted. The columns cover at least the fraction `share` of the weight.
fn distribution(
    times: &[u64],
    share: f64,
    weight: impl Fn(u64) -> f64,
    (part, name): (&str, &str),
) -> Vec<Panel> {
    let whole = times.iter().map(|&ns| weight(ns)).sum::<f64>().max(1.0);
    let mut so_far = 0.0;
    let most = times.iter().copied().find(|&ns| {
        so_far += weight(ns);
        so_far >= whole * share
    });
    let width_ns = bucket_ns(most.unwrap_or(MS));
    let mut parts = vec![0.0; BUCKETS];
    for &ns in times {
        let bucket = usize::try_from(ns / width_ns).unwrap_or(usize::MAX);
        if let Some(part) = parts.get_mut(bucket) {
            *part += weight(ns) / whole;
        }
    }
    parts.truncate(parts.iter().rposition(|&part| part > 0.0).map_or(1, |last| last + 1));

    let width = milliseconds(width_ns);
    let from_ms = |bucket: usize| width * bucket as f64;
    let columns = parts.iter().enumerate();
    let columns = columns.map(|(bucket, &part)| Point::at(from_ms(bucket), part)).collect();
    let sums = (0..=parts.len()).map(|end| Point::at(from_ms(end), parts[..end].iter().sum()));
    let columns = Series::new(name, Mark::Histogram { width }, Style::BLUE, columns);
    let sums = Series::new("cumulative", Mark::Curve, Style::INK, sums.collect());
    vec![
        Panel::new(Axis::new(part, format!("in buckets of {width} ms")), vec![columns]),
        Panel::new(Axis::new(format!("{part} up to this time"), ""), vec![sums]),
    ]
}

/// Returns a round bucket width with which `most_ns` fits into the figure.
fn bucket_ns(most_ns: u64) -> u64 {
    let least = most_ns / 65 + 1;
    let mut power = 1;
    loop {
        if let Some(factor) = [1, 2, 5].into_iter().find(|factor| factor * power >= least) {
            return factor * power;
        }
        power *= 10;
    }
}

/// The fields of `elfen lab bench nap --json` that Figure 5.8 needs.
#[derive(Clone, Debug, Deserialize, PartialEq)]
pub struct Naps {
    pub request_cpu: u32,
    pub batch_cpu: u32,
    pub tsc_mhz: f64,
    pub naps: Vec<Nap>,
}

#[derive(Clone, Debug, Deserialize, PartialEq)]
pub struct Nap {
    pub nap: String,
    pub sleep_cycles: Option<Cycles>,
    pub wake_cycles: Option<Cycles>,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq)]
pub struct Cycles {
    pub median: f64,
}

/// The cycles at 2 GHz to sleep and to wake (section 5.3.2), under Elfen's names for the naps.
const PUBLISHED_NAPS: [(&str, [f64; 2]); 3] =
    [("mwait", [2443.0, 1036.0]), ("device", [3285.0, 1438.0]), ("futex", [11518.0, 3968.0])];

const NAPS_READING: &str = "On the thesis's machine, nanonap (here: device) takes 3285 cycles to \
    sleep and 1438 to wake, which is close to the instruction MWAIT alone. A futex takes 3.5 and \
    2.8 times as long.";

impl Nap {
    /// Returns the cycles to sleep, and to wake.
    fn cycles(&self) -> [Option<f64>; 2] {
        [self.sleep_cycles, self.wake_cycles].map(|cycles| Some(cycles?.median))
    }
}

/// Draws how long a lane takes to fall asleep and to wake, with the published naps. Measured naps
/// are added if there are any.
pub fn naps(measured: Option<&Naps>, command: &str) -> Figure {
    let mut names = PUBLISHED_NAPS.map(|(name, _)| name.to_owned()).to_vec();
    let here = measured.map_or(&[][..], |measured| &measured.naps);
    for nap in here.iter().filter(|nap| nap.cycles() != [None, None]) {
        if !names.contains(&nap.nap) {
            names.push(nap.nap.clone());
        }
    }
    let panel = |(which, quantity): (usize, &str)| {
        let points = PUBLISHED_NAPS.iter().enumerate();
        let points = points.map(|(index, (_, cycles))| Point::at(index as f64, cycles[which]));
        let name = "published in the thesis";
        let published = Series::new(name, Mark::Rings, Style::INK, points.collect());
        let place = |nap: &Nap| names.iter().position(|name| *name == nap.nap);
        let point = |nap: &Nap| Some(Point::at(place(nap)? as f64, nap.cycles()[which]?));
        let points = here.iter().filter_map(point).collect();
        let live = Series::new("measured here", Mark::Dots, Style::BLUE, points);
        let series = std::iter::once(published).chain(measured.map(|_| live)).collect();
        Panel::new(Axis::new(quantity, "cycles").scaled(Scale::Log), series)
    };
    let panels = [(0, "time to sleep"), (1, "time to wake")].map(panel).to_vec();
    let made_here = match measured {
        None => "There are no measurements on this machine; elfen lab bench nap --json makes them."
            .to_owned(),
        Some(Naps { request_cpu, batch_cpu, tsc_mhz, .. }) => format!(
            "Measured here: medians, in cycles of a {tsc_mhz} MHz counter; CPU {request_cpu} wakes \
             CPU {batch_cpu}."
        ),
    };
    Figure {
        id: "naps".to_owned(),
        title: "Naps: times to sleep and to wake".to_owned(),
        reading: NAPS_READING.to_owned(),
        source: if measured.is_some() { Source::Live } else { Source::Published },
        made_with: format!(
            "The thesis's numbers are means of 100 naps, in cycles at 2 GHz. {made_here}"
        ),
        command: command.to_owned(),
        x: Across::names("nap", names, true),
        panels,
    }
}
