//! A service that stands ready, and one measurement with it.
//!
//! The service stays up from run to run: what changes between two runs is the company and nothing
//! else. CPU time is read at the beginning and at the end of the time that the generator measures.

use std::process::Command;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use elfen_console::duration::number;
use elfen_run::report::Report;
use serde::Deserialize;

use super::company::{Batches, Done, Start};
use super::latencies::{self, Latencies, TIMEOUT, append, number_of};
use super::own;
use super::plan::{Job, Spec};
use super::process::Process;
use super::scratch::Scratch;
use super::service::{self, Helpers};
pub use super::tested::Order;
use super::tested::Tested;
use super::watched::{Watched, Watching};
use super::{LOOK_EVERY, LiveError, Programs, go_on, sleep_until, usage};
use crate::record::{Alone, Company, Plan, Run};

/// Every request of a run, for what the generator's summary leaves out.
const REQUESTS: &str = "requests.csv";
const CONNECTIONS: &str = "64";
/// For the generator to connect: nothing is due before.
const LEAD: Duration = Duration::from_millis(30);
/// For the last answers, at a load beyond the capacity.
const TO_ANSWER: Duration = Duration::from_secs(30);
/// How long a batch program runs alone.
const ALONE: Duration = Duration::from_millis(1000);

/// The work of a batch program of the user's own.
const CPU_TIME: &str = "seconds of CPU time";
/// One that takes less of a lane alone has nothing that could be compared.
const LEAST_CPUS: f64 = 0.001;

/// Fields go in this order: the service before its page and its files.
#[derive(Debug)]
pub struct Testbed {
    tested: Tested,
    programs: Programs,
    helpers: Helpers,
    order: Order,
    watched: Option<Watched>,
    scratch: Scratch,
}

impl Testbed {
    /// Builds what there is to build and starts the service.
    pub fn start(order: Order) -> Result<Self, LiveError> {
        let programs = Programs::find()?;
        let lanes = u32::try_from(order.machine.pairs.len()).unwrap_or(u32::MAX);
        let scratch =
            Scratch::new(lanes).map_err(LiveError::io("making a folder for temporary files"))?;
        let helpers = Helpers::choose(&order.machine, &scratch)?;
        let watched = order.shim.as_ref();
        let watched = watched.map(|shim| Watched::choose(shim, &order.machine, &helpers));
        let watched = watched.transpose()?;
        watched.as_ref().map_or(Ok(()), |watched| watched.try_out(&programs, &scratch))?;
        let tested = Tested::start(&order, &programs, &scratch, &helpers)?;
        Ok(Self { tested, programs, helpers, order, watched, scratch })
    }

    pub fn documents(&self) -> u64 {
        self.tested.documents()
    }

    pub fn capacity_rps(&self) -> Result<f64, LiveError> {
        let Self { programs, scratch, helpers, order, .. } = self;
        self.tested.capacity_rps(programs, scratch, &order.machine, helpers)
    }

    /// Where coordinator and generator run.
    pub fn helpers(&self) -> String {
        match self.tested {
            Tested::Search { .. } => self.helpers.words(),
            Tested::Standing(_) => service::words_of_generator(&self.helpers),
        }
    }

    pub fn helpers_share_a_lane(&self) -> bool {
        self.helpers.share_a_lane
    }

    /// What cannot be shown with these lanes, a sentence each.
    pub fn limits(&self) -> Vec<String> {
        let mut limits = Vec::new();
        // An emulated core has a price, and says so itself.
        if !self.order.machine.smt && self.order.machine.emulated.is_none() {
            limits.push(format!(
                "not shown: the price of sharing an SMT core; nothing says that lanes {} share \
                 one, so a batch takes no resources from the service whatever restrains it",
                self.order.machine.lanes()
            ));
        }
        limits.extend(own::label(&self.order.own.command).map(|label| {
            format!(
                "{label}: its work is the CPU time that it got on its lane; what it got done in \
                 that time cannot be seen from outside"
            )
        }));
        if self.helpers.share_a_lane {
            limits.push(format!("{}; the batch has what is left of that lane", self.helpers()));
        }
        limits
    }

    /// A batch program with nothing beside it.
    pub fn alone(&mut self, program: &str) -> Result<Alone, LiveError> {
        let unrestrained = Spec::plain(Company::Unrestrained);
        let mut batches = self.start_batches(&unrestrained, program, ALONE)?;
        let (begin, before_ns) = (Instant::now(), batches.used_ns());
        sleep_until(begin + ALONE, || batches.lives())?;
        let used_ns = batches.used_ns().saturating_sub(before_ns);
        let cpus = Duration::from_nanos(used_ns).as_secs_f64() / begin.elapsed().as_secs_f64();
        let done = batches.end()?.ok_or_else(|| {
            let why = format!("{program} alone gets no work done: the machine is too busy");
            LiveError::Refused { why, fix: "end what else runs on these lanes, and try again" }
        })?;
        if done.per_second.is_none() && cpus < LEAST_CPUS {
            let why = format!("{program} alone takes next to no CPU time, so there is no work");
            return Err(LiveError::Refused { why, fix: "give a program that computes" });
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
        lasting: Duration,
    ) -> Result<Batches, LiveError> {
        let Self { tested, programs, scratch, order, .. } = self;
        let page = tested.page(scratch);
        let (machine, signal) = (&order.machine, order.signal.as_str());
        let own = &order.own;
        Start { programs, scratch, machine, signal, own, page, lasting }.batches(spec, program)
    }

    /// One run of a plan.
    pub fn measure(&mut self, job: &Job, plan: &Plan, alone: &[Alone]) -> Result<Run, LiveError> {
        let warmup = Duration::from_secs_f64(plan.warmup_s);
        let lasting = Duration::from_secs_f64(plan.duration_s);
        let mut batches = match &job.batch {
            Some(program) => self.start_batches(&job.spec, program, warmup + lasting)?,
            None => Batches::none(),
        };
        let recording = self.watched.as_ref().map(|watched| {
            let page = self.tested.page(&self.scratch);
            watched.record(&self.programs, &self.scratch, job, page, warmup + lasting)
        });
        let recording = recording.transpose()?;
        let mut load = self.load(job, warmup, lasting)?;
        let begin = Instant::now() + LEAD + warmup;
        sleep_until(begin, || {
            self.tested.lives()?;
            batches.lives()?;
            load.lives()
        })?;
        let before = self.sample(&load, &mut batches);
        let mut after = before;
        // The last reading must find the generator still there, and that of a plan whose last
        // request is due early ends early.
        let end = begin + lasting.saturating_sub(LEAD * 2);
        while load.ended()?.is_none() && Instant::now() < end {
            go_on()?;
            self.tested.lives()?;
            batches.lives()?;
            after = self.sample(&load, &mut batches);
            std::thread::sleep(LOOK_EVERY);
        }
        let answered: Answered = load.finish_json(None, TO_ANSWER)?;
        if after.at == before.at {
            let why = "a run's last request was due before anything could be measured".to_owned();
            return Err(LiveError::Refused { why, fix: "ask for a longer --duration" });
        }
        // While the batch is there to be named.
        let recording = recording.map(Watching::finish).transpose()?;
        let done = batches.end()?;
        let requests = self.scratch.path(REQUESTS);
        let latencies = Latencies::read(&requests)?;
        let used = before.until(&after);
        let mut run = self.run(job, &answered, done.as_ref(), &used, alone, &latencies);
        run.shim = recording;
        run.latencies_ms = latencies.all();
        let served = latencies::served(&requests)?;
        let times = self.order.service_times.as_ref().filter(|_| job.batch.is_none());
        times.map_or(Ok(()), |file| append(&served, file))?;
        if self.order.machine.emulated.is_some() {
            run.served = served;
        }
        Ok(run)
    }

    fn load(&self, job: &Job, warmup: Duration, lasting: Duration) -> Result<Process, LiveError> {
        let mut command = Command::new(&self.programs.load);
        command.args(["--rps", &job.rps.to_string(), "--seed", &job.seed.to_string()]);
        let us = |time: Duration| format!("{}us", time.as_micros());
        command.args(["--duration", &us(lasting), "--warmup", &us(warmup)]);
        command.args(["--connections", CONNECTIONS, "--json", "--allow-late", "--spin", "20us"]);
        command.args(["--timeout", &us(TIMEOUT)]);
        command.args(["--cpu", &self.helpers.generator.to_string()]);
        command.arg("--csv").arg(self.scratch.path(REQUESTS));
        self.tested.ask(&mut command);
        Process::start("elfen-load", command, &self.helpers.generator_place(), &self.scratch)
    }

    fn sample(&self, load: &Process, batches: &mut Batches) -> Sample {
        let (coordinator_ns, workers_ns) = self.tested.used_ns();
        Sample {
            at: Instant::now(),
            workers_ns,
            helpers_ns: coordinator_ns + usage::of_process(load.id()),
            batch_ns: batches.used_ns(),
        }
    }

    fn run(
        &self,
        job: &Job,
        answered: &Answered,
        done: Option<&Done>,
        used: &Used,
        alone: &[Alone],
        latencies: &Latencies,
    ) -> Run {
        let machine = &self.order.machine;
        let [invocation] = &answered.invocations;
        let reports = done.map(|done| done.reports.clone()).unwrap_or_default();
        let known = alone.iter().find(|alone| Some(&alone.batch) == job.batch.as_ref());
        let right = |done: &Done| {
            let sum = known.map(|alone| alone.checksum.as_str());
            done.checksums.iter().all(|checksum| Some(checksum.as_str()) == sum)
        };
        let lanes = number_of(machine.batch_lanes().count());
        let ran = on_the_lane(used.batch, &reports);
        Run {
            company: job.spec.company,
            budget_ns: job.spec.budget_ns(),
            slo: job.spec.slo(),
            asked: job.spec.to_string(),
            batch: job.batch.clone(),
            load: job.load,
            rps: job.rps,
            invocation: job.invocation,
            seed: job.seed,
            duration_s: used.seconds,
            requests: invocation.requests,
            errors: invocation.errors,
            achieved_rps: invocation.achieved_rps,
            p50_ms: latencies.at(500),
            p95_ms: latencies.at(950),
            p99_ms: latencies.at(990),
            p999_ms: latencies.at(999),
            max_ms: latencies.at(1000),
            mean_ms: latencies.mean(),
            late_p99_ms: invocation.late_us.p99 / 1e3,
            request_lane_utilisation: used.workers / number_of(machine.pairs.len()),
            batch_lane_utilisation: done.map_or(0.0, |_| ran / lanes),
            batch_per_second: done.map(|done| done.per_second.unwrap_or(ran)),
            batch_verified: done.filter(|done| !done.checksums.is_empty()).map(right),
            batch_unit: done.map(|done| done.unit.clone().unwrap_or_else(|| CPU_TIME.to_owned())),
            batch_ends: done.map_or(0, |done| done.ends),
            batch_checksum: done.and_then(|done| done.checksums.first().cloned()),
            report: reports.first().cloned().map(Box::new),
            more_reports: reports.into_iter().skip(1).collect(),
            helper_utilisation: used.helpers,
            latencies_ms: Vec::new(),
            served: Vec::new(),
            shim: None,
            warnings: answered.warnings.clone(),
            ended_s: now_s(),
        }
    }
}

/// How many lanes' worth of time a batch ran. Its CPU time counts naps within its own checks; the
/// time that Elfen says it was on the lane counts other tasks that had the CPU meanwhile. It cannot
/// have run longer than either.
fn on_the_lane(cpu_time: f64, reports: &[Report]) -> f64 {
    if reports.is_empty() {
        return cpu_time;
    }
    let share = |report: &Report| -> Option<f64> {
        let ran_ns = report.figures.ran_ns()?;
        Some(number(ran_ns) / number(report.wall_ns.max(1)))
    };
    let counted: Option<f64> = reports.iter().map(share).sum();
    counted.map_or(cpu_time, |counted| cpu_time.min(counted))
}

/// What the generator prints when it ends, as far as it matters here.
#[derive(Debug, Deserialize)]
struct Answered {
    /// It is asked for one.
    invocations: [Invocation; 1],
    warnings: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct Invocation {
    requests: u64,
    errors: u64,
    achieved_rps: f64,
    late_us: Late,
}

#[derive(Debug, Deserialize)]
struct Late {
    p99: f64,
}

/// CPU time so far, in nanoseconds.
#[derive(Clone, Copy, Debug)]
struct Sample {
    at: Instant,
    workers_ns: u64,
    helpers_ns: u64,
    batch_ns: u64,
}

/// CPU time in between, in CPUs.
#[derive(Clone, Copy, Debug)]
struct Used {
    seconds: f64,
    workers: f64,
    helpers: f64,
    batch: f64,
}

impl Sample {
    fn until(&self, later: &Self) -> Used {
        let seconds = later.at.duration_since(self.at).as_secs_f64();
        // Of a process that ended meanwhile there is nothing to read any more.
        let cpus = |of: fn(&Self) -> u64| {
            Duration::from_nanos(of(later).saturating_sub(of(self))).as_secs_f64() / seconds
        };
        Used {
            seconds,
            workers: cpus(|sample| sample.workers_ns),
            helpers: cpus(|sample| sample.helpers_ns),
            batch: cpus(|sample| sample.batch_ns),
        }
    }
}

pub(super) fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Whether the kernel schedules by core here, or why not.
pub fn core_scheduling() -> Result<(), String> {
    super::os::core_scheduling().map_err(|error| match error.raw_os_error() {
        Some(libc::EINVAL) => "this kernel has no core scheduling".to_owned(),
        Some(libc::ENODEV) => "core scheduling needs SMT".to_owned(),
        _ => format!("core scheduling: {error}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use elfen_run::figures::Figures;

    /// Goal: neither naps nor others count as the batch. Method: reports with more and with less
    /// than its CPU time.
    #[test]
    fn a_batch_ran_no_longer_than_either_clock_says() {
        let figures =
            Figures { borrowed_ns: Some(600), overlapped_ns: Some(100), ..Figures::default() };
        let report = Report { figures, wall_ns: 1000, ..Report::default() };
        assert_eq!(on_the_lane(0.9, &[]), 0.9);
        assert_eq!(on_the_lane(0.9, std::slice::from_ref(&report)), 0.7);
        assert_eq!(on_the_lane(0.5, &[report]), 0.5);
    }
}
