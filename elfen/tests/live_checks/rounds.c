/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Two loops without calls, with short instructions, whose rounds take a few nanoseconds. One uses
 * only registers. The other has a branch past its middle and two exits. Prints the results.
 */
#include <stdio.h>
#include <stdlib.h>

int main(int count, char **words)
{
	unsigned long x = 1, sum = 0, rounds = count > 1 ? strtoul(words[1], NULL, 10) : 1000000;
	unsigned char bytes[256];

	for (unsigned long i = 0; i < rounds; i++) {
		x ^= x << 13;
		x ^= x >> 7;
		x ^= x << 17;
	}
	for (unsigned long i = 0; i < 256; i++)
		bytes[i] = x >> (i % 57);
	for (unsigned long i = 0; i < rounds; i++) {
		if (bytes[(sum + i) & 0xff] & 1)
			sum += i ^ x;
		else if (!(sum >> 1) && i > 1000)
			break;
	}
	printf("%lx %lx\n", x, sum);
	return 3;
}
