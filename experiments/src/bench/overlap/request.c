/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * The request program of `elfen lab bench overlap`. For NS nanoseconds it is busy for TURN ns and
 * then sleeps, again and again. Each pause is random: between TURN / 2 and TURN * 3 / 2 + 1 ms. The
 * program records when its lane was busy, with itself and with other tasks. Nothing here depends on
 * Elfen.
 *
 * Usage: request TURN NS SEED > turns
 *
 * The output is pairs of 64-bit words, start and end: its own turns, then 0 and 0, then the turns
 * of other tasks.
 */
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <time.h>
#include "switches.h"

#define MOST 200000

static uint64_t turns[MOST][2], others[MOST][2];
static size_t count, others_count;

static uint64_t now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

/* Xorshift. Any generator is good enough to keep requests out of step with timers. */
static uint64_t draw(uint64_t *state, uint64_t below)
{
	*state ^= *state << 13;
	*state ^= *state >> 7;
	*state ^= *state << 17;
	return *state % below;
}

/*
 * A turn lasts from when the lane gets busy until it idles. It is an own turn if this program ran
 * in it.
 */
static void read_turns(uint32_t own)
{
	static uint64_t from;
	static int is_own;
	struct a_switch found;

	while (next_switch(&found)) {
		/* Switch-out events name the next thread, so switch-in events are not needed. */
		if (found.in)
			continue;
		if (found.next && !from)
			from = found.at;
		is_own |= found.next == own;
		if (found.next || !from)
			continue;
		if (is_own && count < MOST) {
			turns[count][0] = from;
			turns[count++][1] = found.at;
		} else if (others_count < MOST) {
			others[others_count][0] = from;
			others[others_count++][1] = found.at;
		}
		from = 0;
		is_own = 0;
	}
}

int main(int argc, char **argv)
{
	static const uint64_t between[2];
	uint64_t turn, end, from, pause, state;
	uint32_t own = getpid();

	if (argc != 4)
		return 2;
	note_switches(-1, sched_getcpu());
	turn = strtoull(argv[1], NULL, 10);
	end = now() + strtoull(argv[2], NULL, 10);
	state = strtoull(argv[3], NULL, 10) | 1;
	while (now() < end && count < MOST) {
		pause = turn / 2 + draw(&state, turn + 1000000);
		nanosleep(&(struct timespec){ (time_t)(pause / 1000000000u),
					      (long)(pause % 1000000000u) }, NULL);
		from = now();
		read_turns(own);
		while (now() < from + turn)
			;
	}
	nanosleep(&(struct timespec){ 0, 1000000 }, NULL);
	read_turns(own);
	return fwrite(turns, sizeof(turns[0]), count, stdout) == count &&
	       fwrite(between, sizeof(between), 1, stdout) == 1 &&
	       fwrite(others, sizeof(others[0]), others_count, stdout) == others_count ? 0 : 1;
}
