/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Maintains the task map: on every context switch, stores the new task in the CPU's slot.
 *
 * Every context switch of the machine runs this program, so it does only what readers need: two
 * array look-ups, which the kernel inlines, and a few stores to one cache line. It reads the clock
 * only on CPUs with a lease. Preemption and interrupts are off, so nothing else writes this CPU's
 * slot at the same time.
 *
 * Builds with `clang -target bpf` and nothing else; see the Makefile.
 */
#include "bpf.h"

/*
 * Entry 0 is the page's header, and entry c + 1 is CPU c. The accounts of all CPUs follow the last
 * CPU, ELFEN_ACCOUNTS for each. The loader sizes the maps for the machine, writes the header, marks
 * every CPU unknown, and freezes the map, so the header is reliable. Values of 128 and of 64 bytes
 * lie next to each other without a gap.
 */
struct {
	int (*type)[BPF_MAP_TYPE_ARRAY];
	int (*max_entries)[2];
	int (*map_flags)[BPF_F_MMAPABLE];
	elfen_u32 *key;
	struct elfen_task_slot *value;
} elfen_tasks SECTION(".maps");

/* Readers request here that a CPU's switches are timed for a while. */
struct {
	int (*type)[BPF_MAP_TYPE_ARRAY];
	int (*max_entries)[1];
	int (*map_flags)[BPF_F_MMAPABLE];
	elfen_u32 *key;
	struct elfen_watch_slot *value;
} elfen_watch SECTION(".maps");

/* Privileged processes request here that a batch's tasks are counted on a CPU. */
struct {
	int (*type)[BPF_MAP_TYPE_ARRAY];
	int (*max_entries)[1];
	int (*map_flags)[BPF_F_MMAPABLE];
	elfen_u32 *key;
	struct elfen_claim_slot *value;
} elfen_claims SECTION(".maps");

/* The kernel's fields that this program reads; the loader relocates their offsets. */
struct kernfs_node {
	elfen_u64 id;
} __attribute__((preserve_access_index));
struct cgroup {
	struct kernfs_node *kn;
} __attribute__((preserve_access_index));
struct cgroup_subsys_state {
	struct cgroup *cgroup;
} __attribute__((preserve_access_index));
struct task_group {
	struct cgroup_subsys_state css;
	struct task_group *parent;
} __attribute__((preserve_access_index));
struct sched_entity {
	elfen_u64 sum_exec_runtime;
	elfen_u64 prev_sum_exec_runtime;
} __attribute__((preserve_access_index));
struct task_struct {
	struct sched_entity se;
	int pid;
	int tgid;
	struct task_struct *real_parent;
	struct task_group *sched_task_group;
} __attribute__((preserve_access_index));

/*
 * The time of this switch, or 0 if the CPU has no lease. A lease begins at the first switch after
 * its renewal.
 */
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

/*
 * Adds up the CPU's busy time during leases, without busy periods that began before a lease.
 */
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

/*
 * How many generations below the claiming process are counted. Deeper descendants are not, because
 * the loop must be bounded.
 */
#define GENERATIONS 16

/*
 * Whether a task descends from either process of a claim. The two processes themselves count only
 * with ELFEN_CLAIM_SELF.
 */
INLINE int descends(struct task_struct *task, elfen_u64 claim)
{
	elfen_u32 launcher = (claim >> 32) & ~ELFEN_CLAIM_SELF, supervisor = (elfen_u32)claim;
	elfen_u32 tgid = task->tgid;
	int i;

	if (!tgid)
		return 0;
	if (tgid == launcher || tgid == supervisor)
		return (claim >> 32 & ELFEN_CLAIM_SELF) != 0;
#pragma unroll
	for (i = 0; i < GENERATIONS; i++) {
		task = task->real_parent;
		tgid = task->tgid;
		/*
		 * The idle task and init have no ancestor with a claim. Also, 0 is the value of an
		 * unused half of a claim.
		 */
		if (tgid <= 1)
			return 0;
		if (tgid == launcher || tgid == supervisor)
			return 1;
	}
	return 0;
}

/* How many levels of cgroups below the claimed one are counted. */
#define DEPTH 16

/*
 * Whether a task is in a cgroup or below it, in the hierarchy of the cpu controller. Version 1 has
 * other hierarchies, which may differ. Reading through a null pointer gives 0. The groups that the
 * scheduler makes for sessions give 0 as well.
 */
INLINE int is_within(struct task_struct *task, elfen_u64 cgroup)
{
	struct task_group *group;
	int i;

	if (!__builtin_preserve_field_info(task->sched_task_group, FIELD_EXISTS))
		return 0;
	group = task->sched_task_group;
	for (i = 0; i < DEPTH; i++) {
		if (!group)
			return 0;
		if (group->css.cgroup->kn->id == cgroup)
			return 1;
		group = group->parent;
	}
	return 0;
}

INLINE int is_claimed(struct task_struct *task, elfen_u64 claim)
{
	if (claim & ELFEN_CLAIM_CGROUP)
		return is_within(task, claim & ~ELFEN_CLAIM_CGROUP);
	return descends(task, claim);
}

/*
 * Calls is_claimed() and passes the result through memory. This way the verifier forgets by which
 * path the result was found, and checks the code that follows once, and not once for each path.
 */
INLINE elfen_u64 claimed(struct elfen_account *account, struct task_struct *task, elfen_u64 claim)
{
	STORE(account->claimed, (elfen_u64)is_claimed(task, claim));
	return LOAD(account->claimed);
}

/*
 * The request lane's total busy time. Another CPU writes its slot. If a write overlaps every try (a
 * hypervisor can stop that CPU during a write), one of its switches may be counted as busy or idle
 * wrongly. The caller limits the error to the time that the batch ran.
 */
INLINE elfen_u64 busy_until(struct elfen_task_slot *slot, elfen_u64 now)
{
	elfen_u64 done, busy, since;
	int i;

#pragma unroll
	for (i = 0; i < 4; i++) {
		done = LOAD(slot->switches);
		busy = LOAD(slot->busy_ns);
		since = LOAD(slot->busy_since_ns);
		if (done == LOAD(slot->switches_begun))
			break;
	}
	return since && since < now ? busy + (now - since) : busy;
}

/* A switch on a batch lane. */
struct lane_switch {
	struct task_struct *prev;
	struct task_struct *next;
	elfen_u64 now;
	/* `prev` came by a switch that was not seen: some kernels leave switches out. */
	elfen_u64 unseen;
};

/*
 * How long `prev` has run since it was switched in, by the scheduler's clock. That clock excludes
 * time that a hypervisor has stolen.
 */
INLINE elfen_u64 stretch(struct task_struct *prev)
{
	return prev->se.sum_exec_runtime - prev->se.prev_sum_exec_runtime;
}

/* Adds the time that the batch ran here, up to `until`. Does nothing if no batch task ran. */
INLINE void add_stretch(struct elfen_account *account, elfen_u64 busy, elfen_u64 until)
{
	elfen_u64 since = account->since_ns, ran, shared;

	if (!since || until <= since)
		return;
	ran = until - since;
	shared = busy > account->busy_at_ns ? busy - account->busy_at_ns : 0;
	STORE(account->ran_ns, account->ran_ns + ran);
	STORE(account->shared_ns, account->shared_ns + (shared < ran ? shared : ran));
}

/*
 * Accounts for a switch that was not seen, by which a batch task left or came. The scheduler knows
 * how long ago that switch was.
 */
INLINE void make_up(struct elfen_account *account, elfen_u64 claim,
		    struct elfen_task_slot *request, struct lane_switch *lane)
{
	elfen_u64 came = lane->now - stretch(lane->prev), since = account->since_ns, busy, reading;

	if (!claim || claim != account->claim || (!since) != claimed(account, lane->prev, claim))
		return;
	/* Of the request lane's time since then, only the current busy period is known. */
	busy = busy_until(request, came);
	reading = account->done + 1;
	STORE(account->begun, reading);
	add_stretch(account, busy, came);
	STORE(account->since_ns, since ? 0 : came);
	STORE(account->busy_at_ns, busy);
	STORE(account->done, reading);
}

/*
 * Adds the time of the batch task that leaves, if `prev` is one, and notes the time if `next` is a
 * batch task.
 */
INLINE void count_batch(struct elfen_account *account, elfen_u64 claim,
			struct elfen_task_slot *request, struct lane_switch *lane)
{
	elfen_u64 now = lane->now, since = account->since_ns;
	elfen_u64 runs = claim && now && claimed(account, lane->next, claim);
	elfen_u64 busy, reading;

	if (!since && !runs && claim == account->claim)
		return;
	busy = busy_until(request, now);
	reading = account->done + 1;
	STORE(account->begun, reading);
	if (claim != account->claim) {
		STORE(account->claim, claim);
		STORE(account->ran_ns, 0);
		STORE(account->shared_ns, 0);
	} else {
		add_stretch(account, busy, now);
	}
	STORE(account->since_ns, runs ? now : 0);
	STORE(account->busy_at_ns, busy);
	STORE(account->done, reading);
}

/*
 * On a batch lane, updates the account of each run. On other CPUs this costs one load.
 */
INLINE void count_batches(elfen_u32 cpu, struct lane_switch *lane)
{
	struct elfen_claim_slot *asked = map_lookup_elem(&elfen_claims, &cpu);
	/*
	 * The request lane's CPU plus 1, which is also its entry in the task map. 0, the header's
	 * entry, means that this CPU is not a batch lane.
	 */
	elfen_u32 entry = asked ? (elfen_u32)LOAD(asked->request) : 0;
	struct elfen_page_header *header;
	struct elfen_account *account;
	struct elfen_task_slot *request;
	elfen_u32 i;

	if (!entry || !asked)
		return;
	request = map_lookup_elem(&elfen_tasks, &entry);
	entry = 0;
	header = map_lookup_elem(&elfen_tasks, &entry);
	if (!request || !header)
		return;
#pragma unroll
	for (i = 0; i < ELFEN_ACCOUNTS; i++) {
		entry = 1 + header->slot_count + cpu * ELFEN_ACCOUNTS + i;
		account = map_lookup_elem(&elfen_tasks, &entry);
		if (!account)
			continue;
		if (lane->unseen && lane->now)
			make_up(account, LOAD(asked->claims[i]), request, lane);
		count_batch(account, LOAD(asked->claims[i]), request, lane);
	}
}

INLINE elfen_u64 task_word(struct task_struct *task)
{
	return (elfen_u64)(elfen_u32)task->tgid << 32 | (elfen_u32)task->pid;
}

/* sched_switch(preempt, prev, next, ...) */
SECTION("tp_btf/sched_switch")
int elfen_switch_7(elfen_u64 *arguments)
{
	struct lane_switch lane = {
		.prev = (struct task_struct *)arguments[1],
		.next = (struct task_struct *)arguments[2],
	};
	elfen_u32 cpu = get_smp_processor_id();
	elfen_u32 entry = cpu + 1;
	struct elfen_task_slot *slot = map_lookup_elem(&elfen_tasks, &entry);
	struct elfen_watch_slot *watch = map_lookup_elem(&elfen_watch, &cpu);
	elfen_u64 task, now, count;

	if (!slot || !watch)
		return 0;
	lane.unseen = slot->task != task_word(lane.prev);
	task = task_word(lane.next);
	count = slot->switches + 1;
	/*
	 * Some readers load only `task`. Readers of several words compare the two counters, which
	 * differ during these stores.
	 */
	STORE(slot->switches_begun, count);
	STORE(slot->task, task);
	/* `task` is stored before the clock is read, because a batch may be waiting for it. */
	now = switch_time(slot, watch);
	STORE(slot->switched_at_ns, now);
	count_busy(slot, task, now);
	STORE(slot->switches, count);
	lane.now = now;
	count_batches(cpu, &lane);
	return 0;
}

char license_name[] SECTION("license") = "GPL";
