/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Measures what it costs a program to publish its functions: calls an empty function CALLS times.
 * Writes the CPU time in seconds to FILE.
 *
 * Usage: functions FILE CALLS
 */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define QUIET __attribute__((no_instrument_function, always_inline)) static inline

QUIET double seconds(void)
{
	struct timespec now;

	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
	return now.tv_sec + now.tv_nsec / 1e9;
}

__attribute__((noinline)) long empty(long n)
{
	__asm__ volatile("" : "+r"(n));
	return n;
}

int main(int count, char **words)
{
	double began, took;
	FILE *result;

	if (count < 3)
		return 2;
	long calls = atol(words[2]);
	began = seconds();
	for (long n = 0; n < calls; n++)
		empty(n);
	took = seconds() - began;
	result = fopen(words[1], "w");
	if (!result)
		return 1;
	fprintf(result, "%.9f", took);
	return fclose(result);
}
