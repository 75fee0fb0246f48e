//! The experiments of ProfileMe (MICRO 1997): how well samples of instructions and pairs fit what
//! happens on a modelled core.
//!
//! `elfen profile trace` records each program. One run of the model gives the truth and the samples
//! at all intervals. Figures 2 and 7 use loops that are made in code, as in the paper.

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use elfen_console::duration::number;
use elfen_core_model::branch_paths::{PathAccuracy, PathGraph};
use elfen_core_model::elftrace;
use elfen_core_model::estimate::{Envelope, Fit, SiteEstimate, WORST, estimate, fit};
use elfen_core_model::machine::Machine;
use elfen_core_model::pipeline::{self, Fetched};
use elfen_core_model::sample::{Counting, Sampler, Sampling};
use elfen_core_model::skid::{EventCounter, Skid, data_references};
use elfen_core_model::synthetic::{load_and_nops, three_loops};
use elfen_core_model::trace::Trace;
use elfen_core_model::truth::{SiteTruth, Sites, Truth, kind_of};
use elfen_core_model::window::{WindowedIpc, Windows};
use serde::Serialize;

use super::programs::Program;
use crate::bench::{BenchError, Explain, Progress};

const FIX: &str = "see what `elfen profile trace` says about it";

/// Lengths of the branch history (Figure 6).
const HISTORY_LENGTHS: [usize; 4] = [1, 5, 9, 13];
/// The row of Figure 6 that is printed for each program.
pub(crate) const HISTORY_OF_PROGRAMS: usize = 9;
const PATH_SAMPLES: u32 = 1000;
/// How far apart the instructions of a pair are in Figure 6.
const PATH_WINDOW: u64 = 50;

/// Cycles from an event to the interrupt of its counter: on the 21164 (Figure 2), and more.
pub(crate) const INTERRUPT_DELAYS: [u64; 2] = [6, 20];
/// The core of the in-order counters of Figure 2.
pub(crate) const IN_ORDER: &str = "21164";
/// The mean number of events between interrupts.
const EVENTS_EVERY: u64 = 500;

/// The loops of Figure 7: the address of each one, and what it does.
const LOOPS: [(u64, &str); 3] =
    [(0x40_0000, "chain of loads"), (0x41_0000, "arithmetic"), (0x42_0000, "loads in parallel")];
const LOOP_ITERATIONS: u32 = 5000;
const LOOPS_EVERY: u64 = 40;

/// What to run.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// Instructions to record of each program.
    pub(crate) instructions: u64,
    /// Mean numbers of instructions between samples.
    pub(crate) every: Vec<u64>,
    pub(crate) machine: Machine,
    pub(crate) seed: u64,
}

#[derive(Clone, Serialize, Debug)]
pub(crate) struct Experiment {
    pub(crate) machine: String,
    pub(crate) seed: u64,
    pub(crate) programs: Vec<ProgramOutcome>,
    pub(crate) loops: Loops,
    pub(crate) counters: Vec<CounterOutcome>,
    /// Programs that are not installed.
    pub(crate) missing: Vec<&'static str>,
}

#[derive(Clone, Serialize, Debug)]
pub(crate) struct ProgramOutcome {
    pub(crate) program: &'static str,
    /// Instructions that retired.
    pub(crate) instructions: u64,
    pub(crate) ipc: f64,
    pub(crate) windows: Option<WindowedIpc>,
    pub(crate) intervals: Vec<IntervalOutcome>,
    pub(crate) paths: Vec<PathAccuracy>,
    /// Of a counter of accesses to the data cache, on this core.
    pub(crate) skid: SkidSummary,
    /// Of the same counter on a core that issues in order.
    pub(crate) skid_in_order: Option<SkidSummary>,
}

/// The samples of one program at one interval.
#[derive(Clone, Serialize, Debug)]
pub(crate) struct IntervalOutcome {
    pub(crate) every: u64,
    pub(crate) samples: u64,
    pub(crate) pairs: u64,
    pub(crate) fit: Fit,
    /// Of the instructions that waste most, how many are among as many with the highest latency.
    pub(crate) worst_by_latency: usize,
}

/// How far interrupts are behind the instructions with their events.
#[derive(Clone, Copy, PartialEq, Serialize, Debug)]
pub(crate) struct SkidSummary {
    pub(crate) interrupts: u64,
    /// The share of interrupts at the instruction with the event.
    pub(crate) exact: f64,
    /// The most frequent distance in instructions, and its share.
    pub(crate) peak: i64,
    pub(crate) peak_share: f64,
    /// Distances that a tenth of the interrupts are below, and above.
    pub(crate) p10: i64,
    pub(crate) p90: i64,
}

/// The program of Figure 2 on one core.
#[derive(Clone, Serialize, Debug)]
pub(crate) struct CounterOutcome {
    pub(crate) machine: String,
    /// Cycles from an event to its interrupt.
    pub(crate) delay: u64,
    pub(crate) skid: SkidSummary,
}

/// The program of Figure 7.
#[derive(Clone, Serialize, Debug)]
pub(crate) struct Loops {
    pub(crate) every: u64,
    pub(crate) samples: u64,
    /// By the slots that are really wasted.
    pub(crate) instructions: Vec<LoopInstruction>,
    /// Correlation of the values with the slots that are really wasted. A dozen instructions waste
    /// nearly the same, so a correlation of ranks would depend on chance.
    pub(crate) latency_correlation: f64,
    pub(crate) pairs_correlation: f64,
}

/// One instruction of Figure 7. Ranks begin at 1, the highest value.
#[derive(Clone, Serialize, Debug)]
pub(crate) struct LoopInstruction {
    pub(crate) of: &'static str,
    pub(crate) address: u64,
    pub(crate) latency_rank: usize,
    pub(crate) pairs_rank: usize,
    /// Cycles in progress, from single samples.
    pub(crate) latency: f64,
    /// Wasted slots, from pairs.
    pub(crate) wasted: f64,
    pub(crate) wasted_truly: i64,
}

pub(crate) fn run(
    (elfen, folder): (&Path, &Path),
    programs: &[Program],
    plan: &Plan,
    progress: Progress<'_>,
) -> Result<Experiment, BenchError> {
    let mut outcomes = Vec::new();
    for program in programs {
        progress(&format!("{}: recording", program.name));
        let trace = record((elfen, folder), program, plan.instructions)?;
        progress(&format!("{}: samples", program.name));
        outcomes.push(run_program(program.name, &trace, plan, progress));
    }
    progress("the loops of Figures 2 and 7");
    Ok(Experiment {
        machine: plan.machine.name.clone(),
        seed: plan.seed,
        programs: outcomes,
        loops: run_loops(&plan.machine, plan.seed),
        counters: run_counters(plan.seed),
        missing: Vec::new(),
    })
}

/// Records the first instructions of a program.
fn record(
    (elfen, folder): (&Path, &Path),
    program: &Program,
    instructions: u64,
) -> Result<Trace, BenchError> {
    let path: PathBuf = folder.join(format!("{}.elftrace", program.name));
    let words = program.process_words().explain(program.name, FIX)?;
    let mut arguments: Vec<OsString> = ["profile", "trace", "-q", "--instructions"]
        .map(OsString::from)
        .into_iter()
        .chain([instructions.to_string().into(), "-o".into(), path.clone().into(), "--".into()])
        .collect();
    arguments.extend(words);
    let output = Command::new(elfen)
        .args(&arguments)
        .stdin(Stdio::null())
        .stdout(File::options().write(true).open("/dev/null").explain("/dev/null", FIX)?)
        .output()
        .explain("running elfen", FIX)?;
    if !output.status.success() {
        let printed = String::from_utf8_lossy(&output.stderr);
        let last = printed.lines().last().unwrap_or("it printed nothing");
        let why = format!("recording {}: {}: {last}", program.name, output.status);
        return Err(BenchError::failed(why, FIX));
    }
    let what = format!("the trace of {}", program.name);
    let file = File::open(&path).explain(&what, FIX)?;
    let trace = elftrace::read(file).explain(&what, FIX)?;
    fs::remove_file(&path).explain(&what, "free space in TMPDIR")?;
    if trace.runs.is_empty() {
        return Err(BenchError::failed(format!("{what}: it holds no instructions"), FIX));
    }
    Ok(trace)
}

fn sampling(every: u64, machine: &Machine, seed: u64) -> Sampling {
    Sampling {
        every,
        counting: Counting::Instructions,
        ways: 2,
        window: machine.map.reorder + machine.fetch.queue,
        seed,
        fetch_width: machine.fetch.width,
    }
}

fn run_program(
    program: &'static str,
    trace: &Trace,
    plan: &Plan,
    progress: Progress<'_>,
) -> ProgramOutcome {
    let machine = &plan.machine;
    let sites = Sites::new(trace);
    let mut truth = Truth::new(&sites);
    let mut windows = Windows::default();
    let mut samplers: Vec<(Sampling, Sampler)> = plan
        .every
        .iter()
        .map(|&every| sampling(every, machine, plan.seed))
        .map(|sampling| (sampling, Sampler::new(sampling)))
        .collect();
    let kinds: Vec<_> = trace.instructions.iter().map(kind_of).collect();
    let access =
        |one: &Fetched| kinds[one.instruction as usize].has_addresses.then_some(one.times.issue);
    let [delay, _] = INTERRUPT_DELAYS;
    let mut counter = EventCounter::new(access, EVENTS_EVERY, delay, plan.seed);
    let totals = pipeline::run(trace, machine, |fetched| {
        truth.see(fetched);
        counter.see(fetched);
        for (_, sampler) in &mut samplers {
            sampler.see(fetched, |one: &Fetched| kinds[one.instruction as usize]);
        }
        if fetched.abort.is_none() {
            windows.note(fetched.times.retire);
        }
    });
    let truth = truth.finish();
    let interval = |(sampling, sampler): &(Sampling, Sampler)| {
        let estimates = estimate(&sites, &sampler.samples, &sampler.pairs);
        let truly = order(truth.iter().map(|one| wasted_truly(one, machine)));
        let by_latency = order(estimates.iter().map(|one| latency(one, sampling)));
        let by_latency = by_latency.get(..WORST).unwrap_or(&by_latency);
        let fit = fit(&estimates, &truth, sampling, machine.issue.width);
        let worst = truly.iter().take(fit.worst);
        IntervalOutcome {
            every: sampling.every,
            samples: sampler.samples.len() as u64,
            pairs: sampler.pairs.len() as u64,
            worst_by_latency: worst.filter(|site| by_latency.contains(site)).count(),
            fit,
        }
    };
    let intervals = samplers.iter().map(interval).collect();
    progress(&format!("{program}: event counters"));
    let skid_in_order = Machine::built_in(IN_ORDER).map(|machine| {
        SkidSummary::of(&data_references(trace, &machine, EVENTS_EVERY, delay, plan.seed).0)
    });
    progress(&format!("{program}: paths"));
    let paths =
        PathGraph::new(trace).accuracy(&HISTORY_LENGTHS, PATH_SAMPLES, PATH_WINDOW, plan.seed);
    ProgramOutcome {
        program,
        instructions: totals.retired,
        ipc: number(totals.retired) / number(totals.cycles.max(1)),
        windows: windows.finish(),
        intervals,
        paths,
        skid: SkidSummary::of(&counter.skid),
        skid_in_order,
    }
}

/// Cycles in progress over all executions, as single samples estimate them.
fn latency(estimate: &SiteEstimate, sampling: &Sampling) -> f64 {
    number(estimate.in_progress.sum) * number(sampling.every)
}

fn wasted_truly(truth: &SiteTruth, machine: &Machine) -> f64 {
    let wasted = truth.wasted(machine.issue.width);
    number(wasted.unsigned_abs()) * if wasted < 0 { -1.0 } else { 1.0 }
}

/// The positions of values, the highest value first.
fn order(values: impl Iterator<Item = f64>) -> Vec<usize> {
    let mut order: Vec<(usize, f64)> = values.enumerate().collect();
    order.sort_by(|one, other| other.1.total_cmp(&one.1));
    order.into_iter().map(|(position, _)| position).collect()
}

/// The rank of each value, 1 for the highest one. Equal values have different ranks.
fn ranks(values: &[f64]) -> Vec<usize> {
    let mut ranks = vec![0; values.len()];
    for (rank, position) in (1..).zip(order(values.iter().copied())) {
        ranks[position] = rank;
    }
    ranks
}

/// Pearson's correlation of two lists of values.
fn correlation(one: &[f64], other: &[f64]) -> f64 {
    let count = number(one.len() as u64);
    let [mean, other_mean] = [one, other].map(|values| values.iter().sum::<f64>() / count);
    let [mut products, mut squares, mut other_squares] = [0.0; 3];
    for (one, other) in one.iter().zip(other) {
        let (one, other) = (one - mean, other - other_mean);
        products += one * other;
        squares += one * one;
        other_squares += other * other;
    }
    products / f64::sqrt(squares * other_squares)
}

impl SkidSummary {
    /// How many instructions 80 % of the interrupts are spread over.
    pub(crate) fn spread(&self) -> i64 {
        self.p90 - self.p10
    }

    fn of(skid: &Skid) -> Self {
        let interrupts: u64 = skid.values().sum();
        let share = |count: u64| number(count) / number(interrupts.max(1));
        let (peak, count) =
            skid.iter().max_by_key(|&(_, count)| count).map_or((0, 0), |(&at, &count)| (at, count));
        let quantile = |tenths: u64| {
            let mut seen = 0;
            let found = skid.iter().find(|&(_, count)| {
                seen += count;
                seen * 10 > interrupts * tenths
            });
            found.map_or(0, |(&at, _)| at)
        };
        Self {
            interrupts,
            exact: share(skid.get(&0).copied().unwrap_or(0)),
            peak,
            peak_share: share(count),
            p10: quantile(1),
            p90: quantile(9),
        }
    }
}

/// The loop of one load and 300 instructions that do nothing, on each core.
fn run_counters(seed: u64) -> Vec<CounterOutcome> {
    let trace = load_and_nops(300, 20_000, seed);
    let mut outcomes = Vec::new();
    for machine in Machine::BUILT_IN.iter().filter_map(|name| Machine::built_in(name)) {
        for delay in INTERRUPT_DELAYS {
            let (skid, _) = data_references(&trace, &machine, 7, delay, seed);
            let skid = SkidSummary::of(&skid);
            outcomes.push(CounterOutcome { machine: machine.name.clone(), delay, skid });
        }
    }
    outcomes
}

fn run_loops(machine: &Machine, seed: u64) -> Loops {
    let trace = three_loops(LOOP_ITERATIONS, seed);
    let sampling = sampling(LOOPS_EVERY, machine, seed);
    let sites = Sites::new(&trace);
    let mut truth = Truth::new(&sites);
    let mut sampler = Sampler::new(sampling);
    let kinds: Vec<_> = trace.instructions.iter().map(kind_of).collect();
    pipeline::run(&trace, machine, |fetched| {
        truth.see(fetched);
        sampler.see(fetched, |one: &Fetched| kinds[one.instruction as usize]);
    });
    let truth = truth.finish();
    let estimates = estimate(&sites, &sampler.samples, &sampler.pairs);
    let latencies: Vec<f64> = estimates.iter().map(|one| latency(one, &sampling)).collect();
    let wasted: Vec<f64> =
        estimates.iter().map(|one| one.wasted(&sampling, machine.issue.width)).collect();
    let truly: Vec<f64> = truth.iter().map(|one| wasted_truly(one, machine)).collect();
    let [by_latency, by_pairs] = [&latencies, &wasted].map(|values| ranks(values));
    let instruction = |site: usize| {
        let address = sites.site(site)?.pc;
        let (_, of) = LOOPS.into_iter().rev().find(|&(start, _)| start <= address)?;
        Some(LoopInstruction {
            of,
            address,
            latency_rank: by_latency[site],
            pairs_rank: by_pairs[site],
            latency: latencies[site],
            wasted: wasted[site],
            wasted_truly: truth[site].wasted(machine.issue.width),
        })
    };
    Loops {
        every: LOOPS_EVERY,
        samples: sampler.samples.len() as u64,
        instructions: order(truly.iter().copied()).into_iter().filter_map(instruction).collect(),
        latency_correlation: correlation(&latencies, &truly),
        pairs_correlation: correlation(&wasted, &truly),
    }
}

impl Experiment {
    /// The points of all programs at one interval.
    pub(crate) fn points(&self, every: u64, of: fn(&Fit) -> Envelope) -> Envelope {
        let mut sum = Envelope::default();
        for one in self.at(every) {
            sum.inside += of(&one.fit).inside;
            sum.points += of(&one.fit).points;
        }
        sum
    }

    /// All programs at one interval.
    pub(crate) fn at(&self, every: u64) -> impl Iterator<Item = &IntervalOutcome> {
        let all = self.programs.iter().flat_map(|one| &one.intervals);
        all.filter(move |one| one.every == every)
    }

    /// The means of all programs, by the length of the history.
    pub(crate) fn paths(&self) -> Vec<PathAccuracy> {
        let count = number(self.programs.len() as u64);
        let mean = |index: usize, of: fn(&PathAccuracy) -> [f64; 3]| {
            let mut sums = [0.0; 3];
            for one in self.programs.iter().filter_map(|one| one.paths.get(index)) {
                for (sum, share) in sums.iter_mut().zip(of(one)) {
                    *sum += share / count;
                }
            }
            sums
        };
        (0..)
            .zip(HISTORY_LENGTHS)
            .map(|(index, length)| PathAccuracy {
                length,
                within_functions: mean(index, |one| one.within_functions),
                through_calls: mean(index, |one| one.through_calls),
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_begin_at_the_highest_value() {
        assert_eq!(ranks(&[1.0, 3.0, 2.0]), [3, 1, 2]);
    }

    #[test]
    fn correlation_is_that_of_values() {
        let found = |other: [f64; 3]| correlation(&[1.0, 2.0, 4.0], &other);
        assert!((found([10.0, 20.0, 40.0]) - 1.0).abs() < 1e-9);
        assert!((found([0.0, -1.0, -3.0]) + 1.0).abs() < 1e-9);
        // Deviations -4/3, -1/3, 5/3 and 1/3, -2/3, 1/3: (1/3) / sqrt(14/3 * 2/3).
        assert!((found([1.0, 0.0, 1.0]) - 1.0 / 28_f64.sqrt()).abs() < 1e-9);
    }

    #[test]
    fn skid_is_summarised_by_its_shares() {
        let skid = Skid::from([(-1, 1), (0, 2), (7, 15), (9, 1), (30, 1)]);
        let found = SkidSummary::of(&skid);
        assert_eq!((found.interrupts, found.peak, found.p10, found.p90), (20, 7, 0, 9));
        assert!((found.exact - 0.1).abs() < 1e-9 && (found.peak_share - 0.75).abs() < 1e-9);
        assert_eq!(SkidSummary::of(&Skid::new()).interrupts, 0);
    }

    /// Goal: Figure 7. Pairs rank instructions by the slots that they waste, latency does not.
    #[test]
    fn pairs_rank_the_three_loops() {
        let machine = Machine::built_in("21264").unwrap();
        for seed in 1..3 {
            let found = run_loops(&machine, seed);
            assert!(found.pairs_correlation > 0.9, "{found:?}");
            assert!(found.latency_correlation < 0.5, "{found:?}");
            let first = found.instructions.iter().find(|one| one.latency_rank == 1).unwrap();
            assert_eq!(first.of, "loads in parallel");
            let truly = found.instructions.iter().map(|one| one.wasted_truly);
            assert!(truly.is_sorted_by(|one, other| one >= other));
        }
    }

    /// Goal: the figures of a program come from its trace alone, and each seed gives its own.
    #[test]
    fn a_random_trace_has_all_figures() {
        let trace = elfen_core_model::synthetic::random(3, 200, 300_000);
        let plan = |seed| Plan {
            instructions: 0,
            every: vec![50, 500],
            machine: Machine::built_in("21264").unwrap(),
            seed,
        };
        let run = |seed| run_program("random", &trace, &plan(seed), &mut |_| {});
        let found = run(1);
        assert_eq!(found.intervals.iter().map(|one| one.every).collect::<Vec<_>>(), [50, 500]);
        let dense = &found.intervals[0];
        let share = dense.fit.retired.share().unwrap();
        assert!((0.55..0.85).contains(&share), "{share}");
        assert!((dense.fit.wasted / dense.fit.wasted_truly - 1.0).abs() < 0.1, "{dense:?}");
        assert!(dense.samples > 8 * found.intervals[1].samples);
        assert_eq!(found.paths.len(), HISTORY_LENGTHS.len());
        assert!(found.skid.exact < 0.5 && found.windows.is_some(), "{found:?}");
        let json = |one: &ProgramOutcome| serde_json::to_string(one).unwrap();
        assert_eq!(json(&found), json(&run(1)));
        assert_ne!(json(&found), json(&run(2)));
    }
}
