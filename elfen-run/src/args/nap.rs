//! The option `--nap`, for `run` and the benchmarks.

use clap::ValueEnum;
use elfen_console::failure::{Failure, Status};
use elfen_kernel::sleep::Alarm;
use elfen_rt::nap::device::Device;
use elfen_rt::nap::{Nap, NapKind};

use super::signals;
use elfen_machine::affinity;
use elfen_machine::pair::Pair;

/// Whether the nanonap module serves this pair. The thread moves to the batch lane first, because
/// the module answers for the CPU of the calling thread.
fn is_tied(device: &Device, request: u32, batch: u32) -> bool {
    let ask = || affinity::pin(batch).is_ok() && device.ties(request);
    std::thread::scope(|scope| scope.spawn(ask).join().unwrap_or(false))
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum NapName {
    /// The first of these that this machine supports
    Auto,
    /// MWAIT in the kernel, by the nanonap module
    Device,
    /// UMWAIT, on Intel CPUs with WAITPKG
    Umwait,
    /// MWAITX, on AMD CPUs
    Mwaitx,
    /// Sleep in the kernel, for programs with checks; other threads may run on the lane meanwhile
    Block,
    /// PAUSE, which every CPU supports, but which frees the least of the core
    Spin,
}

impl NapName {
    pub fn of(kind: NapKind) -> Self {
        let is_it = |name: &&Self| name.kind() == Some(kind);
        Self::value_variants().iter().find(is_it).copied().unwrap_or(Self::Auto)
    }

    /// The value of the option; `None` for the default.
    pub fn name(self) -> Option<&'static str> {
        self.kind().map(NapKind::name)
    }

    fn kind(self) -> Option<NapKind> {
        match self {
            Self::Auto => None,
            Self::Device => Some(NapKind::Device),
            Self::Umwait => Some(NapKind::Umwait),
            Self::Mwaitx => Some(NapKind::Mwaitx),
            Self::Block => Some(NapKind::Block),
            Self::Spin => Some(NapKind::Spin),
        }
    }

    /// Opens the nap for these pairs. The nanonap module naps only on lanes that it has tied to
    /// their request lanes, so it is queried on each. If a lane is not tied, `auto` chooses another
    /// nap and `device` fails.
    pub fn open_for(self, pairs: &[Pair]) -> Result<(Nap, Option<Alarm>), Failure> {
        let (nap, alarm) = self.open()?;
        let Nap::Device(device) = &nap else { return Ok((nap, alarm)) };
        let mut lanes =
            pairs.iter().flat_map(|pair| pair.batch.iter().map(|batch| (pair.request, batch)));
        let untied = lanes.find(|&(request, batch)| !is_tied(device, request, batch));
        match (untied, self) {
            (None, _) => Ok((nap, alarm)),
            (Some(_), Self::Auto) => {
                let others = [NapKind::Umwait, NapKind::Mwaitx];
                let other = others.into_iter().find_map(|kind| Nap::open(kind).ok());
                Ok((other.unwrap_or(Nap::Spin), None))
            }
            (Some((request, batch)), _) => {
                let why = format!("the nanonap module has not tied lane {batch} to {request}");
                let fix = "load it with `pairs=` for these lanes, or use --nap auto";
                Err(Failure::new(Status::Unsupported, "nap device", why, fix))
            }
        }
    }

    pub fn open(self) -> Result<(Nap, Option<Alarm>), Failure> {
        match self.kind() {
            None => Ok((Nap::auto(), None)),
            Some(NapKind::Block) => {
                let alarm = Alarm::attach().map_err(|e| signals::failure("nap block", &e))?;
                Ok((Nap::Block, Some(alarm)))
            }
            Some(kind) => Nap::open(kind).map(|nap| (nap, None)).map_err(|missing| {
                let fix = "use --nap auto for the first that works; `elfen doctor` lists them all";
                Failure::new(Status::Unsupported, format!("nap {}", kind.name()), missing, fix)
            }),
        }
    }
}
