// SPDX-License-Identifier: MIT OR Apache-2.0
#include "micro.h"

#include <string.h>

#define NOINLINE __attribute__((noinline))
#define SIDE ELFEN_MICRO_SIDE

/* The compiler must neither drop a call nor inline it. */
#define BARRIER() __asm__ volatile("" ::: "memory")

/* One step of splitmix64, as in src/batch.rs. */
static inline uint64_t mix(uint64_t x)
{
	x += 0x9e3779b97f4a7c15u;
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
	return x ^ (x >> 31);
}

/* A number in [-1, 1) from the top 53 bits. It is exact, so C and Rust compute the same number. */
static inline double unit(uint64_t bits)
{
	return (double)(int64_t)(bits >> 11) / 4503599627370496.0 - 1.0;
}

NOINLINE static void nothing(void)
{
	BARRIER();
}

uint64_t elfen_micro_loop(uint64_t seed, uint64_t calls)
{
	uint64_t done = 0;

	for (uint64_t i = 0; i < calls; i++) {
		nothing();
		done++;
	}
	return mix(seed ^ done);
}

NOINLINE static void multiply(const double a[SIDE][SIDE], const double b[SIDE][SIDE],
			      double out[SIDE][SIDE])
{
	for (int i = 0; i < SIDE; i++) {
		for (int j = 0; j < SIDE; j++) {
			double sum = 0;

			for (int k = 0; k < SIDE; k++)
				sum += a[i][k] * b[k][j];
			out[i][j] = sum;
		}
	}
	BARRIER();
}

uint64_t elfen_micro_matrix(uint64_t seed, uint64_t calls)
{
	double a[SIDE][SIDE], b[SIDE][SIDE], out[SIDE][SIDE];
	uint64_t state = seed, sum = 0, bits;

	for (int i = 0; i < SIDE; i++) {
		for (int j = 0; j < SIDE; j++) {
			state = mix(state);
			a[i][j] = unit(state);
			state = mix(state);
			b[i][j] = unit(state);
		}
	}
	for (uint64_t i = 0; i < calls; i++) {
		int row = i % SIDE, column = i / SIDE % SIDE;

		multiply(a, b, out);
		memcpy(&bits, &out[row][column], sizeof(bits));
		sum = mix(sum ^ bits);
		b[row][column] = unit(sum);
	}
	return sum;
}

NOINLINE static void flush(uint64_t *buffer)
{
	memset(buffer, 0, ELFEN_MICRO_FLUSH_WORDS * sizeof(*buffer));
	BARRIER();
}

uint64_t elfen_micro_flush(uint64_t seed, uint64_t calls, uint64_t *buffer)
{
	uint64_t sum = seed;

	for (uint64_t i = 0; i < calls; i++) {
		uint64_t at = sum % ELFEN_MICRO_FLUSH_WORDS;

		buffer[at] = sum;
		BARRIER();
		flush(buffer);
		sum = mix(sum + buffer[at] + 1);
	}
	return sum;
}
