//! What recording costs a service that is under load: its CPU time for each request that it
//! finished, by the scheduler's account and its own count; and what the recorder itself takes.
//!
//! While programs are attached, events are taken as `elfen tailor record` takes them.

use std::fs;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use elfen_console::duration::number;
use elfen_console::failure::{Failure, Status};
use elfen_console::programs::find_program;
use elfen_kernel::events::{Detail, Events, Watched};
use elfen_machine::affinity;
use elfen_rt::signal::event::Words;

use super::counted::{Counted, Page, Redis};
use crate::bench::{
    BenchError, Column, Explain, Part, Row, Scenario, Table, Values, label, metric,
    number as figure, rounded, row,
};
use crate::live::scratch::Scratch;
use crate::live::usage;

/// As `elfen tailor` looks at its rings.
const LOOK_EVERY: Duration = Duration::from_millis(20);
const RING: u32 = 16_384;

/// A service that is under load.
#[derive(Debug)]
pub(super) struct Served {
    counted: Box<dyn Counted>,
    /// It has no marks, so its sockets are recorded; 0 if it has.
    port: u16,
    processes: Vec<u32>,
    /// Of each round and case.
    pub(super) time: Duration,
    /// For so much of that it is recorded.
    pub(super) duty_percent: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct Window {
    cpu_ns: u64,
    requests: u64,
    events: u64,
}

const DETAILS: [Option<Detail>; 3] = [None, Some(Detail::Sched), Some(Detail::Full)];

impl Scenario for Served {
    const COLUMNS: &'static [Column] = &[
        label("detail", "detail"),
        metric("cpu_ns", "CPU of a request", "us", 1).scaled(1e-3).lower().show(&[Part::Median]),
        metric("more_percent", "more", "%", 2).percent_of("cpu_ns").lower(),
        metric("events_per_second", "events", "1/s", 0).show(&[Part::Median]),
        metric("requests_per_second", "requests", "1/s", 0).show(&[Part::Median]),
    ];

    fn cases(&self) -> Vec<Row> {
        ["none", "sched", "full"].map(|detail| row!["detail" => detail]).to_vec()
    }

    fn baseline(&self, case: usize) -> Option<usize> {
        (case > 0).then_some(0)
    }

    fn run(&mut self, case: usize, _: usize, values: &mut Values) -> Result<(), BenchError> {
        let window = self.window(DETAILS[case])?;
        // A Redis counts that it is asked for its count.
        let most_of_ours = if self.port == 0 { 0 } else { 1 };
        if window.requests <= most_of_ours {
            return Err(BenchError::failed("it finished no request", "put it under load"));
        }
        let seconds = self.time.as_secs_f64();
        values.add("cpu_ns", number(window.cpu_ns) / number(window.requests));
        values.add("requests_per_second", number(window.requests) / seconds);
        if case > 0 {
            values.add("events_per_second", number(window.events) / seconds);
        }
        Ok(())
    }
}

impl Served {
    fn of(counted: Box<dyn Counted>, port: u16, processes: Vec<u32>) -> Self {
        Self { counted, port, processes, time: Duration::ZERO, duty_percent: 100 }
    }

    pub(super) fn find(name: &str) -> Result<Self, BenchError> {
        let found = Page::find(name).map_err(|error| {
            let fix = "start it first; `elfen top` lists those there are";
            Failure::new(Status::Failed, "looking for the service", error, fix)
        });
        let (page, processes) = found?;
        Ok(Self::of(Box::new(page), 0, processes))
    }

    pub(super) fn redis(port: u16) -> Result<Self, BenchError> {
        let found = Redis::find(port).map_err(|error| {
            let fix = "start it first, without a password";
            Failure::new(Status::Failed, "looking for the service", error, fix)
        });
        let (redis, process) = found?;
        Ok(Self::of(Box::new(redis), port, vec![process]))
    }

    fn so_far(&mut self) -> Result<Window, BenchError> {
        let count = self.counted.finished().explain("asking it for its count", "try again");
        Ok(Window {
            cpu_ns: self.processes.iter().map(|process| usage::process_cpu_ns(*process)).sum(),
            requests: count?,
            events: 0,
        })
    }

    /// Recorded for its part of the time. Only with a part is beginning and ending in it.
    fn window(&mut self, detail: Option<Detail>) -> Result<Window, BenchError> {
        let time = self.time;
        let watched = Watched {
            port: self.port,
            processes: self.processes.clone(),
            cpus: affinity::allowed()?.iter().collect(),
        };
        let attach = || detail.map(|detail| Events::attach(detail, RING, &watched)).transpose();
        let recorded = time * self.duty_percent / 100;
        let in_part = detail.is_some() && recorded < time;
        let mut events = if in_part { None } else { attach()? };
        let (before, began) = (self.so_far()?, Instant::now());
        if in_part {
            events = attach()?;
        }
        let (mut words, mut taken): (Vec<Words>, u64) = (Vec::new(), 0);
        while let Some(left) = time.checked_sub(began.elapsed()).filter(|left| !left.is_zero()) {
            thread::sleep(left.min(LOOK_EVERY));
            if let Some(events) = &mut events {
                for cpu in 0..events.cpus() {
                    words.clear();
                    events.read(cpu, &mut words);
                    taken += words.len() as u64;
                }
            }
            if in_part && began.elapsed() >= recorded {
                events = None;
            }
        }
        let after = self.so_far()?;
        Ok(Window {
            cpu_ns: after.cpu_ns.saturating_sub(before.cpu_ns),
            requests: after.requests.saturating_sub(before.requests),
            events: taken,
        })
    }
}

/// The recorder's CPU is measured for so long.
const RECORDER_FOR: Duration = Duration::from_secs(10);
/// It has read its programs into the kernel, and looked which processes there are.
const SETTLED: Duration = Duration::from_secs(1);

/// What `elfen tailor record` takes as a process, with all that it does, from looks at its rings to
/// writing its file. The first words name the service.
pub(super) fn recorder(service: &[String]) -> Result<Table, BenchError> {
    let scratch = Scratch::new(1)?;
    let all = RECORDER_FOR + SETTLED * 2;
    let mut command = Command::new(find_program("elfen")?);
    command.args(["tailor", "record"]).args(service).arg("-d");
    command.arg(format!("{}ms", all.as_millis())).arg("-o").arg(scratch.path("reader.trace"));
    let told = File::options().write(true).create_new(true).open(scratch.path("told"))?;
    command.stdin(Stdio::null()).stdout(told).stderr(Stdio::piped());
    let mut recorder = command.spawn()?;
    let said = recorder.stderr.take().ok_or_else(|| io::Error::from(io::ErrorKind::BrokenPipe))?;
    let mut lines = BufReader::new(said).lines();
    let mut before = Vec::new();
    loop {
        match lines.next().transpose()? {
            Some(line) if line.starts_with("elfen: recording ") => break,
            Some(line) => before.push(line),
            None => return Err(BenchError::failed(before.join("; "), "try again")),
        }
    }
    thread::sleep(SETTLED);
    let (spent_ns, began) = (usage::process_cpu_ns(recorder.id()), Instant::now());
    thread::sleep(RECORDER_FOR);
    let spent_ns = usage::process_cpu_ns(recorder.id()).saturating_sub(spent_ns);
    let took = began.elapsed();
    let status = recorder.wait()?;
    let text = fs::read_to_string(scratch.path("told"))?;
    let (events, lost) = counts(&text).filter(|_| status.success()).ok_or_else(|| {
        let why = format!("elfen tailor record ended with {status}: {text:?}");
        BenchError::failed(why, "try again")
    })?;
    let row = row![
        "events_per_second" => rounded(number(events) / all.as_secs_f64()),
        "lost" => lost,
        "cpu_percent" => rounded(number(spent_ns) / 1e7 / took.as_secs_f64()),
    ];
    Ok(Table { key: "recorder", columns: RECORDER, rows: vec![row] })
}

const RECORDER: &[Column] = &[
    figure("events_per_second", "the recorder: events", "1/s", 0),
    figure("lost", "lost", "", 0).lower(),
    figure("cpu_percent", "CPU", "%", 2).lower(),
];

/// `1234 events in FILE, 5 lost; ..`
fn counts(text: &str) -> Option<(u64, u64)> {
    let (events, rest) = text.split_once(" events in ")?;
    let (_, lost) = rest.rsplit_once(" lost; ")?.0.rsplit_once(", ")?;
    Some((events.parse().ok()?, lost.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recording_says_what_it_took() {
        let told = "104321 events in /tmp/a, b.trace, 7 lost; `elfen tailor report /tmp/a` tells\n";
        assert_eq!(counts(told), Some((104_321, 7)));
        assert_eq!(counts("elfen: no"), None);
    }
}
