// SPDX-License-Identifier: GPL-2.0-only
/*
 * Runs the tests of one boot, each in a process of its own with the module freshly loaded, and
 * prints a line for each: `ok NAME`, or `FAIL NAME: why`. A test also fails if the kernel printed a
 * warning while it ran, if it did not end in time, or if the module could not be removed after it.
 *
 * nanonap-tests BOOT [NAME...]; BOOT is `smt`, `wide`, `nodes` or `bare`, or `list` for the names
 * of all.
 */
#define _GNU_SOURCE
#include "harness.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define TEST_SECONDS 120
#define WHY_BYTES 600

static int kernel_log;

/* Adds to `why` the first unusual warning in the kernel's log since the last call. */
static bool kernel_complained(char *why)
{
	static const char *const usual[] = {
		"loading out-of-tree module taints kernel",
		"module verification failed",
		"tainting kernel",
		"nanonap: ", /* the module's messages about its parameters and the machine */
		"no longer affine to cpu",
		"select_fallback_rq",
		/* on a loaded host */
		"clocksource",
		"TSC",
		"hrtimer: interrupt took",
		"hpet: Lost",
	};
	char record[8192];
	bool complained = false;
	ssize_t count;
	size_t said;

	while ((count = read(kernel_log, record, sizeof(record) - 1)) > 0 || errno == EPIPE) {
		const char *text;
		unsigned int i;

		if (count <= 0)
			continue; /* the log overwrote this record */
		record[count] = 0;
		text = strchr(record, ';');
		if (!text || (atoi(record) & 7) > 4)
			continue;
		for (i = 0; i < sizeof(usual) / sizeof(*usual); i++)
			if (strstr(text, usual[i]))
				break;
		if (i < sizeof(usual) / sizeof(*usual) || complained)
			continue;
		complained = true;
		said = strlen(why);
		snprintf(why + said, WHY_BYTES - said, "%sthe kernel said: %.*s", said ? "; " : "",
			 (int)strcspn(text + 1, "\n"), text + 1);
	}
	return complained;
}

/* Runs in the test's own process. Writes the verdict to the pipe; nothing if the test passed. */
static void run_here(const struct test *test, int pipe)
{
	verdict why = NULL;

	verdict_pipe = pipe;
	if (test->module && load(test->module, test->parameters))
		why = because("loading %s %s: %s", test->module, test->parameters, strerror(errno));
	if (!why)
		why = test->run();
	if (why && write(pipe, why, strlen(why)) < 0)
		_exit(2);
	_exit(why != NULL);
}

/*
 * Waits for the test; false if it had to be killed. Waits without periodic wake-ups, because the
 * scheduler might place this process on a lane that the test expects to be idle.
 */
static bool ended_in_time(pid_t child, int *status)
{
	struct pollfd end = { .fd = syscall(SYS_pidfd_open, child, 0), .events = POLLIN };
	bool in_time = poll(&end, 1, (TEST_SECONDS + 5 * hotplug_rounds()) * 1000) == 1;

	close(end.fd);
	kill(-child, SIGKILL); /* the whole process group */
	waitpid(child, status, 0);
	return in_time;
}

static bool run_forked(const struct test *test, char *why)
{
	int ends[2], status;
	bool in_time;
	ssize_t count;
	pid_t child;

	if (pipe(ends))
		return snprintf(why, WHY_BYTES, "no pipe"), false;
	fflush(stdout);
	child = fork();
	if (!child) {
		setpgid(0, 0);
		close(ends[0]);
		run_here(test, ends[1]);
	}
	close(ends[1]);
	in_time = ended_in_time(child, &status);
	count = read(ends[0], why, WHY_BYTES - 1);
	why[count > 0 ? count : 0] = 0;
	close(ends[0]);
	if (!in_time)
		snprintf(why, WHY_BYTES, "no end after %d s",
			 TEST_SECONDS + 5 * hotplug_rounds());
	else if (WIFSIGNALED(status))
		snprintf(why, WHY_BYTES, "killed by signal %d", WTERMSIG(status));
	else if (WEXITSTATUS(status) && !*why)
		snprintf(why, WHY_BYTES, "exit status %d", WEXITSTATUS(status));
	return !*why;
}

/* Removes the module. If a test leaves it in use, that is a leak. */
static bool removed(char *why)
{
	int tries;

	for (tries = 0; unload() && errno != ENOENT; tries++) {
		if (tries == 200) {
			snprintf(why, WHY_BYTES, "the module stays in use: %s", strerror(errno));
			return false;
		}
		usleep(10000); /* killed children may still be exiting */
	}
	return true;
}

static void all_online(void)
{
	char path[64];
	int cpu;

	for (cpu = 1; cpu < 4; cpu++) {
		snprintf(path, sizeof(path), "/sys/devices/system/cpu/cpu%d/online", cpu);
		if (!access(path, W_OK))
			write_text(path, "1");
	}
}

static void run(const struct test *test)
{
	char why[WHY_BYTES] = "";
	uint64_t began_ns = now_ns();
	unsigned long long seed = test_seed;
	bool passed = run_forked(test, why);

	all_online(); /* a failed test may have left a CPU offline */
	if (!removed(why))
		passed = false;
	if (kernel_complained(why))
		passed = false;
	if (passed)
		printf("@@ ok %s (%d ms)\n", test->name, (int)((now_ns() - began_ns) / MS));
	else
		printf("@@ FAIL %s: %s (seed %llu)\n", test->name, why, seed);
	fflush(stdout);
}

static bool chosen(const char *name, char **names)
{
	if (!*names)
		return true;
	for (; *names; names++)
		if (!strcmp(*names, name))
			return true;
	return false;
}

struct boot {
	const char *name;
	const struct test *const *lists;
};

static const struct boot boots[] = {
	{ "smt", (const struct test *const[]){ map_tests, nap_tests, lane_tests, lifetime_tests,
					       argument_tests, command_tests, fuzz_tests, NULL } },
	{ "wide", (const struct test *const[]){ wide_tests, fence_tests, meddled_tests,
						service_tests, NULL } },
	{ "nodes", (const struct test *const[]){ node_tests, NULL } },
	{ "bare", (const struct test *const[]){ bare_tests, cpusetless_tests, NULL } },
};

static bool takes_command(const struct test *list)
{
	static const struct test *const lists[] = { command_tests, wide_tests,	 fence_tests,
						    meddled_tests, service_tests, node_tests,
						    cpusetless_tests };
	size_t at;

	for (at = 0; at < sizeof(lists) / sizeof(*lists); at++)
		if (lists[at] == list)
			return true;
	return false;
}

/* Runs the selected tests of a boot or, for the host, lists them. Returns their number. */
static int each(const struct boot *boot, char **names, bool list)
{
	const struct test *const *lists;
	const struct test *test;
	int known = 0;

	for (lists = boot->lists; *lists; lists++) {
		if (takes_command(*lists) && !list && access("/elfen", X_OK))
			continue; /* kernel/vm/run was given no command */
		for (test = *lists; test->name; test++) {
			if (!chosen(test->name, names))
				continue;
			if (list)
				printf("%s %s\n", boot->name, test->name);
			else
				run(test);
			known++;
		}
	}
	return known;
}

int main(int count, char **words)
{
	const char *seed = getenv("TEST_SEED");
	bool list = count >= 2 && !strcmp(words[1], "list");
	int known = 0;
	size_t i;

	if (count < 2)
		return 2;
	if (!strcmp(words[1], "batch"))
		return batch(words + 2);
	if (!strcmp(words[1], "confined"))
		return confined(words + 2);
	test_seed = seed && *seed ? strtoull(seed, NULL, 10) : now_ns();
	if (!list) {
		kernel_log = open("/dev/kmsg", O_RDONLY | O_NONBLOCK | O_CLOEXEC);
		lseek(kernel_log, 0, SEEK_END);
		printf("\n@@ begin\n"); /* on a new line, after the firmware's output */
		fflush(stdout);
	}
	for (i = 0; i < sizeof(boots) / sizeof(*boots); i++)
		if (list || !strcmp(words[1], boots[i].name))
			known += each(&boots[i], words + 2, list);
	if (!list)
		printf("@@ end %d\n", known);
	return 0;
}
