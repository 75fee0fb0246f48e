//! Tests of elfend's accounts: the time that a fence has borrowed and overlapped.

use std::fs;
use std::io::{BufRead, BufReader};
use std::ops::RangeInclusive;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use elfen_machine::fence::status::LaneAccount;

use super::SPIN;
use super::stage::{ELFEN, Fenced, KilledOnDrop, NOBODY, comm, kill, ran_ns, wait_until};

/// How late a run time may be: the kernel updates it at each tick, at least every 10 ms.
const LATE_NS: u64 = 20_000_000;

pub(crate) fn spin_on_cpu(cpu: &str) -> KilledOnDrop {
    let mut command = Command::new("taskset");
    command.args(["-c", cpu, "sh", "-c", SPIN]).stdin(Stdio::null());
    let spinner = KilledOnDrop(command.spawn().unwrap());
    let spins = || comm(spinner.id()) == "sh" && ran_ns(spinner.id()) > 20_000_000;
    wait_until("its start", spins);
    spinner
}

/// A run with guards of its own. Its program ends when this value drops, which closes its input.
struct Run(Child);

impl Run {
    /// Starts a run. Also returns the lines that the run prints before its program runs.
    fn start(fenced: &Fenced) -> (Self, String) {
        let words = [ELFEN, "run", "--lanes", "0:1", "--source", "tasks", "--checks", "guard"];
        let mut command = fenced.command(&words);
        command.args(["--user", "root", "--", "sh", "-c", "echo begun >&2; exec cat"]);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut run = Self(command.spawn().unwrap());
        let lines = BufReader::new(run.0.stderr.take().unwrap()).lines();
        let printed = lines.map(Result::unwrap).take_while(|line| line != "begun");
        let printed = printed.collect::<Vec<_>>().join("\n");
        (run, printed)
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        self.0.wait().ok();
    }
}

fn account(fenced: &Fenced) -> Option<LaneAccount> {
    let accounts = fenced.fence().accounts;
    assert!(accounts.len() <= 1, "{accounts:?}");
    accounts.into_iter().next()
}

/// The time that the hypervisor has taken from lane 1. The scheduler does not count it as run time
/// of any thread, but the account of a fence does.
fn stolen_ns() -> u64 {
    let text = fs::read_to_string("/proc/stat").unwrap();
    let line = text.lines().find(|line| line.starts_with("cpu1 ")).unwrap();
    // In hundredths of a second, see proc(5).
    line.split_whitespace().nth(8).map_or(0, |ticks| ticks.parse::<u64>().unwrap()) * 10_000_000
}

/// Lets the batch run for 300 ms. Returns how much its borrowed and overlapped time grew, and the
/// bounds of its run time by the scheduler. Guards are stopped meanwhile, because other processes
/// keep the request lane busy. Each stop is shorter than elfend's limit.
fn measure_account(fenced: &Fenced, batch: u32) -> (u64, u64, RangeInclusive<u64>) {
    let keeper = fenced.status().guard_process.unwrap();
    let now = || (ran_ns(batch), account(fenced).unwrap(), ran_ns(batch));
    let stolen = stolen_ns();
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
    let added = |word: fn(&LaneAccount) -> u64| word(&after.1) - word(&before.1);
    let stolen = stolen_ns() - stolen;
    let ran = after.0 - before.2 - LATE_NS..=after.2 - before.0 + LATE_NS + stolen;
    (added(|account| account.borrowed_ns), added(|account| account.overlapped_ns), ran)
}

/// Goal: the account contains the fence's run time, and the part of it next to a busy request lane.
/// Other processes on the lane do not change the account, and it stays after the end of batch and
/// guards. Method: compare it with the scheduler's account of the batch. One program spins on the
/// request lane, and another on the batch lane outside of the fence.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn the_run_time_of_a_fence_is_counted() {
    let mut fenced = Fenced::start_by_tasks();
    let batch = fenced.batch(&[], NOBODY, SPIN);
    // The account begins at the first context switch after the daemon has requested it.
    let stranger = spin_on_cpu("1");
    let begun = |account: LaneAccount| account.borrowed_ns + account.overlapped_ns > 0;
    wait_until("an account", || account(&fenced).is_some_and(begun));
    assert!(account(&fenced).is_some_and(|account| (account.lane, account.request) == (1, 0)));
    let (borrowed, overlapped, ran) = measure_account(&fenced, batch.id());
    assert!(ran.contains(&(borrowed + overlapped)), "{borrowed} + {overlapped}: {ran:?}");
    drop(stranger);

    let spinner = spin_on_cpu("0");
    let (borrowed, overlapped, ran) = measure_account(&fenced, batch.id());
    println!(
        "next to a spinner: {overlapped} ns overlapped, {borrowed} ns borrowed, {ran:?} ns run"
    );
    assert!(ran.contains(&overlapped) && borrowed <= LATE_NS, "{borrowed} + {overlapped}: {ran:?}");
    drop(spinner);

    drop(batch);
    wait_until("an empty fence", || fenced.fence().processes == 0);
    let left = account(&fenced).unwrap();
    let status = fenced.status();
    let before = status.requests.iter().find(|request| request.lane == 0).unwrap().busy_ns;
    kill(status.guard_process.unwrap(), libc::SIGKILL);
    wait_until("a new guard process", || fenced.status().guard_processes_lost == 1);
    fenced.wait_until_running();
    assert_eq!(account(&fenced), Some(left.clone()));
    wait_until("a busy request lane", || {
        fenced.status().requests.iter().any(|request| request.busy_ns > before)
    });
    let metrics = fenced.prints(&[ELFEN, "metrics", "--once"]);
    let labels = "{fence=\"batch\",lane=\"1\",request_lane=\"0\"}";
    for name in ["borrowed", "overlapped"] {
        let line = format!("elfen_fence_{name}_seconds_total{labels} ");
        assert!(metrics.contains(&line), "{metrics}");
    }
    assert!(metrics.contains("elfen_request_lane_busy_seconds_total{request_lane=\"0\"} "));
    let text = fenced.prints(&[ELFEN, "status"]);
    assert!(text.contains("processes 0, borrowed ") && text.contains(", overlapped "), "{text}");

    // The next daemon starts at 0, because it did not observe the earlier run time.
    fenced.end_daemon();
    fenced.restart();
    wait_until("an account", || account(&fenced).is_some());
    let restarted = account(&fenced).unwrap();
    assert_eq!((restarted.borrowed_ns, restarted.overlapped_ns), (0, 0), "{left:?}");
}

/// Goal: a run or a fence warns that its time is not counted if all accounts of its lane are in
/// use. Method: a fence and enough runs to use all accounts, then one more fence and one more run.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_batch_without_an_account_is_warned() {
    const WARNING: &str = "CPU 1: the time of this batch is not counted there, as other batches \
                           use all 3 accounts";
    let mut fenced = Fenced::start_by_tasks();
    wait_until("an account", || account(&fenced).is_some());
    let runs = [0; 2].map(|_| Run::start(&fenced));
    assert!(
        runs.iter().all(|(_, printed)| !printed.contains(WARNING)),
        "{}, {}",
        runs[0].1,
        runs[1].1
    );
    let (last, printed) = Run::start(&fenced);
    assert!(printed.contains(WARNING), "{printed}");
    drop(last);
    assert!(!fenced.log().contains(WARNING), "{}", fenced.log());
    fenced.end_daemon();
    let (_last, printed) = Run::start(&fenced);
    assert!(!printed.contains(WARNING), "{printed}");
    fenced.restart();
    let warning = format!("fence \"batch\": {WARNING}");
    wait_until("the warning", || fenced.log().contains(&warning));
    assert_eq!(fenced.log().matches(WARNING).count(), 1, "{}", fenced.log());
    assert_eq!(account(&fenced), None);
}
