//! Goal: functions that `--count-at` names publish the counts of their own thread, and other
//! functions do not. Method: a program that emulates the counters, because this machine may have
//! none. It answers perf_event_open(2) with made-up pages. The instruction that reads a counter
//! faults, and the program's handler supplies known numbers.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::Ordering::Relaxed;

use elfen_rt::signal::page::Page;
use elfen_rt::signal::thread::ThreadSlot;

use crate::needs;
use crate::stage::{ROOM, build, observe, run_preloaded, said};

const SOURCE: &str = r#"
#define _GNU_SOURCE
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

/* Values of the emulated counters: cycles and instructions. */
static _Thread_local uint64_t counters[2];
static int opened, events_forbidden;

static long made_up_event(const uint64_t *attributes)
{
	uint64_t which = attributes[1];
	unsigned char page[4096] = { 0 };
	uint32_t index = which + 1;
	uint64_t offset = 1000 * (which + 1), may_read = 1 << 2;
	uint16_t width = 48;
	int fd = memfd_create("event", 0);

	memcpy(page + 12, &index, sizeof(index));
	memcpy(page + 16, &offset, sizeof(offset));
	memcpy(page + 40, &may_read, sizeof(may_read));
	memcpy(page + 48, &width, sizeof(width));
	opened++;
	return write(fd, page, sizeof(page)) == sizeof(page) ? fd : -1;
}

/* The preload library calls this one instead of the C library's. */
long syscall(long number, ...)
{
	va_list rest;
	long a, b, c, result;

	va_start(rest, number);
	a = va_arg(rest, long);
	b = va_arg(rest, long);
	c = va_arg(rest, long);
	va_end(rest);
	if (number == SYS_perf_event_open && !events_forbidden)
		return made_up_event((const uint64_t *)a);
	__asm__ volatile("syscall"
			 : "=a"(result)
			 : "a"(number), "D"(a), "S"(b), "d"(c)
			 : "rcx", "r11", "memory");
	if (result < 0) {
		errno = -result;
		return -1;
	}
	return result;
}

static void in_place_of_a_counter(int signal, siginfo_t *info, void *context)
{
	greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;

	(void)signal;
	(void)info;
	if (memcmp((void *)registers[REG_RIP], "\x0f\x33", 2) != 0)
		_exit(9);
	registers[REG_RAX] = (uint32_t)counters[registers[REG_RCX]];
	registers[REG_RDX] = counters[registers[REG_RCX]] >> 32;
	registers[REG_RIP] += 2;
}

/* Its arguments use all argument registers. */
__attribute__((noinline)) long counted(long a, long b, long c, long d, long e, long f, double g)
{
	__asm__ volatile("");
	return a + 10 * b + 100 * c + 1000 * d + 10000 * e + 100000 * f + (long)(g * 1000000);
}

__attribute__((noinline)) long other(long a)
{
	__asm__ volatile("");
	return a;
}

static void *work(void *from)
{
	for (uint64_t n = 1; n <= 100; n++) {
		counters[0] = (uint64_t)from + n;
		counters[1] = 2 * ((uint64_t)from + n);
		if (counted(1, 2, 3, 4, 5, 6, 7) != 7654321)
			_exit(8);
	}
	counters[0] = counters[1] = 0;
	other(1);
	return NULL;
}

/* From now on, a call of perf_event_open kills the process. */
static int forbid_events(void)
{
	struct sock_filter rules[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_perf_event_open, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = { 4, rules };

	events_forbidden = 1;
	return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) ||
	       prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
}

int main(int count, char **arguments)
{
	struct sigaction action = { .sa_flags = SA_SIGINFO };
	pthread_t thread;
	int status;
	long child;

	action.sa_sigaction = in_place_of_a_counter;
	sigaction(SIGSEGV, &action, NULL);
	work((void *)10000);
	(void)arguments;
	if (count > 1) {
		if (forbid_events())
			return 2;
		pthread_create(&thread, NULL, work, (void *)20000);
		pthread_join(thread, NULL);
		return opened == 2 ? 6 : 7;
	}
	pthread_create(&thread, NULL, work, (void *)20000);
	pthread_join(thread, NULL);
	/* Without the C library, so that no fork handler runs: the child has no pages. */
	child = syscall(SYS_fork, 0, 0, 0);
	if (child == 0) {
		signal(SIGSEGV, SIG_DFL);
		_exit(counted(1, 2, 3, 4, 5, 6, 7) == 7654321 ? 4 : 5);
	}
	waitpid(child, &status, 0);
	return WEXITSTATUS(status) == 4 && opened == 4 ? 3 : 7;
}
"#;

fn counts(folder: &Path, options: &[&str]) -> PathBuf {
    build(folder, "counts", SOURCE, &[options, &["-rdynamic"]].concat())
}

fn address(program: &Path, function: &str) -> u64 {
    let listed = Command::new("nm").arg(program).output().unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    let line = listed.lines().find(|line| line.ends_with(&format!(" T {function}"))).unwrap();
    u64::from_str_radix(line.split_whitespace().next().unwrap(), 16).unwrap()
}

/// Runs the program with this argument, as `elfen shim` would. Also returns the page of its
/// threads.
fn run(program: &Path, word: Option<&str>) -> (Output, Page<ThreadSlot>) {
    let about = fs::metadata(program).unwrap();
    // The second function is named with a file that is not mapped, so it must not count.
    let (device, inode, at) = (about.dev(), about.ino(), address(program, "counted"));
    let other = address(program, "other");
    let places = format!("{device}:{inode}:{at},{device}:{}:{other}", inode + 1);
    run_preloaded(Command::new(program).args(word), &format!("entries,{places} -"))
}

#[test]
#[ignore = "needs GCC, for room at the entries of functions"]
fn functions_publish_what_their_thread_has_executed() {
    let rule = fs::read_to_string("/sys/bus/event_source/devices/cpu/rdpmc");
    let all_may_read = rule.is_ok_and(|rule| rule.trim() == "2");
    assert!(!all_may_read, "needs a machine where not every process may read counters");
    let folder = tempfile::tempdir().unwrap();
    for options in
        [&[ROOM][..], &["-fpatchable-function-entry=5"], &[ROOM, "-fcf-protection=full", "-no-pie"]]
    {
        let program = counts(folder.path(), options);
        let (ended, page) = run(&program, None);
        assert_eq!(ended.status.code(), Some(3), "{options:?}: {ended:?}");
        let first = page.slot(0).unwrap();
        let of_all = [&first.counting, &first.uncounted, &first.refused];
        assert_eq!(of_all.map(|word| word.load(Relaxed)), [1, 0, 0], "{options:?}");
        let counts = |slot: u32| {
            let words = &page.slot(slot).unwrap().words;
            (words.instructions.load(Relaxed), words.cycles.load(Relaxed))
        };
        // The counts at each thread's last call, plus the offsets in its event pages.
        assert_eq!(counts(0), (2 * 10_100 + 2_000, 10_100 + 1_000), "{options:?}");
        assert_eq!(counts(1), (2 * 20_100 + 2_000, 20_100 + 1_000), "{options:?}");
    }
}

/// Goal: the preload library does not kill a program that forbids itself to open events. Method: a
/// program that does so after it has started its first thread, and before its second.
#[test]
#[ignore = "needs GCC, for room at the entries of functions"]
fn a_program_that_forbids_events_continues() {
    let folder = tempfile::tempdir().unwrap();
    let program = counts(folder.path(), &[ROOM]);
    let (ended, page) = run(&program, Some("shut"));
    assert_eq!(ended.status.code(), Some(6), "{ended:?}");
    assert_eq!(page.slot(0).unwrap().uncounted.load(Relaxed), 1);
}

/// Goal: functions that cannot be counted are refused in one line, and so is a machine without
/// counters.
#[test]
#[ignore = "needs GCC, for room at the entries of functions"]
fn what_cannot_be_counted_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    needs::two_cpus();
    let program = counts(folder.path(), &[ROOM]);
    let refused = |function: &str, program: &Path| {
        let output = observe(&["--count-at", function], program);
        let said = said(&output);
        assert_eq!(said.lines().count(), 1, "{said}");
        (output.status.code(), said)
    };
    let (status, said) = refused("nowhere", &program);
    assert!(status == Some(2) && said.contains("no such function"), "{status:?} {said}");
    // On a machine with counters, this works.
    let output = observe(&["--count-at", "counted"], &program);
    if output.status.code() == Some(3) && output.stdout.is_empty() {
        let (_, said) = refused("counted", &program);
        let why = ["no instruction counter", "may not", "(rdpmc)"];
        assert!(why.iter().any(|why| said.contains(why)), "{said}");
    }
    let plain = counts(folder.path(), &[]);
    let (status, said) = refused("counted", &plain);
    assert!(status == Some(2) && said.contains("have no room"), "{status:?} {said}");
}
