//! Performs the runs of a plan, or the runs that are missing in a results file.
//!
//! The results file is the only state. Its first line is the setup, and each finished run adds one
//! line. So after an interruption, the file has the finished runs, and the same command performs
//! the missing ones.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;

use super::plan::{Job, Spec, batch_labels, jobs};
use super::testbed::{Order, Testbed, now_s};
use super::{LiveError, Machine};
use crate::record::{self, Alone, Line, Plan, Run, Setup, Written};

/// The results in a file, which is locked until this value is dropped. Without a file, the results
/// are only in memory.
#[derive(Debug, Default)]
pub struct Results {
    file: Option<File>,
    pub lines: Vec<Line>,
}

impl Results {
    /// Opens or creates the file. Removes the last line if it is incomplete.
    pub fn open(path: &Path) -> Result<Self, LiveError> {
        let failed = || format!("opening {}", path.display());
        let mut options = OpenOptions::new();
        let opened = options.read(true).write(true).create(true).truncate(false).open(path);
        let mut file = opened.map_err(LiveError::io(failed()))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(LiveError::Locked),
            Err(TryLockError::Error(error)) => return Err(LiveError::io(failed())(error)),
        }
        let bytes = fs::read(path).map_err(LiveError::io(failed()))?;
        let Written { lines, bytes: end, .. } = record::read(&bytes)?;
        let end = u64::try_from(end).unwrap_or(u64::MAX);
        file.set_len(end).map_err(LiveError::io(failed()))?;
        file.seek(SeekFrom::Start(end)).map_err(LiveError::io(failed()))?;
        Ok(Self { file: Some(file), lines })
    }

    /// Returns the setup in the first line, if the file has it.
    pub fn setup(&self) -> Option<&Setup> {
        record::setup(&self.lines)
    }

    /// Returns the jobs whose runs are missing in these results.
    pub fn missing(&self, jobs: Vec<Job>) -> Vec<Job> {
        jobs.into_iter()
            .filter(|job| !record::runs(&self.lines).any(|run| job.matches(run)))
            .collect()
    }

    fn add(&mut self, line: Line) -> Result<(), LiveError> {
        let Some(file) = &mut self.file else {
            self.lines.push(line);
            return Ok(());
        };
        let failed = || LiveError::io("writing the results");
        let mut text = serde_json::to_string(&line).map_err(|error| failed()(error.into()))?;
        text.push('\n');
        file.write_all(text.as_bytes()).map_err(failed())?;
        file.sync_data().map_err(failed())?;
        // The line is kept as it will be read again, because JSON may change the last bit of a
        // number.
        let read = serde_json::from_str(&text).map_err(|error| failed()(error.into()))?;
        self.lines.push(read);
        Ok(())
    }
}

/// Returns the first difference between the setup of a file and the requested setup, as a reason
/// not to add runs.
pub fn first_difference(begun: &Setup, asked: &Setup) -> Option<String> {
    let [begun, asked] =
        [begun, asked].map(|setup| serde_json::to_value(setup).unwrap_or_default());
    let plans = [&asked["plan"], &begun["plan"]];
    // Keys without a value are not written, so the keys of both setups are compared.
    let keys = plans.iter().filter_map(|plan| plan.as_object()).flat_map(|plan| plan.keys());
    let of_plan =
        keys.map(|key| (format!("{key} of the file's plan"), &plans[1][key], &plans[0][key]));
    let whole = [
        ("version of elfen", "elfen"),
        ("kernel", "kernel"),
        ("processor", "cpu"),
        ("choice of lanes", "lanes"),
        ("number of documents", "documents"),
    ];
    let whole = whole.map(|(name, key)| (format!("the file's {name}"), &begun[key], &asked[key]));
    let mut differs = of_plan.chain(whole).filter(|(_, begun, asked)| begun != asked);
    differs.next().map(|(what, begun, asked)| format!("{what} is {begun} and not {asked}"))
}

/// Returns the part of the setup that is known before anything is measured.
pub fn setup(order: &Order, plan: &Plan, command: String) -> Setup {
    Setup {
        elfen: env!("CARGO_PKG_VERSION").to_owned(),
        kernel: first_line("/proc/sys/kernel/osrelease"),
        cpu: processor(),
        cpus: order.machine.cpus,
        smt: order.machine.smt,
        lanes: Machine::lanes(&order.machine),
        command,
        started_s: now_s(),
        seed: plan.seed,
        documents: order.documents,
        plan: Some(plan.clone()),
        ..Setup::default()
    }
}

fn first_line(file: &str) -> String {
    let text = fs::read_to_string(file).unwrap_or_default();
    text.lines().next().unwrap_or("unknown").to_owned()
}

fn processor() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let names = ["model name", "Processor", "cpu model", "uarch"];
    let value = |line: &str| {
        let (name, value) = line.split_once(':')?;
        names.contains(&name.trim()).then(|| value.trim().to_owned())
    };
    text.lines().find_map(value).unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

/// The progress of an experiment.
#[derive(Debug)]
pub enum Progress<'a> {
    /// Prepares the runs: builds the index, starts the service, or measures its capacity.
    Preparing(&'static str),
    /// The runs begin. `missing` of `all` runs are not in the results yet.
    Begin {
        missing: usize,
        all: usize,
    },
    Made {
        run: &'a Run,
        left: usize,
    },
    /// A run is measured again, because other machines had this part of the CPUs.
    Again {
        steal: f64,
    },
}

/// What an experiment measures, and on which machine.
#[derive(Clone, Debug)]
pub struct Experiment {
    pub order: Order,
    pub plan: Plan,
    pub specs: Vec<Spec>,
    /// The capacity of the service; `None` to measure it.
    pub capacity_rps: Option<f64>,
    /// The limits of this machine that the caller knows, one sentence for each.
    pub limits: Vec<String>,
    pub command: String,
}

impl Experiment {
    /// Performs the runs that are missing in `results`.
    pub fn run(
        &self,
        results: &mut Results,
        progress: &mut dyn FnMut(&Progress<'_>),
    ) -> Result<(), LiveError> {
        let begun = results.setup().cloned();
        if let Some(begun) = &begun {
            let all = jobs(&self.plan, &self.specs, begun.capacity_rps);
            if results.missing(all).is_empty() {
                return Ok(());
            }
        }
        progress(&Progress::Preparing("building the index and starting the service"));
        let mut testbed = Testbed::start(self.order.clone(), self.plan.clone())?;
        let setup = match begun {
            Some(begun) => {
                check_same_testbed(&begun, &testbed)?;
                begun
            }
            None => {
                progress(&Progress::Preparing("measuring the capacity of the service"));
                let setup = self.measure_setup(&mut testbed)?;
                results.add(Line::Setup(setup.clone()))?;
                setup
            }
        };
        let all = jobs(&self.plan, &self.specs, setup.capacity_rps);
        let count = all.len();
        let missing = results.missing(all);
        progress(&Progress::Begin { missing: missing.len(), all: count });
        let mut left = missing.len();
        for job in missing {
            let again = &mut |steal| progress(&Progress::Again { steal });
            let run = testbed.measure(&job, &setup.alone, again)?;
            left -= 1;
            progress(&Progress::Made { run: &run, left });
            results.add(Line::Run(run))?;
        }
        Ok(())
    }

    fn measure_setup(&self, testbed: &mut Testbed) -> Result<Setup, LiveError> {
        let alone: Vec<Alone> = batch_labels(&self.plan)
            .filter(|_| self.specs.iter().any(Spec::has_batch))
            .map(|batch| testbed.measure_alone(&batch))
            .collect::<Result<_, _>>()?;
        let capacity_rps = match self.capacity_rps {
            Some(given) => given,
            None => testbed.capacity_rps()?,
        };
        Ok(Setup {
            capacity_rps,
            documents: testbed.documents(),
            limits: [testbed.limits(), self.limits.clone()].concat(),
            helpers: testbed.helpers(),
            helpers_share_a_lane: testbed.helpers_share_a_lane(),
            alone,
            ..setup(&self.order, &self.plan, self.command.clone())
        })
    }
}

/// Refuses to add runs if the index or the placement of the helpers has changed. Both are known
/// only once the service runs.
fn check_same_testbed(begun: &Setup, testbed: &Testbed) -> Result<(), LiveError> {
    let (was, is) = (begun.documents, testbed.documents());
    if was != is {
        let why =
            format!("the index of the file's runs had {was} documents, and this index has {is}");
        let fix = "use the same index, or choose another file with --output";
        return Err(LiveError::Refused { why, fix });
    }
    let (was, is) = (&begun.helpers, testbed.helpers());
    if *was != is {
        let why = format!("conditions changed since the file's first runs: then {was}, now {is}");
        let fix =
            "give this process the same CPUs and privileges, or choose another file with --output";
        return Err(LiveError::Refused { why, fix });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(name: &str) -> std::path::PathBuf {
        std::env::temp_dir().join(format!("elfen-results-{}-{name}", std::process::id()))
    }

    /// Opens the file. Other tests of this process may fork at the same time, and their children
    /// hold our locks until exec.
    fn open(path: &Path) -> Results {
        let begin = std::time::Instant::now();
        loop {
            match Results::open(path) {
                Err(LiveError::Locked) if begin.elapsed().as_secs() < 60 => {
                    std::thread::yield_now();
                }
                other => return other.unwrap(),
            }
        }
    }

    fn plan() -> Plan {
        Plan {
            loads: vec![0.3],
            scenarios: vec!["none".to_owned(), "borrow-idle".to_owned()],
            batches: vec!["loop".to_owned()],
            runs: 2,
            duration_s: 1.0,
            ..Plan::default()
        }
    }

    fn run(job: &Job) -> Run {
        Run {
            asked: job.spec.to_string(),
            batch: job.batch.clone(),
            rps: job.rps,
            invocation: job.invocation,
            ..Run::default()
        }
    }

    /// Goal: after an interruption at any byte, exactly the missing runs are performed. Method: a
    /// file with a setup and three of four runs, cut off at every byte. Opened again, its runs are
    /// complete, and a new run gets a line of its own.
    #[test]
    fn a_file_cut_off_anywhere_is_completed() {
        let path = file("cut");
        let plan = plan();
        let specs = super::super::plan::check(&plan).unwrap();
        let all = jobs(&plan, &specs, 977.123_456_789);
        assert_eq!(all.len(), 4);
        fs::remove_file(&path).ok();
        let mut results = open(&path);
        results.add(Line::Setup(Setup { plan: Some(plan), ..Setup::default() })).unwrap();
        for job in &all[..3] {
            results.add(Line::Run(run(job))).unwrap();
        }
        drop(results);
        let whole = fs::read(&path).unwrap();
        for length in 0..=whole.len() {
            fs::write(&path, &whole[..length]).unwrap();
            let mut results = open(&path);
            let lines = whole[..length].iter().filter(|&&byte| byte == b'\n').count();
            assert_eq!(results.lines.len(), lines, "cut at {length}");
            let missing = results.missing(all.clone());
            assert_eq!(missing.len(), 4 - lines.saturating_sub(1), "cut at {length}");
            results.add(Line::Run(run(&missing[0]))).unwrap();
            drop(results);
            let again = open(&path);
            assert_eq!(again.lines.len(), lines + 1, "cut at {length}");
            assert_eq!(again.missing(all.clone()).len(), missing.len() - 1, "cut at {length}");
        }
        fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_file_has_one_writer() {
        let path = file("locked");
        let first = open(&path);
        assert!(matches!(Results::open(&path), Err(LiveError::Locked)));
        drop(first);
        open(&path);
        fs::remove_file(path).unwrap();
    }

    /// Goal: results of two plans or two machines do not mix. Method: setups that differ in one
    /// value.
    #[test]
    fn a_different_plan_or_machine_is_named() {
        let setup = Setup { plan: Some(plan()), lanes: "0:1".to_owned(), ..Setup::default() };
        assert_eq!(first_difference(&setup, &setup), None);
        // Times and measured values may differ.
        let later = Setup { started_s: 7, capacity_rps: 3.0, ..setup.clone() };
        assert_eq!(first_difference(&setup, &later), None);
        let longer = Plan { duration_s: 2.0, ..plan() };
        let asked = Setup { plan: Some(longer), ..setup.clone() };
        let says = "duration_s of the file's plan is 1.0 and not 2.0";
        assert_eq!(first_difference(&setup, &asked).as_deref(), Some(says));
        let command = ["xz", "-k"].map(str::to_owned).to_vec();
        let own = Setup { plan: Some(Plan { command, ..plan() }), ..setup.clone() };
        let says = "command of the file's plan is null and not [\"xz\",\"-k\"]";
        assert_eq!(first_difference(&setup, &own).as_deref(), Some(says));
        let says = "command of the file's plan is [\"xz\",\"-k\"] and not null";
        assert_eq!(first_difference(&own, &setup).as_deref(), Some(says));
        let asked = Setup { lanes: "2:3".to_owned(), ..setup.clone() };
        let says = "the file's choice of lanes is \"0:1\" and not \"2:3\"";
        assert_eq!(first_difference(&setup, &asked).as_deref(), Some(says));
    }
}
