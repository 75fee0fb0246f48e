//! Records runs with `elfen shim`: the tasks on a pair's lanes and the requests of the service,
//! microsecond by microsecond. A recording shows what a guard or a check does between two requests.
//!
//! The observer spins, so it needs a lane of its own. On a machine without a spare lane, it may use
//! the batch lane if no run has a batch. This lane must not share a core with the request lane.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use elfen_machine::process::{name_of, threads_of};
use elfen_shim::observers::OBSERVER;

use super::plan::Job;
use super::process::{Process, Rig, START_TIMEOUT};
use super::service::Helpers;
use super::{LiveError, Machine};

/// The highest number of pairs with which the service's words are recorded. An observer reads up to
/// eight words.
const SERVICE_WORD_PAIRS_MAX: usize = 3;
/// The length of the recording that tests the privileges.
const TRY: Duration = Duration::from_millis(1);

/// The CPUs that an observer watches, and the CPU that it runs on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Observer {
    folder: PathBuf,
    cpus: Vec<u32>,
    observer_cpu: u32,
    /// Whether the words of the service's page are recorded, too.
    with_service_words: bool,
}

/// A recording in progress.
#[derive(Debug)]
pub(super) struct Recording {
    process: Process,
    file: PathBuf,
}

impl Observer {
    /// Chooses an observer for the lanes of the first pair. It runs on a lane without another use.
    /// `any_batch` says whether any run has a batch.
    pub(super) fn choose(
        folder: &Path,
        any_batch: bool,
        machine: &Machine,
        helpers: &Helpers,
    ) -> Result<Self, LiveError> {
        let refused = |why: &str, fix| LiveError::Refused { why: why.to_owned(), fix };
        let pair = machine
            .pairs
            .first()
            .ok_or_else(|| refused("there are no lanes", "name a pair, as in --lanes 0:1"))?;
        let batch = pair.batch.iter().next();
        let taken = [helpers.coordinator, helpers.generator];
        let left = machine.spare.iter().copied().find(|cpu| !taken.contains(cpu));
        let idle =
            batch.filter(|_| !any_batch && !machine.smt && helpers.outranks_ordinary_threads());
        let (observer_cpu, cpus) = match (left, idle) {
            (Some(left), _) => (left, [pair.request].into_iter().chain(batch).collect()),
            (None, Some(idle)) => (idle, vec![pair.request]),
            (None, None) => {
                return Err(refused(
                    "the observer of recordings requires a CPU that is in no pair and that neither \
                     coordinator nor generator uses; there is none",
                    "allow this process more CPUs, or omit --shim",
                ));
            }
        };
        let with_service_words = machine.pairs.len() <= SERVICE_WORD_PAIRS_MAX;
        Ok(Self { folder: folder.to_owned(), cpus, observer_cpu, with_service_words })
    }

    /// Makes a very short recording, so that missing privileges are reported before the first run.
    pub(super) fn probe(&self, rig: &Rig) -> Result<(), LiveError> {
        std::fs::create_dir_all(&self.folder)
            .map_err(LiveError::io(format!("making {}", self.folder.display())))?;
        self.start(rig, None, TRY, rig.scratch.path("try.shim"))?.finish().map(drop)
    }

    /// Starts to record a run of this length, and waits until the observer runs.
    pub(super) fn record(
        &self,
        rig: &Rig,
        job: &Job,
        page: Option<&str>,
        duration: Duration,
    ) -> Result<Recording, LiveError> {
        let page = page.filter(|_| self.with_service_words);
        let mut recording = self.start(rig, page, duration, self.folder.join(file_name(job)))?;
        // First, the observer attaches and prepares its memory.
        recording.process.wait_for(START_TIMEOUT, |process| {
            let mut threads = threads_of(process.id()).into_iter();
            threads.find(|&thread| name_of(thread).as_deref() == Some(OBSERVER))
        })?;
        Ok(recording)
    }

    fn start(
        &self,
        rig: &Rig,
        page: Option<&str>,
        duration: Duration,
        file: PathBuf,
    ) -> Result<Recording, LiveError> {
        let mut command = Command::new(&rig.programs.elfen);
        command.args(self.options(page, duration)).arg("--json").arg("-o").arg(&file);
        Ok(Recording { process: rig.start_anywhere("elfen shim", command)?, file })
    }

    fn options(&self, page: Option<&str>, duration: Duration) -> Vec<String> {
        let on = self.cpus.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
        let duration = format!("{}us", duration.as_micros());
        // If a run exceeds the recorder's memory, the end of the run is kept.
        let times = ["-d", &duration, "--keep-last", &duration];
        let lanes = ["shim", "--cpu", &on, "--observer-cpu", &self.observer_cpu.to_string()]
            .map(str::to_owned);
        let mut words = [&lanes[..], &times.map(str::to_owned)].concat();
        let of_service = page.into_iter().flat_map(|name| {
            ["running_request", "queue_len"].map(|word| format!("service:{name}.{word}"))
        });
        for signal in ["task".to_owned()].into_iter().chain(of_service) {
            words.extend(["--watch".to_owned(), signal]);
        }
        words
    }
}

impl Recording {
    /// Waits for the end of the recording, and returns its file.
    pub(super) fn finish(mut self) -> Result<PathBuf, LiveError> {
        self.process.finish(None, START_TIMEOUT)?;
        Ok(self.file)
    }
}

/// Returns a file name that is unique among the runs of an experiment.
fn file_name(job: &Job) -> PathBuf {
    let Job { spec, batch, rps, invocation, .. } = job;
    let words = [Some(spec.to_string()), batch.clone(), Some(format!("{rps:.1}rps"))];
    let name =
        words.into_iter().flatten().collect::<Vec<_>>().join("-") + &format!("-{invocation}");
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-.=".contains(c) { c } else { '_' };
    Path::new(&name.chars().map(plain).collect::<String>()).with_added_extension("shim")
}

#[cfg(test)]
mod tests {
    use super::super::os::Rank;
    use super::super::plan::{check, jobs};
    use super::*;
    use crate::record::Plan;
    use std::collections::BTreeSet;

    fn machine(spare: &[u32], smt: bool) -> Machine {
        let pairs = elfen_machine::pair::parse("0:1,2:3").unwrap();
        Machine { pairs, spare: spare.to_vec(), smt, ..Machine::default() }
    }

    fn choose(spare: &[u32], smt: bool, any_batch: bool) -> Result<Observer, LiveError> {
        let machine = machine(spare, smt);
        let helpers = Helpers::of(&machine, Rank::Normal)?;
        Observer::choose(Path::new("recordings"), any_batch, &machine, &helpers)
    }

    /// Goal: an observer spins only on a lane that the measurement does not use. Method: machines
    /// with and without spare lanes.
    #[test]
    fn an_observer_has_a_lane_of_its_own() {
        let chosen = |spare: &[u32], smt, any_batch| {
            choose(spare, smt, any_batch).map(|observer| (observer.observer_cpu, observer.cpus))
        };
        assert_eq!(chosen(&[4, 5, 6], true, true).unwrap(), (6, vec![0, 1]));
        for (spare, any_batch) in [(&[][..], true), (&[4][..], true), (&[4, 5][..], true)] {
            let refused = chosen(spare, false, any_batch).unwrap_err().to_string();
            assert!(refused.contains("in no pair"), "{refused}");
        }
        // The coordinator and the generator run on other CPUs, and no run uses the batch lane.
        assert_eq!(chosen(&[4, 5], false, false).unwrap(), (1, vec![0]));
        assert!(chosen(&[4, 5], true, false).is_err());
    }

    /// Goal: each run has its own recording file. Method: the names of a plan's runs.
    #[test]
    fn each_run_has_its_own_file() {
        let plan = Plan {
            loads: vec![0.3, 0.5],
            scenarios: ["none", "borrow-idle", "slo-budget:p99=20ms"].map(str::to_owned).to_vec(),
            batches: ["loop", "compress"].map(str::to_owned).to_vec(),
            runs: 2,
            duration_s: 1.0,
            ..Plan::default()
        };
        let all = jobs(&plan, &check(&plan).unwrap(), 100.0);
        let names: BTreeSet<PathBuf> = all.iter().map(file_name).collect();
        assert_eq!(names.len(), all.len());
        assert!(names.contains(Path::new("none-30.0rps-1.shim")), "{names:?}");
        assert!(names.contains(Path::new("slo-budget_p99=20ms-loop-50.0rps-1.shim")), "{names:?}");
    }

    #[test]
    fn options_of_elfen_shim() {
        let observer = choose(&[4, 5, 6], false, true).unwrap();
        let words = |page| observer.options(page, Duration::from_millis(1500)).join(" ");
        let plain =
            "shim --cpu 0,1 --observer-cpu 6 -d 1500000us --keep-last 1500000us --watch task";
        assert_eq!(words(None), plain);
        let observer = " --watch service:web.running_request --watch service:web.queue_len";
        assert_eq!(words(Some("web")), plain.to_owned() + observer);
    }
}
