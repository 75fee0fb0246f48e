// SPDX-License-Identifier: GPL-2.0-only
/*
 * The task map: who runs on every CPU, written on each context switch, mapped by readers.
 *
 * One writer a slot: the sched_switch probe, on the slot's own CPU with interrupts off. It stores
 * and never waits, so a switch costs the same whoever reads. The same layout and the same
 * discipline as the eBPF program's, except that timing a CPU is tied to open files and needs no
 * leases.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/cpu.h>
#include <linux/cpuhotplug.h>
#include <linux/mm.h>
#include <linux/sched.h>
#include <linux/smp.h>
#include <linux/string.h>
#include <linux/timekeeping.h>
#include <linux/tracepoint.h>
#include <linux/version.h>
#include <linux/vmalloc.h>
#include <trace/events/sched.h>

#include "module.h"

DEFINE_PER_CPU(struct wake_words, wake_words);
static DEFINE_PER_CPU(atomic_t, watchers);

static struct elfen_page_header *page;
static struct tracepoint *sched_switch;
static int hotplug_state;

static struct elfen_task_slot *slot_of(unsigned int cpu)
{
	return (struct elfen_task_slot *)(page + 1) + cpu;
}

size_t map_bytes(void)
{
	return PAGE_ALIGN(sizeof(*page) + nr_cpu_ids * sizeof(struct elfen_task_slot));
}

void map_watch(unsigned int cpu)
{
	atomic_inc(per_cpu_ptr(&watchers, cpu));
}

void map_unwatch(unsigned int cpu)
{
	atomic_dec(per_cpu_ptr(&watchers, cpu));
}

bool map_idle_since(unsigned int cpu, u64 seen_switches)
{
	u64 idle_switch = READ_ONCE(per_cpu(wake_words, cpu).idle_switch);

	return !READ_ONCE(slot_of(cpu)->task) || (s64)(idle_switch - seen_switches) > 0;
}

/* The CPU went idle with its `count`th switch. */
static void wake_siblings(unsigned int cpu, u64 count)
{
	const struct siblings *list = per_cpu_ptr(&siblings, cpu);
	/* Acquire: pairs with the release in tie(). */
	unsigned int i, known = smp_load_acquire(&list->count);

	WRITE_ONCE(per_cpu(wake_words, cpu).idle_switch, count);
	/*
	 * What a nap looks at before the word that wakes it. A nap arms, then looks, then waits: if
	 * it looks too early to see the lines above, the word is stored after it armed. Pairs with
	 * the smp_rmb() in arm_check_wait().
	 */
	smp_wmb();
	for (i = 0; i < known; i++)
		WRITE_ONCE(per_cpu(wake_words, list->cpus[i]).nap_word, count << 16 | cpu);
}

/*
 * Adds up how long the CPU was busy while watched; a stretch that began unwatched is not counted.
 */
static void count_busy(struct elfen_task_slot *slot, u64 task, u64 now_ns)
{
	u64 since_ns = slot->busy_since_ns;

	if (!now_ns) {
		if (since_ns)
			WRITE_ONCE(slot->busy_since_ns, 0);
	} else if (!task && since_ns) {
		WRITE_ONCE(slot->busy_ns, slot->busy_ns + now_ns - since_ns);
		WRITE_ONCE(slot->busy_since_ns, 0);
	} else if (task && !since_ns) {
		WRITE_ONCE(slot->busy_since_ns, now_ns);
	}
}

/* One writer: this runs on the slot's CPU with interrupts off, or when that CPU is dead. */
static void write_slot(unsigned int cpu, u64 task)
{
	struct elfen_task_slot *slot = slot_of(cpu);
	u64 count = slot->switches_begun + 1;
	u64 now_ns = 0;

	/* Readers load these in the opposite order: elfen-rt/src/signal/snapshot.rs. */
	WRITE_ONCE(slot->switches_begun, count);
	smp_wmb();
	WRITE_ONCE(slot->task, task);
	if (atomic_read(per_cpu_ptr(&watchers, cpu)))
		now_ns = ktime_get_mono_fast_ns();
	WRITE_ONCE(slot->switched_at_ns, now_ns);
	count_busy(slot, task, now_ns);
	smp_store_release(&slot->switches, count);
	if (!task)
		wake_siblings(cpu, count);
}

static void switch_here(const struct task_struct *next)
{
	/* 0 for the idle task. */
	write_slot(smp_processor_id(), (u64)next->tgid << 32 | (u32)next->pid);
}

/* Up to 5.17. */
static void __maybe_unused probe_4(void *data, bool preempt, struct task_struct *prev,
				   struct task_struct *next)
{
	switch_here(next);
}

/* From 5.18 on. */
static void __maybe_unused probe_5(void *data, bool preempt, struct task_struct *prev,
				   struct task_struct *next, unsigned int prev_state)
{
	switch_here(next);
}

/* Distributions backport: the declaration decides, not the version. */
#define TAKES_4                                                                                    \
	__builtin_types_compatible_p(typeof(check_trace_callback_type_sched_switch),               \
				     void(void (*)(void *, bool, struct task_struct *,             \
						   struct task_struct *)))
#define PROBE __builtin_choose_expr(TAKES_4, probe_4, probe_5)

/* sched_switch is not exported: known by its name alone. */
static void find_sched_switch(struct tracepoint *tracepoint, void *unused)
{
	if (!strcmp(tracepoint->name, "sched_switch"))
		sched_switch = tracepoint;
}

/*
 * The slot of a CPU that has not switched since the probe is there: a lane may run one thread for
 * hours.
 */
static void first_switch(void *unused)
{
	if (!slot_of(smp_processor_id())->switches_begun)
		switch_here(current);
}

/*
 * A dead lane is idle. Its last switch, from the thread that took it down to the idle task, is not
 * traced: the kernel traces nothing on a CPU that is no longer online.
 */
static int lane_died(unsigned int cpu)
{
	if (slot_of(cpu)->task)
		write_slot(cpu, 0);
	return 0;
}

static int follow_hotplug(void)
{
	unsigned int cpu;

	cpus_read_lock();
	/* By interrupt, not by thread: it works where a real-time thread never yields its CPU. */
	on_each_cpu(first_switch, NULL, 1);
	for_each_possible_cpu(cpu)
		if (!cpu_online(cpu))
			lane_died(cpu);
	hotplug_state = cpuhp_setup_state_nocalls_cpuslocked(CPUHP_BP_PREPARE_DYN, "nanonap:dead",
							     NULL, lane_died);
	cpus_read_unlock();
	return hotplug_state < 0 ? hotplug_state : 0;
}

static void write_header(void)
{
	page->version = ELFEN_ABI_VERSION;
	page->slot_count = nr_cpu_ids;
	page->size = sizeof(*page) + nr_cpu_ids * sizeof(struct elfen_task_slot);
	page->slot_size = sizeof(struct elfen_task_slot);
	page->pid_namespace = 0;
	BUILD_BUG_ON(sizeof(page->name) < sizeof("tasks"));
	strscpy((char *)page->name, "tasks", sizeof(page->name));
	smp_store_release(&page->magic, ELFEN_MAGIC_TASK);
}

static void unregister_probe(void)
{
	tracepoint_probe_unregister(sched_switch, PROBE, NULL);
	/* A probe may still run on another CPU. */
	tracepoint_synchronize_unregister();
}

int map_init(void)
{
	int error;

	check_trace_callback_type_sched_switch(PROBE);
	for_each_kernel_tracepoint(find_sched_switch, NULL);
	if (!sched_switch) {
		pr_err("this kernel has no sched_switch tracepoint\n");
		return -EOPNOTSUPP;
	}
	if (nr_cpu_ids > ELFEN_SLOTS_MAX)
		return -E2BIG;
	page = vmalloc_user(map_bytes());
	if (!page)
		return -ENOMEM;
	write_header();
	error = tracepoint_probe_register(sched_switch, PROBE, NULL);
	if (error)
		goto free_page;
	error = follow_hotplug();
	if (error)
		goto unregister;
	return 0;

unregister:
	unregister_probe();
free_page:
	vfree(page);
	return error;
}

void map_exit(void)
{
	cpuhp_remove_state_nocalls(hotplug_state);
	unregister_probe();
	vfree(page);
}

int map_mmap(struct vm_area_struct *vma)
{
	if (vma->vm_flags & (VM_WRITE | VM_EXEC))
		return -EPERM;
	/* Neither mprotect(2) later nor a forced write of a debugger's. */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 3, 0)
	vm_flags_clear(vma, VM_MAYWRITE | VM_MAYEXEC);
#else
	vma->vm_flags &= ~(VM_MAYWRITE | VM_MAYEXEC);
#endif
	/* Checks offset and length against the allocation. */
	return remap_vmalloc_range(vma, page, vma->vm_pgoff);
}
