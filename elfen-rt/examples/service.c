/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A service that publishes its requests: one request lane, and a request of 1 ms every 3 ms, until
 * it is terminated.
 *
 *   cc -I elfen-rt/include -o service elfen-rt/examples/service.c && taskset -c 0 ./service shop 0
 */
#include "elfen.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define MILLISECOND 1000000

int main(int argc, char **argv)
{
	const char *name = argc > 1 ? argv[1] : "shop";
	elfen_u32 cpu = argc > 2 ? (elfen_u32)strtoul(argv[2], NULL, 10) : 0;
	struct timespec pause = { 0, 2 * MILLISECOND };
	struct elfen_service service;
	struct elfen_service_slot *slot;
	struct elfen_error error;
	elfen_u64 request, start;
	char line[160];

	/* A page with one slot, for the request lane on this CPU. Readers open it by name. */
	if (elfen_service_open(&service, name, 1, &error) ||
	    elfen_service_claim(&service, 0, cpu, &error)) {
		elfen_explain(&error, line, sizeof(line));
		fprintf(stderr, "service: cannot publish: %s\n", line);
		return 1;
	}
	slot = elfen_service_at(&service, 0);
	for (request = 1;; request++) {
		nanosleep(&pause, NULL); /* here a service waits for its next request */
		elfen_service_begin(slot, request, 0);
		elfen_service_class(slot, 1 + request % 2); /* optional: the request's class */
		start = elfen_now_ns();
		while (elfen_now_ns() < start + MILLISECOND)
			; /* here a service works on the request */
		elfen_service_stage(slot, 1); /* optional: the next stage of the work begins */
		elfen_service_end(slot);
	}
}
