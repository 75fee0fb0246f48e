/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Reads the hardware counters of request lanes without disturbing them.
 *
 * A counter can be read only on its own CPU. To read it from another CPU, the kernel would
 * interrupt the request lane, which would delay the request. So the request lane's own CPU
 * copies its counters when it is in the kernel anyway: at its context switches and at its
 * timer interrupts. Readers read the copy.
 *
 * Interrupts are off in both cases, so this CPU's slot has one writer.
 */
#include "bpf.h"

struct perf_value {
	elfen_u64 counter;
	elfen_u64 enabled;
	elfen_u64 running;
};
static long (*const perf_event_read_value)(void *map, elfen_u64 cpu, struct perf_value *value,
					   elfen_u32 size) = (void *)55;

/* The events of the counted CPUs. The loader puts them here. */
struct {
	int (*type)[BPF_MAP_TYPE_PERF_EVENT_ARRAY];
	int (*max_entries)[1];
	elfen_u32 *key;
	elfen_u32 *value;
} elfen_instr SECTION(".maps"), elfen_cycles SECTION(".maps");

/*
 * Readers read this by a call and not through a mapping. The call copies upwards, so the word that
 * is stored last comes first. If `begun` and `done` differ, the read overlapped these stores.
 */
struct counted {
	elfen_u64 done;
	elfen_u64 instructions;
	elfen_u64 cycles;
	elfen_u64 at_ns;
	elfen_u64 begun;
};
struct {
	int (*type)[BPF_MAP_TYPE_ARRAY];
	int (*max_entries)[1];
	elfen_u32 *key;
	struct counted *value;
} elfen_counted SECTION(".maps");

INLINE int count(void)
{
	elfen_u32 cpu = get_smp_processor_id();
	struct counted *counted = map_lookup_elem(&elfen_counted, &cpu);
	struct perf_value instructions, cycles;
	elfen_u64 reading;

	/* Fails at once on CPUs without events, which are all but the request lanes. */
	if (!counted || perf_event_read_value(&elfen_cycles, cpu, &cycles, sizeof(cycles)) ||
	    perf_event_read_value(&elfen_instr, cpu, &instructions, sizeof(instructions)))
		return 0;
	reading = counted->done + 1;
	STORE(counted->begun, reading);
	STORE(counted->instructions, instructions.counter);
	STORE(counted->cycles, cycles.counter);
	STORE(counted->at_ns, ktime_get_ns());
	STORE(counted->done, reading);
	return 0;
}

/* sched_switch(preempt, prev, next, ...) */
SECTION("tp_btf/sched_switch")
int elfen_count_sw(elfen_u64 *arguments)
{
	(void)arguments;
	return count();
}

/* local_timer_entry(vector): x86 */
SECTION("tp_btf/local_timer_entry")
int elfen_count_tick(elfen_u64 *arguments)
{
	(void)arguments;
	return count();
}

char license_name[] SECTION("license") = "GPL";
