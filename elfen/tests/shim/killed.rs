//! Goal: any process of a run may be killed at any time. The other processes end or continue as
//! they should, and no resources are left. Method: rounds with a command and a program. If the
//! program already runs, a page supervisor shares its pages. A seed determines which process is
//! killed and when. The observer is a thread of the command. `SHIM_KILLED_ROUNDS=200` sets the
//! number of rounds, and `ELFEN_SEED` repeats a round.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, SystemTime};

use elfen_shim::random::Random;

use crate::alone::command_with_its_library;
use crate::needs;
use crate::stage::{KilledOnDrop, build, is_shared, kill, status_line, tracer_of, until};

const ROUNDS: u64 = 24;

/// A program that counts forever, sets tags, and forks now and then. It ends when its output is
/// closed.
const COUNTS: &str = r#"
#include "elfen_tag.h"
#include <sys/wait.h>
volatile unsigned long hits;
int main(void)
{
	printf("%d %p\n", getpid(), (void *)&hits);
	fflush(stdout);
	for (unsigned round = 1;; round++) {
		elfen_u32 before = elfen_tag("counts");
		for (int i = 0; i < 1000000; i++)
			hits++;
		elfen_tag_back(before);
		pid_t child = round % 64 ? -1 : fork();
		if (child == 0)
			_exit(0);
		if (child > 0)
			waitpid(child, NULL, 0);
		if (write(1, ".\n", 2) != 2)
			return 1;
	}
}
"#;

/// The process that is killed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Victim {
    Command,
    Observed,
    Supervisor,
}

#[derive(Clone, Copy, Debug)]
struct Round {
    seed: u64,
    /// Whether the program already runs. Then its pages are shared.
    attached: bool,
    victim: Victim,
    after: Duration,
}

impl Round {
    fn of(seed: u64) -> Self {
        let mut random = Random::of(seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let mut draw = |count| random.below(count);
        draw(2);
        let attached = draw(2) == 1;
        let victims = [Victim::Command, Victim::Observed, Victim::Supervisor];
        let victim = victims[usize::try_from(draw(if attached { 3 } else { 2 })).unwrap()];
        Self { seed, attached, victim, after: Duration::from_micros(draw(120_000)) }
    }
}

#[test]
#[ignore = "needs root"]
fn whoever_is_killed_nothing_is_left() {
    needs::root();
    needs::two_cpus();
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let program = build(folder.path(), "counts", COUNTS, &[]);
    match number("ELFEN_SEED") {
        Some(seed) => play(Round::of(seed), &program),
        None => {
            let first = u64::try_from(now.as_millis()).unwrap();
            let rounds = number("SHIM_KILLED_ROUNDS").unwrap_or(ROUNDS);
            (first..first + rounds).for_each(|seed| play(Round::of(seed), &program));
        }
    }
}

fn play(round: Round, program: &Path) {
    eprintln!("{round:?}; ELFEN_SEED={} repeats it", round.seed);
    if round.attached { play_attached(round, program) } else { play_started(round, program) }
}

/// Reads the program's first line: its process, and the address of its counter.
fn first_line(child: &mut Child) -> (u32, String, BufReader<std::process::ChildStdout>) {
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    lines.read_line(&mut line).unwrap();
    let (process, hits) = line.trim().split_once(' ').expect("the program prints a line");
    (process.parse().unwrap(), hits.to_owned(), lines)
}

fn assert_continues(lines: &mut BufReader<std::process::ChildStdout>) {
    // The pipe may still hold some earlier lines.
    for _ in 0..3 {
        let mut line = String::new();
        assert!(lines.read_line(&mut line).unwrap() > 0, "the program continues");
    }
}

/// A round in which the command starts the program, with a page for its threads and a shared
/// global.
fn play_started(round: Round, program: &Path) {
    let mut command = command_with_its_library();
    command.args(["shim", "--period", "1us", "--watch", "hits", "--watch", "tag", "--"]);
    command.arg(program).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut shim = KilledOnDrop(command.spawn().unwrap());
    let (process, _, mut lines) = first_line(&mut shim.0);
    thread::sleep(round.after);
    match round.victim {
        Victim::Command => {
            kill(shim.0.id(), libc::SIGKILL);
            let status = shim.0.wait().unwrap();
            assert_eq!(status.signal(), Some(libc::SIGKILL));
            assert_continues(&mut lines);
            // Closing the output ends the program, because its next write fails.
            drop(lines);
        }
        Victim::Observed | Victim::Supervisor => {
            kill(process, libc::SIGKILL);
            let status = shim.0.wait().unwrap();
            assert_eq!(status.code(), Some(128 + libc::SIGKILL));
        }
    }
    until_gone(process);
    assert_no_segments(shim.0.id());
}

/// A round in which the program already runs, and a page supervisor shares its pages.
fn play_attached(round: Round, program: &Path) {
    let mut own = Command::new(program);
    let mut observed = KilledOnDrop(own.stdout(Stdio::piped()).spawn().unwrap());
    let (process, hits, mut lines) = first_line(&mut observed.0);
    let mut command = Command::new(env!("CARGO_BIN_EXE_elfen"));
    command.args(["shim", "--share", "--period", "1us", "-p", &process.to_string()]);
    command.args(["--watch", &format!("{hits}:u64")]).stdout(Stdio::null()).stderr(Stdio::null());
    // The command is in its own group, so that a signal to the test's group does not reach it.
    let mut shim = KilledOnDrop(command.process_group(0).spawn().unwrap());
    if round.victim == Victim::Supervisor {
        // If a supervisor is killed while a thread of the program makes calls for it, that thread
        // is left with wrong registers. This limit is documented, so the test waits until these
        // calls are over.
        until("shared pages", || tracer_of(process) != 0 && is_shared(process));
        thread::sleep(Duration::from_millis(20));
    }
    thread::sleep(round.after);
    let supervisor = tracer_of(process);
    match round.victim {
        Victim::Command => {
            kill(shim.0.id(), libc::SIGKILL);
            shim.0.wait().unwrap();
            until("private pages", || tracer_of(process) == 0 && !is_shared(process));
            assert_continues(&mut lines);
        }
        Victim::Supervisor if supervisor == 0 => {}
        Victim::Supervisor => {
            kill(supervisor, libc::SIGKILL);
            until("the end of tracing", || tracer_of(process) == 0);
            kill(shim.0.id(), libc::SIGINT);
            shim.0.wait().unwrap();
            assert_continues(&mut lines);
        }
        Victim::Observed => {
            kill(process, libc::SIGKILL);
            observed.0.wait().unwrap();
            shim.0.wait().unwrap();
        }
    }
    drop(shim.0.kill());
    shim.0.wait().unwrap();
    drop(observed.0.kill());
    observed.0.wait().unwrap();
    if supervisor != 0 {
        until_gone(supervisor);
    }
    assert_no_segments(shim.0.id());
}

/// Waits until a process has ended; its parent may still have to reap it.
fn until_gone(process: u32) {
    until("the end of the process", || {
        status_line(process, "State:").is_none_or(|state| state.starts_with('Z'))
    });
}

/// Waits until all segments of a command are removed. They exist until the last process unmaps
/// them.
fn assert_no_segments(command: u32) {
    until("the end of its segments", || {
        let segments = fs::read_to_string("/proc/sysvipc/shm").unwrap();
        let maker = |line: &str| line.split_whitespace().nth(4).map(str::to_owned);
        !segments.lines().filter_map(maker).any(|maker| maker == command.to_string())
    });
}
