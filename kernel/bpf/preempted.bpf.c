/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Records where a batch task was preempted: the address of its instruction identifies the loop that
 * it was in. Also records for each CPU whether the batch task there has a seccomp filter, because a
 * check in such a task must make no system calls.
 *
 * Batch tasks are those at SCHED_IDLE. Switches between other tasks cost two loads of a policy.
 * Interrupts are off, so this CPU's entry has one writer. Its reader is the task that was switched
 * in on this CPU, so no other switch can overwrite the entry before it is read.
 */
#include "bpf.h"

#define SCHED_IDLE 5

struct seccomp {
	int mode;
} __attribute__((preserve_access_index));
struct task_struct {
	int pid;
	int tgid;
	unsigned int policy;
	struct seccomp seccomp;
} __attribute__((preserve_access_index));

/* The registers that the processor saved on entry to the kernel. */
struct pt_regs {
	unsigned long ip;
	unsigned long sp;
	unsigned long orig_ax;
} __attribute__((preserve_access_index));

static struct task_struct *(*const get_current_task)(void) = (void *)158;
static struct pt_regs *(*const task_pt_regs)(struct task_struct *task) = (void *)175;

struct preempted {
	elfen_u64 next; /* the task that was switched in, as tgid << 32 | tid */
	elfen_u64 task; /* the preempted batch task; 0 if it was another task */
	elfen_u64 ip;
	elfen_u64 sp;
	elfen_u64 orig_ax; /* negative unless the task was in a system call */
	elfen_u64 since_ns; /* when the batch task was switched in */
	elfen_u64 until_ns; /* when it was preempted */
	elfen_u64 reserved;
};
struct {
	int (*type)[BPF_MAP_TYPE_ARRAY];
	int (*max_entries)[1];
	elfen_u32 *key;
	struct preempted *value;
} elfen_preempted SECTION(".maps");

/*
 * A word for each CPU: not 0 while the batch task on the CPU has a seccomp filter. Mapped read-only
 * into batch processes. An entry is a page of words, because the verifier would not accept a loop
 * with a look-up for each CPU.
 */
#define CPUS_IN_PAGE 512
struct filters_page {
	elfen_u64 cpus[CPUS_IN_PAGE];
};
struct {
	int (*type)[BPF_MAP_TYPE_ARRAY];
	int (*max_entries)[1];
	int (*map_flags)[BPF_F_MMAPABLE];
	elfen_u32 *key;
	struct filters_page *value;
} elfen_filters SECTION(".maps");

/* A kernel without seccomp has no such field. */
INLINE elfen_u64 filters(struct task_struct *task)
{
	if (!__builtin_preserve_field_info(task->seccomp.mode, FIELD_EXISTS))
		return 0;
	return *(volatile int *)&task->seccomp.mode != 0;
}

INLINE void note_filter(elfen_u32 cpu, struct task_struct *task)
{
	elfen_u32 entry = cpu / CPUS_IN_PAGE;
	struct filters_page *page = map_lookup_elem(&elfen_filters, &entry);
	elfen_u64 *here;

	if (!page)
		return;
	here = &page->cpus[cpu % CPUS_IN_PAGE];
	if (*here == filters(task))
		return;
	STORE(*here, filters(task));
	/*
	 * Meanwhile another thread may have installed a filter for this task and have noted it
	 * first. The addition is a barrier: the filter is read again after the store above.
	 */
	__sync_fetch_and_add(here, 0);
	if (filters(task))
		STORE(*here, 1);
}

INLINE elfen_u64 word_of(struct task_struct *task)
{
	return (elfen_u64)(elfen_u32)task->tgid << 32 | (elfen_u32)task->pid;
}

/* sched_switch(preempt, prev, next, ...) */
SECTION("tp_btf/sched_switch")
int elfen_preempt(elfen_u64 *arguments)
{
	struct task_struct *prev = (struct task_struct *)arguments[1];
	struct task_struct *next = (struct task_struct *)arguments[2];
	elfen_u32 cpu = get_smp_processor_id();
	int was_batch = prev->policy == SCHED_IDLE;
	int is_batch = next->policy == SCHED_IDLE;
	struct preempted *here;
	struct pt_regs *regs;
	elfen_u64 now;

	if (!was_batch && !is_batch)
		return 0;
	here = map_lookup_elem(&elfen_preempted, &cpu);
	if (!here)
		return 0;
	now = ktime_get_ns();
	STORE(here->next, word_of(next));
	if (was_batch) {
		regs = task_pt_regs(prev);
		STORE(here->ip, regs->ip);
		STORE(here->sp, regs->sp);
		STORE(here->orig_ax, regs->orig_ax);
		STORE(here->until_ns, now);
	}
	STORE(here->task, was_batch ? word_of(prev) : 0);
	if (is_batch) {
		STORE(here->since_ns, now);
		note_filter(cpu, next);
	}
	return 0;
}

/*
 * A task installs a filter by one of two system calls, between two switches. This program records
 * the filter before the task returns to user space. If the task is switched out first, its next
 * switch records the filter.
 */
SECTION("fexit/__x64_sys_prctl")
int elfen_prctl(elfen_u64 *arguments)
{
	struct task_struct *task = get_current_task();

	(void)arguments;
	if (task->policy == SCHED_IDLE)
		note_filter(get_smp_processor_id(), task);
	return 0;
}

/* Enough pages for all CPUs that x86-64 supports. */
#define PAGES_MAX 16

/*
 * seccomp(2) can install the filter for the other threads of its process as well, on any CPUs. So
 * this marks all CPUs. A wrong mark is corrected at the CPU's next switch to a batch task.
 */
SECTION("fexit/__x64_sys_seccomp")
int elfen_seccomp(elfen_u64 *arguments)
{
	struct task_struct *task = get_current_task();
	struct filters_page *page;
	elfen_u32 key, entry, cpu;

	(void)arguments;
	if (task->policy != SCHED_IDLE || !filters(task))
		return 0;
	for (entry = 0; entry < PAGES_MAX; entry++) {
		/* The verifier tracks `entry` in a register only; the key must be in memory. */
		asm volatile("" : "+r"(entry));
		key = entry;
		page = map_lookup_elem(&elfen_filters, &key);
		if (!page)
			break;
		for (cpu = 0; cpu < CPUS_IN_PAGE; cpu++)
			STORE(page->cpus[cpu], 1);
	}
	return 0;
}

char license_name[] SECTION("license") = "GPL";
