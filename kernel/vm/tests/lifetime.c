// SPDX-License-Identifier: GPL-2.0-only
/*
 * The end of a process, a CPU or the module while threads nap: nothing hangs and nothing leaks.
 */
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

/* Starts a process that naps on `batch` for ever, without checking the lane between two naps. */
static pid_t napping_process(unsigned int request, int batch)
{
	pid_t child = fork();
	const struct elfen_task_slot *slots;
	int fd;

	if (child)
		return child;
	fd = open_device();
	slots = map_slots(fd);
	pin(batch);
	for (;;)
		nap_on(fd, request, peek(&slots[request].switches), 100 * MS);
}

static uint64_t naps_so_far(int fd, unsigned int cpu)
{
	struct nanonap_stats stats = { .cpu = cpu };

	ioctl(fd, NANONAP_STATS, &stats);
	return stats.naps;
}

/*
 * Goal: a process can be killed in its nap. Method: 100 processes, each killed at a random moment.
 * All of them end, and naps still work.
 */
static verdict killed(void)
{
	struct lane_thread request;
	int fd = open_device(), i;

	lane_thread_start(&request, 0);
	lane_thread_busy(&request, 0);
	for (i = 0; i < 100; i++) {
		pid_t child = napping_process(0, 1);
		int status;

		usleep(random_below(4000));
		CHECK(!kill(child, SIGKILL));
		CHECK(waitpid(child, &status, 0) == child);
		CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
	}
	CHECK(naps_so_far(fd, 1) > 10);
	lane_thread_stop(&request);
	return NULL;
}

/*
 * Goal: SIGSTOP and SIGCONT work in a nap. Method: 100 rounds. A stopped process does not nap, and
 * a continued process does.
 */
static verdict stopped(void)
{
	struct lane_thread request;
	int fd = open_device(), i, status;
	pid_t child;

	lane_thread_start(&request, 0);
	lane_thread_busy(&request, 0);
	child = napping_process(0, 1);
	for (i = 0; i < 100; i++) {
		uint64_t naps = naps_so_far(fd, 1);

		while (naps_so_far(fd, 1) < naps + 1)
			usleep(100);
		CHECK(!kill(child, SIGSTOP));
		CHECK(waitpid(child, &status, WUNTRACED) == child && WIFSTOPPED(status));
		naps = naps_so_far(fd, 1);
		usleep(500);
		CHECK(naps_so_far(fd, 1) == naps);
		CHECK(!kill(child, SIGCONT));
	}
	kill(child, SIGKILL);
	waitpid(child, NULL, 0);
	lane_thread_stop(&request);
	return NULL;
}

/*
 * Goal: a batch lane can be taken down while a thread naps on it. Method: 8 rounds of CPU 1 down
 * and up. A nap on another CPU fails with ENXIO, and naps work again when the lane is back.
 */
static verdict batch_lane_goes(void)
{
	struct lane_thread request;
	int fd = open_device(), round;

	pin(0);
	lane_thread_start(&request, 0);
	lane_thread_busy(&request, 0);
	for (round = 0; round < 8; round++) {
		pid_t child = napping_process(0, 1);
		uint64_t naps = naps_so_far(fd, 1);

		while (naps_so_far(fd, 1) == naps)
			usleep(100);
		write_text(CPU1_ONLINE, "0");
		naps = naps_so_far(fd, 1);
		CHECK(nap_on(fd, 0, 0, MS) == -1 && errno == ENXIO);
		usleep(2000);
		CHECK(naps_so_far(fd, 1) == naps);
		write_text(CPU1_ONLINE, "1");
		kill(child, SIGKILL);
		CHECK(waitpid(child, NULL, 0) == child);
	}
	lane_thread_stop(&request);
	return NULL;
}

/*
 * Goal: a request lane can be taken down while its batch lane naps. Method: 8 rounds of CPU 1 down
 * and up, with naps on CPU 0. An offline lane is idle, so the batch thread runs.
 */
static verdict request_lane_goes(void)
{
	const struct elfen_task_slot *slots;
	int fd = open_device(), round;

	slots = map_slots(fd);
	for (round = 0; round < 8; round++) {
		pid_t child = napping_process(1, 0);
		struct lane_thread request;

		lane_thread_start(&request, 1);
		lane_thread_busy(&request, 0);
		usleep(3000);
		write_text(CPU1_ONLINE, "0");
		CHECK(peek(&slots[1].task) == 0);
		pin(0);
		CHECK(nap_on(fd, 1, peek(&slots[1].switches), 100 * MS) == NANONAP_WOKE_IDLE);
		pin_all();
		write_text(CPU1_ONLINE, "1");
		kill(child, SIGKILL);
		CHECK(waitpid(child, NULL, 0) == child);
		lane_thread_stop(&request);
	}
	return NULL;
}

#define SUSPENDS "/sys/power/suspend_stats/success"

/*
 * Goal: suspend and resume work during a nap. Method: the machine suspends to memory, which freezes
 * all threads and takes CPU 1 down. Its clock wakes it, and naps continue afterwards.
 */
static verdict suspended(void)
{
	char suspends[32], suspends_now[32];
	struct lane_thread request;
	int fd = open_device();
	uint64_t naps;
	pid_t child;

	lane_thread_start(&request, 0);
	lane_thread_busy(&request, 0);
	child = napping_process(0, 1);
	naps = naps_so_far(fd, 1);
	while (naps_so_far(fd, 1) == naps)
		usleep(100);
	read_text(SUSPENDS, suspends, sizeof(suspends));
	write_text("/sys/class/rtc/rtc0/wakealarm", "+2");
	write_text("/sys/power/state", "mem");
	read_text(SUSPENDS, suspends_now, sizeof(suspends_now));
	CHECK(atoi(suspends_now) == atoi(suspends) + 1);
	naps = naps_so_far(fd, 1);
	while (naps_so_far(fd, 1) < naps + 3)
		usleep(1000);
	kill(child, SIGKILL);
	CHECK(waitpid(child, NULL, 0) == child);
	lane_thread_stop(&request);
	return NULL;
}

/*
 * Goal: the module cannot be unloaded while a thread, a file or a mapping needs it. Method: unload
 * it during a nap, with an open file, with only a mapping whose file is closed, and with none of
 * these.
 */
static verdict unloading(void)
{
	struct lane_thread request;
	const void *map;
	pid_t child;
	int fd;

	CHECK(!load(PRODUCT, "wait=spin"));
	fd = open_device();
	lane_thread_start(&request, 0);
	lane_thread_busy(&request, 0);
	child = napping_process(0, 1);
	while (naps_so_far(fd, 1) < 2)
		usleep(100);
	close(fd);
	CHECK(unload() == -1 && errno == EWOULDBLOCK);
	kill(child, SIGKILL);
	waitpid(child, NULL, 0);
	lane_thread_stop(&request);

	fd = open_device();
	CHECK(unload() == -1 && errno == EWOULDBLOCK);
	map = mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0);
	CHECK(map != MAP_FAILED);
	close(fd);
	CHECK(unload() == -1 && errno == EWOULDBLOCK);
	CHECK(*(const volatile uint64_t *)map == ELFEN_MAGIC_TASK);
	munmap((void *)map, 4096);
	CHECK(!unload());
	CHECK(access("/dev/nanonap", F_OK));
	return NULL;
}

/*
 * Goal: loading and unloading leaves nothing behind. Method: 10 rounds during many switches, then a
 * search for remaining memory.
 */
static verdict reloading(void)
{
	static char left[1 << 20];
	struct lane_thread request;
	int round, i;

	pin(1);
	lane_thread_start(&request, 0);
	for (round = 0; round < 10; round++) {
		CHECK(!load(PRODUCT, "wait=spin"));
		for (i = 0; i < 50; i++)
			lane_thread_busy(&request, 1);
		read_text("/proc/vmallocinfo", left, sizeof(left));
		CHECK(strstr(left, "map_init"));
		CHECK(!unload());
	}
	lane_thread_stop(&request);
	read_text("/proc/vmallocinfo", left, sizeof(left));
	CHECK(!strstr(left, "map_init") && !strstr(left, "nanonap"));
	return NULL;
}

const struct test lifetime_tests[] = {
	{ "killed-in-a-nap", PRODUCT, "wait=spin", killed },
	{ "killed-in-a-nap-mwait", PRODUCT, "wait=mwait", killed },
	{ "stopped-in-a-nap", PRODUCT, "wait=spin", stopped },
	{ "batch-lane-taken-down", PRODUCT, "wait=spin", batch_lane_goes },
	{ "request-lane-taken-down", PRODUCT, "wait=spin", request_lane_goes },
	{ "suspended-in-a-nap", PRODUCT, "wait=spin", suspended },
	{ "unload-while-in-use", NULL, "", unloading },
	{ "reload", NULL, "", reloading },
	{ 0 },
};
