//! Slowdowns of programs that share a core, measured, for the model.
//!
//! Each program runs alone on its lane and beside each other one; the ratio of what it gets done is its slowdown. The
//! service is one worker that searches without a pause: then a lane is busy all the time, and no generator disturbs.

use std::process::Command;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::os::{Place, Rank};
use super::process::{Process, wait_for};
use super::programs::Programs;
use super::scratch::Scratch;
use super::service::{Corpus, Searching};
use super::summary::{Figure, figure};
use super::{LiveError, Pair, sleep_until, usage};

/// For an iteration to end that began before the time was over.
const TO_END: Duration = Duration::from_secs(30);

/// What is measured.
#[derive(Clone, Debug)]
pub struct Order {
    pub pair: Pair,
    pub batches: Vec<String>,
    pub documents: u64,
    pub index: Option<std::path::PathBuf>,
    /// How long two programs run beside each other.
    pub lasting: Duration,
    pub rounds: u32,
}

/// How much longer two programs take while both run; 1 is not at all.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Slowdown {
    /// On the request lane: `search`, or a batch program.
    pub first: String,
    /// On the batch lane.
    pub second: String,
    pub of_first: Figure,
    pub of_second: Figure,
}

/// The name of the service in a [`Slowdown`].
pub const SERVICE: &str = "search";

struct Lab {
    programs: Programs,
    corpus: Corpus,
    order: Order,
    scratch: Scratch,
}

/// Measures all pairs; `progress` hears how many of how many are done. Rounds are interleaved.
pub fn slowdowns(
    order: Order,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Vec<Slowdown>, LiveError> {
    let programs = Programs::find()?;
    let scratch = Scratch::new(1).map_err(LiveError::io("making a folder for temporary files"))?;
    let corpus = Corpus::open(&programs, &scratch, order.index.as_deref(), order.documents)?;
    let lab = Lab { programs, corpus, order, scratch };
    let pairs = pairs(&lab.order.batches);
    let rounds = lab.order.rounds;
    let steps = usize::try_from(rounds).unwrap_or(usize::MAX).saturating_mul(pairs.len());
    let mut ratios: Vec<(Vec<f64>, Vec<f64>)> = vec![Default::default(); pairs.len()];
    let mut done = 0;
    for _ in 0..rounds {
        for ((first, second), (of_first, of_second)) in pairs.iter().zip(&mut ratios) {
            let (one, other) = lab.beside(first, second)?;
            of_first.push(one);
            of_second.push(other);
            done += 1;
            progress(done, steps);
        }
    }
    let slowdown = |((first, second), (of_first, of_second)): ((String, String), (Vec<f64>, _))| {
        let of_second: Vec<f64> = of_second;
        Slowdown { first, second, of_first: figure(&of_first), of_second: figure(&of_second) }
    };
    Ok(pairs.into_iter().zip(ratios).map(slowdown).collect())
}

/// The service with each batch program, and each two of these.
fn pairs(batches: &[String]) -> Vec<(String, String)> {
    let firsts = std::iter::once(SERVICE.to_owned()).chain(batches.iter().cloned());
    let mut pairs = Vec::new();
    for (at, first) in firsts.enumerate() {
        // A pair of batch programs is measured once: lanes of a core are alike.
        let rest = batches.iter().skip(at.saturating_sub(1));
        pairs.extend(rest.map(|second| (first.clone(), second.clone())));
    }
    pairs
}

impl Lab {
    /// Slowdowns of both, each beside the other, against the same lane alone just before.
    fn beside(&self, first: &str, second: &str) -> Result<(f64, f64), LiveError> {
        let [lane, sibling] = self.lanes();
        let first_alone = self.alone(first, lane)?;
        let second_alone = self.alone(second, sibling)?;
        if first == SERVICE {
            return self.beside_service(second, first_alone, second_alone);
        }
        let one = self.batch(first, lane)?;
        let other = self.batch(second, sibling)?;
        self.wait()?;
        let (one, other) = (end(one)?, end(other)?);
        Ok((first_alone / one, second_alone / other))
    }

    /// A search lasts as long as its queries do, so the batch is ended after it.
    fn beside_service(
        &self,
        second: &str,
        first_alone: f64,
        second_alone: f64,
    ) -> Result<(f64, f64), LiveError> {
        let [lane, sibling] = self.lanes();
        let batch = self.batch(second, sibling)?;
        let found = self.search(lane)?.finish()?;
        let done = end(batch)?;
        Ok((first_alone / found, second_alone / done))
    }

    fn lanes(&self) -> [u32; 2] {
        let Pair { request, batch } = &self.order.pair;
        [*request, batch.first().copied().unwrap_or(*request)]
    }

    /// Work per second of a program with nothing beside it.
    fn alone(&self, program: &str, cpu: u32) -> Result<f64, LiveError> {
        if program == SERVICE {
            return self.search(cpu)?.finish();
        }
        let batch = self.batch(program, cpu)?;
        self.wait()?;
        end(batch)
    }

    fn wait(&self) -> Result<(), LiveError> {
        sleep_until(Instant::now() + self.order.lasting, || Ok(()))
    }

    fn search(&self, cpu: u32) -> Result<Searching, LiveError> {
        self.corpus.searching(&self.programs, &self.scratch, cpu, Rank::Normal)
    }

    fn batch(&self, program: &str, cpu: u32) -> Result<Process, LiveError> {
        let mut command = Command::new(&self.programs.batch);
        command.args([program, "--json", "--duration", "600s"]);
        let place = Place::on(cpu, Rank::Normal);
        let mut batch = Process::start("elfen-batch", command, &place, &self.scratch)?;
        let id = batch.id();
        wait_for(&mut batch, TO_END, |_| usage::catches(id, libc::SIGTERM).then_some(()))?;
        Ok(batch)
    }
}

fn end(batch: Process) -> Result<f64, LiveError> {
    let report = batch.finish_json(Some(libc::SIGTERM), TO_END)?;
    report["per_second"].as_f64().filter(|rate| *rate > 0.0).ok_or_else(|| LiveError::Garbled {
        name: "elfen-batch".to_owned(),
        why: "no per_second".to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_pair_is_measured_once() {
        let batches = ["loop", "spin"].map(str::to_owned);
        let pairs = pairs(&batches);
        let pairs: Vec<(&str, &str)> =
            pairs.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
        let expected = [
            ("search", "loop"),
            ("search", "spin"),
            ("loop", "loop"),
            ("loop", "spin"),
            ("spin", "spin"),
        ];
        assert_eq!(pairs, expected);
    }
}
