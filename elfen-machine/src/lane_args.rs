//! The option `--lanes`, and its comparison with the machine, for every subcommand that needs
//! lanes.
//!
//! To use it: flatten [`LaneArgs`] into the arguments, read the machine with [`topology`], call
//! [`LaneArgs::resolve`], and print its warnings with `cmd::warn`.

use std::error::Error;
use std::path::Path;

use elfen_console::failure::{Failure, Status};
use elfen_console::output::warn;

use crate::lanes::{self, LaneError, Lanes};
use crate::pair::{Pair, PairError};
use crate::source::{Source, SourceError};
use crate::topology::{Topology, TopologyError};

const HELP: &str = "Pairs of lanes, as in 0:1,2:3 [default: each core with two usable lanes]";
const LONG_HELP: &str = "Pairs of lanes, REQUEST:BATCH[,...], as in 0:1,2:3, or 0:1,2,3 on a \
4-way core [default: each core with two usable lanes]

REQUEST is one CPU; BATCH is a list of CPUs as for taskset: 1,3 or 1-3 or 1-7:2. A colon after a \
single number begins a new pair; a colon after a range begins its stride: 0:1,2-6:2,8:9 is 0 with \
1,2,4,6 and 8 with 9.";

#[derive(clap::Args, Debug)]
pub struct LaneArgs {
    #[arg(long, value_name = "PAIRS", env = "ELFEN_LANES", help = HELP,
        long_help = LONG_HELP)]
    lanes: Option<String>,
}

impl LaneArgs {
    /// Whether the user chose the lanes.
    pub fn by_hand(&self) -> bool {
        self.lanes.is_some()
    }

    /// The pairs that the user gave, or else the machine's own pairs. Empty only if the user gave
    /// none and the machine has none.
    pub fn resolve(&self, topology: &Topology) -> Result<Lanes, Failure> {
        let Some(list) = &self.lanes else {
            return Ok(Lanes { pairs: lanes::default_pairs(topology), warnings: Vec::new() });
        };
        lanes::by_hand(list, topology).map_err(|error| {
            let what = format!("lanes {list:?}");
            Failure::new(Status::Usage, what, &error, way_out(&error, topology))
        })
    }
}

impl LaneArgs {
    /// The pairs for a run or a service, at least one. Prints warnings.
    pub fn pairs(&self) -> Result<Vec<Pair>, Failure> {
        let (topology, pairs) = self.resolve_here()?;
        if pairs.is_empty() {
            let why = "this machine shows no pair of lanes";
            let fix = lanes::remedy(&topology);
            return Err(Failure::new(Status::Unsupported, "lanes", why, fix));
        }
        Ok(pairs)
    }

    /// For benchmarks: the first pair of this machine, or its first two CPUs if it has no pair.
    pub fn first_pair(&self) -> Result<Pair, Failure> {
        let (topology, pairs) = self.resolve_here()?;
        if let Some(pair) = pairs.into_iter().next() {
            return Ok(pair);
        }
        if let Some(pair) = lanes::first_pair(&topology) {
            warn(&format!("this machine shows no pair of lanes: measuring on CPUs {pair}"));
            return Ok(pair);
        }
        let fix = "allow this process a second CPU";
        Err(Failure::new(Status::Unsupported, "measuring", "it requires two CPUs", fix))
    }

    /// This machine and the pairs on it. Prints warnings.
    fn resolve_here(&self) -> Result<(Topology, Vec<Pair>), Failure> {
        let topology = topology(&Source::live())?;
        let Lanes { pairs, warnings } = self.resolve(&topology)?;
        warnings.iter().for_each(|warning| warn(warning));
        Ok((topology, pairs))
    }
}

/// This machine, or the machine in a recording of `COMMAND --dump-machine`.
pub fn source(recording: Option<&Path>, command: &str) -> Result<Source, Failure> {
    match recording {
        None => Ok(Source::live()),
        Some(file) => {
            Source::open_recording(file).map_err(|error| not_a_recording(command, &error))
        }
    }
}

pub fn not_a_recording(command: &str, error: &dyn Error) -> Failure {
    let fix = format!("give a file that `{command} --dump-machine` wrote");
    Failure::new(Status::Usage, "reading a recorded machine", error, fix)
}

/// Reads the machine.
pub fn topology(source: &Source) -> Result<Topology, Failure> {
    Topology::read(source).map_err(|error| {
        let (status, fix) = match &error {
            TopologyError::NoSysfs => {
                (Status::Unsupported, "mount sysfs (as root: `mount -t sysfs sysfs /sys`)")
            }
            TopologyError::Source(SourceError::Unreadable { .. }) => {
                (Status::Failed, "make it readable for this user")
            }
            TopologyError::Source(_) => {
                (Status::Failed, "check the recording, or report what this file holds")
            }
        };
        Failure::new(status, "reading the topology", error, fix)
    })
}

/// What the user can do on this machine instead.
fn way_out(error: &LaneError, topology: &Topology) -> String {
    let usable = &topology.usable;
    let Some(pair) = lanes::first_pair(topology) else {
        return format!("a pair needs two CPUs, and this process may use only {usable}");
    };
    let possible = format!("use CPUs {usable}, as in --lanes {pair}");
    match error {
        LaneError::Pairs(PairError::Empty) => {
            format!("{possible}, or omit --lanes and ELFEN_LANES to use the machine's pairs")
        }
        LaneError::Offline { .. } if topology.smt_control.as_deref() == Some("off") => {
            format!("{possible}, or {}", lanes::SWITCH_SMT_ON)
        }
        LaneError::Offline { cpu } => {
            let online = format!("/sys/devices/system/cpu/cpu{cpu}/online");
            format!("{possible}, or bring it up (as root: `echo 1 > {online}`)")
        }
        _ => possible,
    }
}
