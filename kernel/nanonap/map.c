// SPDX-License-Identifier: GPL-2.0-only
/*
 * The task map: which task runs on every CPU. Each context switch updates it, and readers map it.
 *
 * Each slot has one writer: the sched_switch probe, on the slot's own CPU with interrupts off. The
 * probe never waits, so a switch costs the same with any number of readers. Layout and order of the
 * stores are those of the eBPF program. The difference is that the timing of a CPU depends on open
 * files and not on leases.
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

DEFINE_PER_CPU(struct nanonap_wake_words, nanonap_wake_words);
static DEFINE_PER_CPU(atomic_t, nanonap_watchers);

static struct elfen_page_header *nanonap_page;
static struct tracepoint *nanonap_sched_switch;
static int nanonap_map_hotplug;

static struct elfen_task_slot *nanonap_slot_of(unsigned int cpu)
{
	return (struct elfen_task_slot *)(nanonap_page + 1) + cpu;
}

size_t nanonap_map_bytes(void)
{
	return PAGE_ALIGN(sizeof(*nanonap_page) + nr_cpu_ids * sizeof(struct elfen_task_slot));
}

void nanonap_map_watch(unsigned int cpu)
{
	atomic_inc(per_cpu_ptr(&nanonap_watchers, cpu));
}

void nanonap_map_unwatch(unsigned int cpu)
{
	atomic_dec(per_cpu_ptr(&nanonap_watchers, cpu));
}

bool nanonap_map_idle_since(unsigned int cpu, u64 seen_switches)
{
	u64 idle_switch = READ_ONCE(per_cpu(nanonap_wake_words, cpu).idle_switch);

	return !READ_ONCE(nanonap_slot_of(cpu)->task) || (s64)(idle_switch - seen_switches) > 0;
}

/* Wakes the siblings of a CPU that went idle with its `count`th switch. */
static void nanonap_wake_siblings(unsigned int cpu, u64 count)
{
	const struct nanonap_siblings *list = per_cpu_ptr(&nanonap_siblings, cpu);
	/* Acquire: pairs with the release in nanonap_tie(). */
	unsigned int i, known = smp_load_acquire(&list->count);

	WRITE_ONCE(per_cpu(nanonap_wake_words, cpu).idle_switch, count);
	/*
	 * The words that a nap checks are stored before the word that wakes the nap. A nap arms,
	 * then checks, then waits. If it checks too early to see the stores above, then the nap
	 * word is stored after the nap armed. Pairs with the smp_rmb() in nanonap_arm_check_wait().
	 */
	smp_wmb();
	for (i = 0; i < known; i++)
		WRITE_ONCE(per_cpu(nanonap_wake_words, list->cpus[i]).nap_word, count << 16 | cpu);
}

/*
 * Adds up the CPU's busy time while it is timed. A busy period that began before the timing is not
 * counted.
 */
static void nanonap_count_busy(struct elfen_task_slot *slot, u64 task, u64 now_ns)
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

/* The slot's only writer. Runs on the slot's CPU with interrupts off, or while that CPU is dead. */
static void nanonap_write_slot(unsigned int cpu, u64 task)
{
	struct elfen_task_slot *slot = nanonap_slot_of(cpu);
	u64 count = slot->switches_begun + 1;
	u64 now_ns = 0;

	/* Readers load the counters in the opposite order: elfen-rt/src/signal/snapshot.rs. */
	WRITE_ONCE(slot->switches_begun, count);
	smp_wmb();
	WRITE_ONCE(slot->task, task);
	if (atomic_read(per_cpu_ptr(&nanonap_watchers, cpu)))
		now_ns = ktime_get_mono_fast_ns();
	WRITE_ONCE(slot->switched_at_ns, now_ns);
	nanonap_count_busy(slot, task, now_ns);
	smp_store_release(&slot->switches, count);
	if (!task)
		nanonap_wake_siblings(cpu, count);
}

static void nanonap_switch_here(const struct task_struct *next)
{
	/* The word is 0 for the idle task. */
	nanonap_write_slot(smp_processor_id(), (u64)next->tgid << 32 | (u32)next->pid);
}

/* For kernels up to 5.17. */
static void __maybe_unused nanonap_probe_4(void *data, bool preempt, struct task_struct *prev,
					   struct task_struct *next)
{
	nanonap_switch_here(next);
}

/* For kernels from 5.18 on. */
static void __maybe_unused nanonap_probe_5(void *data, bool preempt, struct task_struct *prev,
					   struct task_struct *next, unsigned int prev_state)
{
	nanonap_switch_here(next);
}

/* Distributions backport the change, so the declaration decides and not the version. */
#define TAKES_4                                                                                    \
	__builtin_types_compatible_p(typeof(check_trace_callback_type_sched_switch),               \
				     void(void (*)(void *, bool, struct task_struct *,             \
						   struct task_struct *)))
#define PROBE __builtin_choose_expr(TAKES_4, nanonap_probe_4, nanonap_probe_5)

/* sched_switch is not exported, so it is found by its name. */
static void nanonap_find_sched_switch(struct tracepoint *tracepoint, void *unused)
{
	if (!strcmp(tracepoint->name, "sched_switch"))
		nanonap_sched_switch = tracepoint;
}

/*
 * Fills the slot of a CPU that has not switched since the probe was registered: a lane may run one
 * thread for hours.
 */
static void nanonap_first_switch(void *unused)
{
	if (!nanonap_slot_of(smp_processor_id())->switches_begun)
		nanonap_switch_here(current);
}

/*
 * Marks a dead lane idle. Its last switch to the idle task is not traced, because the kernel traces
 * nothing on a CPU that is not online.
 */
static int nanonap_lane_died(unsigned int cpu)
{
	if (nanonap_slot_of(cpu)->task)
		nanonap_write_slot(cpu, 0);
	return 0;
}

static int nanonap_follow_hotplug(void)
{
	unsigned int cpu;

	cpus_read_lock();
	/* By interrupt and not by a thread, because a real-time thread may never yield its CPU. */
	on_each_cpu(nanonap_first_switch, NULL, 1);
	for_each_possible_cpu(cpu)
		if (!cpu_online(cpu))
			nanonap_lane_died(cpu);
	nanonap_map_hotplug = cpuhp_setup_state_nocalls_cpuslocked(
		CPUHP_BP_PREPARE_DYN, "nanonap:dead", NULL, nanonap_lane_died);
	cpus_read_unlock();
	return nanonap_map_hotplug < 0 ? nanonap_map_hotplug : 0;
}

static void nanonap_write_header(void)
{
	nanonap_page->version = ELFEN_ABI_VERSION;
	nanonap_page->slot_count = nr_cpu_ids;
	nanonap_page->size = sizeof(*nanonap_page) + nr_cpu_ids * sizeof(struct elfen_task_slot);
	nanonap_page->slot_size = sizeof(struct elfen_task_slot);
	nanonap_page->pid_namespace = 0;
	BUILD_BUG_ON(sizeof(nanonap_page->name) < sizeof("tasks"));
	strscpy((char *)nanonap_page->name, "tasks", sizeof(nanonap_page->name));
	smp_store_release(&nanonap_page->magic, ELFEN_MAGIC_TASK);
}

static void nanonap_unregister_probe(void)
{
	tracepoint_probe_unregister(nanonap_sched_switch, PROBE, NULL);
	/* Waits for probes that still run on other CPUs. */
	tracepoint_synchronize_unregister();
}

int nanonap_map_init(void)
{
	int error;

	check_trace_callback_type_sched_switch(PROBE);
	for_each_kernel_tracepoint(nanonap_find_sched_switch, NULL);
	if (!nanonap_sched_switch) {
		pr_err("this kernel has no sched_switch tracepoint\n");
		return -EOPNOTSUPP;
	}
	if (nr_cpu_ids > ELFEN_SLOTS_MAX)
		return -E2BIG;
	nanonap_page = vmalloc_user(nanonap_map_bytes());
	if (!nanonap_page)
		return -ENOMEM;
	nanonap_write_header();
	error = tracepoint_probe_register(nanonap_sched_switch, PROBE, NULL);
	if (error)
		goto free_page;
	error = nanonap_follow_hotplug();
	if (error)
		goto unregister;
	return 0;

unregister:
	nanonap_unregister_probe();
free_page:
	vfree(nanonap_page);
	return error;
}

void nanonap_map_exit(void)
{
	cpuhp_remove_state_nocalls(nanonap_map_hotplug);
	nanonap_unregister_probe();
	vfree(nanonap_page);
}

int nanonap_map_mmap(struct vm_area_struct *vma)
{
	if (vma->vm_flags & (VM_WRITE | VM_EXEC))
		return -EPERM;
	/* Prevents a later mprotect(2), and forced writes by a debugger. */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 3, 0)
	vm_flags_clear(vma, VM_MAYWRITE | VM_MAYEXEC);
#else
	vma->vm_flags &= ~(VM_MAYWRITE | VM_MAYEXEC);
#endif
	/* Refuses an offset or a length beyond the allocation. */
	return remap_vmalloc_range(vma, nanonap_page, vma->vm_pgoff);
}
