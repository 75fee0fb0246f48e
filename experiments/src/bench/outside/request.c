/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * The request's side of `elfen bench overlap`: busy for TURN ns, then asleep for a time drawn
 * evenly from half of that to one and a half times that and 1 ms more, for SECONDS. Its own clock
 * says when it was busy; nothing here knows of Elfen.
 *
 *   request TURN SECONDS SEED > turns      (pairs of 64-bit words: from, to)
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define MOST 200000

static uint64_t turns[MOST][2];

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

int main(int argc, char **argv)
{
	uint64_t turn, end, from, pause, state;
	size_t count = 0;

	if (argc != 4)
		return 2;
	turn = strtoull(argv[1], NULL, 10);
	end = now() + strtoull(argv[2], NULL, 10) * 1000000000u;
	state = strtoull(argv[3], NULL, 10) | 1;
	while (now() < end && count < MOST) {
		pause = turn / 2 + draw(&state, turn + 1000000);
		nanosleep(&(struct timespec){ (time_t)(pause / 1000000000u),
					      (long)(pause % 1000000000u) }, NULL);
		from = now();
		while (now() < from + turn)
			;
		turns[count][0] = from;
		turns[count++][1] = now();
	}
	return fwrite(turns, sizeof(turns[0]), count, stdout) == count ? 0 : 1;
}
