/* A program with checks that keeps writing the time into a file, which the test reads. */
#include <fcntl.h>
#include <sys/mman.h>
#include <time.h>
#include "elfen_check.h"

int main(int argc, char **argv)
{
	const int file = open(argv[argc - 1], O_RDWR);
	volatile long long *last;
	struct timespec now;

	last = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	if (last == MAP_FAILED)
		return 9;
	for (;;) {
		elfen_check();
		clock_gettime(CLOCK_MONOTONIC, &now);
		*last = now.tv_sec * 1000000000LL + now.tv_nsec;
	}
}
