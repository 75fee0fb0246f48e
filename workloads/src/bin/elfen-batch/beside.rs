//! A batch program on an emulated core: each iteration takes longer by what it ran beside requests.
//!
//! The waiting is in this binary and not in the library, because it has checks: a lane that turns
//! busy takes it back from a program that waits as from one that works.

use elfen_rt::check;
use std::rc::Rc;
use workloads::batch::{EmulatedCore, Program, Work, Wrong};
use workloads::beside::account::Requests;
use workloads::beside::kernel::{self, Kernel, Lacking, OwnClaim};
use workloads::beside::lanes::Lanes;
use workloads::beside::{Slowdown, Slowed};

pub(super) struct Beside {
    program: Box<dyn Program>,
    core: Slowed<Requests<Kernel>>,
    claim: OwnClaim,
}

impl Beside {
    pub(super) fn new(
        program: Box<dyn Program>,
        slowdown: Slowdown,
        lanes: &Lanes,
    ) -> Result<Self, Lacking> {
        let kernel = Rc::new(kernel::open(lanes)?);
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
            // A nap pays for nothing.
            self.core.pass();
        }
        checksum
    }

    fn emulated_core(&self) -> Option<EmulatedCore> {
        Some(EmulatedCore::of(self.core.slowdown(), self.core.tally()))
    }
}
