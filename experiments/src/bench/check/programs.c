/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * The programs into which `elfen lab bench check` puts checks. They differ in how often they enter
 * a function. They are built once for each kind of check. With -DINLINE the checks are in the
 * source. With -DCOUNT they are counted instead.
 *
 * Usage: programs NAME REPETITIONS
 *
 * Prints the time of the shortest repetition in nanoseconds, the result, and the number of checks.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static unsigned long checks;
#if defined(INLINE)
#include "elfen_check.h"
#define CHECK() elfen_check()
#elif defined(COUNT)
#define CHECK() ((void)checks++)
#else
#define CHECK() ((void)0)
#endif
#define NOINLINE __attribute__((noinline, noclone))

typedef unsigned long word;

/* ---- calls: only calls of an empty function ---- */

NOINLINE static void nothing(void)
{
	CHECK();
	__asm__ volatile("");
}

static word calls(void)
{
	int i;

	for (i = 0; i < 200000; i++)
		nothing();
	return (word)i;
}

/* ---- fib: two calls and an addition ---- */

NOINLINE static word fib(int n)
{
	CHECK();
	return n < 2 ? (word)n : fib(n - 1) + fib(n - 2);
}

static word run_fib(void)
{
	return fib(20);
}

/* ---- matrix: multiplies 5x5 matrices, as in the thesis ---- */

enum { SIDE = 5 };

NOINLINE static void multiply(double to[SIDE][SIDE], double a[SIDE][SIDE], double b[SIDE][SIDE])
{
	int i, j, k;

	CHECK();
	for (i = 0; i < SIDE; i++)
		for (j = 0; j < SIDE; j++) {
			double sum = 0;

			for (k = 0; k < SIDE; k++)
				sum += a[i][k] * b[k][j];
			to[i][j] = sum;
		}
}

static word matrix(void)
{
	double a[SIDE][SIDE], b[SIDE][SIDE], c[SIDE][SIDE];
	int i, j, turn;

	for (i = 0; i < SIDE; i++)
		for (j = 0; j < SIDE; j++)
			a[i][j] = b[i][j] = (double)((i * 7 + j * 3) % 5) / 16;
	for (turn = 0; turn < 4000; turn++) {
		multiply(c, a, b);
		a[turn % SIDE][0] = c[0][turn % SIDE] / 1024 + 0.25;
	}
	return (word)(c[2][3] * 1e9);
}

/* ---- words: counts the words of a text, as real programs do ---- */

enum { TEXT = 60000, BUCKETS = 1024, ENTRIES = 8192 };

struct entry {
	struct entry *next;
	const char *start;
	size_t length;
	word count;
};

static char text[TEXT];
static struct entry *buckets[BUCKETS], entries[ENTRIES];
static size_t used;

NOINLINE static void write_text(void)
{
	word state = 12345;
	size_t i;

	CHECK();
	for (i = 0; i < TEXT; i++) {
		state = state * 6364136223846793005ul + 1442695040888963407ul;
		text[i] = (char)(state >> 33 & 7 ? 'a' + (state >> 40 & 3) : ' ');
	}
}

NOINLINE static word hash(const char *start, size_t length)
{
	word value = 0xcbf29ce484222325ul;
	size_t i;

	CHECK();
	for (i = 0; i < length; i++)
		value = (value ^ (unsigned char)start[i]) * 0x100000001b3ul;
	return value ^ value >> 32;
}

NOINLINE static int same(const struct entry *entry, const char *start, size_t length)
{
	CHECK();
	return entry->length == length && !memcmp(entry->start, start, length);
}

NOINLINE static struct entry *find(const char *start, size_t length)
{
	struct entry **at, *entry;

	CHECK();
	for (at = &buckets[hash(start, length) % BUCKETS]; *at; at = &(*at)->next)
		if (same(*at, start, length))
			return *at;
	if (used == ENTRIES)
		return entries;
	entry = &entries[used++];
	entry->next = NULL;
	entry->start = start;
	entry->length = length;
	entry->count = 0;
	return *at = entry;
}

NOINLINE static size_t word_length(const char *start, const char *end)
{
	const char *at = start;

	CHECK();
	while (at < end && *at != ' ')
		at++;
	return (size_t)(at - start);
}

static word words(void)
{
	const char *at = text, *end = text + TEXT;
	word sum = 0;
	size_t i;

	used = 0;
	memset(buckets, 0, sizeof(buckets));
	if (!text[0])
		write_text();
	while (at < end) {
		size_t length = word_length(at, end);

		if (length)
			find(at, length)->count++;
		at += length + 1;
	}
	for (i = 0; i < used; i++)
		sum = sum * 31 + entries[i].count;
	return sum;
}

/* ---- */

static word now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (word)now.tv_sec * 1000000000ul + (word)now.tv_nsec;
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		word (*run)(void);
	} programs[] = {
		{ "calls", calls }, { "fib", run_fib }, { "matrix", matrix }, { "words", words }
	};
	word best = ~0ul, result = 0;
	size_t i;
	int repetition;

	for (i = 0; argc == 3 && i < sizeof(programs) / sizeof(programs[0]); i++) {
		if (strcmp(argv[1], programs[i].name))
			continue;
		/* The first run warms up. */
		result = programs[i].run();
		for (repetition = 0; repetition < atoi(argv[2]); repetition++) {
			word start = now_ns(), took;

			checks = 0;
			result = programs[i].run();
			took = now_ns() - start;
			best = took < best ? took : best;
		}
		printf("%lu %lx %lu\n", best, result, checks);
		return 0;
	}
	return 2;
}
