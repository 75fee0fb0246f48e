// SPDX-License-Identifier: GPL-2.0-only
/* The task map: its layout, its contents, and that no program can write it. */
#define _GNU_SOURCE
#include "harness.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

struct switch_words {
	uint64_t task, at_ns, busy_since_ns, count;
};

static bool snapshot(const struct elfen_task_slot *slot, struct switch_words *words)
{
	words->count = peek(&slot->switches);
	words->task = peek(&slot->task);
	words->at_ns = peek(&slot->switched_at_ns);
	words->busy_since_ns = peek(&slot->busy_since_ns);
	return peek(&slot->switches_begun) == words->count;
}

/*
 * Goal: the header is as in elfen_abi.h. Method: every field, compared with the kernel's own list
 * of CPUs.
 */
static verdict layout(void)
{
	struct nanonap_version version = { .version = NANONAP_ABI };
	const struct elfen_page_header *page;
	int fd = open_device();

	CHECK(!ioctl(fd, NANONAP_VERSION, &version));
	page = mmap(NULL, version.map_bytes, PROT_READ, MAP_SHARED, fd, 0);
	CHECK(page != MAP_FAILED);
	CHECK(page->magic == ELFEN_MAGIC_TASK && page->version == ELFEN_ABI_VERSION);
	CHECK(page->slot_size == sizeof(struct elfen_task_slot) && page->pid_namespace == 0);
	CHECK((long)page->slot_count == sysconf(_SC_NPROCESSORS_CONF));
	CHECK(page->slot_count == version.cpus);
	CHECK(page->size == sizeof(*page) + page->slot_count * sizeof(struct elfen_task_slot));
	CHECK(page->size <= version.map_bytes && version.map_bytes % 4096 == 0);
	CHECK(!strcmp((const char *)page->name, "tasks"));
	CHECK(version.ties == 2);
	return NULL;
}

/*
 * Goal: the map is read-only. Method: every way to a writable or executable mapping, and offsets
 * out of range.
 */
static verdict read_only(void)
{
	const int shared_or_private[] = { MAP_SHARED, MAP_PRIVATE };
	char *page, byte = 1;
	int fd = open_device(), memory, i;

	for (i = 0; i < 2; i++) {
		int flags = shared_or_private[i];

		CHECK(mmap(NULL, 4096, PROT_READ | PROT_WRITE, flags, fd, 0) == MAP_FAILED);
		CHECK(errno == EPERM);
		CHECK(mmap(NULL, 4096, PROT_READ | PROT_EXEC, flags, fd, 0) == MAP_FAILED);
		page = mmap(NULL, 4096, PROT_READ, flags, fd, 0);
		CHECK(page != MAP_FAILED);
		CHECK(mprotect(page, 4096, PROT_READ | PROT_WRITE) && errno == EACCES);
		CHECK(mprotect(page, 4096, PROT_READ | PROT_EXEC) && errno == EACCES);
		/* A debugger writes this way, even to read-only mappings. */
		memory = open("/proc/self/mem", O_RDWR | O_CLOEXEC);
		CHECK(memory >= 0);
		CHECK(pwrite(memory, &byte, 1, (off_t)(uintptr_t)page) == -1);
		close(memory);
	}
	CHECK(mmap(NULL, 1 << 20, PROT_READ, MAP_SHARED, fd, 0) == MAP_FAILED && errno == EINVAL);
	CHECK(mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 1 << 20) == MAP_FAILED);
	CHECK(write(fd, &byte, 1) == -1 && read(fd, &byte, 1) == -1);
	return NULL;
}

/*
 * Goal: a slot follows a pinned thread. Method: the thread runs and sleeps on command, 200 times on
 * either CPU.
 */
static verdict follows(void)
{
	const struct elfen_task_slot *slots = map_slots(open_device());
	int cpu, round;

	for (cpu = 0; cpu < 2; cpu++) {
		struct lane_thread lane;

		pin(!cpu);
		lane_thread_start(&lane, cpu);
		for (round = 0; round < 200; round++) {
			lane_thread_busy(&lane, 0);
			while (peek(&slots[cpu].task) != lane.task)
				sched_yield();
			CHECK(peek(&slots[!cpu].task) == own_task());
			lane_thread_idle(&lane);
			while (peek(&slots[cpu].task) == lane.task)
				sched_yield();
		}
		lane_thread_stop(&lane);
	}
	return NULL;
}

static uint64_t kernel_switches(void)
{
	static char text[65536];
	const char *line;

	read_text("/proc/stat", text, sizeof(text));
	line = strstr(text, "\nctxt ");
	return line ? strtoull(line + 6, NULL, 10) : 0;
}

/*
 * Goal: each switch is counted once. Method: the slots' counts, compared with the kernel's own
 * count of switches over 2,000 wake-ups. The two are read one after the other, so a few switches
 * may come in between.
 */
static verdict counts(void)
{
	const struct elfen_task_slot *slots = map_slots(open_device());
	struct lane_thread lane;
	uint64_t kernel, map;
	int round;

	pin(1);
	lane_thread_start(&lane, 0);
	kernel = kernel_switches();
	map = peek(&slots[0].switches) + peek(&slots[1].switches);
	for (round = 0; round < 2000; round++) {
		lane_thread_busy(&lane, 1);
		while (!lane_thread_finished(&lane) || peek(&slots[0].task))
			sched_yield();
	}
	map = peek(&slots[0].switches) + peek(&slots[1].switches) - map;
	kernel = kernel_switches() - kernel;
	lane_thread_stop(&lane);
	CHECK(map >= 4000);
	if (llabs((long long)(kernel - map)) > 20)
		return because("the kernel counts %llu switches, the map %llu",
			       (unsigned long long)kernel, (unsigned long long)map);
	return NULL;
}

/*
 * Goal: the words between the two counters belong to one switch. Method: 200,000 snapshots of a
 * timed lane that switches all the time. Equal counts have equal tasks and times. A later count has
 * no earlier time. An idle lane has no busy period.
 */
static verdict whole(void)
{
	struct nanonap_watch watch = { .cpu = 0, .on = 1 };
	struct switch_words before = { 0 }, now;
	const struct elfen_task_slot *slots;
	int fd = open_device(), i, changes = 0;
	struct lane_thread lane;

	slots = map_slots(fd);
	CHECK(!ioctl(fd, NANONAP_WATCH, &watch));
	pin(1);
	lane_thread_start(&lane, 0);
	for (i = 0; i < 200000 || changes < 100; i++) {
		if (lane_thread_finished(&lane))
			lane_thread_busy(&lane, 1);
		if (!snapshot(&slots[0], &now))
			continue;
		if (now.count == before.count)
			CHECK(now.task == before.task && now.at_ns == before.at_ns);
		else if (now.at_ns && before.at_ns)
			CHECK(now.count > before.count && now.at_ns >= before.at_ns);
		CHECK(now.task ? now.busy_since_ns <= now.at_ns : !now.busy_since_ns);
		changes += now.count != before.count;
		before = now;
	}
	lane_thread_stop(&lane);
	return NULL;
}

/*
 * Goal: a lane that never switches is in the map too. Method: a thread spins on CPU 0 before the
 * module is loaded.
 */
static verdict first_slot(void)
{
	const struct elfen_task_slot *slots;
	struct lane_thread lane;
	int fd;

	pin(1);
	lane_thread_start(&lane, 0);
	lane_thread_busy(&lane, 0);
	usleep(20000);
	CHECK(!load(PRODUCT, ""));
	fd = open_device();
	slots = map_slots(fd);
	CHECK(peek(&slots[0].task) == lane.task || peek(&slots[0].switches) > 1);
	while (peek(&slots[0].task) != lane.task)
		sched_yield();
	CHECK(peek(&slots[1].task) == own_task());
	lane_thread_stop(&lane);
	return NULL;
}

/* Makes CPU 0 switch, and returns whether the switch was timed. */
static bool timed(struct lane_thread *lane, const struct elfen_task_slot *slots)
{
	uint64_t before = now_ns();
	struct switch_words words;

	lane_thread_busy(lane, 0);
	lane_thread_await(lane);
	while (!snapshot(&slots[0], &words) || words.task != lane->task)
		sched_yield();
	lane_thread_idle(lane);
	while (peek(&slots[0].task) == lane->task)
		sched_yield();
	return words.at_ns >= before && words.at_ns <= now_ns();
}

/*
 * Goal: a CPU is timed while a file watches it, and a file's request ends with the file. Method:
 * two files that watch twice, stop watching, and are closed; and a process that is killed while it
 * watches.
 */
static verdict watching(void)
{
	struct nanonap_watch on = { .cpu = 0, .on = 1 }, off = { .cpu = 0, .on = 0 };
	int reader = open_device(), first = open_device(), second = open_device();
	const struct elfen_task_slot *slots = map_slots(reader);
	struct lane_thread lane;
	pid_t child;

	pin(1);
	lane_thread_start(&lane, 0);
	CHECK(!timed(&lane, slots) && peek(&slots[0].switched_at_ns) == 0);
	CHECK(!ioctl(first, NANONAP_WATCH, &on) && !ioctl(first, NANONAP_WATCH, &on));
	CHECK(timed(&lane, slots));
	CHECK(!ioctl(second, NANONAP_WATCH, &on) && !ioctl(second, NANONAP_WATCH, &off));
	CHECK(!ioctl(second, NANONAP_WATCH, &off));
	CHECK(timed(&lane, slots));
	CHECK(!ioctl(second, NANONAP_WATCH, &on));
	close(first);
	CHECK(timed(&lane, slots));
	close(second);
	CHECK(!timed(&lane, slots));
	child = fork();
	if (!child) {
		int fd = open_device();

		ioctl(fd, NANONAP_WATCH, &on);
		kill(getpid(), SIGKILL);
	}
	waitpid(child, NULL, 0);
	CHECK(!timed(&lane, slots));
	lane_thread_stop(&lane);
	return NULL;
}

/*
 * Goal: busy time is counted only while a process watches. Method: 20 rounds of a millisecond,
 * unwatched and watched. The counted time is at least the length of the rounds, and at most the
 * elapsed time.
 */
static verdict busy_time(void)
{
	struct nanonap_watch on = { .cpu = 0, .on = 1 }, off = { .cpu = 0, .on = 0 };
	const struct elfen_task_slot *slots;
	uint64_t before_ns, began_ns;
	int fd = open_device(), part, round;
	struct lane_thread lane;

	slots = map_slots(fd);
	pin(1);
	lane_thread_start(&lane, 0);
	for (part = 0; part < 3; part++) {
		bool watched = part == 1;

		CHECK(!ioctl(fd, NANONAP_WATCH, watched ? &on : &off));
		timed(&lane, slots); /* the first switch after a change decides */
		before_ns = peek(&slots[0].busy_ns);
		began_ns = now_ns();
		for (round = 0; round < 20; round++) {
			lane_thread_busy(&lane, 1 * MS);
			while (!lane_thread_finished(&lane) || peek(&slots[0].task))
				sched_yield();
		}
		before_ns = peek(&slots[0].busy_ns) - before_ns;
		if (watched)
			CHECK(before_ns >= 20 * MS && before_ns <= now_ns() - began_ns);
		else
			CHECK(before_ns == 0);
	}
	lane_thread_stop(&lane);
	return NULL;
}

const struct test map_tests[] = {
	{ "map-layout", PRODUCT, "", layout },
	{ "map-is-read-only", PRODUCT, "", read_only },
	{ "map-follows-a-thread", PRODUCT, "", follows },
	{ "map-counts-every-switch", PRODUCT, "", counts },
	{ "map-snapshots-are-whole", PRODUCT, "", whole },
	{ "map-knows-a-lane-that-never-switches", NULL, "", first_slot },
	{ "watch-ends-with-its-file", PRODUCT, "", watching },
	{ "busy-time-is-counted-while-watched", PRODUCT, "", busy_time },
	{ 0 },
};
