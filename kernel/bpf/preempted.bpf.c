/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Notes where a batch task stood when its CPU was given to another task: the instruction at which
 * it was interrupted names the loop that it was in.
 *
 * Batch tasks are those at SCHED_IDLE. Everybody else's switches cost a look at two priorities.
 * Interrupts are off, so this CPU's entry has one writer; its reader is the task that was switched
 * in, on this CPU, which no switch can come between.
 */
#include "bpf.h"

#define SCHED_IDLE 5

struct task_struct {
	int pid;
	int tgid;
	unsigned int policy;
} __attribute__((preserve_access_index));

/* What the processor saved on the way into the kernel. */
struct pt_regs {
	unsigned long ip;
	unsigned long sp;
	unsigned long orig_ax;
} __attribute__((preserve_access_index));

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
	if (is_batch)
		STORE(here->since_ns, now);
	return 0;
}

char license_name[] SECTION("license") = "GPL";
