//! What recording costs a service under load, and how much CPU time the recorder itself takes.
//!
//! The cost is the service's CPU time for each request that it finished. The scheduler accounts for
//! the CPU time, and the service counts its requests. While the programs are attached, events are
//! read as `elfen tailor record` reads them.

use std::collections::BTreeSet;
use std::io;
use std::process::Command;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::{Duration, Instant};

use elfen_console::duration::number;
use elfen_console::failure::{Failure, Status};
use elfen_console::programs::find_program;
use elfen_kernel::events::{Detail, Events, Watched};
use elfen_machine::affinity;
use elfen_rt::process::Liveness;
use elfen_rt::signal::event::Words;
use elfen_rt::signal::service::{OpenError, ServiceReader, Writer};

use crate::bench::{
    BenchError, Column, Explain, Part, Progress, Table, cases, label, measure, metric,
    number as figure, rounded, row, with_baseline,
};
use crate::live::process::{Process, STOP_TIMEOUT};
use crate::live::scratch::Scratch;
use crate::live::usage;

/// The interval at which `elfen tailor` reads its rings.
const LOOK_EVERY: Duration = Duration::from_millis(20);
const RING: u32 = 16_384;

/// A service under load.
#[derive(Debug)]
pub(super) struct Served {
    counted: Counted,
    processes: Vec<u32>,
}

/// Where the number of finished requests comes from.
#[derive(Debug)]
enum Counted {
    /// The page on which the service publishes its requests.
    Page(ServiceReader),
    /// The statistics of the Redis on this port. A Redis publishes no requests, so its sockets are
    /// recorded.
    Redis(u16),
}

#[derive(Clone, Copy, Debug, Default)]
struct Window {
    cpu_ns: u64,
    requests: u64,
    events: u64,
}

const SERVED: &[Column] = &[
    label("detail", "detail"),
    metric("cpu_ns", "CPU of a request", "us", 1).scaled(1e-3).lower().show(&[Part::Median]),
    metric("more_percent", "added", "%", 2).percent_of("cpu_ns").lower(),
    metric("events_per_second", "events", "1/s", 0).show(&[Part::Median]),
    metric("requests_per_second", "requests", "1/s", 0).show(&[Part::Median]),
];

impl Served {
    pub(super) fn find(name: &str) -> Result<Self, BenchError> {
        let page = match ServiceReader::open(name) {
            Err(OpenError::Foreign(user)) => ServiceReader::open_of(name, Some(user)),
            opened => opened,
        };
        let page = page.map_err(|error| {
            let fix = "start the service first; `elfen top` lists services that publish";
            Failure::new(Status::Failed, "looking for the service", error, fix)
        })?;
        let writer = |lane| match page.writer(lane) {
            Writer::Process(of, Liveness::Alive) => Some(of.pid().unsigned_abs()),
            _ => None,
        };
        let processes: BTreeSet<u32> = (0..page.lanes()).filter_map(writer).collect();
        let processes = processes.into_iter().collect();
        Ok(Self { counted: Counted::Page(page), processes })
    }

    pub(super) fn redis(port: u16) -> Result<Self, BenchError> {
        let process = redis_number(port, "server", "process_id").map_err(|error| {
            let fix = "start Redis without a password first, and install redis-cli";
            Failure::new(Status::Failed, "looking for the service", error, fix)
        })?;
        let processes = u32::try_from(process).into_iter().collect();
        Ok(Self { counted: Counted::Redis(port), processes })
    }

    /// Measures the service without recording, with some detail and with all, for `duty` percent of
    /// each `time`.
    pub(super) fn measure(
        &self,
        time: Duration,
        duty: u32,
        runs: usize,
        progress: Progress<'_>,
    ) -> Result<Table, BenchError> {
        let details = [None, Some(Detail::Sched), Some(Detail::Full)];
        let cases = with_baseline(cases("detail", ["none", "sched", "full"]));
        measure(("served", SERVED), &cases, runs, progress, |case, _, values| {
            let window = self.window(details[case], time, duty)?;
            // A Redis counts the query for its statistics as a command.
            let most_of_ours = u64::from(matches!(self.counted, Counted::Redis(_)));
            if window.requests <= most_of_ours {
                return Err(BenchError::failed(
                    "the service finished no request",
                    "put the service under load",
                ));
            }
            let seconds = time.as_secs_f64();
            values.add("cpu_ns", number(window.cpu_ns) / number(window.requests));
            values.add("requests_per_second", number(window.requests) / seconds);
            if case > 0 {
                values.add("events_per_second", number(window.events) / seconds);
            }
            Ok(())
        })
    }

    fn so_far(&self) -> Result<Window, BenchError> {
        let requests = match &self.counted {
            Counted::Page(page) => {
                let slots = (0..page.lanes()).filter_map(|lane| page.slot(lane));
                // Relaxed: a count; no other data depends on it.
                slots.map(|slot| slot.finished_requests.load(Relaxed)).sum()
            }
            Counted::Redis(port) => redis_number(*port, "stats", "total_commands_processed")
                .explain("reading the number of commands from Redis", "try again")?,
        };
        let cpu_ns = self.processes.iter().map(|process| usage::process_cpu_ns(*process)).sum();
        Ok(Window { cpu_ns, requests, events: 0 })
    }

    /// Measures one window, and records for `duty` percent of it. If that is less than the whole
    /// window, attaching and detaching are part of the measurement.
    fn window(
        &self,
        detail: Option<Detail>,
        time: Duration,
        duty: u32,
    ) -> Result<Window, BenchError> {
        let watched = Watched {
            port: if let Counted::Redis(port) = self.counted { port } else { 0 },
            processes: self.processes.clone(),
            cpus: affinity::allowed()?.iter().collect(),
        };
        let attach = || detail.map(|detail| Events::attach(detail, RING, &watched)).transpose();
        let recorded = time * duty / 100;
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

/// Reads a number from a section of a Redis's `INFO`.
fn redis_number(port: u16, section: &str, name: &str) -> io::Result<u64> {
    let mut command = Command::new("redis-cli");
    let output = command.args(["-p", &port.to_string(), "INFO", section]).output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    number_in(&text, name).ok_or_else(|| {
        let message = String::from_utf8_lossy(&output.stderr);
        let message = message.lines().chain(text.lines()).next().unwrap_or_default();
        io::Error::other(format!("invalid answer of Redis to INFO: {message:?}"))
    })
}

fn number_in(text: &str, name: &str) -> Option<u64> {
    let value = |line: &str| line.strip_prefix(name)?.strip_prefix(':')?.trim_end().parse().ok();
    text.lines().find_map(value)
}

/// How long the recorder's CPU time is measured.
const RECORDER_FOR: Duration = Duration::from_secs(10);
/// How long the recorder takes to load its programs into the kernel, and to find the processes.
const SETTLED: Duration = Duration::from_secs(1);

/// Measures the CPU time of a whole `elfen tailor record`, from reading its rings to writing its
/// file. `service` is the option that names the service.
pub(super) fn recorder(service: &[String]) -> Result<Table, BenchError> {
    let scratch = Scratch::new(1)?;
    let all = RECORDER_FOR + SETTLED * 2;
    let mut command = Command::new(find_program("elfen")?);
    command.args(["tailor", "record"]).args(service).arg("-d");
    command.arg(format!("{}ms", all.as_millis())).arg("-o").arg(scratch.path("trace"));
    let mut recorder = Process::start_anywhere("elfen tailor record", command, &scratch)?;
    recorder.wait_for(STOP_TIMEOUT * 2, |recorder| {
        recorder.stderr_text().contains("elfen: recording ").then_some(())
    })?;
    thread::sleep(SETTLED);
    let id = recorder.id();
    let (spent_ns, began) = (usage::process_cpu_ns(id), Instant::now());
    thread::sleep(RECORDER_FOR);
    let spent_ns = usage::process_cpu_ns(id).saturating_sub(spent_ns);
    let took = began.elapsed();
    let text = recorder.finish(None, STOP_TIMEOUT * 6)?;
    let (events, lost) = counts(&text).ok_or_else(|| {
        BenchError::failed(format!("elfen tailor record printed {text:?}"), "try again")
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

/// Parses `1234 events in FILE, 5 lost; ..`.
fn counts(text: &str) -> Option<(u64, u64)> {
    let (events, rest) = text.split_once(" events in ")?;
    let (_, lost) = rest.rsplit_once(" lost; ")?.0.rsplit_once(", ")?;
    Some((events.parse().ok()?, lost.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_printed_is_read() {
        let told = "104321 events in /tmp/a, b.trace, 7 lost; see `elfen tailor report /tmp/a`\n";
        assert_eq!(counts(told), Some((104_321, 7)));
        assert_eq!(counts("elfen: no"), None);
        let info = "# Stats\r\ntotal_commands_processed:9\r\nother:1\r\n";
        assert_eq!(number_in(info, "total_commands_processed"), Some(9));
        assert_eq!(number_in("NOAUTH Authentication required.\n", "other"), None);
    }
}
