/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Marks in C: the steps of each request and their times, for `elfen tailor`. elfen.h includes this
 * file and writes a mark at each begin and end. For more detail, a service calls
 * elfen_service_stage() and elfen_service_class().
 *
 * elfen-rt/src/signal/mark.rs is the same in Rust, and gives the reasons.
 */
#ifndef ELFEN_MARK_H
#define ELFEN_MARK_H

#include "elfen_abi.h"

#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* The calling thread's id; 0 before its first mark. Weak: every file with marks defines it. */
__attribute__((weak, visibility("hidden"))) __thread elfen_u32 elfen_mark_thread = 0;

static inline elfen_u64 elfen_now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (elfen_u64)now.tv_sec * 1000000000u + (elfen_u64)now.tv_nsec;
}

/* Writes a mark. Only the lane's writer may call this. */
static inline void elfen_mark(struct elfen_marks *marks, elfen_u64 now, elfen_u64 request,
			      enum elfen_mark_step step, elfen_u64 value)
{
	elfen_u64 index = __atomic_load_n(&marks->head, __ATOMIC_RELAXED);
	elfen_u64 *mark = marks->ring[index % ELFEN_MARKS];
	elfen_u64 lap = (index / ELFEN_MARKS + 1) & 0xffff;

	if (!elfen_mark_thread)
		elfen_mark_thread = (elfen_u32)syscall(SYS_gettid);
	__atomic_store_n(&mark[3], 0, __ATOMIC_RELAXED);
	__atomic_thread_fence(__ATOMIC_RELEASE);
	__atomic_store_n(&mark[0], now, __ATOMIC_RELAXED);
	__atomic_store_n(&mark[1], request, __ATOMIC_RELAXED);
	__atomic_store_n(&mark[2], value, __ATOMIC_RELAXED);
	__atomic_store_n(&mark[3],
			 (elfen_u64)elfen_mark_thread << 32 | lap << 16 | (elfen_u64)step << 8,
			 __ATOMIC_RELEASE);
	__atomic_store_n(&marks->head, index + 1, __ATOMIC_RELEASE);
}

/*
 * Enters a stage of the running request, with a number of the service's choice. Does nothing
 * without a running request.
 */
static inline void elfen_service_stage(struct elfen_service_slot *slot, unsigned short stage)
{
	elfen_u64 request = __atomic_load_n(&slot->running_request, __ATOMIC_RELAXED);

	if (request)
		elfen_mark(&slot->marks, elfen_now_ns(), request, ELFEN_MARK_STAGE, stage);
}

/* Sets the class of the running request: a route, or a hash of its query. */
static inline void elfen_service_class(struct elfen_service_slot *slot, elfen_u64 kind)
{
	__atomic_store_n(&slot->marks.kind, kind, __ATOMIC_RELAXED);
}

#endif /* ELFEN_MARK_H */
