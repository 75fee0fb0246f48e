/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Keeps the task map: on every context switch, the CPU's slot says who runs there now.
 *
 * The switch path of every program on the machine goes through here, so it does the least that readers need: two array
 * look-ups, which the kernel inlines, and a few stores to one cache line. The clock is read only on CPUs that
 * somebody watches. Preemption and interrupts are off: nobody else writes this CPU's slot.
 *
 * Builds with `clang -target bpf` and nothing else; see the Makefile.
 */
#include "bpf.h"

/*
 * Entry 0 is the page's header; entry c + 1 is CPU c. The loader sizes both maps for the machine, writes the header and
 * marks every CPU unknown, and freezes the map. Values of 128 and of 8 bytes lie side by side without a gap.
 */
struct {
	int (*type)[BPF_MAP_TYPE_ARRAY];
	int (*max_entries)[2];
	int (*map_flags)[BPF_F_MMAPABLE];
	elfen_u32 *key;
	struct elfen_task_slot *value;
} elfen_tasks SECTION(".maps");

/* Readers count up a CPU's word to have its switches timed for a while. */
struct {
	int (*type)[BPF_MAP_TYPE_ARRAY];
	int (*max_entries)[1];
	int (*map_flags)[BPF_F_MMAPABLE];
	elfen_u32 *key;
	struct elfen_watch_slot *value;
} elfen_watch SECTION(".maps");

/* The two fields we read; the loader finds their offsets in the running kernel. */
struct task_struct {
	int pid;
	int tgid;
} __attribute__((preserve_access_index));

/* When the CPU switched, or 0 if nobody watches it. A lease runs from the first switch after its renewal. */
INLINE elfen_u64 switch_time(struct elfen_task_slot *slot, struct elfen_watch_slot *watch)
{
	elfen_u64 renewal = LOAD(watch->renewals);
	elfen_u64 end = slot->lease_end_ns;
	elfen_u64 now;

	if (renewal == slot->lease_renewal && !end)
		return 0;
	now = ktime_get_ns();
	if (renewal != slot->lease_renewal) {
		slot->lease_renewal = renewal;
		slot->lease_end_ns = now + ELFEN_LEASE_NS;
	} else if (now > end) {
		slot->lease_end_ns = 0;
	}
	return now;
}

/* Adds up how long the CPU was busy while watched. A stretch that began unwatched is not counted. */
INLINE void count_busy(struct elfen_task_slot *slot, elfen_u64 task, elfen_u64 now)
{
	elfen_u64 since = slot->busy_since_ns;

	if (!now) {
		if (since)
			STORE(slot->busy_since_ns, 0);
	} else if (!task && since) {
		STORE(slot->busy_ns, slot->busy_ns + (now - since));
		STORE(slot->busy_since_ns, 0);
	} else if (task && !since) {
		STORE(slot->busy_since_ns, now);
	}
}

/* sched_switch(preempt, prev, next, ...) */
SECTION("tp_btf/sched_switch")
int elfen_switch(elfen_u64 *arguments)
{
	struct task_struct *next = (struct task_struct *)arguments[2];
	elfen_u32 cpu = get_smp_processor_id();
	elfen_u32 entry = cpu + 1;
	struct elfen_task_slot *slot = map_lookup_elem(&elfen_tasks, &entry);
	struct elfen_watch_slot *watch = map_lookup_elem(&elfen_watch, &cpu);
	elfen_u64 task, now, count;

	if (!slot || !watch)
		return 0;
	task = (elfen_u64)(elfen_u32)next->tgid << 32 | (elfen_u32)next->pid;
	now = switch_time(slot, watch);
	count = slot->switches + 1;
	/* Readers of one word look at `task` alone; readers of several hold the two counters against each other. */
	STORE(slot->switches_begun, count);
	STORE(slot->task, task);
	STORE(slot->switched_at_ns, now);
	count_busy(slot, task, now);
	STORE(slot->switches, count);
	return 0;
}

char license_name[] SECTION("license") = "GPL";
