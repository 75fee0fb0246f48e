//! `--lanes`, as every subcommand that needs lanes takes it.
//!
//! Flatten [`LaneArgs`], read a [`Topology`], call [`LaneArgs::resolve`], print its warnings with `cmd::warn`.

use crate::host::lanes::{self, LaneError, Lanes};
use crate::host::pair::Pair;
use crate::host::topology::Topology;

use super::failure::{Failure, Status};

const HELP: &str = "\
Pairs of lanes by hand, REQUEST:BATCH[,...]: `0:1,2:3`, or `0:1,2,3` on a 4-way core

REQUEST is one CPU, BATCH a list as taskset takes it: 1,3, 1-3, 1-7:2. A number with a colon begins a new pair; \
a colon after a range is its stride, so `0:1,2-6:2,8:9` is 0 with 1,2,4,6 and 8 with 9. \
Without this option, every core with several usable lanes is a pair.";

#[derive(clap::Args, Debug)]
pub(crate) struct LaneArgs {
    #[arg(long, value_name = "PAIRS", env = "ELFEN_LANES", help = HELP)]
    lanes: Option<String>,
}

impl LaneArgs {
    /// Whether the user chose the lanes.
    pub(crate) fn by_hand(&self) -> bool {
        self.lanes.is_some()
    }

    /// The pairs given by hand, or the machine's own; the list is empty only if the machine has none.
    pub(crate) fn resolve(&self, topology: &Topology) -> Result<Lanes, Failure> {
        let Some(list) = &self.lanes else {
            return Ok(Lanes { pairs: lanes::default_pairs(topology), warnings: Vec::new() });
        };
        lanes::by_hand(list, topology).map_err(|error| {
            let what = format!("lanes {list:?}");
            Failure::new(Status::Usage, what, &error, way_out(&error, topology))
        })
    }
}

/// What is possible on this machine.
fn way_out(error: &LaneError, topology: &Topology) -> String {
    let usable = topology.usable();
    let up = match error {
        LaneError::Offline { cpu } => {
            format!(
                "bring it up (as root: `echo 1 > /sys/devices/system/cpu/cpu{cpu}/online`), or "
            )
        }
        _ => String::new(),
    };
    match example(topology) {
        Some(pair) => format!("{up}use CPUs {usable}, as in --lanes {pair}"),
        None => {
            format!("{up}use a machine with more CPUs: a pair needs two, usable here: {usable}")
        }
    }
}

/// A pair that would be accepted: one of the machine's own, or its first two CPUs.
fn example(topology: &Topology) -> Option<Pair> {
    lanes::default_pairs(topology).into_iter().next().or_else(|| {
        let usable = topology.usable();
        let mut cpus = usable.iter();
        let (request, batch) = (cpus.next()?, cpus.next()?);
        Some(Pair { request, batch: [batch].into_iter().collect() })
    })
}
