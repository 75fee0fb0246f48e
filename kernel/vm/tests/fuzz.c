// SPDX-License-Identifier: GPL-2.0-only
/*
 * Random calls from several threads and processes at once. Passes if the kernel prints no warning
 * (main.c checks this), and if the device works afterwards and has leaked nothing.
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
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define THREADS 4

static uint64_t end_ns;
static int files[8];
static char *edge; /* the end of mapped memory */
static uint64_t calls, accepted;

static uint64_t random_word(void)
{
	static const uint64_t telling[] = {
		0, 1, 2, 3, 0x7fffffff, 0x80000000, 0xffffffff, 1ULL << 32, 1ULL << 63, ~0ULL,
		NANONAP_BOUND_MAX_NS, NANONAP_BOUND_MAX_NS + 1, NANONAP_ABI,
	};
	uint32_t choice = random_below(32);

	if (choice < sizeof(telling) / sizeof(*telling))
		return telling[choice];
	return (uint64_t)random_below(~0U) << 32 | random_below(choice < 20 ? 4096 : ~0U);
}

static unsigned long random_command(void)
{
	static const unsigned long real[] = { NANONAP_VERSION, NANONAP_NAP, NANONAP_WATCH,
					      NANONAP_STATS };

	switch (random_below(4)) {
	case 0:
		return _IOC(random_below(4), 0xE1, random_below(8), random_below(256));
	case 1:
		return random_word();
	default:
		return real[random_below(4)];
	}
}

/* Fills a structure, mostly with small numbers, so that many calls pass the checks. */
static void fill(uint64_t *words, int count)
{
	int i;

	for (i = 0; i < count; i++)
		words[i] = random_below(3) ? random_below(3) : random_word();
	if (random_below(2))
		words[2] = random_below(3 * MS); /* the bound of a nap */
}

static unsigned long random_pointer(uint64_t *words)
{
	switch (random_below(12)) {
	case 0:
		return random_word();
	case 1:
		return 0xffff800000000000UL + random_word();
	case 2:
		return (unsigned long)(edge - random_below(100)); /* partly mapped */
	case 3:
		return (unsigned long)&random_command; /* not writable */
	case 4:
		return (unsigned long)words + 1 + random_below(7); /* not aligned */
	default:
		return (unsigned long)words;
	}
}

static void map_something(int fd)
{
	size_t bytes = 1 + random_below(random_below(2) ? 4096 : 1 << 16);
	off_t offset = random_below(4) ? 0 : (off_t)(random_word() & ~4095ULL);
	int protection = random_below(8);
	char *page = mmap(NULL, bytes, protection, 1 + random_below(2), fd, offset);
	volatile char *byte = page;

	if (page == MAP_FAILED)
		return;
	if (protection & PROT_READ)
		(void)*byte;
	mprotect(page, bytes, random_below(8));
	madvise(page, bytes, random_below(26));
	/* Unmaps no more than was mapped. */
	munmap(page, bytes);
}

static void *makes_calls(void *argument)
{
	uint64_t words[16];
	cpu_set_t set;

	seed_random(test_seed + (uintptr_t)argument);
	while (now_ns() < end_ns) {
		int *file = &files[random_below(8)];
		int fd;

		switch (random_below(64)) {
		case 0: /* other threads may be inside a call on this file */
			fd = open("/dev/nanonap", random_below(3) | O_CLOEXEC);
			fd = __atomic_exchange_n(file, fd, __ATOMIC_SEQ_CST);
			close(fd);
			break;
		case 1:
			map_something(*file);
			break;
		case 2:
			CPU_ZERO(&set);
			CPU_SET(random_below(2), &set);
			sched_setaffinity(0, sizeof(set), &set);
			break;
		default:
			fill(words, 16);
			if (ioctl(*file, random_command(), random_pointer(words)) >= 0)
				__atomic_add_fetch(&accepted, 1, __ATOMIC_RELAXED);
			__atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED);
		}
	}
	return NULL;
}

/* Starts a process that makes the same calls, and kills it at a random moment. */
static void be_killed(void)
{
	pid_t child = fork();
	uintptr_t seed = random_below(1 << 20);
	pthread_t thread;

	if (!child) {
		pthread_create(&thread, NULL, makes_calls, (void *)seed);
		makes_calls((void *)(seed + 1));
		_exit(0);
	}
	usleep(random_below(200000));
	kill(child, SIGKILL);
	waitpid(child, NULL, 0);
}

static verdict fuzz(void)
{
	const char *seconds = getenv("FUZZ_SECONDS");
	const struct elfen_task_slot *slots;
	pthread_t threads[THREADS];
	int i, fd;

	end_ns = now_ns() + (seconds ? strtoull(seconds, NULL, 10) : 10) * 1000 * MS;
	edge = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(edge != MAP_FAILED && !munmap(edge + 4096, 4096));
	edge += 4096;
	for (i = 0; i < 8; i++)
		files[i] = open_device();
	for (i = 0; i < THREADS; i++)
		pthread_create(&threads[i], NULL, makes_calls, (void *)(uintptr_t)(i + 1));
	while (now_ns() < end_ns)
		be_killed();
	for (i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
	for (i = 0; i < 8; i++)
		close(files[i]);
	printf("note: %llu calls, %llu of them accepted\n", (unsigned long long)calls,
	       (unsigned long long)accepted);
	CHECK(calls > 1000 && accepted > calls / 100);
	/* No file watches a CPU any more, naps work, and only this file holds the module. */
	fd = open_device();
	slots = map_slots(fd);
	for (i = 0; i < 2; i++) {
		pin(i);
		usleep(1000);
		CHECK(peek(&slots[i].switched_at_ns) == 0);
		CHECK(nap_on(fd, !i, 0, MS) > 0);
	}
	munmap((void *)((uintptr_t)slots & ~4095UL), 4096);
	close(fd);
	CHECK(!unload());
	return NULL;
}

const struct test fuzz_tests[] = {
	{ "fuzzed-calls", PRODUCT, "wait=spin", fuzz },
	{ 0 },
};
