//! What a batch gains by writing into the pages of its run.

use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::sync::atomic::Ordering::Relaxed;

use elfen_rt::memory::{Access, Memory};
use elfen_rt::process::Identity;
use elfen_rt::signal::control::ControlSlot;
use elfen_rt::signal::page::Page;

use crate::needs;
use crate::stage::{Running, Serving, kill, parent_of, wait_until};

/// Goal: a batch that writes another process into the page that it was handed has no signal sent
/// there. Method: the page names a process of the test's before the front passes on its first
/// signal, and keeper and spare are killed, too: then the front has to know it by itself.
#[test]
fn a_page_that_names_another_process_is_not_believed() {
    needs::two_cpus();
    for kills_keeper in [false, true] {
        let serving = Serving::start();
        let mut running = Running::start(&serving, "exec sleep 600");
        let mut decoy = Command::new("sleep").arg("600").spawn().unwrap();
        let id = running.inheritance[2].parse().unwrap();
        let control: Page<ControlSlot> =
            Page::open(Memory::attach_id(id, Access::Write).unwrap()).unwrap();
        let other = Identity::of(decoy.id().cast_signed()).unwrap();
        control.slot(0).unwrap().batch.store(other.word(), Relaxed);
        if kills_keeper {
            let keeper = running.keeper();
            let spare = parent_of(keeper);
            kill(keeper, libc::SIGKILL);
            wait_until("the spare takes over", || parent_of(running.batch) == spare);
            kill(spare, libc::SIGKILL);
            wait_until("the front does", || parent_of(running.batch) == running.front.id());
        }
        kill(running.front.id(), libc::SIGTERM);
        assert_eq!(running.front.wait().unwrap().signal(), Some(libc::SIGTERM));
        assert_eq!(decoy.try_wait().unwrap(), None, "it was none of the front's");
        decoy.kill().unwrap();
        decoy.wait().unwrap();
    }
}
