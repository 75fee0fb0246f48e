/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Reads the hardware counters of request lanes without disturbing them.
 *
 * A counter can be read on its own CPU alone; from another one the kernel interrupts that
 * CPU, and the request would pay for being watched. So the request lane's own CPU reads, when
 * it is in the kernel anyway: at its context switches and at its timer interrupts. Whoever
 * wants to know reads the copy.
 *
 * Interrupts are off in both places, so this CPU's slot has one writer.
 */
#include "bpf.h"

struct perf_value {
	elfen_u64 counter;
	elfen_u64 enabled;
	elfen_u64 running;
};
static long (*const perf_event_read_value)(void *map, elfen_u64 cpu, struct perf_value *value,
					   elfen_u32 size) = (void *)55;

/* The events of the CPUs that are counted, put there by the loader. */
struct {
	int (*type)[BPF_MAP_TYPE_PERF_EVENT_ARRAY];
	int (*max_entries)[1];
	elfen_u32 *key;
	elfen_u32 *value;
} elfen_instr SECTION(".maps"), elfen_cycles SECTION(".maps");

/*
 * Read by a call and not through a mapping, which copies upwards: so the word that is stored last
 * comes first. `begun` and `done` tell a reader that it met us in the middle.
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

	/* Fails at once on CPUs without events: all but the request lanes. */
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
