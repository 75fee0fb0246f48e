/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Adds up the results of all parts. */
#include <stdio.h>

#define SIX(of, a, b, c, d, e, f) of(a) of(b) of(c) of(d) of(e) of(f)
#define ALL(of)                       \
	SIX(of, 0, 1, 2, 3, 4, 5)     \
	SIX(of, 6, 7, 8, 9, 10, 11)   \
	SIX(of, 12, 13, 14, 15, 16, 17) \
	SIX(of, 18, 19, 20, 21, 22, 23)
#define DECLARED(n) int part##n(int);
#define ADDED(n) +part##n(i)

ALL(DECLARED)

int main(void)
{
	long sum = 0;

	for (int i = 0; i < 1000; i++)
		sum += 0 ALL(ADDED);
	printf("%ld\n", sum);
	return 0;
}
