/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Notes where a batch task stood when its CPU was given to another task: the instruction at which
 * it was interrupted names the loop that it was in. And it notes for each CPU whether the batch
 * task there filters its system calls (seccomp): a check in such a task must make none.
 *
 * Batch tasks are those at SCHED_IDLE. Everybody else's switches cost a look at two priorities.
 * Interrupts are off, so this CPU's entry has one writer; its reader is the task that was switched
 * in, on this CPU, which no switch can come between.
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

/* What the processor saved on the way into the kernel. */
struct pt_regs {
	unsigned long ip;
	unsigned long sp;
	unsigned long orig_ax;
} __attribute__((preserve_access_index));

static struct task_struct *(*const get_current_task)(void) = (void *)158;
static struct pt_regs *(*const task_pt_regs)(struct task_struct *task) = (void *)175;

struct preempted {
	elfen_u64 next; /* who has the CPU since, as tgid << 32 | tid */
	elfen_u64 task; /* the batch task that had it before; 0 if it was none */
	elfen_u64 ip;
	elfen_u64 sp;
	elfen_u64 orig_ax; /* negative unless the task was in a system call */
	elfen_u64 since_ns; /* from when to when it ran */
	elfen_u64 until_ns;
	elfen_u64 reserved;
};
struct {
	int (*type)[BPF_MAP_TYPE_ARRAY];
	int (*max_entries)[1];
	elfen_u32 *key;
	struct preempted *value;
} elfen_preempted SECTION(".maps");

/*
 * A word for each CPU: not 0 while the batch task that has the CPU filters its system calls. Mapped
 * into batch processes, which the loader lets read it only. One look-up finds a page of words, or
 * no verifier would follow a walk over all CPUs.
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
	 * Another thread may have made this one filter in between, and have noted so first. The
	 * addition is a barrier: what is read behind it is newer than what was stored.
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
 * A filter is entered by one of two system calls, between two switches. The task runs no code of
 * its own before this has been noted. If it is put off its CPU on the way, the switch notes the
 * same.
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

/* For all CPUs that x86-64 can have. */
#define PAGES_MAX 16

/*
 * seccomp(2) can make the other threads of its process filter as well, on whatever CPUs they run.
 * A CPU that is wrongly noted is noted anew at its next switch to a batch task.
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
		/* The verifier counts in registers, and the key is in memory: a word of its own. */
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
