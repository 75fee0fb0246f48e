//! The settings after parsing: lanes that are lent, and fences.

use std::fmt;
use std::net::SocketAddr;

use elfen_console::failure::Failure;
use elfen_rt::nap::Nap;
use elfen_rt::policy::slo::Slo;
use elfen_rt::signal::control::Settings as Policy;

use elfen_machine::cgroup::CgroupPath;
use elfen_machine::cpulist::CpuSet;
use elfen_machine::pair::Pair;
use elfen_run::args::nap::NapName;
use elfen_run::channels::SourceChoice;
use elfen_run::poll_timing::PollTiming;

#[derive(Clone, Debug)]
pub struct Settings {
    pub poll_timing: PollTiming,
    pub nap: NapName,
    pub source: SourceChoice,
    /// The address at which to serve what `elfen metrics` serves.
    pub metrics: Option<SocketAddr>,
    pub lent: Vec<Lent>,
    pub fences: Vec<Fence>,
}

/// Lanes with one policy: those of a service, or lanes without a service.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Lent {
    pub service: Option<String>,
    /// The user, besides root, whose page is trusted.
    pub user: Option<String>,
    pub pairs: Vec<Pair>,
    pub policy: Policy,
    pub slo: Option<Slo>,
    /// The cgroups of the service, if they are named.
    pub places: Vec<CgroupSelector>,
    /// Whether to confine these cgroups to the request lanes.
    pub confine: bool,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Fence {
    pub name: String,
    pub which: CgroupSelector,
    pub lanes: CpuSet,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CgroupSelector {
    Cgroup(CgroupPath),
    /// All child cgroups of a parent whose names match: the last name of the path is the pattern.
    Cgroups(CgroupPath),
    /// A systemd unit, or a pattern for several units.
    Unit(String),
}

impl fmt::Display for CgroupSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cgroup(path) | Self::Cgroups(path) => write!(f, "cgroup {path}"),
            Self::Unit(unit) => write!(f, "unit {unit}"),
        }
    }
}

impl Settings {
    /// Opens the nap for these lanes.
    pub fn open_nap(&self) -> Result<Nap, Failure> {
        let pairs: Vec<_> = self.lent.iter().flat_map(|lent| lent.pairs.clone()).collect();
        Ok(self.nap.open_for(&pairs)?.0)
    }

    /// All request lanes.
    pub fn requests(&self) -> CpuSet {
        self.lent.iter().flat_map(|lent| &lent.pairs).map(|pair| pair.request).collect()
    }
}
