//! Whether gaps are all of the time in which the observer did not look: a thread that spins takes
//! half of its lane, and the kernel's account of the observer says how much that was.

use std::fs;
use std::hint::spin_loop;
use std::process::Child;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use elfen_shim::clock;
use elfen_shim::recording::{Recording, State};
use elfen_shim::session::OBSERVER;

use super::stage::Lanes;
use super::truth::{self, Run, untrue};
use crate::bench::{
    BenchError, Column, Report, Row, Table, joined, number, percent, pin, rounded, row, value_of,
};

const PERIOD: &str = "1us";
/// Of the run, between its first and last looks at the kernel's account.
const BEFORE: Duration = Duration::from_millis(500);
const BETWEEN: Duration = Duration::from_millis(2_000);
const LOOKS: u32 = 400;

const COLUMNS: &[Column] = &[
    number("time_ns", "next to a competitor", "ms", 1).scaled(1e-6),
    number("gap_ns", "gaps", "ms", 1).scaled(1e-6),
    number("not_run_ns", "by the kernel", "ms", 1).scaled(1e-6),
    number("gap_error_percent", "off", "%", 2).lower(),
    number("share_error_percent", "share off by", "%", 2).lower(),
];

pub(super) fn measure(lanes: Lanes) -> Result<Report, BenchError> {
    let stop = AtomicBool::new(false);
    let found = thread::scope(|scope| {
        let competitor = scope.spawn(|| -> Result<(), BenchError> {
            pin(lanes.from)?;
            while !stop.load(Relaxed) {
                spin_loop();
            }
            Ok(())
        });
        let found = next_to(lanes);
        stop.store(true, Relaxed);
        joined(competitor).and(found)
    });
    let table = Table { key: "competitor", columns: COLUMNS, rows: vec![found?] };
    Ok(Report { tables: vec![table], ..Report::default() })
}

fn next_to(lanes: Lanes) -> Result<Row, BenchError> {
    let run = Run::new()?;
    let mut child = run.start(lanes, PERIOD)?;
    let looked = accounts(&mut child);
    let output = child.wait_with_output()?;
    let (recording, stamps) = run.read(&output)?;
    let [first, last] = looked?;
    let clock = recording.head.clock;
    // Between two looks at the kernel's account: what the recording says that nobody looked, and
    // what the kernel says.
    let gap_ns = clock.ns(gaps(&recording, first.at, last.at));
    let time_ns = clock.ns(last.at - first.at);
    let not_run_ns = time_ns.saturating_sub(last.ran_ns - first.ran_ns);
    let rows = truth::compare(&recording, &stamps, PERIOD)?;
    Ok(row![
        "time_ns" => time_ns,
        "gap_ns" => gap_ns,
        "not_run_ns" => not_run_ns,
        "gap_error_percent" => rounded(percent(gap_ns.abs_diff(not_run_ns), not_run_ns)),
        "share_error_percent" => rows.first().map(|row| value_of(row, "share_error_percent")),
    ])
}

/// How long a thread has run by some time.
#[derive(Clone, Copy, Debug)]
struct Account {
    at: u64,
    ran_ns: u64,
}

/// Of the observer, twice.
fn accounts(elfen: &mut Child) -> Result<[Account; 2], BenchError> {
    let tasks = format!("/proc/{}/task", elfen.id());
    let gone = || untrue("its observer did not run");
    let observer = (0..LOOKS).find_map(|_| {
        thread::sleep(Duration::from_millis(5));
        let mut tasks = fs::read_dir(&tasks).ok()?.flatten().map(|task| task.path());
        tasks.find(|task| {
            fs::read_to_string(task.join("comm")).is_ok_and(|name| name.trim_end() == OBSERVER)
        })
    });
    let schedule = observer.ok_or_else(gone)?.join("schedstat");
    let account = || -> Result<Account, BenchError> {
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
    let gaps = recording.stretches(0).filter(|(run, _)| run.state == State::Gap);
    gaps.map(|(run, end)| end.min(to).saturating_sub(run.start_ticks.max(from))).sum()
}
