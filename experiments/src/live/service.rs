//! The service of a live run: its index, its queries, and the process that serves them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use elfen_machine::process::threads_of;
use serde_json::Value;

use super::os::{self, Place, Rank};
use super::process::{Process, wait_for};
use super::scratch::Scratch;
use super::{LiveError, Machine, Programs, usage};

/// Tasks that match many documents; so many of them make one query of several words. A request has
/// to take long beside what coordinator and generator take for it: most of a millisecond with the
/// demo's index, and two with the experiment's.
const MANY_WORDS: &str = "OrHigh";
const TASKS_A_QUERY: usize = 12;
/// Tasks that take their time as they are.
const AS_THEY_ARE: [&str; 2] = ["AndHighHigh", "Fuzzy2"];
/// For a large index to be checked, and for its queries to be asked once.
const TO_OPEN: Duration = Duration::from_secs(120);
const TO_BUILD: Duration = Duration::from_secs(3600);
const TO_ANSWER: Duration = Duration::from_secs(60);

/// Where the service's coordinator and the generator run, besides the lanes.
#[derive(Clone, Debug)]
pub(super) struct Helpers {
    pub(super) coordinator: u32,
    pub(super) generator: u32,
    /// Whether that is a batch lane.
    pub(super) share_a_lane: bool,
    rank: Rank,
}

impl Helpers {
    /// CPUs outside all pairs if there are any; else the first batch lane, at the best rank that
    /// may be had.
    pub(super) fn choose(machine: &Machine, scratch: &Scratch) -> Result<Self, LiveError> {
        let mut batch_lanes = machine.batch_lanes();
        let (_, lane) = batch_lanes.next().ok_or_else(|| {
            let why = "there is no pair of lanes".to_owned();
            LiveError::Refused { why, fix: "give one by hand, as in --lanes 0:1" }
        })?;
        let (coordinator, generator) = match machine.spare.as_slice() {
            [] => (lane, lane),
            [only] => (*only, *only),
            [first, second, ..] => (*first, *second),
        };
        let share_a_lane = machine.spare.is_empty();
        let may = |rank: &Rank| {
            let place = Place::anywhere(*rank);
            let tried = Process::start("true", Command::new("true"), &place, scratch);
            tried.and_then(|tried| tried.finish(None, TO_ANSWER)).is_ok()
        };
        let ranks = [Rank::Fifo(2), Rank::Nice(-20), Rank::ShortSlice];
        let rank = ranks.into_iter().find(may).unwrap_or(Rank::Normal);
        Ok(Self { coordinator, generator, share_a_lane, rank })
    }

    /// The worker's lane is its own; the coordinator goes before the generator, which may spin.
    fn ranks(&self) -> [Rank; 3] {
        match self.rank {
            Rank::Fifo(_) => [Rank::Fifo(3), Rank::Fifo(2), Rank::Fifo(1)],
            other => [other; 3],
        }
    }

    /// Whether an ordinary thread on their lane is none of their business.
    pub(super) fn goes_first(&self) -> bool {
        !self.share_a_lane || matches!(self.rank, Rank::Fifo(_))
    }

    pub(super) fn generator_place(&self) -> Place {
        let [_, rank, _] = self.ranks();
        Place::on(self.generator, rank)
    }

    /// One sentence for the results.
    pub(super) fn words(&self) -> String {
        let Self { coordinator, generator, share_a_lane, rank } = self;
        let place = match share_a_lane {
            true => format!(
                "coordinator and generator share CPU {coordinator} with the batch, for want of \
                 others"
            ),
            false if coordinator == generator => {
                format!("coordinator and generator run on CPU {coordinator}, outside the lanes")
            }
            false => format!(
                "the coordinator runs on CPU {coordinator} and the generator on CPU {generator}, \
                 outside the lanes"
            ),
        };
        let rank = match rank {
            Rank::Fifo(_) => "service and generator go before everything else (SCHED_FIFO)",
            Rank::Nice(_) => "service and generator go before others (nice -20)",
            Rank::ShortSlice => {
                "service and generator have no privilege to go before others, only shorter slices"
            }
            _ => "service and generator have no privilege to go before others",
        };
        format!("{place}; {rank}")
    }
}

/// The same where there is no coordinator of ours, but a service of the user's own.
pub(super) fn words_of_generator(helpers: &Helpers) -> String {
    let Helpers { generator, share_a_lane, rank, .. } = helpers;
    let place = match share_a_lane {
        true => format!("the generator shares CPU {generator} with the batch, for want of others"),
        false => format!("the generator runs on CPU {generator}, outside the lanes"),
    };
    let rank = match rank {
        Rank::Fifo(_) => "it goes before everything else (SCHED_FIFO)",
        Rank::Nice(_) => "it goes before others (nice -20)",
        Rank::ShortSlice => "it has no privilege to go before others, only shorter slices",
        _ => "it has no privilege to go before others",
    };
    format!("{place}; {rank}")
}

/// An index and the queries for it.
#[derive(Clone, Debug)]
pub(super) struct Corpus {
    pub(super) index: PathBuf,
    pub(super) queries: PathBuf,
    pub(super) documents: u64,
}

impl Corpus {
    /// Opens the index in a folder of the user's, builds it there if there is none, or builds it
    /// for this run alone.
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
            let place = Place::anywhere(Rank::Normal);
            Process::start("elfen-search", command, &place, scratch)?.finish(None, TO_BUILD)?;
        }
        let (documents, seed) = manifest(&index)?;
        let mut command = Command::new(&programs.search);
        command.args(["tasks", "--docs", &documents.to_string(), "--seed", &seed.to_string()]);
        let tasks =
            Process::start("elfen-search", command, &Place::anywhere(Rank::Normal), scratch)?;
        let tasks = tasks.finish(None, TO_ANSWER)?;
        let queries = scratch.path("tasks");
        fs::write(&queries, heavy(&tasks))
            .map_err(LiveError::io(format!("writing {}", queries.display())))?;
        Ok(Self { index, queries, documents })
    }

    /// What the service's workers can serve: each has its lane, and searches without a pause.
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

    /// One worker that searches without a pause, on one CPU.
    pub(super) fn searching(
        &self,
        programs: &Programs,
        scratch: &Scratch,
        cpu: u32,
        rank: Rank,
    ) -> Result<Searching, LiveError> {
        let mut command = Command::new(&programs.search);
        command.args(["bench", "--json", "--passes", "1", "--cpu", &cpu.to_string()]);
        command.arg("--tasks").arg(&self.queries).arg(&self.index);
        let place = Place::on(cpu, rank);
        Ok(Searching(Process::start("elfen-search", command, &place, scratch)?))
    }
}

#[derive(Debug)]
pub(super) struct Searching(Process);

impl Searching {
    /// Queries per second.
    pub(super) fn finish(self) -> Result<f64, LiveError> {
        let report: Value = self.0.finish_json(None, TO_BUILD)?;
        let rate = report["queries_per_second"].as_f64().filter(|rate| *rate > 0.0);
        rate.ok_or_else(|| LiveError::Garbled {
            name: "elfen-search".to_owned(),
            why: "no queries_per_second".to_owned(),
        })
    }
}

/// A query set of long requests, from a set of all kinds.
fn heavy(tasks: &str) -> String {
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

/// Documents and seed of an index; queries can be made for the built-in corpus alone.
fn manifest(index: &Path) -> Result<(u64, u64), LiveError> {
    let refuse = |why: &str| LiveError::Refused {
        why: format!("the index {}: {why}", index.display()),
        fix: "leave --index out, or name a folder that is not there yet: one is built in it",
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
pub(super) struct Serving {
    process: Process,
    pub(super) address: String,
}

impl Serving {
    pub(super) fn start(
        programs: &Programs,
        scratch: &Scratch,
        machine: &Machine,
        helpers: &Helpers,
        corpus: &Corpus,
    ) -> Result<Self, LiveError> {
        let lanes: Vec<String> = machine.pairs.iter().map(|p| p.request.to_string()).collect();
        let mut command = Command::new(&programs.search);
        // The kernel knows which port is free.
        command.args(["serve", "--listen", "127.0.0.1:0", "--drain", "1s"]);
        command.args(["--lanes", &lanes.join(",")]);
        command.args(["--coordinator-cpu", &helpers.coordinator.to_string()]);
        command.args(["--service-name", scratch.service()]).args(machine.beside());
        command.arg("--warmup").arg(&corpus.queries).arg(&corpus.index);
        let place = Place::anywhere(Rank::Normal);
        let mut process = Process::start("elfen-search", command, &place, scratch)?;
        let address = wait_for(&mut process, TO_OPEN, |process| {
            let line = process.printed();
            line.strip_prefix("serving on ")?.strip_suffix('\n').map(str::to_owned)
        })?;
        let [first, _, others] = helpers.ranks();
        for thread in threads_of(process.id()) {
            let rank = if thread == process.id() { first } else { others };
            let thread = i32::try_from(thread).unwrap_or(0);
            os::take_rank(thread, rank).map_err(LiveError::io("ranking the service's threads"))?;
        }
        Ok(Self { process, address })
    }

    pub(super) fn lives(&mut self) -> Result<(), LiveError> {
        self.process.lives()
    }

    /// CPU time of the coordinator, and of all workers together, in nanoseconds.
    pub(super) fn used_ns(&self) -> (u64, u64) {
        usage::first_and_others(self.process.id())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: long queries, each another. Method: three tasks of two words and others.
    #[test]
    fn queries_are_long() {
        let tasks = "OrHighLow: a b\nLowTerm: x\nOrHighHigh: c d\nFuzzy2: f~2\nOrHighMed: e g\n";
        let lines = heavy(tasks);
        let lines: Vec<&str> = lines.lines().collect();
        assert_eq!(lines.len(), 4);
        assert!(
            lines[0].starts_with("Or: a b c d e g a b ") && lines[1].starts_with("Or: c d e g ")
        );
        assert_eq!(lines[0].split(' ').count(), 1 + 2 * TASKS_A_QUERY);
        assert_eq!(lines[3], "Fuzzy2: f~2");
    }
}
