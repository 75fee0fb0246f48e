//! What a fence borrowed and overlapped, by elfend's own account.

use std::io::{BufRead, BufReader};
use std::ops::RangeInclusive;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use elfen_machine::fence::status::LaneAccount;

use super::SPIN;
use super::stage::{Fenced, NOBODY, comm, kill, ran_ns, require_fences, wait_until};

/// Run times are brought up to date every tick, which comes every 10 ms at the least.
const LATE_NS: u64 = 20_000_000;

/// Ends with the test, also with one that fails.
pub(crate) struct Spinner(Child);

/// A run with guards of its own; likewise.
struct Run(Child);

impl Spinner {
    pub(crate) fn on_cpu(cpu: &str) -> Self {
        let mut command = Command::new("taskset");
        command.args(["-c", cpu, "sh", "-c", SPIN]).stdin(Stdio::null());
        let spinner = Self(command.spawn().unwrap());
        let spins = || comm(spinner.0.id()) == "sh" && ran_ns(spinner.0.id()) > 20_000_000;
        wait_until("its start", spins);
        spinner
    }
}

impl Drop for Spinner {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

impl Run {
    /// With what it says before its program runs.
    fn start(fenced: &Fenced) -> (Self, String) {
        let words = ["run", "--lanes", "0:1", "--signal", "tasks", "--inject"];
        let mut command = fenced.command(env!("CARGO_BIN_EXE_elfen"), &words);
        command.args(["guard", "--user", "root", "--", "sh", "-c", "echo begun >&2; exec cat"]);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut run = Self(command.spawn().unwrap());
        let lines = BufReader::new(run.0.stderr.take().unwrap()).lines();
        let said = lines.map(Result::unwrap).take_while(|line| line != "begun");
        let said = said.collect::<Vec<_>>().join("\n");
        (run, said)
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        // Its program ends with its input.
        drop(self.0.stdin.take());
        self.0.wait().ok();
    }
}

fn account(fenced: &Fenced) -> Option<LaneAccount> {
    let accounts = fenced.fence().accounts;
    assert!(accounts.len() <= 1, "{accounts:?}");
    accounts.into_iter().next()
}

/// What came to the fence's account until the batch had run for 300 ms: borrowed, overlapped, and
/// at least and at most how much it ran, by the scheduler. Guards stand still meanwhile, for less
/// than would be noticed: what else runs on this machine keeps its request lane busy.
fn counted(fenced: &Fenced, batch: u32) -> (u64, u64, RangeInclusive<u64>) {
    let keeper = fenced.status().keeper.unwrap();
    let now = || (ran_ns(batch), account(fenced).unwrap(), ran_ns(batch));
    let before = now();
    let mut after = now();
    wait_until("some time of the batch", || {
        kill(keeper, libc::SIGSTOP);
        sleep(Duration::from_millis(500));
        kill(keeper, libc::SIGCONT);
        after = now();
        sleep(Duration::from_millis(100));
        after.0 - before.2 >= 300_000_000
    });
    let of = |word: fn(&LaneAccount) -> u64| word(&after.1) - word(&before.1);
    let ran = after.0 - before.2 - LATE_NS..=after.2 - before.0 + LATE_NS;
    (of(|one| one.borrowed_ns), of(|one| one.overlapped_ns), ran)
}

/// Goal: what a fence ran, and how much of that beside a busy request lane, is counted, whoever
/// else runs on its lane, and stays counted when its batch and its guards are gone. Method: the
/// scheduler's own account of the batch, with a hog on the request lane and a stranger on the
/// batch lane.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn what_a_fence_ran_is_counted() {
    require_fences();
    let mut fenced = Fenced::start_by_tasks();
    fenced.wait_until_it_runs();
    let mut batch = fenced.batch(&[], NOBODY, SPIN);
    // It begins with the first switch after the daemon has asked for it.
    let stranger = Spinner::on_cpu("1");
    let begun = |one: LaneAccount| one.borrowed_ns + one.overlapped_ns > 0;
    wait_until("an account", || account(&fenced).is_some_and(begun));
    assert!(account(&fenced).is_some_and(|one| (one.lane, one.request) == (1, 0)));
    let (borrowed, overlapped, ran) = counted(&fenced, batch.id());
    assert!(ran.contains(&(borrowed + overlapped)), "{borrowed} + {overlapped}: {ran:?}");
    drop(stranger);

    let hog = Spinner::on_cpu("0");
    let (alone, beside, ran) = counted(&fenced, batch.id());
    println!("beside a hog: {beside} ns overlapped and {alone} ns borrowed of {ran:?} ns");
    assert!(ran.contains(&beside) && alone <= LATE_NS, "{alone} + {beside}: {ran:?}");
    drop(hog);

    kill(batch.id(), libc::SIGKILL);
    batch.wait().unwrap();
    wait_until("an empty fence", || fenced.fence().processes == 0);
    let left = account(&fenced).unwrap();
    let status = fenced.status();
    let before = status.requests.iter().find(|request| request.lane == 0).unwrap().busy_ns;
    kill(status.keeper.unwrap(), libc::SIGKILL);
    wait_until("another keeper", || fenced.status().keepers_lost == 1);
    fenced.wait_until_it_runs();
    assert_eq!(account(&fenced), Some(left.clone()));
    wait_until("a busy request lane", || {
        fenced.status().requests.iter().any(|request| request.busy_ns > before)
    });
    let metrics = String::from_utf8(fenced.elfen(&["metrics", "--once"]).stdout).unwrap();
    let labels = "{fence=\"batch\",lane=\"1\",request_lane=\"0\"}";
    for name in ["borrowed", "overlapped"] {
        let line = format!("elfen_fence_{name}_seconds_total{labels} ");
        assert!(metrics.contains(&line), "{metrics}");
    }
    assert!(metrics.contains("elfen_request_lane_busy_seconds_total{request_lane=\"0\"} "));
    let text = String::from_utf8(fenced.elfen(&["status"]).stdout).unwrap();
    assert!(text.contains("processes 0, borrowed ") && text.contains(", overlapped "), "{text}");

    // The next daemon begins at 0: what was there it has not seen.
    fenced.end_daemon();
    fenced.restart();
    wait_until("an account", || account(&fenced).is_some());
    let anew = account(&fenced).unwrap();
    assert_eq!((anew.borrowed_ns, anew.overlapped_ns), (0, 0), "{left:?}");
}

/// Goal: who comes when all accounts of a lane are others' is told that nothing is counted. Method:
/// a fence and runs, as many as a lane has accounts for, and one more of either.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn who_is_not_counted_is_told() {
    const TOLD: &str = "CPU 1: what this batch runs there is not counted, as 3 others' there is";
    require_fences();
    let mut fenced = Fenced::start_by_tasks();
    fenced.wait_until_it_runs();
    wait_until("an account", || account(&fenced).is_some());
    let runs = [0; 2].map(|_| Run::start(&fenced));
    assert!(runs.iter().all(|(_, said)| !said.contains(TOLD)), "{}, {}", runs[0].1, runs[1].1);
    let (last, said) = Run::start(&fenced);
    assert!(said.contains(TOLD), "{said}");
    drop(last);
    assert!(!fenced.said().contains(TOLD), "{}", fenced.said());
    fenced.end_daemon();
    let (_last, said) = Run::start(&fenced);
    assert!(!said.contains(TOLD), "{said}");
    fenced.restart();
    let told = format!("fence \"batch\": {TOLD}");
    wait_until("saying so", || fenced.said().contains(&told));
    assert_eq!(fenced.said().matches(TOLD).count(), 1, "{}", fenced.said());
    assert_eq!(account(&fenced), None);
}
