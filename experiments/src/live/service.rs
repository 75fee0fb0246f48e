//! `elfen-search` in live runs: its index, its queries, and its process.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use elfen_machine::process::threads_of;
use serde_json::Value;

use super::os::{self, ChildSetup, Rank};
use super::process::{Process, wait_for};
use super::scratch::Scratch;
use super::{LiveError, Machine, Programs, usage};

/// Tasks that match many documents; several of them make one query. A request has to run long
/// compared with coordinator and generator: most of a millisecond with the demo's index, and two
/// with the experiment's.
const MANY_WORDS: &str = "OrHigh";
const TASKS_A_QUERY: usize = 12;
/// Tasks that are long enough unchanged.
const AS_THEY_ARE: [&str; 2] = ["AndHighHigh", "Fuzzy2"];
/// Time to check a large index and to answer each query once.
const OPEN_TIMEOUT: Duration = Duration::from_secs(120);
const BUILD_TIMEOUT: Duration = Duration::from_secs(3600);
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// The CPUs and the priority of the service's coordinator and of the generator.
#[derive(Clone, Debug)]
pub(super) struct Helpers {
    pub(super) coordinator: u32,
    pub(super) generator: u32,
    /// Whether they share a batch lane.
    pub(super) share_a_lane: bool,
    rank: Rank,
}

impl Helpers {
    /// Chooses CPUs outside all pairs if there are any, else the first batch lane; and the highest
    /// priority that is permitted.
    pub(super) fn choose(machine: &Machine, scratch: &Scratch) -> Result<Self, LiveError> {
        let mut batch_lanes = machine.batch_lanes();
        let (_, lane) = batch_lanes.next().ok_or_else(|| {
            let why = "there is no pair of lanes".to_owned();
            LiveError::Refused { why, fix: "give a pair by hand, as in --lanes 0:1" }
        })?;
        let (coordinator, generator) = match machine.spare.as_slice() {
            [] => (lane, lane),
            [only] => (*only, *only),
            [first, second, ..] => (*first, *second),
        };
        let share_a_lane = machine.spare.is_empty();
        let may = |rank: &Rank| {
            let setup = ChildSetup::anywhere(*rank);
            let tried = Process::start("true", Command::new("true"), &setup, scratch);
            tried.and_then(|tried| tried.finish(None, ANSWER_TIMEOUT)).is_ok()
        };
        let ranks = [Rank::Fifo(2), Rank::Nice(-20), Rank::ShortSlice];
        let rank = ranks.into_iter().find(may).unwrap_or(Rank::Normal);
        Ok(Self { coordinator, generator, share_a_lane, rank })
    }

    /// The priority of coordinator, generator and workers. The coordinator preempts the generator,
    /// which may spin; a worker has its own lane.
    fn ranks(&self) -> [Rank; 3] {
        match self.rank {
            Rank::Fifo(_) => [Rank::Fifo(3), Rank::Fifo(2), Rank::Fifo(1)],
            other => [other; 3],
        }
    }

    /// Whether an ordinary thread on their lane cannot delay them.
    pub(super) fn outranks_ordinary_threads(&self) -> bool {
        !self.share_a_lane || matches!(self.rank, Rank::Fifo(_))
    }

    pub(super) fn generator_setup(&self) -> ChildSetup {
        let [_, rank, _] = self.ranks();
        ChildSetup::on(self.generator, rank)
    }

    /// Describes their CPUs and priority, as a sentence for the results. A service of the user's
    /// own has no coordinator of ours.
    pub(super) fn describe(&self, has_coordinator: bool) -> String {
        let Self { coordinator, generator, share_a_lane, rank } = self;
        let cpus = match (has_coordinator, share_a_lane) {
            (true, true) => format!(
                "coordinator and generator share CPU {coordinator} with the batch, because there \
                 is no other"
            ),
            (true, false) if coordinator == generator => {
                format!("coordinator and generator run on CPU {coordinator}, outside the lanes")
            }
            (true, false) => format!(
                "the coordinator runs on CPU {coordinator} and the generator on CPU {generator}, \
                 outside the lanes"
            ),
            (false, true) => format!(
                "the generator shares CPU {generator} with the batch, because there is no other"
            ),
            (false, false) => {
                format!("the generator runs on CPU {generator}, outside the lanes")
            }
        };
        let programs = if has_coordinator { "service and generator run" } else { "it runs" };
        let rank = match rank {
            Rank::Fifo(_) => "before all ordinary threads (SCHED_FIFO)",
            Rank::Nice(_) => "at nice -20",
            Rank::ShortSlice => "at normal priority, with a shorter slice",
            _ => "at normal priority",
        };
        format!("{cpus}; {programs} {rank}")
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
    /// Opens the index in the user's folder, and builds it there if it is missing. Without a
    /// folder, builds an index for this run only.
    pub(super) fn open(
        programs: &Programs,
        scratch: &Scratch,
        folder: Option<&Path>,
        documents: u64,
    ) -> Result<Self, LiveError> {
        let index = folder.map_or_else(|| scratch.path("index"), Path::to_owned);
        if !index.exists() {
            let mut command = Command::new(&programs.search);
            command.args(["index", "--docs", &documents.to_string()]).arg(&index);
            Process::start_anywhere("elfen-search", command, scratch)?
                .finish(None, BUILD_TIMEOUT)?;
        }
        let (documents, seed) = manifest(&index)?;
        let mut command = Command::new(&programs.search);
        command.args(["tasks", "--docs", &documents.to_string(), "--seed", &seed.to_string()]);
        let tasks = Process::start_anywhere("elfen-search", command, scratch)?;
        let tasks = tasks.finish(None, ANSWER_TIMEOUT)?;
        let queries = scratch.path("tasks");
        fs::write(&queries, long_queries(&tasks))
            .map_err(LiveError::io(format!("writing {}", queries.display())))?;
        Ok(Self { index, queries, documents })
    }

    /// Measures the capacity of the service: the sum over its workers, each of which searches
    /// without a pause on its lane.
    pub(super) fn capacity_rps(
        &self,
        programs: &Programs,
        scratch: &Scratch,
        machine: &Machine,
        helpers: &Helpers,
    ) -> Result<f64, LiveError> {
        let mut sum = 0.0;
        for pair in &machine.pairs {
            let [_, _, rank] = helpers.ranks();
            sum += self.searching(programs, scratch, pair.request, rank)?.finish()?;
        }
        Ok(sum)
    }

    /// Starts one worker that searches without a pause on one CPU.
    pub(super) fn searching(
        &self,
        programs: &Programs,
        scratch: &Scratch,
        cpu: u32,
        rank: Rank,
    ) -> Result<SearchBench, LiveError> {
        let mut command = Command::new(&programs.search);
        command.args(["bench", "--json", "--passes", "1", "--cpu", &cpu.to_string()]);
        command.arg("--tasks").arg(&self.queries).arg(&self.index);
        let setup = ChildSetup::on(cpu, rank);
        Ok(SearchBench(Process::start("elfen-search", command, &setup, scratch)?))
    }
}

#[derive(Debug)]
pub(super) struct SearchBench(Process);

impl SearchBench {
    /// Waits for its end, and returns queries per second.
    pub(super) fn finish(self) -> Result<f64, LiveError> {
        let report: Value = self.0.finish_json(None, BUILD_TIMEOUT)?;
        let rate = report["queries_per_second"].as_f64().filter(|rate| *rate > 0.0);
        rate.ok_or_else(|| LiveError::Garbled {
            name: "elfen-search".to_owned(),
            why: "no queries_per_second".to_owned(),
        })
    }
}

/// A set of long queries, made from a set of all kinds.
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

/// The number of documents and the seed of an index. Queries can only be generated for the built-in
/// corpus.
fn manifest(index: &Path) -> Result<(u64, u64), LiveError> {
    let refuse = |why: &str| LiveError::Refused {
        why: format!("the index {}: {why}", index.display()),
        fix: "leave --index out, or name a new folder, in which an index is built",
    };
    let text = fs::read_to_string(index.join("elfen-search.json"))
        .map_err(|error| refuse(&format!("its manifest cannot be read: {error}")))?;
    let manifest: Value = serde_json::from_str(&text)
        .map_err(|error| refuse(&format!("its manifest cannot be read: {error}")))?;
    let documents = manifest["documents"].as_u64().ok_or_else(|| refuse("it has no documents"))?;
    let seed = manifest["source"]["builtin"]["seed"].as_u64();
    Ok((documents, seed.ok_or_else(|| refuse("it is not of the built-in corpus"))?))
}

/// The running service.
#[derive(Debug)]
pub(super) struct SearchService {
    process: Process,
    pub(super) address: String,
}

impl SearchService {
    pub(super) fn start(
        programs: &Programs,
        scratch: &Scratch,
        machine: &Machine,
        helpers: &Helpers,
        corpus: &Corpus,
    ) -> Result<Self, LiveError> {
        let lanes: Vec<String> = machine.pairs.iter().map(|p| p.request.to_string()).collect();
        let mut command = Command::new(&programs.search);
        // Port 0: the kernel chooses a free port.
        command.args(["serve", "--listen", "127.0.0.1:0", "--drain", "1s"]);
        command.args(["--lanes", &lanes.join(",")]);
        command.args(["--coordinator-cpu", &helpers.coordinator.to_string()]);
        command.args(["--service-name", scratch.service()]).args(machine.emulation_options());
        command.arg("--warmup").arg(&corpus.queries).arg(&corpus.index);
        let mut process = Process::start_anywhere("elfen-search", command, scratch)?;
        let address = wait_for(&mut process, OPEN_TIMEOUT, |process| {
            let line = process.stdout_text();
            line.strip_prefix("serving on ")?.strip_suffix('\n').map(str::to_owned)
        })?;
        let [first, _, others] = helpers.ranks();
        for thread in threads_of(process.id()) {
            let rank = if thread == process.id() { first } else { others };
            let thread = i32::try_from(thread).unwrap_or(0);
            os::set_rank(thread, rank).map_err(LiveError::io("ranking the service's threads"))?;
        }
        Ok(Self { process, address })
    }

    pub(super) fn check_alive(&mut self) -> Result<(), LiveError> {
        self.process.check_alive()
    }

    /// CPU time of the coordinator, and of all workers together, in nanoseconds.
    pub(super) fn used_ns(&self) -> (u64, u64) {
        usage::main_and_other_threads_ns(self.process.id())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: queries are long, and no two are alike. Method: three tasks of two words and others.
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
