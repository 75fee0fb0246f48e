/* Counts up in a file that the test maps, with a check at each turn. */
#include <fcntl.h>
#include <sys/mman.h>

#include "elfen_check.h"

int main(int argc, char **argv)
{
	volatile unsigned long *count;
	const int file = open(argv[argc - 1], O_RDWR);

	count = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	if (count == MAP_FAILED)
		return 9;
	for (;;) {
		elfen_check();
		++*count;
	}
}
