//! Options of `record` and `watch` that select the service and the detail.

use std::sync::atomic::Ordering::Relaxed;

use crate::trace::Header;
use elfen_console::failure::{Failure, Status, to_stderr};
use elfen_kernel::events::Detail;
use elfen_machine::lane_args::{LaneArgs, topology};
use elfen_machine::source::Source;
use elfen_run::batches;

use super::failure;
use crate::duty::{Duty, DutyCycle};
use crate::marks::MarkedService;
use crate::recorder::Recorder;
use crate::service::{Service, ServiceSelector};

#[derive(clap::Args, Debug)]
pub(super) struct Target {
    /// The port that the service listens on
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    port: Option<u16>,

    /// A process of the service, which may be in a container
    #[arg(short, long, value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    pid: Option<u32>,

    /// The name under which the service publishes its requests; it then reports them itself
    #[arg(long, value_name = "NAME", conflicts_with_all = ["port", "pid"])]
    service: Option<String>,

    #[command(flatten)]
    lanes: LaneArgs,

    /// `sched`: switches, wake-ups, sockets, and which code runs; `full`: also interrupts, page
    /// faults and kernel waits
    #[arg(long, value_enum, default_value = "sched")]
    detail: Level,

    /// Record only this part of the time, in periods of 4 s; the rest of the time costs nothing
    #[arg(long, value_name = "PERCENT", value_parser = duty)]
    duty: Option<Duty>,

    /// Size of the ring of each CPU in events of 32 bytes; rounded up to a power of two
    #[arg(long, value_name = "EVENTS", default_value = "16384",
        value_parser = clap::value_parser!(u32).range(16..=4_194_304))]
    ring: u32,
}

/// Parses a percentage, as in `10%`. The minimum of 2 % of a period is four polls of the rings.
fn duty(text: &str) -> Result<Duty, String> {
    let percent = text.strip_suffix('%').unwrap_or(text).parse::<u32>().ok();
    let percent = percent.filter(|percent| (2..=99).contains(percent));
    percent.map(Duty::percent).ok_or_else(|| "it must be 2% to 99%".to_owned())
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum Level {
    Sched,
    Full,
}

/// Names the service in messages.
pub(super) fn describe(head: &Header) -> String {
    match head.port {
        0 => format!("{}, by its marks", head.service),
        port => format!("{}, port {port}", head.service),
    }
}

impl Target {
    pub(super) fn detail(&self) -> Detail {
        match self.detail {
            Level::Sched => Detail::Sched,
            Level::Full => Detail::Full,
        }
    }

    /// The CPUs of each shared core: from `--lanes`, or from the machine and its running batches.
    fn cores(&self) -> Result<Vec<Vec<u32>>, Failure> {
        if self.lanes.by_hand() {
            let pairs = self.lanes.pairs()?;
            return Ok(pairs.iter().map(|pair| pair.lanes().collect()).collect());
        }
        let topology = topology(&Source::live())?;
        let shared = topology.cores.iter().filter(|core| core.lanes.len() > 1);
        let mut cores: Vec<Vec<u32>> = shared.map(|core| core.lanes.iter().collect()).collect();
        // If the machine has no list of segments, it has no batches.
        for run in batches::runs().unwrap_or_default() {
            for slot in run.lanes.slots() {
                let lanes = [&slot.request_cpu, &slot.batch_cpu].map(|cpu| cpu.load(Relaxed));
                let lanes: Vec<u32> =
                    lanes.into_iter().filter_map(|cpu| cpu.try_into().ok()).collect();
                match cores.iter_mut().find(|core| lanes.iter().any(|cpu| core.contains(cpu))) {
                    Some(core) => core.extend(lanes),
                    None => cores.push(lanes),
                }
            }
        }
        for core in &mut cores {
            core.sort_unstable();
            core.dedup();
        }
        Ok(cores)
    }

    pub(super) fn attach(&self) -> Result<Recorder, Failure> {
        let mut recorder = self.open()?;
        recorder.duty_cycle = self.duty.map(DutyCycle::new);
        if !recorder.lacks().is_empty() {
            let lacks = recorder.lacks().join(", ");
            to_stderr(&format!("not recorded, because the kernel lacks tracepoints: {lacks}"));
        }
        Ok(recorder)
    }

    fn open(&self) -> Result<Recorder, Failure> {
        let ring = self.ring.next_power_of_two();
        // Resolves the lanes first, so that invalid lanes fail before anything is attached.
        let cores = self.cores()?;
        if let Some(name) = &self.service {
            let marked =
                MarkedService::find(name).map_err(|missing| failure::not_found(&missing))?;
            let (recorder, refused) = Recorder::of_marks(marked, cores, self.detail(), ring);
            if let Some(error) = refused {
                to_stderr(&format!(
                    "no kernel events ({error}): only queue and service times are recorded"
                ));
            }
            return Ok(recorder);
        }
        let selector = match (self.port, self.pid) {
            (port, Some(pid)) => ServiceSelector::Process(pid, port),
            (Some(port), None) => ServiceSelector::Port(port),
            (None, None) => {
                let (why, fix) =
                    ("no service is named", "name one with --port, --pid or --service");
                return Err(Failure::new(Status::Usage, "arguments", why, fix));
            }
        };
        let mut service =
            Service::find(selector).map_err(|missing| failure::not_found(&missing))?;
        service.cores = cores;
        Recorder::attach(service, self.detail(), ring).map_err(|error| failure::no_events(&error))
    }
}
