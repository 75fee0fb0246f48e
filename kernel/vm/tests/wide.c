// SPDX-License-Identifier: GPL-2.0-only
/*
 * Two cores, and so two batch lanes: `elfen` patches checks into a program whose threads move from
 * one lane to the other.
 */
#define _GNU_SOURCE
#include "harness.h"

#include <errno.h>
#include <linux/seccomp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define THREADS 3
#define PROCESSES 2

/* A long loop without a call, so that only a check can stop it. */
static uint64_t mix(uint64_t sum, long rounds)
{
	long round;

	for (round = 0; round < rounds; round++) {
		sum ^= sum << 13;
		sum ^= sum >> 7;
		sum = sum * 0x9e3779b97f4a7c15ULL + (uint64_t)round;
		if (sum & 1)
			sum += 0x12345678;
	}
	return sum;
}

static uint64_t branch(uint64_t sum, long rounds)
{
	long round;

	for (round = 0; round < rounds; round++)
		switch (sum % 5) {
		case 0:
			sum = sum / 5 + 0x1234567;
			break;
		case 1:
			sum = sum * 7 + 3;
			break;
		default:
			sum ^= sum >> 3 ^ 0xabcdef;
		}
	return sum;
}

struct work {
	pthread_t thread;
	uint64_t sum;
	long rounds;
};

static void *work(void *argument)
{
	struct work *own = argument;
	int turn;

	for (turn = 0; turn < 40; turn++) {
		own->sum = mix(own->sum, own->rounds);
		own->sum = branch(own->sum, own->rounds / 8);
	}
	return NULL;
}

/* Runs threads in some processes, which are forked one after the other, and prints each sum. */
int batch(char **words)
{
	long rounds = words[0] ? atol(words[0]) : 1000;
	struct work all[THREADS];
	int process, thread;
	pid_t child;

	setvbuf(stdout, NULL, _IONBF, 0);
	for (process = 0; process < PROCESSES; process++) {
		fflush(stdout);
		child = fork();
		if (!child)
			break;
		waitpid(child, NULL, 0);
	}
	for (thread = 0; thread < THREADS; thread++) {
		all[thread].sum = 1 + process * THREADS + thread;
		all[thread].rounds = rounds;
		if (pthread_create(&all[thread].thread, NULL, work, &all[thread]))
			return 1;
	}
	for (thread = 0; thread < THREADS; thread++) {
		pthread_join(all[thread].thread, NULL);
		printf("%d.%d %016llx\n", process, thread, (unsigned long long)all[thread].sum);
	}
	return 0;
}

/*
 * Works, prints how many eBPF maps it has mapped, forbids itself all system calls except read,
 * write and exit, and works on.
 */
int confined(char **words)
{
	long rounds = words[0] ? atol(words[0]) : 1000;
	static char maps[65536];
	const char *at;
	uint64_t sum = 1;
	int turn, found = 0;

	setvbuf(stdout, NULL, _IONBF, 0);
	for (turn = 0; turn < 40; turn++)
		sum = mix(sum, rounds);
	if (read_text("/proc/self/maps", maps, sizeof(maps)) <= 0)
		return 1;
	for (at = maps; (at = strstr(at, "bpf-map")); at++)
		found++;
	printf("maps: %d\n", found);
	if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT))
		return 2;
	for (turn = 0; turn < 10; turn++)
		sum = mix(sum, rounds);
	syscall(SYS_exit, sum ? 3 : 4);
	return 0;
}

struct turns {
	pthread_t thread;
	int cpu;
	uint64_t end;
};

static void *take_turns(void *argument)
{
	struct turns *turns = argument;
	struct lane_thread lane;

	lane_thread_start(&lane, turns->cpu);
	while (!peek(&turns->end)) {
		lane_thread_busy(&lane, 2 * MS);
		usleep(5000 + random_below(5000));
	}
	lane_thread_stop(&lane);
	return NULL;
}

/* The batch's output after that of `elfen`. */
static const char *sums_in(const char *text)
{
	const char *at = strstr(text, "0.0 ");

	return at ? at : text;
}

static int run_batch(char *text, size_t bytes, const char *rounds)
{
	char *const words[] = { "/elfen", "run", "--lanes", "0:1,2:3", "--checks", "live",
				"--json-out", "/tmp/report", "--", "/nanonap-tests", "batch",
				(char *)rounds, NULL };

	return output_of(words, text, bytes);
}

/* Whether both have the same lines, in any order. */
static bool has_same_sums(const char *text, const char *alone)
{
	char line[64];
	int process, thread;
	const char *at, *other;

	for (process = 0; process <= PROCESSES; process++)
		for (thread = 0; thread < THREADS; thread++) {
			snprintf(line, sizeof(line), "%d.%d ", process, thread);
			at = strstr(text, line);
			other = strstr(alone, line);
			if (!at || !other || strncmp(at, other, 20))
				return false;
		}
	return true;
}

/* Runs the batch once. `learned`: checks were patched in and rang the doorbell. */
static verdict live_once(const char *rounds, bool *learned)
{
	static char text[65536], alone[65536], report[262144];
	char *const words[] = { "/nanonap-tests", "batch", (char *)rounds, NULL };
	struct turns turns[2] = { { .cpu = 0 }, { .cpu = 2 } };
	int status, lane;

	CHECK(!output_of(words, alone, sizeof(alone)));
	for (lane = 0; lane < 2; lane++)
		CHECK(!pthread_create(&turns[lane].thread, NULL, take_turns, &turns[lane]));
	status = run_batch(text, sizeof(text), rounds);
	for (lane = 0; lane < 2; lane++) {
		__atomic_store_n(&turns[lane].end, 1, __ATOMIC_RELEASE);
		pthread_join(turns[lane].thread, NULL);
	}
	if (status)
		return because("elfen run failed (%x): %.400s", status, text);
	CHECK(read_text("/tmp/report", report, sizeof(report)) > 0);
	if (!has_same_sums(text, alone))
		return because("other sums: %.300s, alone: %.200s", sums_in(text), alone);
	*learned = number_of(report, "\"on\": ") > 0 &&
		   number_of(report, "\"stopped_by_check\": ") > 0 &&
		   number_of(report, "\"rendezvous\": ") > 0;
	return *learned ? NULL : because("no checks: %.550s", strstr(report, "\"live\": {"));
}

/*
 * Goal: checks are patched into a program whose threads and forks move between lanes. They ring the
 * doorbell, and the program computes the same as without them. Method: its sums, and the run's
 * report. An emulated machine may be too slow to patch a program before it ends; then the next
 * program does more work.
 */
static verdict live_on_two_lanes(void)
{
	static const char *const rounds[] = {
		"60000", "120000", "240000", "480000", "960000", NULL
	};
	bool learned = false;
	verdict why = NULL;
	int at;

	for (at = 0; rounds[at] && !learned; at++) {
		why = live_once(rounds[at], &learned);
		if (why && strncmp(why, "no checks", 9))
			return why;
	}
	return why;
}

/*
 * Goal: patched checks make no system calls after the program installs a seccomp filter. Method:
 * strict mode, in which any other call is fatal, next to requests. The kernel records the filter in
 * a second map next to the task map.
 */
static verdict filter_while_checked(void)
{
	static const char *const rounds[] = { "120000", "480000", "1920000", NULL };
	static char text[65536];
	int status, at, maps = 0;

	for (at = 0; rounds[at] && maps < 2; at++) {
		char *const words[] = { "/elfen", "run", "--lanes", "0:1", "--checks", "live", "--",
					"/nanonap-tests", "confined", (char *)rounds[at], NULL };
		struct turns turns = { .cpu = 0 };

		CHECK(!pthread_create(&turns.thread, NULL, take_turns, &turns));
		status = output_of(words, text, sizeof(text));
		__atomic_store_n(&turns.end, 1, __ATOMIC_RELEASE);
		pthread_join(turns.thread, NULL);
		if (!WIFEXITED(status) || WEXITSTATUS(status) != 3)
			return because("status %x: %.400s", status, text);
		maps = number_of(text, "maps: ");
	}
	if (maps < 2)
		return because("no checks, or not noted: %d maps, %.500s", maps, text);
	return NULL;
}

const struct test wide_tests[] = {
	{ "filter-while-checked", NULL, "", filter_while_checked },
	{ "elfen-run-live-on-two-lanes", NULL, "", live_on_two_lanes },
	{ 0 },
};
