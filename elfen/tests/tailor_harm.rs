//! Goal: an injector leaves nothing behind that it changed, whatever ends it. Method: one that is
//! killed while it hurts.

mod served;

use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use served::{Ends, PATIENCE, tailor as elfen};

fn skipped(why: &str) {
    served::skipped("elfen tailor", why);
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "waited a minute for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Loopback's packets go where they went before.
#[test]
fn a_flood_that_is_killed() {
    const STEERING: &str = "/sys/class/net/lo/queues/rx-0/rps_cpus";
    let Ok(before) = fs::read_to_string(STEERING) else {
        return skipped("packets can't be steered here");
    };
    if fs::write(STEERING, before.trim()).is_err() {
        return skipped("it takes root");
    }
    let hurt = Ends(Command::new("sleep").arg("600").spawn().unwrap());
    let pid = hurt.0.id().to_string();
    let words = ["inject", "softirq", "--pid", &pid, "--cpu", "1", "--every", "1s"];
    let mut flood = elfen(&words);
    flood.args(["--last", "900ms"]).stderr(Stdio::null());
    let flood = Ends(flood.spawn().unwrap());
    let now = || fs::read_to_string(STEERING).unwrap();
    until("packets to be steered", || now() != before);
    // By SIGKILL.
    drop(flood);
    until("packets to go where they went before", || now() == before);
}
