/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* A library that starts a thread when it is loaded. */
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

static void *sleeper(void *unused)
{
	(void)unused;
	for (;;)
		pause();
	return NULL;
}

__attribute__((constructor)) static void start(void)
{
	pthread_t thread;

	if (pthread_create(&thread, NULL, sleeper, NULL))
		abort();
}
