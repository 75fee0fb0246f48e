//! Goal: any process may be killed at any time. The others continue, the lane is guarded while the
//! batch lives, and nothing is left at the end. Method: rounds with a service, a launcher, two
//! supervisors and a batch. A seed chooses which process is killed and when. `KILLED_ROUNDS=200`
//! sets the number of rounds, and `ELFEN_SEED` repeats a round.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, SystemTime};

use elfen_machine::process::children;
use elfen_rt::service::Service;
use elfen_rt::signal::lane::LaneState;

use crate::needs;
use crate::process::{KilledOnDrop, wait_until};
use crate::stage::{Running, exists, kill, parent_of, wait_until_gone};

const ROUNDS: u64 = 10;
const SERVICE: &str = "ELFEN_TEST_SERVICE";

/// Runs before the test runner, so that a process that was started as a service runs no tests.
#[used]
#[unsafe(link_section = ".init_array")]
static SERVE_IF_ASKED: extern "C" fn() = serve_if_asked;

extern "C" fn serve_if_asked() {
    if let Ok(name) = std::env::var(SERVICE) {
        serve(&name);
    }
}

/// The process of the service: alternates requests and pauses, until its input ends or the test
/// kills it.
fn serve(name: &str) {
    let service = Service::open(name, 1).unwrap();
    std::thread::spawn(|| {
        let mut rest = Vec::new();
        std::io::stdin().read_to_end(&mut rest).ok();
        std::process::exit(0);
    });
    let mut worker = service.claim(0, 0).unwrap();
    println!("serving");
    for request in 1.. {
        worker.begin(request);
        std::thread::sleep(Duration::from_millis(3));
        worker.end();
        std::thread::sleep(Duration::from_millis(3));
    }
}

fn start_service(name: &str) -> KilledOnDrop {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.env(SERVICE, name).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut service = KilledOnDrop(command.spawn().unwrap());
    let mut line = String::new();
    BufReader::new(service.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "serving\n");
    service
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Victim {
    Service,
    Launcher,
    Supervisor,
    Spare,
    /// Two processes are killed at once, as by `killall -9 elfen`.
    LauncherAndSupervisor,
    SupervisorAndSpare,
    Batch,
}

/// The next random number of xorshift64*.
fn next_random(seed: &mut u64) -> u64 {
    *seed ^= *seed >> 12;
    *seed ^= *seed << 25;
    *seed ^= *seed >> 27;
    seed.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32
}

#[test]
fn whichever_process_is_killed_nothing_is_left() {
    needs::two_cpus();
    let number = |name| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let clock = SystemTime::UNIX_EPOCH.elapsed().unwrap().as_nanos();
    let random = u64::try_from(clock % u128::from(u64::MAX)).unwrap() | 1;
    let mut seed = number("ELFEN_SEED").unwrap_or(random);
    for round in 0..number("KILLED_ROUNDS").unwrap_or(ROUNDS) {
        println!("round {round}: ELFEN_SEED={seed}");
        play_round(&mut seed);
    }
}

fn play_round(seed: &mut u64) {
    let name = format!("killed-{}", std::process::id());
    let mut serving = start_service(&name);
    // The batch has a child, so that the guard has to stop several processes.
    let script = "(while :; do :; done) & while :; do :; done";
    let running = Running::start_next_to(&name, script);
    let (supervisor, launcher) = (running.supervisor(), running.launcher.id());
    let mut child = Vec::new();
    wait_until("a child", || {
        child = children(running.batch);
        !child.is_empty()
    });
    let pages = [1, 2].map(|field: usize| running.inheritance[field].parse::<i32>().unwrap());
    let spare = parent_of(supervisor);
    let victim = match next_random(seed) % 7 {
        0 => Victim::Service,
        1 => Victim::Launcher,
        2 => Victim::Supervisor,
        3 => Victim::Spare,
        4 => Victim::LauncherAndSupervisor,
        5 => Victim::SupervisorAndSpare,
        _ => Victim::Batch,
    };
    // In either order, and up to a few milliseconds apart.
    let both = |mut two: [u32; 2], seed: &mut u64| {
        two.rotate_left(usize::from(next_random(seed).is_multiple_of(2)));
        kill(two[0], libc::SIGKILL);
        std::thread::sleep(Duration::from_micros(next_random(seed) % 4 * 1_000));
        kill(two[1], libc::SIGKILL);
    };
    std::thread::sleep(Duration::from_micros(next_random(seed) % 40_000));
    println!("  {victim:?}");
    match victim {
        Victim::Service => serving.kill().unwrap(),
        Victim::Launcher => kill(launcher, libc::SIGKILL),
        Victim::Supervisor => kill(supervisor, libc::SIGKILL),
        Victim::Spare => kill(spare, libc::SIGKILL),
        Victim::LauncherAndSupervisor => both([launcher, supervisor], seed),
        Victim::SupervisorAndSpare => both([supervisor, spare], seed),
        Victim::Batch => kill(running.batch, libc::SIGKILL),
    }
    match victim {
        // A dead service does not keep the batch off its lane, even if it died during a request.
        Victim::Service => wait_until("borrowing", || running.is(LaneState::Running)),
        Victim::Batch => {}
        _ => {
            let naps = || running.lanes().slot(0).unwrap().naps.load(Relaxed);
            let before = naps();
            wait_until("naps for requests", || naps() > before + 3);
        }
    }
    if victim != Victim::Batch {
        assert!(exists(running.batch), "the batch continues");
        kill(running.batch, libc::SIGKILL);
    }
    child.iter().for_each(|&child| kill(child, libc::SIGKILL));
    let ended = running.end();
    assert_eq!(ended.signal(), Some(libc::SIGKILL), "{ended}");
    wait_until("the end of both", || !exists(supervisor) && !exists(spare));
    drop(serving);
    Service::open(&name, 1).unwrap().remove().unwrap();
    pages.into_iter().for_each(wait_until_gone);
}

/// Goal: if its supervisor is stopped, a batch runs unguarded for only a few seconds. Method:
/// SIGSTOP to the supervisor. The spare kills it, and guards the lane.
#[test]
fn a_stopped_supervisor_is_replaced() {
    needs::two_cpus();
    let name = format!("stopped-{}", std::process::id());
    let serving = start_service(&name);
    let running = Running::start_next_to(&name, "while :; do :; done");
    let supervisor = running.supervisor();
    let naps = || running.lanes().slot(0).unwrap().naps.load(Relaxed);
    wait_until("naps for requests", || naps() > 3);
    kill(supervisor, libc::SIGSTOP);
    wait_until("the end of the stopped supervisor", || !exists(supervisor));
    let before = naps();
    wait_until("naps for requests", || naps() > before + 3);
    assert!(exists(running.batch), "the batch continues");
    kill(running.batch, libc::SIGKILL);
    let ended = running.end();
    assert_eq!(ended.signal(), Some(libc::SIGKILL), "{ended}");
    drop(serving);
    Service::open(&name, 1).unwrap().remove().unwrap();
}
