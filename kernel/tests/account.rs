//! Goal: the kernel counts all descendants of a batch's claimant on its lane, and no other tasks.
//! Method: the real program. Shells spin on CPU 1, some of them descendants of the claimant and
//! some not. The account is compared with the kernel's own run time of each (schedstat). Needs the
//! same capabilities as `task_map`.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use elfen_kernel::task_map;
use elfen_rt::clock::monotonic_ns;
use elfen_rt::signal::account::Claim;
use elfen_rt::signal::task::TaskMap;

const REQUEST: u32 = 0;
const BATCH: u32 = 1;

/// Scripts: a shell that spins on the batch lane, and shells that start such a shell in the
/// background and wait.
const SPIN: &str = "while :; do :; done";
const SPIN_BELOW: &str = "taskset -c 1 sh -c 'while :; do :; done' & echo $!; wait";
const SPIN_TWO_BELOW: &str =
    "sh -c \"taskset -c 1 sh -c 'while :; do :; done' & echo \\$!; wait\"; wait";

struct Shell(Child);

impl Drop for Shell {
    fn drop(&mut self) {
        // SAFETY: `shell` made this group for the child, which is not reaped yet.
        unsafe { libc::kill(-self.0.id().cast_signed(), libc::SIGKILL) };
        self.0.wait().unwrap();
    }
}

fn shell(program: &str, arguments: &[&str]) -> Shell {
    use std::os::unix::process::CommandExt;
    let mut command = Command::new(program);
    command.args(arguments).stdout(Stdio::piped()).process_group(0);
    Shell(command.spawn().unwrap())
}

/// Reads the spinner's id, which is the shell's first line.
fn spinner_below(shell: &mut Shell) -> u32 {
    use std::io::{BufRead, BufReader};
    let mut line = String::new();
    BufReader::new(shell.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    line.trim().parse().unwrap()
}

/// How long the kernel has run a process with one thread.
fn run_time_ns(process: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{process}/schedstat")).unwrap();
    text.split(' ').next().unwrap().parse().unwrap()
}

#[track_caller]
fn open() -> TaskMap {
    assert!(std::thread::available_parallelism().unwrap().get() >= 2, "needs two CPUs");
    task_map::open().unwrap_or_else(|error| panic!("needs root and eBPF: {error}")).0
}

/// How much the account and the spinner's own run time grew until the spinner had run for 100 ms.
#[derive(Debug)]
struct Counted {
    ran_ns: u64,
    shared_ns: u64,
    own_ns: u64,
    busy_ns: u64,
    /// Time that the hypervisor stole from the lane meanwhile: the spinner did not run in it.
    stolen_ns: u64,
}

impl Counted {
    /// Whether all of the spinner's time is counted, and nothing else.
    fn is_of_the_spinner(&self) -> bool {
        let most_ns = self.own_ns + self.stolen_ns + 2 * TICK_NS;
        (self.own_ns.saturating_sub(2 * TICK_NS)..=most_ns).contains(&self.ran_ns)
    }
}

/// The time stolen from the batch lane so far. The kernel reports it in hundredths of a second.
fn stolen_ns() -> u64 {
    let all = std::fs::read_to_string("/proc/stat").unwrap();
    let lane = format!("cpu{BATCH} ");
    let lane = all.lines().find(|line| line.starts_with(&lane)).unwrap();
    lane.split_whitespace().nth(8).unwrap().parse::<u64>().unwrap() * 10_000_000
}

fn count(map: &TaskMap, claim: Claim, spinner: u32) -> Counted {
    let index = map.claim(BATCH, REQUEST, claim, |_| false).expect("three claims have room");
    let renew = || [REQUEST, BATCH].map(|cpu| map.renew(cpu));
    renew();
    // The first switch after the claim begins the account.
    std::thread::sleep(Duration::from_millis(50));
    let now = || {
        let request = map.slot(REQUEST).unwrap().snapshot().unwrap();
        let account = map.account(BATCH, index, claim.word());
        let now_ns = monotonic_ns();
        let busy_ns = request.busy_until_ns(now_ns);
        let (ran_ns, shared_ns) = account.map_or((0, 0), |account| {
            (account.ran_until_ns(now_ns), account.shared_until_ns(now_ns, busy_ns))
        });
        // The kernel updates a task's run time at its switches and ticks.
        let (own_ns, stolen_ns) = (run_time_ns(spinner), stolen_ns());
        Counted { ran_ns, shared_ns, own_ns, busy_ns, stolen_ns }
    };
    let (before, start) = (now(), Instant::now());
    let mut after = now();
    while after.own_ns - before.own_ns < 100_000_000 {
        assert!(start.elapsed() < Duration::from_secs(60), "the spinner does not run");
        std::thread::sleep(Duration::from_millis(10));
        renew();
        after = now();
    }
    map.disclaim(BATCH, claim);
    Counted {
        ran_ns: after.ran_ns - before.ran_ns,
        shared_ns: after.shared_ns - before.shared_ns,
        own_ns: after.own_ns - before.own_ns,
        busy_ns: after.busy_ns - before.busy_ns,
        stolen_ns: after.stolen_ns - before.stolen_ns,
    }
}

/// The longest interval between two ticks, at which run times are updated.
const TICK_NS: u64 = 10_000_000;

#[test]
#[ignore = "needs root and eBPF"]
fn only_the_batch_is_counted() {
    let map = open();
    for below in [SPIN_BELOW, SPIN_TWO_BELOW] {
        let mut supervisor = shell("sh", &["-c", below]);
        let spinner = spinner_below(&mut supervisor);
        let alone = count(&map, Claim::of_run(0, supervisor.0.id()), spinner);
        assert!(alone.is_of_the_spinner(), "{alone:?}");
        assert!(alone.shared_ns <= alone.busy_ns + TICK_NS);
        let _other = shell("taskset", &["-c", "1", "sh", "-c", SPIN]);
        let with_other = count(&map, Claim::of_run(0, supervisor.0.id()), spinner);
        assert!(with_other.is_of_the_spinner(), "another task is not counted: {with_other:?}");
    }
}

#[test]
#[ignore = "needs root and eBPF"]
fn time_next_to_a_busy_lane_is_shared() {
    let map = open();
    let _request = shell("taskset", &["-c", "0", "sh", "-c", SPIN]);
    let mut supervisor = shell("sh", &["-c", SPIN_BELOW]);
    let spinner = spinner_below(&mut supervisor);
    let counted = count(&map, Claim::of_run(0, supervisor.0.id()), spinner);
    assert!(counted.shared_ns <= counted.ran_ns);
    assert!(counted.ran_ns - counted.shared_ns <= TICK_NS, "the lane was busy all the time");
}

#[test]
#[ignore = "needs root and eBPF"]
fn the_claimant_is_not_part_of_its_batch() {
    let map = open();
    let spinner = shell("taskset", &["-c", "1", "sh", "-c", SPIN]);
    let id = spinner.0.id();
    let counted = count(&map, Claim::of_run(0, id), id);
    assert_eq!((counted.ran_ns, counted.shared_ns), (0, 0), "guards run on the lane, too");
    let counted = count(&map, Claim::of_program(id), id);
    assert!(counted.is_of_the_spinner(), "a program is its own batch: {counted:?}");
}
