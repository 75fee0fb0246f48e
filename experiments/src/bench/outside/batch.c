/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * The batch's side of `elfen bench overlap`: reads the clock all the time, and notes when it was
 * off its lane. With -DCHECKS each round has a check, and that is all that it shares with Elfen.
 *
 * A stretch without a reading is a nap if a check took it. Elsewhere something took the CPU:
 * another task, or an interrupt, which leaves the batch on its lane and is no way off it.
 *
 *   batch FILE      (on SIGTERM: pairs of 64-bit words, the reading before a stretch and after it)
 */
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/resource.h>
#include <time.h>
#ifdef CHECKS
#include "elfen_check.h"
#endif

#define MOST 2000000
/* Longer than any two readings are apart, and shorter than what takes a CPU from a program. */
#define STRETCH 2000
/* Readings from check to check. */
#define ROUND 2

static uint64_t pauses[MOST][2];
static size_t count;
static volatile sig_atomic_t ended;

static void end(int signal)
{
	(void)signal;
	ended = 1;
}

static uint64_t now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

/* Whether another task had the CPU since this was asked last. */
static int was_switched_out(void)
{
	static long before;
	struct rusage usage;
	long switches;

	getrusage(RUSAGE_THREAD, &usage);
	switches = usage.ru_nvcsw + usage.ru_nivcsw;
	if (switches == before)
		return 0;
	before = switches;
	return 1;
}

static void note(uint64_t from, uint64_t to)
{
	if (count < MOST) {
		pauses[count][0] = from;
		pauses[count++][1] = to;
	}
}

int main(int argc, char **argv)
{
	uint64_t last, reading;
	int i;
	FILE *file = argc == 2 ? fopen(argv[1], "wb") : NULL;

	if (!file)
		return 2;
	signal(SIGTERM, end);
	/* Says that it runs. */
	puts("ready");
	fflush(stdout);
	was_switched_out();
	last = now();
	while (!ended) {
#ifdef CHECKS
		elfen_check();
		reading = now();
		if (reading - last > STRETCH) {
			was_switched_out();
			note(last, reading);
		}
		last = reading;
#endif
		for (i = 0; i < ROUND; i++) {
			reading = now();
			if (reading - last > STRETCH && was_switched_out())
				note(last, reading);
			last = reading;
		}
	}
	if (count == MOST)
		count--;
	note(last, UINT64_MAX);
	return fwrite(pauses, sizeof(pauses[0]), count, file) == count && !fclose(file) ? 0 : 1;
}
