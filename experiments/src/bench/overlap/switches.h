/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Context switches, as the kernel records them for any program that calls perf_event_open(2).
 *
 * Reading the clock is not precise enough. A thread reads it some microseconds after it got its
 * CPU, when a batch with checks has already left its lane. Its last reading comes before the
 * interrupt that takes the CPU away.
 */
#include <linux/perf_event.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

/* A power of two. Each page has 4 KiB. */
#define RING_PAGES 64

struct a_switch {
	uint64_t at;
	/* For events of one thread: 1 if the thread gets its CPU, 0 if it loses it. */
	int in;
	/* For events of a CPU: the thread that gets the CPU, or 0 if the CPU idles. */
	uint32_t next;
};

static struct perf_event_mmap_page *ring;

/* Records the calling thread with (0, -1), or all threads of one CPU with (-1, cpu). */
static void note_switches(int thread, int cpu)
{
	struct perf_event_attr ask = {
		.type = PERF_TYPE_SOFTWARE,
		.size = sizeof(ask),
		.config = PERF_COUNT_SW_DUMMY,
		.sample_type = PERF_SAMPLE_TIME,
		.sample_id_all = 1,
		.context_switch = 1,
		.use_clockid = 1,
		.clockid = 1, /* CLOCK_MONOTONIC, like the task map */
	};
	int event = syscall(SYS_perf_event_open, &ask, thread, cpu, -1, PERF_FLAG_FD_CLOEXEC);

	ring = mmap(NULL, (1 + RING_PAGES) * 4096, PROT_READ | PROT_WRITE, MAP_SHARED, event, 0);
	if (ring == MAP_FAILED)
		exit(3);
}

/* Records consist of words. A record may wrap around at the end of the ring. */
static uint64_t word(uint64_t at)
{
	return *(uint64_t *)((char *)ring + ring->data_offset + at % ring->data_size);
}

/* Returns whether there was another switch. If there was none, this costs one load. */
static int next_switch(struct a_switch *found)
{
	uint64_t tail = ring->data_tail, first;
	struct perf_event_header header;

	/* Pairs with the kernel, which writes records before it moves the head. */
	if (__atomic_load_n(&ring->data_head, __ATOMIC_ACQUIRE) == tail)
		return 0;
	first = word(tail);
	__builtin_memcpy(&header, &first, sizeof(header));
	/* Lost records would hide a turn or a pause, so the program ends. */
	if (header.type != PERF_RECORD_SWITCH && header.type != PERF_RECORD_SWITCH_CPU_WIDE)
		exit(4);
	found->in = !(header.misc & PERF_RECORD_MISC_SWITCH_OUT);
	found->next = (uint32_t)(word(tail + 8) >> 32);
	found->at = word(tail + header.size - 8);
	__atomic_store_n(&ring->data_tail, tail + header.size, __ATOMIC_RELEASE);
	return 1;
}
