/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * What a program says of its functions, and what that costs it: a caller whose callee works for a
 * tenth of its own time, or calls of a function that does nothing. FILE gets its seconds of CPU.
 *
 *   functions FILE sandwich|calls ROUNDS
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define QUIET __attribute__((no_instrument_function, always_inline)) static inline

QUIET double seconds(void)
{
	struct timespec now;

	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
	return now.tv_sec + now.tv_nsec / 1e9;
}

/* As long wherever the loop lies: each multiplication waits for the one before it. */
QUIET void work(long turns)
{
	long chain = turns;

	for (long turn = 0; turn < turns; turn++)
		__asm__ volatile("imul %0, %0; imul %0, %0; imul %0, %0" : "+r"(chain));
}

__attribute__((noinline)) void filling(long turns)
{
	work(turns);
}

__attribute__((noinline)) void bread(long turns)
{
	work(5 * turns);
	filling(turns);
	work(5 * turns);
}

__attribute__((noinline)) long empty(long n)
{
	__asm__ volatile("" : "+r"(n));
	return n;
}

int main(int count, char **words)
{
	double began, took;
	FILE *told;

	if (count < 4)
		return 2;
	long rounds = atol(words[3]);
	if (strcmp(words[2], "calls") == 0) {
		began = seconds();
		for (long n = 0; n < rounds; n++)
			empty(n);
		took = seconds() - began;
	} else {
		/* As many turns as the filling has in 0.2 us. */
		const long tries = 10000000;
		began = seconds();
		work(tries);
		long turns = tries * 0.2e-6 / (seconds() - began) + 0.5;
		began = seconds();
		for (long n = 0; n < rounds; n++)
			bread(turns);
		took = seconds() - began;
	}
	told = fopen(words[1], "w");
	if (!told)
		return 1;
	fprintf(told, "%.9f", took);
	return fclose(told);
}
