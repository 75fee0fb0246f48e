//! Goal: `elfen shim --share` does not disturb a running process. Its results stay correct, its
//! children have their own memory, and its sleeps are not interrupted. Its pages are private at the
//! end, however the command ends. Method: the real command on a program that checks itself, with
//! few threads and with many. Also on a Redis whose every reply is checked. `--nocapture` prints
//! how long the processes were stopped.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use serde_json::Value;

use crate::needs;
use crate::stage::{KilledOnDrop, build, has_observer, is_shared, json, kill, tracer_of, until};

/// A program that counts in a global until SIGTERM, and then prints its errors. It has threads that
/// sleep, and children that write the same global.
const CHECKS: &str = r#"
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
volatile unsigned long hits;
static volatile int ends, alarms;
static unsigned long mixed, interrupted, children;
static void stop(int signal) { ends = 1; }
static void ring(int signal) { alarms++; }
static void *sleeps(void *how)
{
	sigset_t none;
	sigfillset(&none);
	pthread_sigmask(SIG_BLOCK, &none, NULL);
	int epoll = epoll_create1(0);
	struct epoll_event event;
	struct timespec time = { 0, 20000000 };
	while (!ends) {
		int done = 0;
		switch ((long)how % 3) {
		case 0: done = nanosleep(&time, NULL); break;
		case 1: done = epoll_wait(epoll, &event, 1, 20); break;
		default: done = poll(NULL, 0, 20); break;
		}
		if (done < 0)
			__atomic_fetch_add(&interrupted, 1, __ATOMIC_RELAXED);
	}
	return NULL;
}
int main(int words, char **word)
{
	pthread_t threads[64];
	long sleepers = words > 1 ? atol(word[1]) : 3;
	signal(SIGTERM, stop);
	signal(SIGALRM, ring);
	for (long how = 0; how < sleepers; how++)
		pthread_create(&threads[how], NULL, sleeps, (void *)how);
	printf("%p %p\n", (void *)&hits, (void *)&threads);
	fflush(stdout);
	unsigned long count = 0;
	while (!ends) {
		for (int i = 0; i < 5000000; i++)
			if (hits++ != count++)
				mixed++;
		pid_t child = fork();
		if (child == 0) {
			hits = 7;
			for (int i = 0; i < 1000; i++)
				hits++;
			_exit(hits == 1007 ? 0 : 1);
		}
		int status = 1;
		while (waitpid(child, &status, 0) < 0 && errno == EINTR)
			;
		mixed += status != 0;
		children++;
		kill(getpid(), SIGALRM);
	}
	for (long how = 0; how < sleepers; how++)
		pthread_join(threads[how], NULL);
	printf("mixed %lu interrupted %lu children %lu alarms %d\n", mixed, interrupted, children,
	       alarms);
	return mixed != 0;
}
"#;

struct Checked {
    program: KilledOnDrop,
    output: BufReader<ChildStdout>,
    /// The address and type of the program's global.
    hits: String,
    /// The address and type of a word on the program's stack.
    stack: String,
}

fn start(folder: &Path, source: &str, sleepers: u32) -> Checked {
    let program = build(folder, "checks", source, &[]);
    let mut command = Command::new(&program);
    command.arg(sleepers.to_string());
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    let (hits, stack) = line.trim().split_once(' ').unwrap();
    let typed = |at: &str| format!("{at}:u64");
    Checked { program: KilledOnDrop(child), output, hits: typed(hits), stack: typed(stack) }
}

impl Checked {
    fn process(&self) -> u32 {
        self.program.0.id()
    }

    fn is_untouched(&self) -> bool {
        !is_shared(self.process()) && tracer_of(self.process()) == 0
    }

    /// Ends the program, and checks that it reports what it should.
    fn end(&mut self, expected: &str) -> String {
        kill(self.process(), libc::SIGTERM);
        let mut said = String::new();
        self.output.read_to_string(&mut said).unwrap();
        assert!(self.program.0.wait().unwrap().success() && said.contains(expected), "{said}");
        said
    }
}

fn shim(process: u32, words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_elfen"));
    command.args(["shim", "--json", "--share", "-p", &process.to_string()]).args(words);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Starts a command, and waits until it observes. By then its page supervisor no longer makes calls
/// with a thread of the program. Killing the supervisor during such a call would leave the thread
/// with wrong registers.
fn start_observing(process: u32, words: &[&str]) -> Child {
    let command = shim(process, words).spawn().unwrap();
    until("its observer", || has_observer(command.id()));
    command
}

#[test]
#[ignore = "needs root"]
fn a_program_that_checks_itself_finds_nothing_wrong() {
    needs::root();
    needs::two_cpus();
    let folder = tempfile::tempdir().unwrap();
    // A Redis has five threads.
    for sleepers in [3, 64] {
        assert_undisturbed(start(folder.path(), CHECKS, sleepers), sleepers + 1);
    }
}

fn assert_undisturbed(mut checked: Checked, threads: u32) {
    let process = checked.process();
    let (mut stopped, mut seen) = (Stops::default(), 0);
    for _ in 0..5 {
        let words = ["--watch", &checked.hits, "-d", "200ms", "--period", "1us"];
        let output = shim(process, &words).output().unwrap();
        let summary = json(&output);
        assert!(output.status.success(), "{output:?}");
        assert_eq!(summary["signals"][0]["source"], "shared", "{summary:#}");
        seen += summary["signals"][0]["new_values"].as_u64().unwrap();
        stopped.add(&summary);
        assert!(checked.is_untouched());
    }
    assert!(seen > 0, "no run observed that it counts");
    let refused = shim(process, &["--watch", &checked.stack, "-d", "1ms"]).output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(refused.status.code() == Some(2) && said.contains("stack"), "{said}");
    let said = checked.end("mixed 0 interrupted 0 ");
    assert!(!said.contains("children 0 "), "{said}");
    println!("{threads} threads: {stopped}");
}

/// How long a process was stopped in each run.
#[derive(Default)]
struct Stops {
    to_share_us: Vec<u64>,
    at_end_us: Vec<u64>,
}

impl Stops {
    fn add(&mut self, summary: &Value) {
        let of = |name| summary[name].as_u64().unwrap();
        let (all, at_end) = (of("stopped_ns"), of("stopped_at_end_ns"));
        assert!(0 < at_end && at_end < all, "it is stopped twice: {summary:#}");
        self.to_share_us.push((all - at_end) / 1000);
        self.at_end_us.push(at_end / 1000);
    }
}

impl std::fmt::Display for Stops {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let all = [("to share", &self.to_share_us), ("at the end", &self.at_end_us)];
        write!(to, "stopped {} times", self.at_end_us.len())?;
        all.into_iter().try_for_each(|(when, times)| {
            let mut times = times.clone();
            times.sort_unstable();
            let (median, most) = (times[times.len() / 2], times[times.len() - 1]);
            write!(to, ", {when} for {median} us, {most} at most")
        })
    }
}

/// Goal: a Redis under load replies correctly while pages of its globals are shared and made
/// private again, twenty times. Method: a client that checks each reply.
#[test]
#[ignore = "needs root and Redis"]
fn a_redis_under_load_answers_right() {
    needs::root();
    needs::two_cpus();
    needs::programs(&["redis-server"]);
    let folder = tempfile::tempdir().unwrap();
    let port = {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        free.local_addr().unwrap().port()
    };
    let mut redis = Command::new("redis-server");
    redis.args(["--port", &port.to_string(), "--save", "", "--dir"]).arg(folder.path());
    let mut redis = redis.stdout(Stdio::null()).spawn().unwrap();
    let mut client = loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(client) => break client,
            Err(_) => thread::sleep(Duration::from_millis(10)),
        }
    };
    client.set_nodelay(true).unwrap();
    let watched = globals_of(redis.id());
    let words: Vec<&str> = watched.iter().flat_map(|at| ["--watch", at.as_str()]).collect();
    let (stop, answers) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        let load = scope.spawn(|| {
            let mut answer = [0; 64];
            for count in 1_u64.. {
                if stop.load(Relaxed) {
                    return;
                }
                client.write_all(b"*2\r\n$4\r\nINCR\r\n$1\r\nn\r\n").unwrap();
                let expected = format!(":{count}\r\n");
                let answer = &mut answer[..expected.len()];
                client.read_exact(answer).unwrap();
                assert_eq!(answer, expected.as_bytes(), "a wrong answer");
                answers.fetch_add(1, Relaxed);
            }
        });
        let mut stopped = Stops::default();
        for _ in 0..20 {
            let mut command = shim(redis.id(), &["-d", "50ms", "--period", "1us"]);
            let output = command.args(&words).output().unwrap();
            let summary = json(&output);
            assert!(output.status.success(), "{output:?}");
            stopped.add(&summary);
            assert!(!is_shared(redis.id()) && tracer_of(redis.id()) == 0);
        }
        stop.store(true, Relaxed);
        load.join().unwrap();
        println!("a Redis: {stopped}; {} answers are right", answers.load(Relaxed));
    });
    assert!(answers.load(Relaxed) > 100);
    redis.kill().unwrap();
    redis.wait().unwrap();
}

/// Names a word in the middle of each of eight pages of the process's data.
fn globals_of(process: u32) -> Vec<String> {
    let maps = fs::read_to_string(format!("/proc/{process}/maps")).unwrap();
    let data = maps.lines().filter(|line| line.contains("rw-p") && line.contains("redis"));
    let pages = data.flat_map(|line| {
        let (from, to) = line.split_whitespace().next().unwrap().split_once('-').unwrap();
        let number = |text| u64::from_str_radix(text, 16).unwrap();
        (number(from)..number(to)).step_by(4096)
    });
    pages.take(8).map(|page| format!("{:#x}:u64", page + 2048)).collect()
}

/// A program that forks all the time. Parent and child write the same global and check what they
/// wrote. The program counts wrong values, and children that a signal ended.
const FORKS: &str = r#"
#include <signal.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>
volatile unsigned long hits;
static volatile int ends;
static void stop(int signal) { ends = 1; }
int main(void)
{
	unsigned long count = 0, wrong = 0, ended = 0;
	signal(SIGTERM, stop);
	printf("%p %p\n", (void *)&hits, (void *)&count);
	fflush(stdout);
	while (!ends || count < 1000) {
		hits = ++count;
		pid_t child = fork();
		if (child == 0) {
			if (hits != count)
				_exit(1);
			hits = 1000000000 + count;
			_exit(hits == 1000000000 + count ? 0 : 1);
		}
		int status;
		if (child < 0 || waitpid(child, &status, 0) != child)
			return 1;
		ended += WIFSIGNALED(status);
		wrong += (WIFEXITED(status) && WEXITSTATUS(status) != 0) || hits != count;
	}
	printf("count %lu wrong %lu ended %lu\n", count, wrong, ended);
	return wrong != 0;
}
"#;

/// Goal: a program that forks has no wrong byte when the supervisor of its shared pages is killed.
/// Method: a program that forks at least 1,000 times, while supervisors are killed at various
/// moments. The command then makes the pages private and ends. A child that is forked at that
/// moment may be killed by a signal, but never continues with wrong memory.
#[test]
#[ignore = "needs root"]
fn forks_stay_right_when_the_supervisor_is_killed() {
    needs::root();
    needs::two_cpus();
    let folder = tempfile::tempdir().unwrap();
    let mut checked = start(folder.path(), FORKS, 0);
    let process = checked.process();
    // In a container, root may not be allowed to lower this value.
    let lowers = "echo -1000 2>/dev/null >/proc/self/oom_score_adj";
    let may_spare = Command::new("sh").args(["-c", lowers]).status().unwrap().success();
    for round in 0..8 {
        let mut command = start_observing(process, &["--watch", &checked.hits]);
        thread::sleep(Duration::from_micros(round * 1_777));
        let supervisor = tracer_of(process);
        let spared = fs::read_to_string(format!("/proc/{supervisor}/oom_score_adj")).unwrap();
        assert_eq!(spared.trim() == "-1000", may_spare, "{spared}");
        kill(supervisor, libc::SIGKILL);
        let status = command.wait().unwrap();
        let mut said = String::new();
        command.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert!(status.code() == Some(1) && said.contains("supervisor"), "{status} {said}");
        assert!(checked.is_untouched(), "{said}");
    }
    println!("8 supervisors killed: {}", checked.end("wrong 0 ").trim());
}

/// Goal: if the command and its page supervisor are killed together, the parent's memory stays
/// correct, and the next run makes the pages private. Method: the same program. Its children die
/// when they access the missing pages.
#[test]
#[ignore = "needs root"]
fn a_later_run_repairs_what_killed_processes_left() {
    needs::root();
    needs::two_cpus();
    let folder = tempfile::tempdir().unwrap();
    let mut checked = start(folder.path(), FORKS, 0);
    let process = checked.process();
    let mut command = start_observing(process, &["--watch", &checked.hits]);
    // The command is stopped first, so that it does not make the pages private itself.
    for (victim, signal) in [
        (command.id(), libc::SIGSTOP),
        (tracer_of(process), libc::SIGKILL),
        (command.id(), libc::SIGKILL),
    ] {
        kill(victim, signal);
    }
    command.wait().unwrap();
    until("the end of tracing", || tracer_of(process) == 0);
    assert!(is_shared(process), "no process was left to make them private");
    let again = shim(process, &["--watch", &checked.hits, "-d", "20ms"]).output().unwrap();
    assert!(again.status.success(), "{again:?}");
    assert!(!is_shared(process));
    checked.end("wrong 0 ");
}
