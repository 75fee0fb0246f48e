//! Runs that Shim records: who ran on a pair's lanes, microsecond by microsecond, and what the
//! service had to do. So it can be seen what a guard or a check did between two requests.
//!
//! The observer spins, so it takes a lane that nobody else has. Where there is none it may have the
//! batch lane of runs without a batch, if it shares no core with the request lane.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use elfen_machine::process::threads_of;
use elfen_shim::session::OBSERVER;

use super::os::{Place, Rank};
use super::plan::Job;
use super::process::{Process, TO_START, wait_for};
use super::scratch::Scratch;
use super::service::Helpers;
use super::{LiveError, Machine, Programs, usage};

/// Pairs whose service's words fit beside who runs: an observer reads eight words.
const PAIRS_WITH_WORDS: usize = 3;
/// For an observer to say that it may not.
const TRY: Duration = Duration::from_millis(1);

/// What is to be recorded.
#[derive(Clone, Debug)]
pub struct Shim {
    pub folder: PathBuf,
    /// Whether any run has a batch.
    pub beside_batch: bool,
}

/// Where an observer looks, and from where.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Watched {
    folder: PathBuf,
    on: Vec<u32>,
    from: u32,
    /// Whether the service's words are read as well.
    with_words: bool,
}

/// An observer at work.
#[derive(Debug)]
pub(super) struct Watching {
    process: Process,
    file: PathBuf,
}

impl Watched {
    /// The first pair's lanes, from a lane that is left.
    pub(super) fn choose(
        shim: &Shim,
        machine: &Machine,
        helpers: &Helpers,
    ) -> Result<Self, LiveError> {
        let refused = |why: &str, fix| LiveError::Refused { why: why.to_owned(), fix };
        let pair =
            machine.pairs.first().ok_or_else(|| refused("there are no lanes", "name some"))?;
        let batch = pair.batch.first().copied();
        let taken = [helpers.coordinator, helpers.generator];
        let left = machine.spare.iter().copied().find(|cpu| !taken.contains(cpu));
        let idle = batch.filter(|_| !shim.beside_batch && !machine.smt && helpers.goes_first());
        let (from, on) = match (left, idle) {
            (Some(left), _) => (left, [pair.request].into_iter().chain(batch).collect()),
            (None, Some(idle)) => (idle, vec![pair.request]),
            (None, None) => {
                return Err(refused(
                    "to record runs, an observer takes a lane that is in no pair and that neither \
                     coordinator nor generator has; there is none",
                    "allow this process more CPUs, or leave out --shim",
                ));
            }
        };
        let with_words = machine.pairs.len() <= PAIRS_WITH_WORDS;
        Ok(Self { folder: shim.folder.clone(), on, from, with_words })
    }

    /// Has an observer look once, so that what it may not is known before the first run.
    pub(super) fn try_out(&self, programs: &Programs, scratch: &Scratch) -> Result<(), LiveError> {
        std::fs::create_dir_all(&self.folder)
            .map_err(LiveError::io(format!("making {}", self.folder.display())))?;
        let file = scratch.path("try.shim");
        self.start(programs, scratch, None, TRY, file)?.finish().map(drop)
    }

    /// One run, which lasts so long from when somebody looks.
    pub(super) fn record(
        &self,
        programs: &Programs,
        scratch: &Scratch,
        job: &Job,
        page: Option<&str>,
        lasting: Duration,
    ) -> Result<Watching, LiveError> {
        let (page, file) = (page.filter(|_| self.with_words), self.folder.join(name_of(job)));
        let mut watching = self.start(programs, scratch, page, lasting, file)?;
        // It may have to attach first, and has memory to write.
        wait_for(&mut watching.process, TO_START, |process| {
            let mut threads = threads_of(process.id()).into_iter();
            threads.find(|&thread| usage::name_of(thread).as_deref() == Some(OBSERVER))
        })?;
        Ok(watching)
    }

    fn start(
        &self,
        programs: &Programs,
        scratch: &Scratch,
        page: Option<&str>,
        lasting: Duration,
        file: PathBuf,
    ) -> Result<Watching, LiveError> {
        let mut command = Command::new(&programs.elfen);
        command.args(self.options(page, lasting)).arg("--json").arg("-o").arg(&file);
        let place = Place::anywhere(Rank::Normal);
        let process = Process::start("elfen shim", command, &place, scratch)?;
        Ok(Watching { process, file })
    }

    fn options(&self, page: Option<&str>, lasting: Duration) -> Vec<String> {
        let on = self.on.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
        let lasting = format!("{}us", lasting.as_micros());
        // Of a run that is too long for its memory the end is kept.
        let times = ["--for", &lasting, "--last", &lasting];
        let lanes = ["shim", "--on", &on, "--from", &self.from.to_string()].map(str::to_owned);
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

impl Watching {
    /// Waits for the recording.
    pub(super) fn finish(self) -> Result<PathBuf, LiveError> {
        self.process.finish(None, TO_START)?;
        Ok(self.file)
    }
}

/// A name that each run of an experiment has for itself.
fn name_of(job: &Job) -> PathBuf {
    let Job { spec, batch, rps, invocation, .. } = job;
    let words = [Some(spec.to_string()), batch.clone(), Some(format!("{rps:.1}rps"))];
    let name =
        words.into_iter().flatten().collect::<Vec<_>>().join("-") + &format!("-{invocation}");
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-.=".contains(c) { c } else { '_' };
    Path::new(&name.chars().map(plain).collect::<String>()).with_added_extension("shim")
}

#[cfg(test)]
mod tests {
    use super::super::Pair;
    use super::super::plan::{check, jobs};
    use super::*;
    use crate::record::Plan;
    use std::collections::BTreeSet;

    fn machine(spare: &[u32], smt: bool) -> Machine {
        let pairs = vec![Pair { request: 0, batch: vec![1] }, Pair { request: 2, batch: vec![3] }];
        Machine { pairs, spare: spare.to_vec(), smt, ..Machine::default() }
    }

    fn choose(spare: &[u32], smt: bool, beside_batch: bool) -> Result<Watched, LiveError> {
        let machine = machine(spare, smt);
        let scratch = Scratch::new(1).unwrap();
        let helpers = Helpers::choose(&machine, &scratch)?;
        let shim = Shim { folder: PathBuf::from("recordings"), beside_batch };
        Watched::choose(&shim, &machine, &helpers)
    }

    /// Goal: an observer spins on a lane that nothing that is measured needs, or on none. Method:
    /// machines with and without lanes to spare.
    #[test]
    fn an_observer_has_its_lane_for_itself() {
        let chosen = |spare: &[u32], smt, beside_batch| {
            choose(spare, smt, beside_batch).map(|watched| (watched.from, watched.on))
        };
        assert_eq!(chosen(&[4, 5, 6], true, true).unwrap(), (6, vec![0, 1]));
        for (spare, beside_batch) in [(&[][..], true), (&[4][..], true), (&[4, 5][..], true)] {
            let refused = chosen(spare, false, beside_batch).unwrap_err().to_string();
            assert!(refused.contains("in no pair"), "{refused}");
        }
        // Coordinator and generator are elsewhere, and no batch is on its lane.
        assert_eq!(chosen(&[4, 5], false, false).unwrap(), (1, vec![0]));
        assert!(chosen(&[4, 5], true, false).is_err());
    }

    /// Goal: no run writes over another's recording. Method: the names of a plan's runs.
    #[test]
    fn each_run_has_a_file_of_its_own() {
        let plan = Plan {
            loads: vec![0.3, 0.5],
            companies: ["none", "borrow-idle", "slo-budget:p99=20ms"].map(str::to_owned).to_vec(),
            batches: ["loop", "compress"].map(str::to_owned).to_vec(),
            invocations: 2,
            duration_s: 1.0,
            ..Plan::default()
        };
        let all = jobs(&plan, &check(&plan).unwrap(), 100.0);
        let names: BTreeSet<PathBuf> = all.iter().map(name_of).collect();
        assert_eq!(names.len(), all.len());
        assert!(names.contains(Path::new("none-30.0rps-1.shim")), "{names:?}");
        assert!(names.contains(Path::new("slo-budget_p99=20ms-loop-50.0rps-1.shim")), "{names:?}");
    }

    #[test]
    fn what_is_asked_of_elfen_shim() {
        let watched = choose(&[4, 5, 6], false, true).unwrap();
        let words = |page| watched.options(page, Duration::from_millis(1500)).join(" ");
        let plain = "shim --on 0,1 --from 6 --for 1500000us --last 1500000us --watch task";
        assert_eq!(words(None), plain);
        let watched = " --watch service:web.running_request --watch service:web.queue_len";
        assert_eq!(words(Some("web")), plain.to_owned() + watched);
    }
}
