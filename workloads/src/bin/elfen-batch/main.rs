//! The command `elfen-batch`: batch programs whose work can be counted and verified. They contain
//! checks: `elfen_rt::check!()` is in their inner loops.
//!
//! Results are verified where possible. For example, compressed text is unpacked and compared, and
//! a zeroed buffer is read again.

mod compress;
mod corunner;
mod micro;

use clap::{Parser, ValueEnum};
use compress::Compress;
use corunner::{Spin, Stall};
use elfen_console::command;
use elfen_console::failure::Failure;
use elfen_rt::check;
use micro::Micro;
use std::process::ExitCode;
use std::sync::Arc;
use workloads::batch::{self, EmulatedCore, Kind, Program, Repetition, Work, Wrong};
use workloads::beside::kernel::{self, OwnClaim, Requests};
use workloads::beside::{Lanes, Slowdown, Slowed};

/// Repeats one batch program and prints the amount of work that it did, with a checksum.
#[derive(Debug, Parser)]
#[command(
    name = "elfen-batch",
    version,
    after_help = "Example: elfen-batch compress --duration 5s\n\n\
                  All iterations with the same seed do the same work and have the same checksum. \
                  Ctrl-C and SIGTERM end the program after its iteration, with its report.\n\
                  Exit status: 0 done, 1 a result was wrong, 2 wrong arguments, 3 this machine \
                  can't emulate a core."
)]
struct BatchProgramArgs {
    program: Which,

    #[command(flatten)]
    repetition: Repetition,

    /// Emulate cores that lanes share: work next to a busy request lane takes this many times as
    /// long, 1 to 10, by the kernel's account
    #[arg(long, value_name = "FACTOR", requires = "beside")]
    beside_slowdown: Option<Slowdown>,

    /// The pairs of lanes that share an emulated core, as in 0:1 or 0:1,2:3
    #[arg(long, value_name = "LANES", requires = "beside_slowdown")]
    beside: Option<Lanes>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Which {
    /// Calls an empty function (thesis, section 5.4)
    Loop,
    /// Multiplies 5x5 matrices (section 5.4)
    Matrix,
    /// Zeros a 32 KB buffer (section 5.4)
    Flush,
    /// Non-temporal stores and fences: IPC 0.01 (section 5.2)
    Stall,
    /// An empty loop: IPC 1 (section 5.2)
    Spin,
    /// Compresses text, unpacks and compares it
    Compress,
}

impl Which {
    fn program(self, seed: u64) -> Box<dyn Program> {
        match self {
            Self::Loop => Box::new(Micro::new(Kind::Loop, seed)),
            Self::Matrix => Box::new(Micro::new(Kind::Matrix, seed)),
            Self::Flush => Box::new(Micro::new(Kind::Flush, seed)),
            Self::Stall => Box::new(Stall::new(seed)),
            Self::Spin => Box::new(Spin::new(seed)),
            Self::Compress => Box::new(Compress::new(seed)),
        }
    }
}

fn main() -> ExitCode {
    command::main::<BatchProgramArgs>(
        |_| Ok(()),
        |args, out| {
            let name = args.program.to_possible_value().expect("no variant is hidden");
            let mut program = program(&args)?;
            batch::run(name.get_name(), "rust", program.as_mut(), &args.repetition, out)
        },
    )
}

fn program(args: &BatchProgramArgs) -> Result<Box<dyn Program>, Failure> {
    let program = args.program.program(args.repetition.seed);
    match (args.beside_slowdown, &args.beside) {
        (Some(slowdown), Some(lanes)) => Ok(Box::new(Beside::new(program, slowdown, lanes)?)),
        _ => Ok(program),
    }
}

/// A batch program on an emulated core. Each iteration takes longer, according to how long it ran
/// next to requests.
///
/// The waiting loop is in this binary, and not in the library, because it contains checks. A
/// request lane that becomes busy then stops the waiting program as quickly as a working one.
struct Beside {
    program: Box<dyn Program>,
    core: Slowed<Requests>,
    claim: OwnClaim,
}

impl Beside {
    fn new(program: Box<dyn Program>, slowdown: Slowdown, lanes: &Lanes) -> Result<Self, Failure> {
        let kernel = Arc::new(kernel::open(lanes)?);
        let core = Slowed::new(slowdown, Requests::new(kernel.clone(), lanes.clone()));
        Ok(Self { program, core, claim: OwnClaim::new(kernel, lanes.clone()) })
    }
}

impl Program for Beside {
    fn work(&self) -> Work {
        self.program.work()
    }

    fn iterate(&mut self) -> Result<u64, Wrong> {
        self.claim.tend();
        self.core.pass();
        let checksum = self.program.iterate();
        self.core.worked();
        while self.core.wait() {
            check!();
            // Time in a nap does not pay.
            self.core.pass();
        }
        checksum
    }

    fn emulated_core(&self) -> Option<EmulatedCore> {
        Some(EmulatedCore::of(self.core.slowdown(), self.core.tally()))
    }
}
