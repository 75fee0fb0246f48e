/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Threads that each stand in a different function. With -DLIBRARY and -DTWINS: a library and a
 * program with two functions whose addresses have the same lower half.
 */
#include <pthread.h>
#include <stdio.h>

#ifdef LIBRARY
__attribute__((aligned(4096), noinline)) long twin(long n)
{
	return n + 1;
}

unsigned twin_half(void)
{
	return (unsigned)(unsigned long)twin;
}
#elif defined(TWINS)
long twin(long n);
unsigned twin_half(void);

__attribute__((aligned(4096), noinline)) static long own(long n)
{
	return n + 2;
}

int main(void)
{
	printf("tags: %ld, twins %d\n", twin(own(3)),
	       twin_half() == (unsigned)(unsigned long)own);
	return 0;
}
#else
static pthread_barrier_t all_there;

#define WORK(name)                                                    \
	__attribute__((noinline)) static void *name(void *argument)      \
	{                                                             \
		pthread_barrier_wait(&all_there);                     \
		pthread_barrier_wait(&all_there);                     \
		return argument;                                          \
	}

WORK(first)
WORK(second)

int main(int argc, char **argv)
{
	pthread_t threads[2];

	(void)argv;
	pthread_barrier_init(&all_there, NULL, 3);
	pthread_create(&threads[0], NULL, first, NULL);
	pthread_create(&threads[1], NULL, second, NULL);
	pthread_barrier_wait(&all_there);
	printf("%x %x\n", (unsigned)(unsigned long)first, (unsigned)(unsigned long)second);
	fflush(stdout);
	if (argc > 1)
		getchar();
	pthread_barrier_wait(&all_there);
	pthread_join(threads[0], NULL);
	pthread_join(threads[1], NULL);
	return 0;
}
#endif
