/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * The request's side of `elfen lab bench overlap`: busy for TURN ns, then asleep for a time drawn
 * evenly from half of that to one and a half times that and 1 ms more, for NS. It notes when
 * its lane was busy, by itself and by others; nothing here knows of Elfen.
 *
 *   request TURN NS SEED > turns           (pairs of 64-bit words, from and to: its turns, 0 and 0,
 *                                           and the turns of others)
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

/* Xorshift: any generator will do to keep requests out of step with timers. */
static uint64_t draw(uint64_t *state, uint64_t below)
{
	*state ^= *state << 13;
	*state ^= *state >> 7;
	*state ^= *state << 17;
	return *state % below;
}

/*
 * A turn is the lane's: from when it was given to anybody until it was given to nobody, with this
 * program among them.
 */
static void read_turns(uint32_t own)
{
	static uint64_t from;
	static int is_own;
	struct a_switch found;

	while (next_switch(&found)) {
		/* What the thread that leaves says is enough. */
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
