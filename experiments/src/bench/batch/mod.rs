//! Any program of the user's as a batch: what it overlaps of requests that come at random, how fast
//! it is off its lane, what `elfen run` costs it while the lane idles, and whether it does the same
//! as alone. What guards it otherwise is measured beside `--inject guard`, in the same run.
//!
//! Who ran when is the scheduler's own account, its trace; nothing here asks Elfen but for the
//! report that stands beside it.

mod output;
mod program;
mod request;
mod seen;

use std::ffi::OsString;
use std::path::Path;
use std::time::{Duration, Instant};

use elfen_rt::clock::nanos;
use elfen_run::report::Report;

use super::trace::buffer::{self, Buffer};
use crate::live::LiveError;
use output::Ended;
use program::{Running, Starts};
use request::Player;
use seen::{Cast, seen};

pub(crate) use seen::{Seen, Shared};

/// The baseline.
pub(crate) const GUARD: &str = "guard";

/// What is to be measured.
#[derive(Clone, Debug)]
pub(crate) struct Order<'a> {
    pub(crate) lanes: (u32, u32),
    pub(crate) words: &'a [OsString],
    /// As `elfen run` takes it.
    pub(crate) inject: &'a str,
    /// For `elfen run`: how to nap, how often to look.
    pub(crate) options: &'a [String],
    pub(crate) turns: &'a [Duration],
    /// For so long turns of one length are counted.
    pub(crate) seconds: u64,
    /// So much of every run is not.
    pub(crate) learn: Duration,
    /// Pairs of whole runs; without any, runs are not compared either.
    pub(crate) rounds: usize,
}

/// Turns of one length.
#[derive(Debug)]
pub(crate) struct Case {
    pub(crate) inject: String,
    pub(crate) turn: Duration,
    pub(crate) seen: Seen,
    /// How the program was checked indeed.
    pub(crate) used: String,
    /// Over whole runs; nothing where the kernel counted nothing.
    pub(crate) reported_ns: Option<u64>,
    pub(crate) runs: usize,
}

/// Runs that were held against the run alone.
#[derive(Debug)]
pub(crate) struct Compared {
    pub(crate) inject: String,
    pub(crate) runs: usize,
    pub(crate) different: usize,
    pub(crate) first_difference: Option<String>,
}

/// Two runs alone.
#[derive(Debug)]
pub(crate) struct Alone {
    /// The shorter one.
    pub(crate) wall: Duration,
    pub(crate) status: u8,
    /// What the second did otherwise than the first: then there is nothing to compare with.
    pub(crate) unlike: Option<String>,
}

/// A whole run on an idle lane, in nanoseconds.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Whole {
    /// Without naps.
    pub(crate) wall_ns: u64,
    /// How long the batch itself ran; nothing where the kernel counted nothing.
    pub(crate) ran_ns: Option<u64>,
}

/// One under each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pair {
    pub(crate) chosen: Whole,
    pub(crate) guard: Whole,
}

#[derive(Debug)]
pub(crate) struct Measured {
    pub(crate) alone: Option<Alone>,
    pub(crate) cases: Vec<Case>,
    pub(crate) pairs: Vec<Pair>,
    pub(crate) compared: Vec<Compared>,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Live(#[from] LiveError),
    #[error(transparent)]
    Trace(#[from] buffer::Error),
}

fn io_error(what: &'static str) -> impl FnOnce(std::io::Error) -> LiveError {
    LiveError::io(what)
}

/// Below this a program's wall time is that of being started.
pub(crate) const TOO_SHORT: Duration = Duration::from_millis(50);

/// Where runs keep their files, and what they are compared with.
struct Stage<'a> {
    order: &'a Order<'a>,
    starts: Starts<'a>,
    /// Nothing if two runs alone differ, or none was made.
    alone: Option<Ended>,
    /// For a whole run.
    patience: Duration,
    compared: Vec<Compared>,
}

/// `hear` is told what is being done, for the user who waits.
pub(crate) fn measure(order: &Order<'_>, hear: &mut dyn FnMut(&str)) -> Result<Measured, Error> {
    let folder = tempfile::tempdir().map_err(io_error("making a folder"))?;
    // Refused before minutes go by.
    drop(Buffer::start(&[order.lanes.0], 1)?);
    let mut stage = Stage::new(order, folder.path());
    for inject in stage.injects() {
        stage.starts.check(inject)?;
    }
    hear("alone, twice");
    let alone = stage.alone()?;
    let mut cases = Vec::new();
    for inject in stage.injects() {
        for &turn in order.turns {
            hear(&format!("under {inject}, turns of {turn:?}"));
            cases.push(stage.case(inject, turn)?);
        }
        hear(&format!("under {inject}, to its end"));
        stage.once_beside_requests(inject)?;
    }
    let short = alone.as_ref().is_none_or(|alone| alone.wall < TOO_SHORT);
    let pairs = if short || order.inject == GUARD { Vec::new() } else { stage.pairs(hear)? };
    Ok(Measured { alone, cases, pairs, compared: stage.compared })
}

impl<'a> Stage<'a> {
    fn new(order: &'a Order<'a>, folder: &'a Path) -> Self {
        let Order { lanes, words, options, .. } = *order;
        let keeps_output = order.rounds > 0;
        let starts = Starts { lanes, words, options, folder, keeps_output };
        Self { order, starts, alone: None, patience: A_DAY, compared: Vec::new() }
    }

    /// The baseline first.
    fn injects(&self) -> Vec<&'a str> {
        let chosen = (self.order.inject != GUARD).then_some(self.order.inject);
        [GUARD].into_iter().chain(chosen).collect()
    }

    fn alone(&mut self) -> Result<Option<Alone>, Error> {
        if self.order.rounds == 0 {
            return Ok(None);
        }
        let (first, first_wall) = whole(&mut self.starts.alone("alone")?, A_DAY)?;
        let (second, second_wall) = whole(&mut self.starts.alone("again")?, A_DAY)?;
        let [Some(first), Some(second)] = [first, second] else { return Ok(None) };
        let unlike = first.unlike(&second).map_err(io_error("comparing outputs"))?;
        let status = first.status;
        // Beside turns of any length it has a third of its lane at least.
        self.patience = first_wall.max(second_wall) * 10 + Duration::from_secs(30);
        self.alone = unlike.is_none().then_some(first);
        Ok(Some(Alone { wall: first_wall.min(second_wall), status, unlike }))
    }

    fn case(&mut self, inject: &str, turn: Duration) -> Result<Case, Error> {
        let (request_cpu, batch_cpu) = self.order.lanes;
        let limit = Duration::from_secs(3 * self.order.seconds + 5) + self.order.learn;
        let trace = Buffer::start(&[request_cpu, batch_cpu], KB_A_SECOND * limit.as_secs())?;
        let player = Player::start(request_cpu, turn).map_err(io_error("starting requests"))?;
        let request = player.thread;
        let (fronts, reports) = self.beside(player, inject, limit)?;
        let learn_ns = nanos(self.order.learn);
        let runs = fronts.len();
        let cast = Cast { request_cpu, batch_cpu, request, fronts, learn_ns };
        let seen = seen(&trace.read()?, &cast);
        if !seen.any_request {
            return Err(buffer::Error::Strangers.into());
        }
        let Some(last) = reports.last() else { return Err(unreported(inject).into()) };
        let used = last.inject.clone();
        let reported = reports.iter().map(|report| report.figures.overlapped_ns);
        let reported_ns = reported.sum();
        Ok(Case { inject: inject.to_owned(), turn, seen, used, reported_ns, runs })
    }

    /// Runs the program again and again while requests are played, until they have been counted
    /// for long enough or `limit` is over.
    fn beside(
        &mut self,
        player: Player,
        inject: &str,
        limit: Duration,
    ) -> Result<(Vec<i32>, Vec<Report>), Error> {
        let begin = Instant::now();
        let wanted = Duration::from_secs(self.order.seconds);
        let (mut fronts, mut reports, mut counted) = (Vec::new(), Vec::new(), Duration::ZERO);
        let mut player = Some(player);
        while player.is_some() {
            let start = Instant::now();
            let mut running = self.starts.under(inject)?;
            fronts.push(running.id());
            let is_enough = |counted: Duration| {
                let counts = start.elapsed().saturating_sub(self.order.learn + TO_START);
                counted + counts >= wanted || begin.elapsed() >= limit
            };
            let ended = running.wait_until(|| is_enough(counted))?;
            if is_enough(counted) {
                // Before the batch is told to end: that takes the lane, whoever is on the other.
                player = None;
            }
            counted += start.elapsed().saturating_sub(self.order.learn + TO_START);
            match ended {
                Some(status) => {
                    reports.extend(running.report()?);
                    self.compare(inject, running.ended(status))?;
                }
                None => {
                    running.stop();
                    reports.extend(running.report()?);
                }
            }
        }
        Ok((fronts, reports))
    }

    /// A program that came to no end while turns were counted is held against itself alone all
    /// the same.
    fn once_beside_requests(&mut self, inject: &str) -> Result<(), Error> {
        let ran = self.compared.iter().any(|compared| compared.inject == inject);
        let (Some(_), false, Some(&turn)) = (&self.alone, ran, self.order.turns.first()) else {
            return Ok(());
        };
        let request = self.order.lanes.0;
        let player = Player::start(request, turn).map_err(io_error("starting requests"))?;
        self.whole_under(inject)?;
        drop(player);
        Ok(())
    }

    fn whole_under(&mut self, inject: &str) -> Result<Whole, Error> {
        let mut running = self.starts.under(inject)?;
        let (ended, _) = whole(&mut running, self.patience)?;
        let report = running.report()?;
        self.compare(inject, ended)?;
        let whole = |Report { wall_ns, figures, .. }: Report| {
            // Whoever else comes by on the request lane is no cost of what was chosen.
            let wall_ns = wall_ns.saturating_sub(figures.napped_ns);
            Whole { wall_ns, ran_ns: figures.ran_ns() }
        };
        Ok(report.map(whole).unwrap_or_default())
    }

    /// By turns, and each of the two first as often as second.
    fn pairs(&mut self, hear: &mut dyn FnMut(&str)) -> Result<Vec<Pair>, Error> {
        let (rounds, chosen) = (self.order.rounds, self.order.inject);
        let mut pairs = Vec::new();
        for round in 0..rounds {
            hear(&format!("whole runs on an idle lane, pair {} of {rounds}", round + 1));
            let pair = if round % 2 == 0 {
                let guard = self.whole_under(GUARD)?;
                Pair { chosen: self.whole_under(chosen)?, guard }
            } else {
                let chosen = self.whole_under(chosen)?;
                Pair { chosen, guard: self.whole_under(GUARD)? }
            };
            pairs.push(pair);
        }
        Ok(pairs)
    }

    fn compare(&mut self, inject: &str, ended: Option<Ended>) -> Result<(), Error> {
        let (Some(alone), Some(ended)) = (&self.alone, ended) else { return Ok(()) };
        let unlike = alone.unlike(&ended).map_err(io_error("comparing outputs"))?;
        let at = self.compared.iter().position(|compared| compared.inject == inject);
        let at = at.unwrap_or_else(|| {
            let inject = inject.to_owned();
            let none = Compared { inject, runs: 0, different: 0, first_difference: None };
            self.compared.push(none);
            self.compared.len() - 1
        });
        let compared = &mut self.compared[at];
        compared.runs += 1;
        compared.different += usize::from(unlike.is_some());
        compared.first_difference = compared.first_difference.take().or(unlike);
        Ok(())
    }
}

/// Alone, nobody but the user knows how long a program takes.
const A_DAY: Duration = Duration::from_secs(24 * 60 * 60);
/// What `elfen run` takes to attach, about.
const TO_START: Duration = Duration::from_millis(300);
/// Of the trace, on a lane where everything happens every 50 us.
const KB_A_SECOND: u64 = 2048;

fn unreported(inject: &str) -> LiveError {
    LiveError::Refused {
        why: format!("no run under {inject} came as far as its report"),
        fix: "give more --seconds; see whether the machine is busy with other things",
    }
}

/// Waits for its end, but not for ever: others may hold the lanes.
fn whole(
    running: &mut Running,
    patience: Duration,
) -> Result<(Option<Ended>, Duration), LiveError> {
    let begin = Instant::now();
    let status = running.wait_until(|| begin.elapsed() > patience)?;
    let status = status.ok_or_else(|| LiveError::Refused {
        why: format!("the program did not end within {} s", patience.as_secs()),
        fix: "see whether others use these lanes; give --rounds 0 for a program that does not end",
    })?;
    Ok((running.ended(status), begin.elapsed()))
}
