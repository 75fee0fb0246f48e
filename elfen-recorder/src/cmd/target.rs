//! Which service to record, and in how much detail: what `record` and `watch` share.

use std::sync::atomic::Ordering::Relaxed;

use elfen_console::failure::{Failure, Status, to_stderr};
use elfen_host::args::lanes::{LaneArgs, topology};
use elfen_host::run::find;
use elfen_host::source::Source;
use elfen_kernel::events::Detail;
use elfen_tailor::trace::Header;

use super::failure;
use crate::duty::{Duty, Turns};
use crate::marks::Marked;
use crate::recorder::Recorder;
use crate::service::{Service, Which};

#[derive(clap::Args, Debug)]
pub(super) struct Target {
    /// The port that the service listens on
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    port: Option<u16>,

    /// A process of the service; in a container too
    #[arg(long, value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    pid: Option<u32>,

    /// The name under which it publishes its requests: then it says itself what is a request
    #[arg(long, value_name = "NAME", conflicts_with_all = ["port", "pid"])]
    service: Option<String>,

    #[command(flatten)]
    lanes: LaneArgs,

    /// Switches, wake-ups and sockets; `full` has interrupts as well
    #[arg(long, value_enum, default_value = "sched")]
    detail: Level,

    /// Record only so much of the time, in turns of 4 s: nobody pays for the rest of it
    #[arg(long, value_name = "PERCENT", value_parser = duty)]
    duty: Option<Duty>,

    /// Events of each CPU that wait to be read, 32 bytes each; rounded up to a power of two
    #[arg(long, value_name = "EVENTS", default_value = "16384",
        value_parser = clap::value_parser!(u32).range(16..=4_194_304))]
    ring: u32,
}

/// As in 10%: looks at the rings are a fiftieth of a second apart.
fn duty(text: &str) -> Result<Duty, String> {
    let percent = text.strip_suffix('%').unwrap_or(text).parse::<u32>().ok();
    let percent = percent.filter(|percent| (2..=99).contains(percent));
    percent.map(Duty::percent).ok_or_else(|| "it is 2% to 99%".to_owned())
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum Level {
    Sched,
    Full,
}

/// Whose requests are recorded.
pub(super) fn who(head: &Header) -> String {
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

    /// Lanes that share a core: those that are named, or the machine's, and those of batches that
    /// run beside requests.
    fn cores(&self) -> Result<Vec<Vec<u32>>, Failure> {
        if self.lanes.by_hand() {
            let pairs = self.lanes.pairs()?;
            return Ok(pairs.iter().map(|pair| pair.lanes().collect()).collect());
        }
        let topology = topology(&Source::live())?;
        let shared = topology.cores.iter().filter(|core| core.lanes.len() > 1);
        let mut cores: Vec<Vec<u32>> = shared.map(|core| core.lanes.iter().collect()).collect();
        // A machine that lists no segments has no batches.
        for run in find::runs().unwrap_or_default() {
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
        recorder.turns = self.duty.map(Turns::of);
        if !recorder.lacks().is_empty() {
            let lacks = recorder.lacks().join(", ");
            to_stderr(&format!("not recorded, as the kernel has no such tracepoints: {lacks}"));
        }
        Ok(recorder)
    }

    fn open(&self) -> Result<Recorder, Failure> {
        let ring = self.ring.next_power_of_two();
        // First, as they may be wrong.
        let cores = self.cores()?;
        if let Some(name) = &self.service {
            let marked = Marked::find(name).map_err(|missing| failure::not_found(&missing))?;
            let (recorder, refused) = Recorder::of_marks(marked, cores, self.detail(), ring);
            if let Some(error) = refused {
                to_stderr(&format!(
                    "the kernel shows nothing ({error}): there are queue and service times alone"
                ));
            }
            return Ok(recorder);
        }
        let which = match (self.port, self.pid) {
            (port, Some(pid)) => Which::Process(pid, port),
            (Some(port), None) => Which::Port(port),
            (None, None) => {
                let (why, fix) =
                    ("no service is named", "name one with --port, --pid or --service");
                return Err(Failure::new(Status::Usage, "arguments", why, fix));
            }
        };
        let mut service = Service::find(which).map_err(|missing| failure::not_found(&missing))?;
        service.cores = cores;
        Recorder::attach(service, self.detail(), ring).map_err(|error| failure::no_events(&error))
    }
}
