//! Whether gaps are all of the time in which the observer did not look: a thread that spins takes
//! half of its lane, and the kernel's account of the observer says how much that was.

use std::fs;
use std::hint::spin_loop;
use std::process::Child;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use elfen_machine::affinity;
use elfen_shim::clock;
use elfen_shim::recording::{Recording, State};
use elfen_shim::session::OBSERVER;
use serde::Serialize;

use super::stage::{Error, Lanes, percent};
use super::truth::{self, Run};

const PERIOD: &str = "1us";
/// Of the run, between its first and last looks at the kernel's account.
const BEFORE: Duration = Duration::from_millis(500);
const BETWEEN: Duration = Duration::from_millis(2_000);
const LOOKS: u32 = 400;

/// A run beside a competitor.
#[derive(Debug, Serialize)]
pub(crate) struct Competitor {
    /// Between two looks at the kernel's account.
    pub(crate) time_ns: u64,
    /// What the recording says that nobody looked, and what the kernel says.
    pub(crate) gap_ns: u64,
    pub(crate) not_run_ns: u64,
    pub(crate) gap_error_percent: f64,
    pub(crate) share_error_percent: f64,
}

pub(super) fn measure(lanes: Lanes) -> Result<Competitor, Error> {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let competitor = scope.spawn(|| -> Result<(), Error> {
            affinity::pin(lanes.from)?;
            while !stop.load(Relaxed) {
                spin_loop();
            }
            Ok(())
        });
        let found = beside(lanes);
        stop.store(true, Relaxed);
        competitor.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        found
    })
}

fn beside(lanes: Lanes) -> Result<Competitor, Error> {
    let run = Run::new()?;
    let mut child = run.start(lanes, PERIOD)?;
    let looked = accounts(&mut child);
    let output = child.wait_with_output()?;
    let (recording, stamps) = run.read(&output)?;
    let [first, last] = looked?;
    let clock = recording.head.clock;
    let gap = clock.ns(gaps(&recording, first.at, last.at));
    let time = clock.ns(last.at - first.at);
    let not_run = time.saturating_sub(last.ran_ns - first.ran_ns);
    let rows = truth::compare(&recording, &stamps, PERIOD)?;
    Ok(Competitor {
        time_ns: time,
        gap_ns: gap,
        not_run_ns: not_run,
        gap_error_percent: percent(gap.abs_diff(not_run), not_run),
        share_error_percent: rows.first().map_or(100.0, |row| row.share_error_percent),
    })
}

/// How long a thread has run by some time.
#[derive(Clone, Copy, Debug)]
struct Account {
    at: u64,
    ran_ns: u64,
}

/// Of the observer, twice.
fn accounts(elfen: &mut Child) -> Result<[Account; 2], Error> {
    let tasks = format!("/proc/{}/task", elfen.id());
    let gone = || Error::Truth("its observer did not run".to_owned());
    let observer = (0..LOOKS).find_map(|_| {
        thread::sleep(Duration::from_millis(5));
        let mut tasks = fs::read_dir(&tasks).ok()?.flatten().map(|task| task.path());
        tasks.find(|task| {
            fs::read_to_string(task.join("comm")).is_ok_and(|name| name.trim_end() == OBSERVER)
        })
    });
    let schedule = observer.ok_or_else(gone)?.join("schedstat");
    let account = || -> Result<Account, Error> {
        let before = clock::before();
        let text = fs::read_to_string(&schedule)?;
        let at = before + (clock::before() - before) / 2;
        let ran = text.split_whitespace().next().and_then(|ran| ran.parse().ok());
        Ok(Account { at, ran_ns: ran.ok_or_else(gone)? })
    };
    thread::sleep(BEFORE);
    let first = account()?;
    thread::sleep(BETWEEN);
    Ok([first, account()?])
}

/// Ticks of gaps between two times.
fn gaps(recording: &Recording, from: u64, to: u64) -> u64 {
    let gaps = recording.runs_with_ends(0).filter(|(run, _)| run.state == State::Gap);
    gaps.map(|(run, end)| end.min(to).saturating_sub(run.start_ticks.max(from))).sum()
}
