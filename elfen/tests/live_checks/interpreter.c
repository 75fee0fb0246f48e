/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * An interpreter whose instructions jump to each other through a table. Its program is one loop,
 * whose rounds take about thirty nanoseconds. Prints the result.
 */
#include <stdio.h>
#include <stdlib.h>

enum { MULTIPLY, STORE, LOAD, MIX, DIVIDE, AGAIN, END };

static const unsigned char program[] = {
	MULTIPLY, STORE, DIVIDE, LOAD, MIX, DIVIDE, STORE, LOAD, MIX, DIVIDE, DIVIDE, MIX,
	DIVIDE, AGAIN, END
};

static unsigned long memory[1024];

int main(int count, char **words)
{
	static const void *const table[] = {
		&&multiply, &&store, &&load, &&mix, &&divide, &&again, &&end
	};
	unsigned long rounds = count > 1 ? strtoul(words[1], NULL, 10) : 1000000;
	unsigned long x = 1, y = 0;
	const unsigned char *next = program;

#define NEXT goto *table[*next++]
	NEXT;
multiply:
	x = x * 6364136223846793005UL + 1442695040888963407UL;
	NEXT;
store:
	memory[(x >> 33) % 1024] += 0x123456789;
	NEXT;
load:
	y += memory[(y ^ x >> 40) % 1024];
	NEXT;
mix:
	x ^= y >> 7 ^ 0x1234567;
	NEXT;
divide:
	y = y / ((x >> 50) + 0x12345) + x;
	NEXT;
again:
	if (--rounds)
		next = program;
	NEXT;
end:
	printf("%lx %lx\n", x, y);
	return 3;
}
