// SPDX-License-Identifier: GPL-2.0-only
/*
 * The device, the map and pinned threads, for every test. Failures that a working guest cannot have
 * end the test here.
 */
#define _GNU_SOURCE
#include "harness.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int verdict_pipe = -1;

static void broken(const char *what)
{
	dprintf(verdict_pipe, "%s: %s", what, strerror(errno));
	_exit(1);
}

verdict because(const char *format, ...)
{
	static char text[512];
	va_list arguments;

	va_start(arguments, format);
	vsnprintf(text, sizeof(text), format, arguments);
	va_end(arguments);
	return text;
}

int load(const char *file, const char *parameters)
{
	int fd = open(file, O_RDONLY | O_CLOEXEC);
	int result;

	if (fd < 0)
		broken(file);
	result = syscall(SYS_finit_module, fd, parameters, 0);
	close(fd);
	return result;
}

int unload(void)
{
	return syscall(SYS_delete_module, "nanonap", O_NONBLOCK);
}

int open_device(void)
{
	struct nanonap_version version = { .version = NANONAP_ABI };
	int fd = open("/dev/nanonap", O_RDWR | O_CLOEXEC);

	if (fd < 0)
		broken("/dev/nanonap");
	if (ioctl(fd, NANONAP_VERSION, &version))
		broken("NANONAP_VERSION");
	return fd;
}

const struct elfen_task_slot *map_slots(int fd)
{
	struct nanonap_version version = { .version = NANONAP_ABI };
	const struct elfen_page_header *page;

	if (ioctl(fd, NANONAP_VERSION, &version))
		broken("NANONAP_VERSION");
	page = mmap(NULL, version.map_bytes, PROT_READ, MAP_SHARED, fd, 0);
	if (page == MAP_FAILED)
		broken("mapping the task map");
	return (const struct elfen_task_slot *)(page + 1);
}

void pin(int cpu)
{
	cpu_set_t set;

	CPU_ZERO(&set);
	CPU_SET(cpu, &set);
	if (sched_setaffinity(0, sizeof(set), &set))
		broken("pinning");
}

void pin_all(void)
{
	cpu_set_t set;

	memset(&set, 0xff, sizeof(set));
	if (sched_setaffinity(0, sizeof(set), &set))
		broken("unpinning");
}

uint64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000000ULL + now.tv_nsec;
}

uint64_t own_task(void)
{
	return (uint64_t)getpid() << 32 | (uint32_t)gettid();
}

void write_text(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY | O_TRUNC | O_CLOEXEC);

	if (fd < 0 || write(fd, text, strlen(text)) < 0)
		broken(path);
	close(fd);
}

long read_text(const char *path, char *text, long bytes)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	long done = 0, count;

	if (fd < 0)
		broken(path);
	while (done < bytes - 1 && (count = read(fd, text + done, bytes - 1 - done)) > 0)
		done += count;
	close(fd);
	text[done] = 0;
	return done;
}

int nap_on(int fd, unsigned int request_cpu, uint64_t seen, uint64_t bound_ns)
{
	struct nanonap_nap nap = {
		.request_cpu = request_cpu,
		.seen_switches = seen,
		.bound_ns = bound_ns,
	};

	return ioctl(fd, NANONAP_NAP, &nap);
}

uint64_t cpu_ns(pthread_t thread)
{
	struct timespec used;
	clockid_t clock;

	if (pthread_getcpuclockid(thread, &clock) || clock_gettime(clock, &used))
		broken("a thread's clock");
	return used.tv_sec * 1000000000ULL + used.tv_nsec;
}

uint64_t test_seed;

int hotplug_rounds(void)
{
	const char *rounds = getenv("HOTPLUG_ROUNDS");

	return rounds ? atoi(rounds) : 0;
}
static __thread uint64_t random_state;

void seed_random(uint64_t seed)
{
	random_state = seed * 2 + 1;
}

uint32_t random_below(uint32_t limit)
{
	/* A multiplicative congruential generator; its upper half is good enough to vary a test. */
	if (!random_state)
		seed_random(test_seed + gettid());
	random_state = random_state * 6364136223846793005ULL + 1442695040888963407ULL;
	return limit ? (random_state >> 33) % limit : 0;
}

static void futex_wait(int *word, int value)
{
	syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void futex_wake(int *word)
{
	syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

static void one_round(struct lane_thread *lane)
{
	uint64_t end = now_ns() + lane->round_ns;

	while (lane->round_ns ? now_ns() < end : !__atomic_load_n(&lane->release, __ATOMIC_ACQUIRE))
		__builtin_ia32_pause();
}

static void *serve(void *argument)
{
	struct lane_thread *lane = argument;
	int done = 0;

	pin(lane->cpu);
	__atomic_store_n(&lane->task, own_task(), __ATOMIC_RELEASE);
	for (;;) {
		while (__atomic_load_n(&lane->asked, __ATOMIC_ACQUIRE) == done)
			futex_wait(&lane->asked, done);
		if (__atomic_load_n(&lane->stop, __ATOMIC_ACQUIRE))
			return NULL;
		__atomic_store_n(&lane->begun, done + 1, __ATOMIC_RELEASE);
		one_round(lane);
		__atomic_store_n(&lane->finished, ++done, __ATOMIC_RELEASE);
	}
}

void lane_thread_start(struct lane_thread *lane, int cpu)
{
	memset(lane, 0, sizeof(*lane));
	lane->cpu = cpu;
	if (pthread_create(&lane->thread, NULL, serve, lane))
		broken("a thread");
	while (!peek(&lane->task))
		sched_yield();
}

/*
 * Waits for `begun` and not for the thread's slot. If a wake-up comes while the thread goes to
 * sleep, the slot holds its task for a moment before the round, and then the idle task.
 */
void lane_thread_await(const struct lane_thread *lane)
{
	while (__atomic_load_n(&lane->begun, __ATOMIC_ACQUIRE) != lane->asked)
		sched_yield();
}

bool lane_thread_finished(const struct lane_thread *lane)
{
	return __atomic_load_n(&lane->finished, __ATOMIC_ACQUIRE) == lane->asked;
}

void lane_thread_busy(struct lane_thread *lane, uint64_t round_ns)
{
	/* The last round is over, so the thread does not read these words now. */
	while (!lane_thread_finished(lane))
		sched_yield();
	lane->round_ns = round_ns;
	lane->release = 0;
	__atomic_add_fetch(&lane->asked, 1, __ATOMIC_RELEASE);
	futex_wake(&lane->asked);
}

void lane_thread_idle(struct lane_thread *lane)
{
	__atomic_store_n(&lane->release, 1, __ATOMIC_RELEASE);
}

void lane_thread_stop(struct lane_thread *lane)
{
	lane_thread_idle(lane);
	__atomic_store_n(&lane->stop, 1, __ATOMIC_RELEASE);
	__atomic_add_fetch(&lane->asked, 1, __ATOMIC_RELEASE);
	futex_wake(&lane->asked);
	pthread_join(lane->thread, NULL);
}
