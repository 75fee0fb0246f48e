/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Tests that a check at a function's entry preserves all arguments: integer registers, vector
 * registers of every width that the CPU has, the number of vectors of a variadic call in %al, and
 * the static chain of a nested function in %r10. Prints the wrong arguments and their number.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define NOINLINE __attribute__((noinline, noclone))

typedef long v2 __attribute__((vector_size(16)));
typedef long v4 __attribute__((vector_size(32)));
typedef long v8 __attribute__((vector_size(64)));

static int wrong;

static void expect(int holds, const char *what)
{
	if (!holds && wrong++ < 10)
		printf("wrong: %s\n", what);
}

NOINLINE static long integers(long a, long b, long c, long d, long e, long f, long g)
{
	return a + 2 * b + 3 * c + 5 * d + 7 * e + 11 * f + 13 * g;
}

NOINLINE static double doubles(double a, double b, double c, double d, double e, double f,
			       double g, double h)
{
	return a + 2 * b + 3 * c + 5 * d + 7 * e + 11 * f + 13 * g + 17 * h;
}

NOINLINE static double variadic(int count, ...)
{
	va_list list;
	double sum = 0;
	int i;

	va_start(list, count);
	for (i = 0; i < count; i++)
		sum += va_arg(list, double);
	va_end(list);
	return sum;
}

NOINLINE static int nested(int base)
{
	NOINLINE int inner(int more)
	{
		return base + more;
	}

	return inner(1) + inner(2);
}

#define VECTORS(type, width)                                                                       \
	__attribute__((target(width))) NOINLINE static int hold_##type(                            \
		type a, type b, type c, type d, type e, type f, type g, type h, const type *as)    \
	{                                                                                          \
		const type args[8] = { a, b, c, d, e, f, g, h };                                   \
                                                                                                   \
		return !memcmp(args, as, sizeof(args));                                            \
	}                                                                                          \
	__attribute__((target(width))) NOINLINE static void try_##type(long seed)                  \
	{                                                                                          \
		type args[8];                                                                      \
		unsigned int i;                                                                    \
                                                                                                   \
		for (i = 0; i < sizeof(args) / sizeof(long); i++)                                  \
			((long *)args)[i] = seed * 31 + i;                                         \
		expect(hold_##type(args[0], args[1], args[2], args[3], args[4], args[5], args[6],  \
				   args[7], args), #type);                                         \
	}

VECTORS(v2, "sse2")
VECTORS(v4, "avx2")
VECTORS(v8, "avx512f")

int main(int argc, char **argv)
{
	double until = argc > 1 ? atof(argv[1]) : 0.1;
	const clock_t start = clock();
	long calls = 0;
	int has_avx2 = __builtin_cpu_supports("avx2");
	int has_avx512 = __builtin_cpu_supports("avx512f");

	do {
		long i;

		for (i = 0; i < 1000; i++, calls++) {
			expect(integers(i, 2, 3, 4, 5, 6, 7) == i + 4 + 9 + 20 + 35 + 66 + 91,
			       "integers");
			expect(doubles(i, 1, 1, 1, 1, 1, 1, 1) == i + 58., "doubles");
			expect(variadic(9, 1., 2., 3., 4., 5., 6., 7., 8., (double)i) == i + 36.,
			       "variadic");
			expect(nested((int)i) == 2 * i + 3, "nested");
			try_v2(i);
			if (has_avx2)
				try_v4(i);
			if (has_avx512)
				try_v8(i);
		}
	} while ((double)(clock() - start) < until * CLOCKS_PER_SEC);
	printf("%d wrong\n", wrong);
	return wrong != 0;
}
