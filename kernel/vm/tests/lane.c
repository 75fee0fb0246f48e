// SPDX-License-Identifier: GPL-2.0-only
/*
 * The lane's other threads do not run during a nap, and get their share of time over several naps.
 *
 * Naps are observed in the kernel's trace, next to the context switches: with preemption off, a nap
 * first starts its timer, and last cancels it unless it has expired.
 */
#define _GNU_SOURCE
#include "harness.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define TRACE "/sys/kernel/tracing/"
#define REQUEST 0
#define BATCH 1

struct napper {
	int fd, stop;
	const struct elfen_task_slot *slots;
	pthread_t thread;
};

static void *naps(void *argument)
{
	struct napper *napper = argument;

	pin(BATCH);
	while (!__atomic_load_n(&napper->stop, __ATOMIC_ACQUIRE))
		nap_on(napper->fd, REQUEST, peek(&napper->slots[REQUEST].switches), 5 * MS);
	return NULL;
}

static void napper_start(struct napper *napper)
{
	napper->fd = open_device();
	napper->slots = map_slots(napper->fd);
	pthread_create(&napper->thread, NULL, naps, napper);
}

static void napper_stop(struct napper *napper)
{
	__atomic_store_n(&napper->stop, 1, __ATOMIC_RELEASE);
	pthread_join(napper->thread, NULL);
}

static void *wakes_often(void *argument)
{
	pin(BATCH);
	while (!__atomic_load_n((int *)argument, __ATOMIC_ACQUIRE))
		usleep(200 + random_below(400));
	return NULL;
}

/* Reads the word after `key` in a line of the trace, cut to the buffer's length. */
static bool word_after(const char *line, const char *key, char *word)
{
	const char *at = strstr(line, key);

	return at && sscanf(at + strlen(key), "%31[^ \n]", word) == 1;
}

struct trace_counts {
	int naps, switches, switches_in_naps;
};

static struct trace_counts read_trace(void)
{
	struct trace_counts counts = { 0 };
	char line[1024], word[32], timer[32] = "";
	FILE *trace = fopen(TRACE "per_cpu/cpu1/trace", "r");

	while (trace && fgets(line, sizeof(line), trace)) {
		if (strstr(line, " hrtimer_start: ") && strstr(line, "[nanonap]")) {
			word_after(line, "hrtimer=", timer);
			counts.naps++;
		} else if (strstr(line, " hrtimer_cancel: ") ||
			   strstr(line, " hrtimer_expire_entry: ")) {
			if (word_after(line, "hrtimer=", word) && !strcmp(word, timer))
				timer[0] = 0;
		} else if (strstr(line, " sched_switch: ")) {
			counts.switches++;
			counts.switches_in_naps += timer[0] != 0;
		}
	}
	if (trace)
		fclose(trace);
	return counts;
}

/*
 * Traces the lane of a napping thread for half a second, while another thread wakes on the lane
 * every 0.4 ms.
 */
static struct trace_counts traced_lane(void)
{
	struct napper napper = { 0 };
	struct lane_thread request;
	struct trace_counts counts;
	pthread_t rival;
	int stop = 0, i;

	lane_thread_start(&request, REQUEST);
	napper_start(&napper);
	pthread_create(&rival, NULL, wakes_often, &stop);
	write_text(TRACE "trace", "");
	write_text(TRACE "tracing_on", "1");
	for (i = 0; i < 120; i++) {
		lane_thread_busy(&request, random_below(4 * MS));
		usleep(5000);
	}
	write_text(TRACE "tracing_on", "0");
	__atomic_store_n(&stop, 1, __ATOMIC_RELEASE);
	pthread_join(rival, NULL);
	napper_stop(&napper);
	lane_thread_stop(&request);
	counts = read_trace();
	write_text(TRACE "trace", "");
	return counts;
}

/*
 * Goal: no other thread runs on the lane during a nap. Method: no switch is traced between the
 * start and the end of any nap.
 */
static verdict kept(void)
{
	struct trace_counts counts = traced_lane();

	if (counts.naps < 100 || counts.switches < 100)
		return because("only %d naps and %d switches traced", counts.naps, counts.switches);
	if (counts.switches_in_naps)
		return because("%d switches in %d naps", counts.switches_in_naps, counts.naps);
	return NULL;
}

/* Goal: the test above can fail. Method: a module that leaves preemption on. */
static verdict preemptible_is_seen(void)
{
	struct trace_counts counts = traced_lane();

	if (!counts.switches_in_naps)
		return because("no switch in %d naps, of %d", counts.naps, counts.switches);
	return NULL;
}

static void *spins(void *argument)
{
	pin(BATCH);
	while (!__atomic_load_n((int *)argument, __ATOMIC_ACQUIRE))
		__builtin_ia32_pause();
	return NULL;
}

/*
 * Goal: time slices end on time, so a napping thread does not starve its lane. Method: one thread
 * naps all the time, another spins on the same lane. When they have used 1.5 s together, each has
 * had at least a quarter.
 */
static verdict slices(void)
{
	uint64_t napped_ns = 0, spun_ns = 0;
	struct napper napper = { 0 };
	struct lane_thread request;
	pthread_t spinner;
	int stop = 0;

	lane_thread_start(&request, REQUEST);
	lane_thread_busy(&request, 0);
	napper_start(&napper);
	pthread_create(&spinner, NULL, spins, &stop);
	while (napped_ns + spun_ns < 1500 * MS) {
		usleep(10000);
		napped_ns = cpu_ns(napper.thread);
		spun_ns = cpu_ns(spinner);
	}
	__atomic_store_n(&stop, 1, __ATOMIC_RELEASE);
	pthread_join(spinner, NULL);
	napper_stop(&napper);
	lane_thread_stop(&request);
	if (napped_ns * 4 < napped_ns + spun_ns || spun_ns * 4 < napped_ns + spun_ns)
		return because("the napper had %llu ms, the other %llu ms",
			       (unsigned long long)(napped_ns / MS),
			       (unsigned long long)(spun_ns / MS));
	return NULL;
}

const struct test lane_tests[] = {
	{ "lane-kept-during-naps", PRODUCT, "wait=spin", kept },
	{ "lane-kept-during-naps-mwait", PRODUCT, "wait=mwait", kept },
	{ "lane-lost-if-preemptible", "/preemptible.ko", "wait=spin", preemptible_is_seen },
	{ "lane-shared-by-time-slices", PRODUCT, "wait=spin", slices },
	{ 0 },
};
