//! What `elfen profile core` prints of a trace on a modelled core.

use elfen_console::table;
use elfen_core_model::branch_paths::{PathAccuracy, PathGraph};
use elfen_core_model::estimate::{EXPECTED_MIN, Fit, SiteEstimate, estimate, fit, relative_error};
use elfen_core_model::machine::Machine;
use elfen_core_model::pair_metric::PairMetric;
use elfen_core_model::pipeline::{self, Fetched, Totals};
use elfen_core_model::sample::{Sampler, Sampling};
use elfen_core_model::trace::{BlockNumber, Trace};
use elfen_core_model::truth::{Site, SiteTruth, Sites, Truth, kind_of};
use elfen_core_model::window::{WindowedIpc, Windows};
use serde::Serialize;

use crate::profile::{Place, Profile, ProfiledFile};
use crate::sample_table::{EventRates, MeanLatencies, TABLE_1, latency_heads, percent};
use crate::symbols::ProfileSymbols;

/// Names of the places of a trace.
pub(crate) struct TraceNames {
    symbols: ProfileSymbols,
    /// Files that have changed since.
    pub(crate) changed: Vec<String>,
}

impl TraceNames {
    pub(crate) fn read(trace: &Trace) -> Self {
        let file = |one: &elfen_core_model::trace::CodeFile| ProfiledFile {
            path: one.path.clone(),
            build_id: one.build_id.clone(),
        };
        let files = trace.files.iter().map(file).collect();
        let (symbols, changed) = ProfileSymbols::read(&Profile { files, ..Profile::default() });
        Self { symbols, changed }
    }

    fn place(trace: &Trace, block: BlockNumber, inside: u64) -> Option<Place> {
        let (file, offset) = trace.block(block)?.place?;
        Some(Place { file, offset: offset.checked_add(inside)? })
    }

    /// The name of an instruction, as in `main+0x12`, or its address.
    pub(crate) fn of(&self, trace: &Trace, site: &Site) -> String {
        match Self::place(trace, site.block, site.inside) {
            Some(place) => self.symbols.place(place),
            None => format!("{:#x}", site.pc),
        }
    }

    /// The name of the function that an instruction is in.
    pub(crate) fn function(&self, trace: &Trace, site: &Site) -> Option<String> {
        let place = Self::place(trace, site.block, site.inside)?;
        let function = self.symbols.function_of(place);
        function.start.map(|_| self.symbols.name(&function))
    }
}

/// How a trace is run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CoreOrder<'a> {
    pub(crate) machine: &'a Machine,
    pub(crate) sampling: Sampling,
    pub(crate) top: usize,
    pub(crate) metric: Option<(&'a str, &'a PairMetric)>,
}

/// What a run shows.
#[derive(Serialize, Debug)]
pub(crate) struct CoreReport {
    program: Vec<String>,
    machine: String,
    instructions: u64,
    skipped: u64,
    untraced_accesses: u64,
    totals: Totals,
    ipc: f64,
    windows: Option<WindowedIpc>,
    every: u64,
    window: u32,
    ways: u32,
    seed: u64,
    samples: u64,
    pairs: u64,
    /// Chosen fetch opportunities without an instruction.
    empty: u64,
    fit: Fit,
    metric: Option<String>,
    rows: Vec<Row>,
    /// Instructions with samples that are not among the rows.
    left_out: usize,
}

/// One instruction.
#[derive(Serialize, Debug)]
struct Row {
    address: u64,
    name: String,
    class: &'static str,
    samples: u64,
    executions: f64,
    relative_error: Option<f64>,
    executions_truly: u64,
    aborted: u64,
    latencies: MeanLatencies,
    wasted: f64,
    wasted_truly: i64,
    #[serde(flatten)]
    rates: EventRates,
    metric: Option<f64>,
}

impl CoreReport {
    pub(crate) fn of(trace: &Trace, names: &TraceNames, order: CoreOrder<'_>) -> Self {
        let CoreOrder { machine, sampling, top, metric } = order;
        let sites = Sites::new(trace);
        let mut truth = Truth::new(&sites);
        let mut sampler = Sampler::new(sampling);
        let mut windows = Windows::default();
        let kinds: Vec<_> = trace.instructions.iter().map(kind_of).collect();
        let totals = pipeline::run(trace, machine, |fetched| {
            truth.see(fetched);
            sampler.see(fetched, |one: &Fetched| kinds[one.instruction as usize]);
            if fetched.abort.is_none() {
                windows.note(fetched.times.retire);
            }
        });
        let truth = truth.finish();
        let estimates = estimate(&sites, &sampler.samples, &sampler.pairs);
        let width = machine.issue.width;
        let values =
            metric.map(|(_, metric)| metric.of(trace, &sites, &sampler.pairs, sampling.window));
        let mut order: Vec<usize> =
            (0..sites.len()).filter(|&site| estimates[site].samples > 0).collect();
        let key = |site: usize| estimates[site].wasted(&sampling, width);
        order.sort_by(|&one, &other| key(other).total_cmp(&key(one)));
        let left_out = order.len().saturating_sub(top);
        order.truncate(top);
        let row = |site: usize| {
            let found = sites.site(site)?;
            let mut row =
                Row::of(trace, names, found, &estimates[site], &truth[site], &sampling, width)?;
            row.metric =
                values.as_ref().and_then(|values| Some(values.get(site)?.as_ref()?.around));
            Some(row)
        };
        Self {
            program: trace.program.clone(),
            machine: machine.name.clone(),
            instructions: totals.retired,
            skipped: trace.skipped,
            untraced_accesses: trace.untraced_accesses,
            ipc: ratio(totals.retired, totals.cycles).unwrap_or(0.0),
            totals,
            windows: windows.finish(),
            every: sampling.every,
            window: sampling.window,
            ways: sampling.ways,
            seed: sampling.seed,
            samples: sampler.samples.len() as u64,
            pairs: sampler.pairs.len() as u64,
            empty: sampler.empty_beside + sampler.empty_cycles,
            fit: fit(&estimates, &truth, &sampling, width),
            metric: metric.map(|(text, _)| text.to_owned()),
            rows: order.into_iter().filter_map(row).collect(),
            left_out,
        }
    }

    pub(crate) fn text(&self) -> String {
        let totals = &self.totals;
        let fetched = totals.retired + totals.aborted;
        let mut text = format!(
            "{}: {} instructions on the core {}\n",
            self.program.join(" "),
            self.instructions,
            self.machine
        );
        text += &format!(
            "{:.2} instructions per cycle, {} cycles; {} of the fetched instructions aborted\n",
            self.ipc,
            totals.cycles,
            percent(ratio(totals.aborted, fetched)),
        );
        if let Some(windows) = &self.windows {
            text += &format!(
                "in windows of 30 cycles {:.2} to {:.2}, standard deviation {} of the mean; {} of \
                 the windows are empty\n",
                windows.min,
                windows.max,
                percent(Some(windows.deviation)),
                percent(Some(windows.empty)),
            );
        }
        text += &format!(
            "of 1000 instructions, {:.2} mispredict, {:.2} miss the I-cache, {:.2} the D-cache, \
             {:.2} the D-TLB\n",
            per_thousand(totals.mispredicted, totals.retired),
            per_thousand(totals.icache_misses, totals.retired),
            per_thousand(totals.dcache_misses, totals.retired),
            per_thousand(totals.dtlb_misses, totals.retired),
        );
        text += &self.fit_text();
        text.push('\n');
        text += &self.table();
        if self.left_out > 0 {
            text += &format!("{} more instructions have samples: see --top\n", self.left_out);
        }
        text
    }

    fn fit_text(&self) -> String {
        let fit = &self.fit;
        let mut text = format!(
            "{} samples, one per {} (seed {}); {} pairs, within {} instructions\n",
            self.samples, self.every, self.seed, self.pairs, self.window
        );
        if self.empty > 0 {
            text += &format!("{} chosen fetch opportunities had no instruction\n", self.empty);
        }
        for (what, envelope) in
            [("executions", &fit.retired), ("D-cache misses", &fit.dcache_misses)]
        {
            if let Some(share) = envelope.share() {
                text += &format!(
                    "{what}: {} of {} estimates are within one standard deviation (68 % is \
                     expected)\n",
                    percent(Some(share)),
                    envelope.points,
                );
            } else {
                text += &format!("{what}: fewer than {EXPECTED_MIN} samples of each instruction\n");
            }
        }
        if self.pairs > 0 {
            text += &format!(
                "wasted slots: estimated {:.3} of the true number; {} of the {} worst instructions \
                 are named\n",
                fit.wasted / fit.wasted_truly,
                fit.worst_named,
                fit.worst,
            );
        }
        text
    }

    fn table(&self) -> String {
        let mut head = vec!["instruction", "class", "executions", "±"];
        head.extend(&latency_heads()[..TABLE_1]);
        head.extend(["wasted", "D-miss", "mispr."]);
        if self.metric.is_some() {
            head.push("metric");
        }
        let rows: Vec<Vec<String>> = self
            .rows
            .iter()
            .map(|row| {
                let mut cells = vec![
                    row.name.clone(),
                    row.class.to_owned(),
                    format!("{:.0}", row.executions),
                    percent(row.relative_error),
                ];
                cells.extend(row.latencies.cells().into_iter().take(TABLE_1));
                cells.extend([
                    format!("{:.0}", row.wasted),
                    percent(row.rates.dcache_miss_rate),
                    percent(row.rates.mispredict_rate),
                ]);
                if self.metric.is_some() {
                    cells.push(row.metric.map_or(String::new(), |value| format!("{value:.3}")));
                }
                cells
            })
            .collect();
        table::lines(&head, &rows)
    }
}

impl Row {
    fn of(
        trace: &Trace,
        names: &TraceNames,
        site: &Site,
        estimate: &SiteEstimate,
        truth: &SiteTruth,
        sampling: &Sampling,
        issue_width: u32,
    ) -> Option<Self> {
        let error = relative_error(estimate.retired);
        Some(Self {
            address: site.pc,
            name: names.of(trace, site),
            class: trace.instructions.get(site.instruction as usize)?.class.name(),
            samples: estimate.samples,
            executions: float(estimate.retired) * float(sampling.every),
            relative_error: error,
            executions_truly: truth.retired,
            aborted: estimate.aborted.iter().sum(),
            latencies: MeanLatencies::of(estimate),
            wasted: estimate.wasted(sampling, issue_width),
            wasted_truly: truth.wasted(issue_width),
            rates: EventRates::of(estimate),
            metric: None,
        })
    }
}

/// Two traces on one core, next to each of them alone.
#[derive(Serialize, Debug)]
pub(crate) struct BesideReport {
    machine: String,
    /// This compares a model with itself. It is not tuned to any machine.
    experimental: bool,
    threads: [BesideThread; 2],
}

#[derive(Serialize, Debug)]
struct BesideThread {
    program: Vec<String>,
    instructions: u64,
    ipc_alone: f64,
    ipc_beside: f64,
}

impl BesideReport {
    pub(crate) fn of(traces: [&Trace; 2], machine: &Machine) -> Self {
        let beside = pipeline::run_beside(traces, machine, |_, _| {});
        let mut totals = beside.into_iter();
        let threads = traces.map(|trace| {
            let both = totals.next().unwrap_or_default();
            // As many instructions alone, from the same beginning.
            let (mut retired, mut cycles) = (0, 0);
            pipeline::run(trace, machine, |fetched| {
                if fetched.abort.is_none() && retired < both.retired {
                    retired += 1;
                    cycles = fetched.times.retire + 1;
                }
            });
            BesideThread {
                program: trace.program.clone(),
                instructions: both.retired,
                ipc_alone: ratio(retired, cycles).unwrap_or(0.0),
                ipc_beside: ratio(both.retired, both.cycles).unwrap_or(0.0),
            }
        });
        Self { machine: machine.name.clone(), experimental: true, threads }
    }

    pub(crate) fn text(&self) -> String {
        let row = |one: &BesideThread| {
            vec![
                one.program.join(" "),
                one.instructions.to_string(),
                format!("{:.2}", one.ipc_alone),
                format!("{:.2}", one.ipc_beside),
                percent(Some(one.ipc_beside / one.ipc_alone)),
            ]
        };
        let head = ["program", "instructions", "IPC alone", "IPC beside", "speed"];
        let rows: Vec<Vec<String>> = self.threads.iter().map(row).collect();
        format!(
            "experiment: two threads on the core {}, which is not tuned to any machine\n\n{}",
            self.machine,
            table::lines(&head, &rows)
        )
    }
}

/// How often the path to an instruction is found (Figure 6).
#[derive(Serialize, Debug)]
pub(crate) struct PathsReport {
    program: Vec<String>,
    samples: u32,
    seed: u64,
    rows: Vec<PathAccuracy>,
}

const PATH_LENGTHS: [usize; 6] = [1, 3, 5, 7, 9, 11];
const PATH_SAMPLES: u32 = 500;
/// How far apart the instructions of a pair are in the paper.
const PATH_WINDOW: u64 = 50;

impl PathsReport {
    pub(crate) fn of(trace: &Trace, seed: u64) -> Self {
        let graph = PathGraph::new(trace);
        let rows = graph.accuracy(&PATH_LENGTHS, PATH_SAMPLES, PATH_WINDOW, seed);
        Self { program: trace.program.clone(), samples: PATH_SAMPLES, seed, rows }
    }

    pub(crate) fn text(&self) -> String {
        let row = |one: &PathAccuracy| {
            let shares = one.within_functions.iter().chain(&one.through_calls);
            let cells = shares.map(|&share| percent(Some(share)));
            [one.length.to_string()].into_iter().chain(cells).collect()
        };
        let rows: Vec<Vec<String>> = self.rows.iter().map(row).collect();
        let head = [
            "branches",
            "counts",
            "history",
            "with pairs",
            "calls: counts",
            "history",
            "with pairs",
        ];
        format!(
            "{}: paths found, of {} samples (seed {}); within functions, and through calls\n\n{}",
            self.program.join(" "),
            self.samples,
            self.seed,
            table::lines(&head, &rows)
        )
    }
}

fn ratio(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| float(part) / float(whole))
}

fn per_thousand(part: u64, whole: u64) -> f64 {
    ratio(part, whole).unwrap_or(0.0) * 1000.0
}

#[expect(clippy::cast_precision_loss, reason = "counts of a trace are below 2^53")]
fn float(number: u64) -> f64 {
    number as f64
}
