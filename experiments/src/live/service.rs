//! `elfen-search` in live runs: its index, its queries, and its process.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use elfen_machine::pair::Pair;
use elfen_machine::process::threads_of;
use serde_json::Value;

use super::os::{self, ChildSetup, Rank};
use super::process::{Process, Rig};
use super::{LiveError, Machine, usage};

const NAME: &str = "elfen-search";

/// The tasks that match many documents. Several of them make one query, because a request has to
/// run long compared with the coordinator and the generator. With the demo's index, it takes most
/// of a millisecond; with the experiment's, two.
const MANY_WORDS: &str = "OrHigh";
const TASKS_A_QUERY: usize = 12;
/// The tasks that are long enough without a change.
const AS_THEY_ARE: [&str; 2] = ["AndHighHigh", "Fuzzy2"];
/// How often all queries are searched to measure the capacity.
const PASSES: &str = "3";
/// The time limit for checking a large index and answering each query once.
const OPEN_TIMEOUT: Duration = Duration::from_secs(120);
const BUILD_TIMEOUT: Duration = Duration::from_secs(3600);
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// The CPUs and the priority of the helpers: the service's coordinator and the load generator.
#[derive(Clone, Debug)]
pub(super) struct Helpers {
    pub(super) coordinator: u32,
    pub(super) generator: u32,
    /// Whether they share a batch lane.
    pub(super) share_a_lane: bool,
    rank: Rank,
}

impl Helpers {
    /// Returns helpers with the highest priority that is permitted.
    pub(super) fn choose(rig: &Rig) -> Result<Self, LiveError> {
        let may = |rank: &Rank| {
            let setup = ChildSetup::anywhere(*rank);
            let tried = rig.start("true", Command::new("true"), &setup);
            tried.and_then(|mut tried| tried.finish(None, ANSWER_TIMEOUT)).is_ok()
        };
        let ranks = [Rank::Fifo(2), Rank::Nice(-20), Rank::ShortSlice];
        Self::of(&rig.machine, ranks.into_iter().find(may).unwrap_or(Rank::Normal))
    }

    /// Returns helpers on CPUs outside all pairs. If all CPUs are in pairs, the helpers run on the
    /// first batch lane.
    pub(super) fn of(machine: &Machine, rank: Rank) -> Result<Self, LiveError> {
        let (_, lane) = machine.batch_lanes().next().ok_or_else(|| {
            let why = "there is no pair of lanes".to_owned();
            LiveError::Refused { why, fix: "name a pair, as in --lanes 0:1" }
        })?;
        let (coordinator, generator) = match machine.spare.as_slice() {
            [] => (lane, lane),
            [only] => (*only, *only),
            [first, second, ..] => (*first, *second),
        };
        Ok(Self { coordinator, generator, share_a_lane: machine.spare.is_empty(), rank })
    }

    /// Returns the priorities of the coordinator, the generator and the workers. The coordinator
    /// preempts the generator, which may spin. Each worker has its own lane.
    fn ranks(&self) -> [Rank; 3] {
        match self.rank {
            Rank::Fifo(_) => [Rank::Fifo(3), Rank::Fifo(2), Rank::Fifo(1)],
            other => [other; 3],
        }
    }

    /// Whether an ordinary thread on their lane cannot delay the helpers.
    pub(super) fn outranks_ordinary_threads(&self) -> bool {
        !self.share_a_lane || matches!(self.rank, Rank::Fifo(_))
    }

    pub(super) fn generator_setup(&self) -> ChildSetup {
        let [_, rank, _] = self.ranks();
        ChildSetup::on(self.generator, rank)
    }

    /// Describes the CPUs and the priority of the helpers, as a sentence for the results. With a
    /// service of the user's own, the only helper is the generator.
    pub(super) fn describe(&self, has_coordinator: bool) -> String {
        let Self { coordinator, generator, share_a_lane, rank } = self;
        let (subject, programs) = match has_coordinator {
            true => ("coordinator and load generator run", "service and load generator run"),
            false => ("the load generator runs", "it runs"),
        };
        let cpus = match share_a_lane {
            true => {
                format!("next to the batch on CPU {generator}, because no other CPU is available")
            }
            false if has_coordinator && coordinator != generator => {
                format!("on CPUs {coordinator} and {generator}, outside the lanes")
            }
            false => format!("on CPU {generator}, outside the lanes"),
        };
        let rank = match rank {
            Rank::Fifo(_) => "above all ordinary threads (SCHED_FIFO)",
            Rank::Nice(_) => "at nice -20",
            Rank::ShortSlice => "at normal priority, with a shorter slice",
            _ => "at normal priority",
        };
        format!("{subject} {cpus}; {programs} {rank}")
    }
}

/// An index and its queries.
#[derive(Clone, Debug)]
pub(super) struct Corpus {
    pub(super) index: PathBuf,
    pub(super) queries: PathBuf,
    pub(super) documents: u64,
}

impl Corpus {
    /// Opens the index in the user's folder, or builds it there if it is missing. Without a folder,
    /// builds an index for this run only.
    pub(super) fn open(
        rig: &Rig,
        folder: Option<&Path>,
        documents: u64,
    ) -> Result<Self, LiveError> {
        let index = folder.map_or_else(|| rig.scratch.path("index"), Path::to_owned);
        if !index.exists() {
            let mut command = Command::new(&rig.programs.search);
            command.args(["index", "--docs", &documents.to_string()]).arg(&index);
            rig.start_anywhere(NAME, command)?.finish(None, BUILD_TIMEOUT)?;
        }
        let (documents, seed) = manifest(&index)?;
        let mut command = Command::new(&rig.programs.search);
        command.args(["tasks", "--docs", &documents.to_string(), "--seed", &seed.to_string()]);
        let tasks = rig.start_anywhere(NAME, command)?.finish(None, ANSWER_TIMEOUT)?;
        let queries = rig.scratch.path("tasks");
        fs::write(&queries, long_queries(&tasks))
            .map_err(LiveError::io(format!("writing {}", queries.display())))?;
        Ok(Self { index, queries, documents })
    }

    /// Measures the capacity of the service. It is the sum over its workers. Each of them searches
    /// without a pause on its lane.
    pub(super) fn capacity_rps(&self, rig: &Rig, helpers: &Helpers) -> Result<f64, LiveError> {
        let [_, _, rank] = helpers.ranks();
        let alone = |pair: &Pair| self.search(rig, pair.request, rank);
        rig.machine.pairs.iter().map(alone).sum()
    }

    /// Searches without a pause on one CPU. Returns the queries per second of the fastest pass.
    pub(super) fn search(&self, rig: &Rig, cpu: u32, rank: Rank) -> Result<f64, LiveError> {
        let mut command = Command::new(&rig.programs.search);
        command.args(["bench", "--json", "--passes", PASSES, "--cpu", &cpu.to_string()]);
        command.arg("--tasks").arg(&self.queries).arg(&self.index);
        let mut bench = rig.start(NAME, command, &ChildSetup::on(cpu, rank))?;
        let report: Value = bench.finish_json(None, BUILD_TIMEOUT)?;
        let rate = report["fastest_queries_per_second"].as_f64().filter(|rate| *rate > 0.0);
        let why = "fastest_queries_per_second is missing".to_owned();
        rate.ok_or_else(|| LiveError::Garbled { name: NAME.to_owned(), why })
    }
}

/// Makes a set of long queries from a set of all kinds.
fn long_queries(tasks: &str) -> String {
    let of = |kind: &'static str| {
        tasks
            .lines()
            .filter_map(|line| line.split_once(": "))
            .filter(move |(k, _)| k.starts_with(kind))
    };
    let words: Vec<&str> = of(MANY_WORDS).map(|(_, words)| words).collect();
    let mut text = String::new();
    for first in 0..words.len() {
        let some: Vec<&str> =
            words.iter().cycle().skip(first).take(TASKS_A_QUERY).copied().collect();
        text += &format!("Or: {}\n", some.join(" "));
    }
    for (kind, words) in AS_THEY_ARE.into_iter().flat_map(of) {
        text += &format!("{kind}: {words}\n");
    }
    text
}

/// Returns the number of documents and the seed of an index. Fails for other corpora than the
/// built-in one, because queries cannot be generated for them.
fn manifest(index: &Path) -> Result<(u64, u64), LiveError> {
    let refuse = |why: &str| LiveError::Refused {
        why: format!("the index {}: {why}", index.display()),
        fix: "omit --index, or name a new folder for the index",
    };
    let text = fs::read_to_string(index.join("elfen-search.json"))
        .map_err(|error| refuse(&format!("its manifest cannot be read: {error}")))?;
    let manifest: Value = serde_json::from_str(&text)
        .map_err(|error| refuse(&format!("its manifest cannot be read: {error}")))?;
    let documents = manifest["documents"].as_u64().ok_or_else(|| refuse("it has no documents"))?;
    let seed = manifest["source"]["builtin"]["seed"].as_u64();
    Ok((documents, seed.ok_or_else(|| refuse("it was not built from the built-in corpus"))?))
}

/// The running service.
#[derive(Debug)]
pub(super) struct SearchService {
    pub(super) process: Process,
    pub(super) corpus: Corpus,
    address: String,
}

impl SearchService {
    pub(super) fn start(rig: &Rig, helpers: &Helpers, corpus: Corpus) -> Result<Self, LiveError> {
        let Rig { programs, machine, scratch } = rig;
        let lanes: Vec<String> = machine.pairs.iter().map(|p| p.request.to_string()).collect();
        let mut command = Command::new(&programs.search);
        // With port 0, the kernel chooses a free port.
        command.args(["serve", "--listen", "127.0.0.1:0", "--drain", "1s"]);
        command.args(["--lanes", &lanes.join(",")]);
        command.args(["--coordinator-cpu", &helpers.coordinator.to_string()]);
        command.args(["--service-name", scratch.service()]).args(machine.emulation_options());
        command.arg("--warmup").arg(&corpus.queries).arg(&corpus.index);
        let mut process = rig.start_anywhere(NAME, command)?;
        let address = process.wait_for(OPEN_TIMEOUT, |process| {
            let line = process.stdout_text();
            line.strip_prefix("serving on ")?.strip_suffix('\n').map(str::to_owned)
        })?;
        let [first, _, others] = helpers.ranks();
        for thread in threads_of(process.id()) {
            let rank = if thread == process.id() { first } else { others };
            os::set_rank(thread, rank).map_err(LiveError::io("ranking the service's threads"))?;
        }
        Ok(Self { process, corpus, address })
    }

    /// Returns the generator's arguments for the service and its requests.
    pub(super) fn load_args(&self) -> Vec<OsString> {
        let queries = self.corpus.queries.clone().into_os_string();
        let words = ["--tasks", "--template", "/search?q={}", &format!("http://{}", self.address)];
        ["--queries".into(), queries].into_iter().chain(words.map(OsString::from)).collect()
    }

    /// Returns the CPU time of the coordinator, and of all workers together, in nanoseconds.
    pub(super) fn used_ns(&self) -> (u64, u64) {
        let id = self.process.id();
        let coordinator_ns = usage::thread_cpu_ns(id).unwrap_or(0);
        (coordinator_ns, usage::process_cpu_ns(id).saturating_sub(coordinator_ns))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: queries are long, and all of them differ. Method: three tasks of two words, and other
    /// tasks.
    #[test]
    fn queries_are_long() {
        let tasks = "OrHighLow: a b\nLowTerm: x\nOrHighHigh: c d\nFuzzy2: f~2\nOrHighMed: e g\n";
        let lines = long_queries(tasks);
        let lines: Vec<&str> = lines.lines().collect();
        assert_eq!(lines.len(), 4);
        assert!(
            lines[0].starts_with("Or: a b c d e g a b ") && lines[1].starts_with("Or: c d e g ")
        );
        assert_eq!(lines[0].split(' ').count(), 1 + 2 * TASKS_A_QUERY);
        assert_eq!(lines[3], "Fuzzy2: f~2");
    }
}
