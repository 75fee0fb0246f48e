//! A running service, and the measurement of one run with it.
//!
//! The service is `elfen-search`, which the testbed starts and ends, or a service of the user's
//! own, which only gets requests and is observed. The service keeps running between runs, so that
//! two runs differ only in the scenario. CPU time is read at the start and at the end of the time
//! that the generator measures.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use elfen_console::duration::number;
use elfen_run::report::RunReport;
use serde::Deserialize;

use super::batches::{BatchResults, Batches};
use super::latencies::{self, Latencies, Requests, TIMEOUT, append_service_times, count_as_f64};
use super::os::Spinners;
use super::own_service::{OwnService, ServiceProcesses};
use super::plan::{Job, Spec, label};
use super::process::{Process, Rig};
use super::recording::{Observer, Recording};
use super::service::{Corpus, Helpers, SearchService};
use super::{LiveError, Machine, POLL_INTERVAL, check_interrupted, sleep_until, usage};
use crate::record::{Alone, Plan, Run, Scenario, Served};

/// The generator's CSV of all requests of a run.
const REQUESTS: &str = "requests.csv";
const CONNECTIONS: &str = "64";
/// The time for the generator to connect, before the first request is due.
const LEAD: Duration = Duration::from_millis(30);
/// The time limit for the last answers, at a load above the capacity.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a batch program runs alone.
const ALONE: Duration = Duration::from_millis(1000);

/// The part of the time of the measured CPUs that other machines may get. Runs with more are
/// measured again.
pub const STEAL_MAX: f64 = 0.01;
/// How often one run is measured at most.
const TRIES_MAX: u32 = 3;

/// The unit of work of a batch program of the user's own.
const CPU_TIME: &str = "seconds of CPU time";
/// The least number of CPUs that a program has to use alone. Below this, its work cannot be
/// compared.
const LEAST_CPUS: f64 = 0.001;

/// The lanes and the service that a testbed measures, and the files that it writes in addition to
/// the results.
#[derive(Clone, Debug, Default)]
pub struct Order {
    pub machine: Machine,
    /// The number of documents of the index that is built, if the folder `index` has no index yet.
    pub documents: u64,
    pub index: Option<PathBuf>,
    /// The processes of the user's own service, if the plan has one.
    pub service: Option<ServiceProcesses>,
    /// The file for the service times of the runs without a batch.
    pub service_times: Option<PathBuf>,
    /// The folder for recordings of the runs, if they are requested.
    pub shim: Option<PathBuf>,
}

#[derive(Debug)]
enum ServiceUnderTest {
    Search(SearchService),
    Own(OwnService),
}

impl ServiceUnderTest {
    /// Builds the index and starts `elfen-search`, or probes the user's service.
    fn start(rig: &Rig, helpers: &Helpers, order: &Order, plan: &Plan) -> Result<Self, LiveError> {
        if let (Some(service), Some(processes)) = (&plan.service, &order.service) {
            let own = OwnService { service: service.clone(), processes: processes.clone() };
            own.check_ready(rig, helpers)?;
            return Ok(Self::Own(own));
        }
        let corpus = Corpus::open(rig, order.index.as_deref(), order.documents)?;
        SearchService::start(rig, helpers, corpus).map(Self::Search)
    }

    fn load_args(&self) -> Vec<OsString> {
        match self {
            Self::Search(search) => search.load_args(),
            Self::Own(own) => own.load_args(),
        }
    }

    fn check_alive(&mut self) -> Result<(), LiveError> {
        match self {
            Self::Search(search) => search.process.check_alive(),
            Self::Own(own) => own.processes.check(),
        }
    }

    /// Returns the CPU time in nanoseconds of the service's coordinator, which runs outside the
    /// request lanes, and of its workers.
    fn used_ns(&self) -> (u64, u64) {
        match self {
            Self::Search(search) => search.used_ns(),
            Self::Own(own) => (0, own.processes.used_ns()),
        }
    }
}

/// A running service with its helpers. The fields are dropped in this order, so the service ends
/// before its page and its files are removed.
#[derive(Debug)]
pub struct Testbed {
    service: ServiceUnderTest,
    helpers: Helpers,
    observer: Option<Observer>,
    order: Order,
    plan: Plan,
    rig: Rig,
}

impl Testbed {
    /// Builds the index and starts the service.
    pub fn start(order: Order, plan: Plan) -> Result<Self, LiveError> {
        let rig = Rig::new(order.machine.clone())?;
        let helpers = Helpers::choose(&rig)?;
        let any_batch = plan.scenarios.iter().any(|scenario| scenario != "none");
        let choose = |folder: &PathBuf| {
            let observer = Observer::choose(folder, any_batch, &rig.machine, &helpers)?;
            observer.probe(&rig).map(|()| observer)
        };
        let observer = order.shim.as_ref().map(choose).transpose()?;
        let service = ServiceUnderTest::start(&rig, &helpers, &order, &plan)?;
        Ok(Self { service, helpers, observer, order, plan, rig })
    }

    /// Returns the number of documents, or 0 for a service of the user's own.
    pub fn documents(&self) -> u64 {
        match &self.service {
            ServiceUnderTest::Search(search) => search.corpus.documents,
            ServiceUnderTest::Own(_) => 0,
        }
    }

    pub fn capacity_rps(&self) -> Result<f64, LiveError> {
        match &self.service {
            ServiceUnderTest::Search(search) => {
                search.corpus.capacity_rps(&self.rig, &self.helpers)
            }
            ServiceUnderTest::Own(_) => {
                unreachable!("the user gives the capacity of such a service")
            }
        }
    }

    /// Returns the name under which the service publishes its requests, if it publishes them.
    fn published_name(&self) -> Option<&str> {
        match &self.service {
            ServiceUnderTest::Search(_) => Some(self.rig.scratch.service()),
            ServiceUnderTest::Own(own) => own.service.name.as_deref(),
        }
    }

    /// Describes where the coordinator and the generator run, and at which priority.
    pub fn helpers(&self) -> String {
        self.helpers.describe(matches!(self.service, ServiceUnderTest::Search(_)))
    }

    pub fn helpers_share_a_lane(&self) -> bool {
        self.helpers.share_a_lane
    }

    /// Returns what these lanes cannot show, one sentence for each limit.
    pub fn limits(&self) -> Vec<String> {
        let mut limits = Vec::new();
        // An emulated core has interference. `Machine::emulation` describes its limit.
        if !self.order.machine.smt && self.order.machine.emulated.is_none() {
            limits.push(format!(
                "not shown: the cost of sharing an SMT core; in the kernel's topology, lanes {} do \
                 not share a core, so a batch takes no resources from the service in any scenario",
                self.order.machine.lanes()
            ));
        }
        limits.extend(label(&self.plan.command).map(|label| {
            format!(
                "{label}: its work is measured as the CPU time on its lane; its progress in that \
                 time is unknown"
            )
        }));
        if self.helpers.share_a_lane {
            limits.push(format!("{}; the batch gets the rest of that lane", self.helpers()));
        }
        limits
    }

    /// Measures a batch program alone.
    pub fn measure_alone(&mut self, program: &str) -> Result<Alone, LiveError> {
        let unrestrained = Spec::plain(Scenario::Unrestrained);
        let mut batches = self.start_batches(&unrestrained, program, ALONE)?;
        let (begin, before_ns) = (Instant::now(), batches.used_ns());
        sleep_until(begin + ALONE, || batches.check_alive())?;
        let used_ns = batches.used_ns().saturating_sub(before_ns);
        let cpus = Duration::from_nanos(used_ns).as_secs_f64() / begin.elapsed().as_secs_f64();
        let done = batches.end()?.ok_or_else(|| {
            let why = format!("{program} does no work when it runs alone: the machine is too busy");
            LiveError::Refused { why, fix: "end other programs on these lanes, and try again" }
        })?;
        if done.per_second.is_none() && cpus < LEAST_CPUS {
            let why = format!("{program} uses almost no CPU time when it runs alone");
            return Err(LiveError::Refused { why, fix: "use a program that uses the CPU" });
        }
        Ok(Alone {
            batch: program.to_owned(),
            per_second: done.per_second.unwrap_or(cpus),
            unit: done.unit.unwrap_or_else(|| CPU_TIME.to_owned()),
            checksum: done.checksums.into_iter().next().unwrap_or_default(),
        })
    }

    fn start_batches(
        &self,
        spec: &Spec,
        program: &str,
        duration: Duration,
    ) -> Result<Batches, LiveError> {
        Batches::start(&self.rig, &self.plan, spec, program, self.published_name(), duration)
    }

    /// Measures one run of a plan. If other machines take too much CPU time, measures it again, up
    /// to twice, and calls `again` before.
    pub fn measure(
        &mut self,
        job: &Job,
        alone: &[Alone],
        again: &mut dyn FnMut(f64),
    ) -> Result<Run, LiveError> {
        let mut tries = 1;
        let (mut run, served) = loop {
            let (run, served) = self.measure_once(job, alone)?;
            if run.steal <= STEAL_MAX || tries == TRIES_MAX {
                break (run, served);
            }
            again(run.steal);
            tries += 1;
        };
        let times = self.order.service_times.as_ref().filter(|_| job.batch.is_none());
        times.map_or(Ok(()), |file| append_service_times(&served, file))?;
        if self.order.machine.emulated.is_some() {
            run.served = served;
        }
        Ok(run)
    }

    fn measure_once(
        &mut self,
        job: &Job,
        alone: &[Alone],
    ) -> Result<(Run, Vec<Served>), LiveError> {
        let warmup = Duration::from_secs_f64(self.plan.warmup_s);
        let duration = Duration::from_secs_f64(self.plan.duration_s);
        let mut batches = match &job.batch {
            Some(program) => self.start_batches(&job.spec, program, warmup + duration)?,
            None => Batches::none(),
        };
        let _awake = self.keep_awake(job);
        let recording = self.observer.as_ref().map(|observer| {
            observer.record(&self.rig, job, self.published_name(), warmup + duration)
        });
        let recording = recording.transpose()?;
        let mut load = self.load(job, warmup, duration)?;
        let begin = Instant::now() + LEAD + warmup;
        sleep_until(begin, || {
            self.service.check_alive()?;
            batches.check_alive()?;
            load.check_alive()
        })?;
        let before = self.sample(&load, &mut batches);
        let mut after = before;
        // The last sample is taken while the generator still runs. The generator ends early if its
        // last request is due early.
        let end = begin + duration.saturating_sub(LEAD * 2);
        while load.try_wait()?.is_none() && Instant::now() < end {
            check_interrupted()?;
            self.service.check_alive()?;
            batches.check_alive()?;
            after = self.sample(&load, &mut batches);
            std::thread::sleep(POLL_INTERVAL);
        }
        let output: LoadOutput = load.finish_json(None, ANSWER_TIMEOUT)?;
        if after.at == before.at {
            let why =
                "the last request of a run was due before the measurement could start".to_owned();
            return Err(LiveError::Refused { why, fix: "use a longer --duration" });
        }
        // The recording names the batch, so it has to end while the batch still runs.
        let recording = recording.map(Recording::finish).transpose()?;
        let done = batches.end()?;
        let requests = self.rig.scratch.path(REQUESTS);
        let Requests { latencies, in_order_us, served } = latencies::read(&requests)?;
        let used = before.until(&after, self.measured_cpus().len());
        let mut run = self.run(job, &output, done.as_ref(), &used, alone, &latencies);
        run.shim = recording;
        run.latencies_us = in_order_us;
        Ok((run, served))
    }

    /// Keeps the batch lanes of a run without a batch from halting.
    ///
    /// A virtual CPU that halts takes tens of microseconds to wake up, for the helpers that share
    /// it. With a batch or a guard on it, it never halts. So without this, the run without a batch
    /// would be the slowest. On an SMT core, a spinning lane would slow the service instead.
    fn keep_awake(&self, job: &Job) -> Option<Spinners> {
        let Machine { smt, .. } = self.order.machine;
        let is_needed = !job.spec.has_batch() && !smt && self.helpers.share_a_lane;
        let lanes = || self.order.machine.batch_lanes().map(|(_, batch)| batch);
        is_needed.then(|| Spinners::start(lanes()))
    }

    fn load(&self, job: &Job, warmup: Duration, duration: Duration) -> Result<Process, LiveError> {
        let mut command = Command::new(&self.rig.programs.load);
        command.args(["--rps", &job.rps.to_string(), "--seed", &job.seed.to_string()]);
        let us = |time: Duration| format!("{}us", time.as_micros());
        command.args(["--duration", &us(duration), "--warmup", &us(warmup)]);
        command.args(["--connections", CONNECTIONS, "--json", "--allow-late", "--spin", "20us"]);
        command.args(["--timeout", &us(TIMEOUT)]);
        command.args(["--cpu", &self.helpers.generator.to_string()]);
        command.arg("--csv").arg(self.rig.scratch.path(REQUESTS)).args(self.service.load_args());
        self.rig.start("elfen-load", command, &self.helpers.generator_setup())
    }

    fn sample(&self, load: &Process, batches: &mut Batches) -> Sample {
        let (coordinator_ns, workers_ns) = self.service.used_ns();
        Sample {
            at: Instant::now(),
            workers_ns,
            helpers_ns: coordinator_ns + usage::process_cpu_ns(load.id()),
            batch_ns: batches.used_ns(),
            steal_ns: usage::steal_ns(&self.measured_cpus()),
        }
    }

    /// Returns the lanes and the CPUs of the helpers.
    fn measured_cpus(&self) -> BTreeSet<u32> {
        let lanes = self.order.machine.batch_lanes().flat_map(|(request, batch)| [request, batch]);
        lanes.chain([self.helpers.coordinator, self.helpers.generator]).collect()
    }

    fn run(
        &self,
        job: &Job,
        output: &LoadOutput,
        done: Option<&BatchResults>,
        used: &Used,
        alone: &[Alone],
        latencies: &Latencies,
    ) -> Run {
        let machine = &self.order.machine;
        let [measured] = &output.runs;
        let reports = done.map(|done| done.reports.clone()).unwrap_or_default();
        let known = alone.iter().find(|alone| Some(&alone.batch) == job.batch.as_ref());
        let right = |done: &BatchResults| {
            let sum = known.map(|alone| alone.checksum.as_str());
            done.checksums.iter().all(|checksum| Some(checksum.as_str()) == sum)
        };
        let lanes = count_as_f64(machine.batch_lanes().count());
        let ran = lanes_used(used.batch, &reports);
        Run {
            scenario: job.spec.scenario,
            budget_ns: job.spec.budget_ns(),
            slo: job.spec.slo(),
            asked: job.spec.to_string(),
            batch: job.batch.clone(),
            load: job.load,
            rps: job.rps,
            invocation: job.invocation,
            seed: job.seed,
            duration_s: used.seconds,
            requests: measured.requests,
            errors: measured.errors,
            achieved_rps: measured.achieved_rps,
            p50_ms: latencies.at(500),
            p95_ms: latencies.at(950),
            p99_ms: latencies.at(990),
            p999_ms: latencies.at(999),
            max_ms: latencies.at(1000),
            mean_ms: latencies.mean(),
            late_p99_ms: measured.late_us.p99 / 1e3,
            request_lane_utilisation: used.workers / count_as_f64(machine.pairs.len()),
            batch_lane_utilisation: done.map_or(0.0, |_| ran / lanes),
            batch_per_second: done.map(|done| done.per_second.unwrap_or(ran)),
            batch_verified: done.filter(|done| !done.checksums.is_empty()).map(right),
            batch_unit: done.map(|done| done.unit.clone().unwrap_or_else(|| CPU_TIME.to_owned())),
            batch_ends: done.map_or(0, |done| done.ends),
            batch_checksum: done.and_then(|done| done.checksums.first().cloned()),
            report: reports.first().cloned().map(Box::new),
            more_reports: reports.into_iter().skip(1).collect(),
            helper_utilisation: used.helpers,
            latencies_us: Vec::new(),
            steal: used.steal,
            served: Vec::new(),
            shim: None,
            warnings: output.warnings.clone(),
            ended_s: now_s(),
        }
    }
}

/// Returns how long a batch ran, in lanes.
///
/// CPU time includes naps in the batch's own checks. The lane time that Elfen reports includes
/// other tasks that ran on the lane. So the batch ran for at most the smaller of the two.
fn lanes_used(cpu_time: f64, reports: &[RunReport]) -> f64 {
    if reports.is_empty() {
        return cpu_time;
    }
    let share = |report: &RunReport| -> Option<f64> {
        let ran_ns = report.figures.ran_ns()?;
        Some(number(ran_ns) / number(report.wall_ns.max(1)))
    };
    let counted: Option<f64> = reports.iter().map(share).sum();
    counted.map_or(cpu_time, |counted| cpu_time.min(counted))
}

/// The fields of the generator's output that are used here.
#[derive(Debug, Deserialize)]
struct LoadOutput {
    /// One element, because each start of the generator is one run.
    runs: [MeasuredRun; 1],
    warnings: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct MeasuredRun {
    requests: u64,
    errors: u64,
    achieved_rps: f64,
    late_us: Late,
}

#[derive(Debug, Deserialize)]
struct Late {
    p99: f64,
}

/// The CPU time so far, in nanoseconds.
#[derive(Clone, Copy, Debug)]
struct Sample {
    at: Instant,
    workers_ns: u64,
    helpers_ns: u64,
    batch_ns: u64,
    steal_ns: u64,
}

/// The CPU time between two samples, in CPUs.
#[derive(Clone, Copy, Debug)]
struct Used {
    seconds: f64,
    workers: f64,
    helpers: f64,
    batch: f64,
    /// The part of the time of the measured CPUs that went to other machines.
    steal: f64,
}

impl Sample {
    fn until(&self, later: &Self, measured_cpus: usize) -> Used {
        let seconds = later.at.duration_since(self.at).as_secs_f64();
        // A process that has ended in the meantime has a CPU time of 0.
        let cpus = |of: fn(&Self) -> u64| {
            Duration::from_nanos(of(later).saturating_sub(of(self))).as_secs_f64() / seconds
        };
        Used {
            seconds,
            workers: cpus(|sample| sample.workers_ns),
            helpers: cpus(|sample| sample.helpers_ns),
            batch: cpus(|sample| sample.batch_ns),
            steal: cpus(|sample| sample.steal_ns) / count_as_f64(measured_cpus.max(1)),
        }
    }
}

pub(super) fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Fails with the reason if core scheduling is not available on this machine.
pub fn core_scheduling() -> Result<(), String> {
    super::os::core_scheduling().map_err(|error| match error.raw_os_error() {
        Some(libc::EINVAL) => "this kernel has no core scheduling".to_owned(),
        Some(libc::ENODEV) => "core scheduling requires SMT".to_owned(),
        _ => format!("core scheduling: {error}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use elfen_run::figures::Figures;

    /// Goal: neither naps nor other tasks count as the batch. Method: reports with more and with
    /// less than its CPU time.
    #[test]
    fn the_smaller_of_both_times_counts() {
        let figures =
            Figures { borrowed_ns: Some(600), overlapped_ns: Some(100), ..Figures::default() };
        let report = RunReport { figures, wall_ns: 1000, ..RunReport::default() };
        assert_eq!(lanes_used(0.9, &[]), 0.9);
        assert_eq!(lanes_used(0.9, std::slice::from_ref(&report)), 0.7);
        assert_eq!(lanes_used(0.5, &[report]), 0.5);
    }
}
