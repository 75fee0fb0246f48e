/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Wakes a process that sleeps until a CPU idles.
 *
 * As the CPU goes idle, it sends itself an interrupt, which wakes the process. Both delay a request
 * that arrives in the same microseconds. So this program is attached only for naps that need it:
 * see `elfen_rt::nap`.
 */
#include "bpf.h"

#define BPF_F_CURRENT_CPU 0xffffffffULL
static long (*const perf_event_output)(void *context, void *map, elfen_u64 cpu, void *data,
				       elfen_u64 size) = (void *)25;

/*
 * The events that sleepers wait for, one for each CPU. On CPUs without one, a call fails at once.
 */
struct {
	int (*type)[BPF_MAP_TYPE_PERF_EVENT_ARRAY];
	int (*max_entries)[1];
	elfen_u32 *key;
	elfen_u32 *value;
} elfen_sleepers SECTION(".maps");

struct task_struct {
	int pid;
} __attribute__((preserve_access_index));

/* sched_switch(preempt, prev, next, ...) */
SECTION("tp_btf/sched_switch")
int elfen_wake(elfen_u64 *arguments)
{
	struct task_struct *next = (struct task_struct *)arguments[2];
	elfen_u64 nothing = 0;

	if (next->pid == 0)
		perf_event_output(arguments, &elfen_sleepers, BPF_F_CURRENT_CPU, &nothing,
				  sizeof(nothing));
	return 0;
}

char license_name[] SECTION("license") = "GPL";
