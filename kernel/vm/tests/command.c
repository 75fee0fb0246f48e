// SPDX-License-Identifier: GPL-2.0-only
/* Tests the `elfen` command with the module, if kernel/vm/run was given the command. */
#define _GNU_SOURCE
#include "harness.h"
#include "elfen.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

int output_of(char *const words[], char *text, size_t bytes)
{
	size_t done = 0;
	int ends[2], status;
	ssize_t count;
	pid_t child;

	if (pipe(ends))
		return -1;
	child = fork();
	if (!child) {
		dup2(ends[1], 1);
		dup2(ends[1], 2);
		execv(words[0], words);
		_exit(127);
	}
	close(ends[1]);
	while (done < bytes - 1 && (count = read(ends[0], text + done, bytes - 1 - done)) > 0)
		done += count;
	text[done] = 0;
	close(ends[0]);
	waitpid(child, &status, 0);
	return status;
}

/* The number after `table` and `key` in the device's entry, or -1. */
static long number_of_device(const char *json, const char *table, const char *key)
{
	const char *at = strstr(json, "\"nap\": \"device\"");

	at = at ? strstr(at, table) : NULL;
	return at ? number_of(at, key) : -1;
}

/*
 * Goal: the Rust side naps through the device, and measures every nap that the request lane ended,
 * even if the host delays the batch lane's wake-up. Method: `elfen lab bench nap`, compared with
 * the module's counts.
 */
static verdict bench_nap(void)
{
	char *const words[] = { "/elfen-lab", "bench", "nap",     "--json", "--runs",
				"5",     "--lanes", "0:1", NULL };
	static char text[65536];
	struct nanonap_stats stats = { .cpu = 1 };
	int fd = open_device();
	long woken, wakes, overtaken;

	if (output_of(words, text, sizeof(text)))
		return because("elfen lab bench nap failed: %.300s", text);
	CHECK(strstr(text, "\"nap\": \"device\",\n      \"available\": true"));
	CHECK(strstr(text, "\"auto\": \"device\""));
	CHECK(!ioctl(fd, NANONAP_STATS, &stats) && stats.naps >= 50);
	woken = stats.woke[NANONAP_WOKE_IDLE];
	/* Of the naps that the device counts, only the first of each run is left out. */
	wakes = number_of_device(text, "\"wake_cycles\": {", "\"n\": ");
	overtaken = number_of_device(text, "", "\"overtaken\": ");
	if (wakes + overtaken < woken - 5)
		return because("%ld wake-ups measured and %ld overtaken of %ld", wakes, overtaken,
			       woken);
	/* A kernel thread may run on the request lane before the batch lane has checked it. */
	if (wakes < overtaken)
		return because("%ld wake-ups measured, %ld overtaken", wakes, overtaken);
	/* Other naps ended for the scheduler, or by their bound if the host delayed this lane. */
	if (woken * 2 < (long)stats.naps)
		return because("the request lane ended %ld naps of %llu", woken,
			       (unsigned long long)stats.naps);
	return NULL;
}

/* A request lane that is alternately busy and idle, until the word is set. */
static void *take_turns(void *told)
{
	struct lane_thread lane;

	lane_thread_start(&lane, 0);
	while (!peek(told)) {
		lane_thread_busy(&lane, 5 * 1000 * 1000);
		usleep(10 * 1000);
	}
	lane_thread_stop(&lane);
	return NULL;
}

long number_of(const char *json, const char *key)
{
	const char *at = strstr(json, key);

	return at ? strtol(at + strlen(key), NULL, 10) : -1;
}

/*
 * Goal: a batch borrows with the module only: with its task map and its naps. Method: `elfen run`
 * of a program without checks, next to a request lane that is alternately busy and idle; the run's
 * report.
 */
static verdict run_by_module(void)
{
	char *const words[] = {
		"/elfen", "run", "--lanes", "0:1", "--source", "module", "--nap", "device",
		"--json-out", "/tmp/report", "--", "/bin/busybox", "sh", "-c",
		"i=0; while [ $i -lt 60000 ]; do i=$((i + 1)); done; echo $i", NULL
	};
	static char text[65536], report[65536];
	uint64_t end = 0;
	pthread_t turns;
	int status;

	CHECK(!pthread_create(&turns, NULL, take_turns, &end));
	status = output_of(words, text, sizeof(text));
	__atomic_store_n(&end, 1, __ATOMIC_RELEASE);
	pthread_join(turns, NULL);
	if (status || !strstr(text, "60000"))
		return because("elfen run failed: %.300s", text);
	CHECK(read_text("/tmp/report", report, sizeof(report)) > 0);
	CHECK(strstr(report, "\"source\": \"module\"") && strstr(report, "\"nap\": \"device\""));
	CHECK(number_of(report, "\"naps\": ") > 0);
	CHECK(number_of(report, "\"request_busy_ns\": ") > 0);
	CHECK(number_of(report, "\"napped_ns\": ") > 0);
	/* The module keeps no account of the batch's tasks, so borrowed time is unknown. */
	CHECK(strstr(report, "\"borrowed_ns\": null"));
	return NULL;
}

/*
 * Goal: on lanes that the module has not tied, `--nap device` is refused, and `--nap auto` chooses
 * another nap. Method: a module that has tied the pair in the other direction.
 */
static verdict run_untied(void)
{
	char *words[] = { "/elfen", "run",    "--lanes", "0:1", "--source", "module",
			  "--nap",  "device", "--",	 "/bin/busybox", "true", NULL };
	static char text[65536];
	int status = output_of(words, text, sizeof(text));

	if (!WIFEXITED(status) || WEXITSTATUS(status) != 3)
		return because("status %#x: %.300s", status, text);
	if (!strstr(text, "has not tied lane 1 to 0"))
		return because("it says %.300s", text);
	words[7] = "auto";
	if (output_of(words, text, sizeof(text)) || strstr(text, "nap       device"))
		return because("by itself: %.300s", text);
	return NULL;
}

#define REQUESTS 40

/* Serves requests of 1 ms with pauses of 1 ms. `done` counts them. */
static void serve(uint64_t *done)
{
	struct elfen_service service;
	struct elfen_service_slot *slot;
	struct elfen_error error;
	uint64_t end, request;

	pin(0);
	if (elfen_service_open(&service, "typed", 1, &error) ||
	    elfen_service_claim(&service, 0, 0, &error))
		_exit(1);
	slot = elfen_service_at(&service, 0);
	for (request = 1;; request++) {
		elfen_service_begin(slot, request, now_ns());
		for (end = now_ns() + 1000 * 1000; now_ns() < end;)
			;
		elfen_service_end(slot);
		__atomic_store_n(done, request, __ATOMIC_RELEASE);
		usleep(1000);
	}
}

/*
 * Goal: `elfen run` works without options: it finds the machine's pair and the publishing service,
 * and computes a budget from its requests. Method: the command, on a machine with one core and one
 * such service.
 */
static verdict run_as_typed(void)
{
	char *const words[] = { "/elfen", "run", "--policy", "refresh-budget", "--",
				"/bin/busybox", "true", NULL };
	uint64_t *done = mmap(NULL, sizeof(*done), PROT_READ | PROT_WRITE,
			      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	static char text[65536];

	if (!fork())
		serve(done);
	while (__atomic_load_n(done, __ATOMIC_ACQUIRE) < REQUESTS)
		usleep(10000);
	if (output_of(words, text, sizeof(text)))
		return because("elfen run failed: %.300s", text);
	if (!strstr(text, "a tenth of the median request") || !strstr(text, "lanes     0:1, "))
		return because("it says %.300s", text);
	return NULL;
}

const struct test command_tests[] = {
	{ "elfen-run-as-typed", NULL, "", run_as_typed },
	{ "elfen-run-module", PRODUCT, "wait=spin", run_by_module },
	{ "elfen-run-untied", PRODUCT, "wait=spin pairs=1:0", run_untied },
	{ "elfen-bench-nap", PRODUCT, "wait=spin", bench_nap },
	{ 0 },
};
