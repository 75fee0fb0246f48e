/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Who got a CPU and when, as the kernel notes it for any program that asks perf_event_open(2). A
 * thread's own readings of the clock are not enough: the first one comes some microseconds after it
 * got its CPU, by which time a batch that checks is off its lane, and the last one before the
 * interrupt at whose end it loses it.
 */
#include <linux/perf_event.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

/* A power of two: of 4 KiB each. */
#define RING_PAGES 64

struct a_switch {
	uint64_t at;
	/* Of those that are noted of one thread: it gets its CPU, and does not lose it. */
	int in;
	/* Of those that are noted of a CPU: the thread that gets it, 0 for nobody. */
	uint32_t next;
};

static struct perf_event_mmap_page *ring;

/* Of the calling thread, with 0 and -1; or with -1 of one CPU. */
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
		.clockid = 1, /* CLOCK_MONOTONIC, as the task map has it */
	};
	int event = syscall(SYS_perf_event_open, &ask, thread, cpu, -1, PERF_FLAG_FD_CLOEXEC);

	ring = mmap(NULL, (1 + RING_PAGES) * 4096, PROT_READ | PROT_WRITE, MAP_SHARED, event, 0);
	if (ring == MAP_FAILED)
		exit(3);
}

/* Records are made of words, and may begin at the ring's end and go on at its beginning. */
static uint64_t word(uint64_t at)
{
	return *(uint64_t *)((char *)ring + ring->data_offset + at % ring->data_size);
}

/* Whether there is another one; costs one load where there is none. */
static int next_switch(struct a_switch *found)
{
	uint64_t tail = ring->data_tail, first;
	struct perf_event_header header;

	/* The kernel writes records before it moves the head. */
	if (__atomic_load_n(&ring->data_head, __ATOMIC_ACQUIRE) == tail)
		return 0;
	first = word(tail);
	__builtin_memcpy(&header, &first, sizeof(header));
	/* A lost one would be a turn or a pause that is not there. */
	if (header.type != PERF_RECORD_SWITCH && header.type != PERF_RECORD_SWITCH_CPU_WIDE)
		exit(4);
	found->in = !(header.misc & PERF_RECORD_MISC_SWITCH_OUT);
	found->next = (uint32_t)(word(tail + 8) >> 32);
	found->at = word(tail + header.size - 8);
	__atomic_store_n(&ring->data_tail, tail + header.size, __ATOMIC_RELEASE);
	return 1;
}
