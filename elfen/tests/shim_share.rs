//! Goal: a process that runs is looked at by pages that it shares meanwhile, and is none the worse
//! for it: what it computes is right, its children's memory is their own, its sleeps are not cut
//! short, and its pages are private again at the end, however the command ends. Method: the real
//! command on a program that checks itself, of few threads and of many, and on a Redis whose every
//! answer is checked. `--nocapture` prints for how long they were stopped, to share and at the end.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use serde_json::Value;

/// Counts in a global, with threads that sleep and children that write the same global, until it is
/// told to end; then says what went wrong.
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
static volatile int told, alarms;
static unsigned long mixed, interrupted, children;
static void tell(int signal) { told = 1; }
static void ring(int signal) { alarms++; }
static void *sleeps(void *how)
{
	sigset_t none;
	sigfillset(&none);
	pthread_sigmask(SIG_BLOCK, &none, NULL);
	int epoll = epoll_create1(0);
	struct epoll_event event;
	struct timespec time = { 0, 20000000 };
	while (!told) {
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
	signal(SIGTERM, tell);
	signal(SIGALRM, ring);
	for (long how = 0; how < sleepers; how++)
		pthread_create(&threads[how], NULL, sleeps, (void *)how);
	printf("%p %p\n", (void *)&hits, (void *)&threads);
	fflush(stdout);
	unsigned long count = 0;
	while (!told) {
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

fn skipped(why: &str) {
    let mut terminal = std::io::stderr();
    writeln!(terminal, "skipped: elfen shim --share: {why}").unwrap();
}

fn possible() -> bool {
    // SAFETY: takes nothing.
    let root = unsafe { libc::geteuid() } == 0;
    let online = fs::read_to_string("/sys/devices/system/cpu/online").unwrap();
    let possible = root && online.trim() != "0";
    if !possible {
        skipped("it takes root and two CPUs");
    }
    possible
}

struct Checked {
    child: Child,
    output: BufReader<ChildStdout>,
    /// Of its global, and of something on its stack.
    hits: String,
    stack: String,
}

fn start(folder: &Path, sleepers: u32) -> Checked {
    let (source, program) = (folder.join("checks.c"), folder.join("checks"));
    fs::write(&source, CHECKS).unwrap();
    let mut compiler = Command::new("cc");
    compiler.args(["-O1", "-pthread", "-o"]).arg(&program).arg(&source);
    assert!(compiler.status().unwrap().success());
    let mut command = Command::new(&program);
    command.arg(sleepers.to_string());
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    let (hits, stack) = line.trim().split_once(' ').unwrap();
    let typed = |at: &str| format!("{at}:u64");
    Checked { child, output, hits: typed(hits), stack: typed(stack) }
}

impl Checked {
    fn end(&mut self) -> String {
        // SAFETY: takes numbers; the child has not been waited for.
        unsafe { libc::kill(self.child.id().cast_signed(), libc::SIGTERM) };
        let mut said = String::new();
        self.output.read_to_string(&mut said).unwrap();
        assert!(self.child.wait().unwrap().success(), "{said}");
        assert!(said.contains("mixed 0 interrupted 0 "), "{said}");
        said
    }
}

impl Drop for Checked {
    fn drop(&mut self) {
        let _ended = self.child.kill().and_then(|()| self.child.wait());
    }
}

fn shim(process: u32, words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_elfen"));
    command.args(["shim", "--json", "--share", "-p", &process.to_string()]).args(words);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn is_shared(process: u32) -> bool {
    fs::read_to_string(format!("/proc/{process}/maps")).unwrap().contains("memfd:elfen-globals")
}

fn is_traced(process: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    !status.lines().any(|line| line == "TracerPid:\t0")
}

fn json(output: &std::process::Output) -> Value {
    let said = String::from_utf8_lossy(&output.stderr);
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {said}"))
}

#[test]
fn a_program_that_checks_itself_finds_nothing_wrong() {
    if !possible() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    // The Redis has five threads.
    for sleepers in [3, 64] {
        nothing_is_wrong_with(start(folder.path(), sleepers), sleepers + 1);
    }
}

fn nothing_is_wrong_with(mut checked: Checked, threads: u32) {
    let process = checked.child.id();
    let mut stopped = Stops::default();
    for _ in 0..5 {
        let words = ["--watch", &checked.hits, "--for", "200ms", "--period", "1us"];
        let output = shim(process, &words).output().unwrap();
        let summary = json(&output);
        assert!(output.status.success(), "{output:?}");
        assert_eq!(summary["signals"][0]["source"], "shared", "{summary:#}");
        let seen = summary["signals"][0]["new_values"].as_u64().unwrap();
        assert!(seen > 1, "it counts, however busy the machine is: {summary:#}");
        stopped.add(&summary);
        assert_eq!((is_shared(process), is_traced(process)), (false, false));
    }
    let refused = shim(process, &["--watch", &checked.stack, "--for", "1ms"]).output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(refused.status.code() == Some(2) && said.contains("stack"), "{said}");
    let said = checked.end();
    assert!(!said.contains("children 0 "), "{said}");
    println!("{threads} threads: {stopped}");
}

/// How long a process was stopped, each time.
#[derive(Default)]
struct Stops {
    to_share_us: Vec<u64>,
    at_end_us: Vec<u64>,
}

impl Stops {
    fn add(&mut self, summary: &Value) {
        let of = |name| summary[name].as_u64().unwrap();
        let (all, at_end) = (of("stopped_ns"), of("stopped_at_end_ns"));
        assert!(0 < at_end && at_end < all, "it was stopped twice: {summary:#}");
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

/// Goal: nothing is left when the front is killed, and the program goes on when its keeper is.
#[test]
fn whoever_is_killed_the_program_goes_on() {
    if !possible() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let checked = start(folder.path(), 3);
    let process = checked.child.id();
    let rounds = std::env::var("KILLED_ROUNDS").ok().and_then(|rounds| rounds.parse().ok());
    let rounds: u64 = rounds.unwrap_or(20);
    for round in 0..rounds {
        let mut front = shim(process, &["--watch", &checked.hits, "--period", "1us"]);
        let mut front = front.stdout(Stdio::null()).spawn().unwrap();
        // At any moment, from before anything is shared to long after.
        thread::sleep(Duration::from_micros(round * 7919 % 60_000));
        front.kill().unwrap();
        front.wait().unwrap();
        // The keeper sees to the rest, soon.
        until(|| !is_shared(process) && !is_traced(process));
    }
    let mut front = shim(process, &["--watch", &checked.hits, "--period", "1us"]).spawn().unwrap();
    until(|| is_shared(process));
    thread::sleep(Duration::from_millis(20));
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let keeper = status.lines().find_map(|line| line.strip_prefix("TracerPid:\t")).unwrap();
    let keeper: i32 = keeper.parse().unwrap();
    assert_ne!(keeper, 0);
    // SAFETY: takes numbers; the keeper is a child of the front, which has not waited for it.
    unsafe { libc::kill(keeper, libc::SIGKILL) };
    until(|| !is_traced(process));
    let before = said_to_run(process);
    // SAFETY: takes numbers; our child, and not waited for.
    unsafe { libc::kill(front.id().cast_signed(), libc::SIGINT) };
    front.wait().unwrap();
    until(|| said_to_run(process) != before);
    // What it shares with nobody but its children is wrong from here on, and was said to be: so it
    // is not asked.
    drop(checked);
}

/// Waits, and not for ever.
fn until(is_so: impl Fn() -> bool) {
    let so = (0..20_000).any(|_| {
        thread::sleep(Duration::from_millis(1));
        is_so()
    });
    assert!(so, "that never came");
}

/// Its CPU time.
fn said_to_run(process: u32) -> String {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    stat.split_whitespace().nth(13).unwrap().to_owned()
}

/// Goal: a Redis under load answers right while pages of its globals are shared and private again,
/// twenty times. Method: a client that knows each answer.
#[test]
fn a_redis_under_load_answers_right() {
    if !possible() {
        return;
    }
    if Command::new("redis-server").arg("--version").output().is_err() {
        return skipped("there is no redis-server");
    }
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
            let mut command = shim(redis.id(), &["--for", "50ms", "--period", "1us"]);
            let output = command.args(&words).output().unwrap();
            let summary = json(&output);
            assert!(output.status.success(), "{output:?}");
            stopped.add(&summary);
            assert!(!is_shared(redis.id()) && !is_traced(redis.id()));
        }
        stop.store(true, Relaxed);
        load.join().unwrap();
        println!("a Redis: {stopped}; {} answers are right", answers.load(Relaxed));
    });
    assert!(answers.load(Relaxed) > 100);
    redis.kill().unwrap();
    redis.wait().unwrap();
}

/// A word in the middle of each of eight pages of its data.
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
