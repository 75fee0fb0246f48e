/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * The batch program of `elfen lab bench overlap`. It reads the clock all the time, and records when
 * it was off its lane. With -DCHECKS each round has a check, which is all that it shares with
 * Elfen. With -DLOOP it works in a loop without a call, and records only its context switches.
 *
 * The program is off its lane while another task has the CPU, and while a check naps. During an
 * interrupt it counts as on its lane.
 *
 * Usage: batch FILE
 *
 * On SIGTERM it writes its pauses to FILE, as pairs of 64-bit words: start and end. A nap and a
 * context switch may overlap.
 */
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <time.h>
#include "switches.h"
#ifdef CHECKS
#include "elfen_check.h"
#endif

#define MOST 2000000
/* Longer than the time between two readings of the clock, and shorter than any nap. */
#define STRETCH 2000
/* Readings of the clock between two checks. */
#define ROUND 2

static uint64_t pauses[MOST][2];
static size_t count;
static volatile sig_atomic_t ended;
#ifdef LOOP
static volatile uint64_t work;
#endif

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

static void note(uint64_t from, uint64_t to)
{
	if (count < MOST) {
		pauses[count][0] = from;
		pauses[count++][1] = to;
	}
}

static inline void note_pauses(void)
{
	static uint64_t since;
	struct a_switch found;

	while (next_switch(&found)) {
		if (found.in && since)
			note(since, found.at);
		since = found.in ? 0 : found.at;
	}
}

int main(int argc, char **argv)
{
	uint64_t last;
	int i;
	FILE *file = argc == 2 ? fopen(argv[1], "wb") : NULL;

	if (!file)
		return 2;
	note_switches(0, -1);
	signal(SIGTERM, end);
	/* Tells the benchmark that the program runs. */
	puts("ready");
	fflush(stdout);
#ifdef LOOP
	while (!ended) {
		work = work * 6364136223846793005u + 1;
		note_pauses();
	}
#endif
	last = now();
	while (!ended) {
#ifdef CHECKS
		uint64_t reading;

		elfen_check();
		reading = now();
		if (reading - last > STRETCH)
			note(last, reading);
#endif
		for (i = 0; i < ROUND; i++)
			last = now();
		note_pauses();
	}
	if (count == MOST)
		count--;
	note(last, UINT64_MAX);
	return fwrite(pauses, sizeof(pauses[0]), count, file) == count && !fclose(file) ? 0 : 1;
}
