/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Leaves functions without a return: by exceptions, longjmp, pthread_exit and cancellation. Prints
 * how many objects were destroyed on the way, which is the same for any build.
 */
#include <csetjmp>
#include <cstdio>
#include <pthread.h>
#include <semaphore.h>
#include <stdexcept>
#include <string>
#include <unistd.h>

#define NOINLINE __attribute__((noinline))

static thread_local int destroyed;

struct Guard {
	~Guard() { destroyed++; }
};

NOINLINE static long deeper(long depth, bool throws)
{
	Guard guard;

	if (depth == 0 && throws)
		throw std::runtime_error("at the bottom");
	return depth == 0 ? 1 : deeper(depth - 1, throws) + 1;
}

NOINLINE static long rethrown(long depth)
{
	try {
		return deeper(depth, true);
	} catch (const std::runtime_error &error) {
		throw std::string(error.what());
	}
}

static jmp_buf back;

NOINLINE static long jumps(long depth)
{
	if (depth == 0)
		longjmp(back, 7);
	return jumps(depth - 1) + 1;
}

NOINLINE static long ends_thread(long depth)
{
	Guard guard;

	if (depth == 0)
		pthread_exit(reinterpret_cast<void *>(42L));
	return ends_thread(depth - 1) + 1;
}

static void *ends(void *)
{
	return reinterpret_cast<void *>(ends_thread(5));
}

static sem_t reached;

NOINLINE static void *waits(void *destroyed_at)
{
	struct Report {
		int *at;
		~Report() { *at = destroyed + 1; }
	} report{ static_cast<int *>(destroyed_at) };

	sem_post(&reached);
	for (;;)
		pause();
}

int main()
{
	long sum = 0;
	int from_outside = 0, jumped = 0;
	pthread_t thread;
	void *ended = nullptr;

	for (int round = 0; round < 1000; round++) {
		sum += deeper(10, false);
		try {
			sum += rethrown(10);
		} catch (const std::string &text) {
			sum += static_cast<long>(text.size());
		}
		int landed = setjmp(back);
		if (landed == 0)
			sum += jumps(20);
		jumped += landed;
	}
	for (int round = 0; round < 100; round++) {
		pthread_create(&thread, nullptr, ends, nullptr);
		pthread_join(thread, &ended);
		sum += reinterpret_cast<long>(ended);
	}
	sem_init(&reached, 0, 0);
	pthread_create(&thread, nullptr, waits, &from_outside);
	sem_wait(&reached);
	pthread_cancel(thread);
	pthread_join(thread, &ended);
	printf("unwinds: sum %ld, destroyed %d, jumped %d, cancelled %d, told %d\n", sum, destroyed,
	       jumped, ended == PTHREAD_CANCELED, from_outside);
	return 0;
}
