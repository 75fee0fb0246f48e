// SPDX-License-Identifier: GPL-2.0-only
/*
 * A machine without MWAIT and without siblings, where no tracer has enabled sched_switch before.
 */
#define _GNU_SOURCE
#include "harness.h"

#include <errno.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <unistd.h>

/*
 * Goal: without MWAIT, naps are refused and the map works. Method: the module with its default
 * parameters.
 */
static verdict no_mwait(void)
{
	struct nanonap_version version = { .version = NANONAP_ABI };
	const struct elfen_task_slot *slots;
	struct lane_thread lane;
	int fd = open_device();

	CHECK(!ioctl(fd, NANONAP_VERSION, &version));
	CHECK(version.wait == NANONAP_WAIT_NONE);
	pin(1);
	CHECK(nap_on(fd, 0, 0, MS) == -1 && errno == EOPNOTSUPP);
	slots = map_slots(fd);
	lane_thread_start(&lane, 0);
	lane_thread_busy(&lane, 0);
	while (peek(&slots[0].task) != lane.task)
		sched_yield();
	lane_thread_idle(&lane);
	while (peek(&slots[0].task) == lane.task)
		sched_yield();
	lane_thread_stop(&lane);
	return NULL;
}

/*
 * Goal: without siblings, naps are refused. Method: a nap on each CPU for the other one, with
 * wait=spin.
 */
static verdict no_siblings(void)
{
	struct nanonap_version version = { .version = NANONAP_ABI };
	int fd = open_device(), cpu;

	CHECK(!ioctl(fd, NANONAP_VERSION, &version));
	CHECK(version.wait == NANONAP_WAIT_SPIN && version.ties == 0);
	for (cpu = 0; cpu < 2; cpu++) {
		pin(cpu);
		CHECK(nap_on(fd, !cpu, 0, MS) == -1 && errno == ENXIO);
	}
	return NULL;
}

/*
 * Goal: pairs from the parameter wake each other where the topology shows none. Method: 300 naps
 * that end because the request lane idles.
 */
static verdict by_hand(void)
{
	struct nanonap_stats stats = { .cpu = 1 };
	const struct elfen_task_slot *slots;
	struct lane_thread request;
	int fd = open_device();

	slots = map_slots(fd);
	pin(1);
	lane_thread_start(&request, 0);
	do {
		uint64_t switches = peek(&slots[0].switches);

		lane_thread_busy(&request, 1 + random_below(200 * US));
		while (peek(&slots[0].switches) == switches)
			__builtin_ia32_pause();
		CHECK(nap_on(fd, 0, peek(&slots[0].switches), 100 * MS) > 0);
		CHECK(!ioctl(fd, NANONAP_STATS, &stats));
	} while (stats.woke[NANONAP_WOKE_IDLE] < 300);
	lane_thread_stop(&request);
	return NULL;
}

const struct test bare_tests[] = {
	{ "no-mwait-no-nap", PRODUCT, "", no_mwait },
	{ "no-siblings-no-nap", PRODUCT, "wait=spin", no_siblings },
	{ "pairs-by-hand", PRODUCT, "wait=spin pairs=0:1", by_hand },
	{ 0 },
};
