/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Keeps the task map: on every context switch, the CPU's slot says who runs there now.
 *
 * The switch path of every program on the machine goes through here, so it does the least that
 * readers need: two array look-ups, which the kernel inlines, and a few stores to one cache line.
 * The clock is read only on CPUs that somebody watches. Preemption and interrupts are off: nobody
 * else writes this CPU's slot.
 *
 * Builds with `clang -target bpf` and nothing else; see the Makefile.
 */
#include "bpf.h"

/*
 * Entry 0 is the page's header; entry c + 1 is CPU c; behind the last CPU come the accounts of all
 * CPUs, ELFEN_ACCOUNTS for each. The loader sizes both maps for the machine, writes the header and
 * marks every CPU unknown, and freezes the map: what the header says can be counted on. Values of
 * 128 and of 64 bytes lie side by side without a gap.
 */
struct {
	int (*type)[BPF_MAP_TYPE_ARRAY];
	int (*max_entries)[2];
	int (*map_flags)[BPF_F_MMAPABLE];
	elfen_u32 *key;
	struct elfen_task_slot *value;
} elfen_tasks SECTION(".maps");

/* What readers ask: to have a CPU's switches timed for a while. */
struct {
	int (*type)[BPF_MAP_TYPE_ARRAY];
	int (*max_entries)[1];
	int (*map_flags)[BPF_F_MMAPABLE];
	elfen_u32 *key;
	struct elfen_watch_slot *value;
} elfen_watch SECTION(".maps");

/* What privileged ones ask: to have a batch's tasks counted on a CPU. */
struct {
	int (*type)[BPF_MAP_TYPE_ARRAY];
	int (*max_entries)[1];
	int (*map_flags)[BPF_F_MMAPABLE];
	elfen_u32 *key;
	struct elfen_claim_slot *value;
} elfen_claims SECTION(".maps");

/* The fields we read; the loader finds their offsets in the running kernel. */
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
 * When the CPU switched, or 0 if nobody watches it. A lease runs from the first
 * switch after its renewal.
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
 * Adds up how long the CPU was busy while watched. A stretch that began unwatched is not counted.
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
 * Processes of a batch have this many ancestors at most up to its keeper;
 * deeper ones are not counted.
 */
#define GENERATIONS 16

/*
 * Whether a task descends from either process of a claim; those two themselves count
 * only if the claim says so.
 */
INLINE int descends(struct task_struct *task, elfen_u64 claim)
{
	elfen_u32 front = (claim >> 32) & ~ELFEN_CLAIM_SELF, keeper = (elfen_u32)claim;
	elfen_u32 tgid = task->tgid;
	int i;

	if (!tgid)
		return 0;
	if (tgid == front || tgid == keeper)
		return (claim >> 32 & ELFEN_CLAIM_SELF) != 0;
#pragma unroll
	for (i = 0; i < GENERATIONS; i++) {
		task = task->real_parent;
		tgid = task->tgid;
		/*
		 * The idle task and init have no ancestor that claims; 0 is
		 * also what half a claim holds.
		 */
		if (tgid <= 1)
			return 0;
		if (tgid == front || tgid == keeper)
			return 1;
	}
	return 0;
}

/* Cgroups lie this deep below a claimed one at most; deeper ones are not counted. */
#define DEPTH 16

/*
 * Whether a task is in a cgroup, or below it, as the scheduler has it: where the controller is of
 * version 1, other hierarchies may say otherwise. Reading through no pointer gives 0, and so do the
 * groups that the scheduler makes for sessions.
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
 * The same, by way of memory: the verifier forgets there which way the answer was found, and looks
 * at what follows once and not for each of the ways.
 */
INLINE elfen_u64 claimed(struct elfen_account *account, struct task_struct *task, elfen_u64 claim)
{
	STORE(account->claimed, (elfen_u64)is_claimed(task, claim));
	return LOAD(account->claimed);
}

/*
 * How long the request lane has been busy until now. Another CPU writes its slot; if it did so at
 * every try (a hypervisor can stop it in the middle), one of its switches counts to the wrong side,
 * and the caller's stretch bounds that.
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

/* A switch as its batch lane sees it. */
struct lane_switch {
	struct task_struct *prev;
	struct task_struct *next;
	elfen_u64 now;
	/* The task that leaves came unseen: there are kernels that leave switches out. */
	elfen_u64 unseen;
};

/*
 * How long the task that leaves had the CPU, by the scheduler, in whose clock no
 * time passes that a hypervisor takes.
 */
INLINE elfen_u64 stretch(struct task_struct *prev)
{
	return prev->se.sum_exec_runtime - prev->se.prev_sum_exec_runtime;
}

/* Adds the stretch that the batch ran here, if it did, up to a moment. */
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
 * The last switch was not seen: the batch has left by it, or has come. The scheduler knows how long
 * ago that was.
 */
INLINE void make_up(struct elfen_account *account, elfen_u64 claim,
		    struct elfen_task_slot *request, struct lane_switch *lane)
{
	elfen_u64 came = lane->now - stretch(lane->prev), since = account->since_ns, busy, reading;

	if (!claim || claim != account->claim || (!since) != claimed(account, lane->prev, claim))
		return;
	/* Of what the request lane did since, only that which goes on is known. */
	busy = busy_until(request, came);
	reading = account->done + 1;
	STORE(account->begun, reading);
	add_stretch(account, busy, came);
	STORE(account->since_ns, since ? 0 : came);
	STORE(account->busy_at_ns, busy);
	STORE(account->done, reading);
}

/*
 * Ends the stretch that the batch ran here, if it did, and begins one if the
 * next task is the batch's.
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
 * On a batch lane: what each of its runs' batches had of it. Everywhere else, one look at one word.
 */
INLINE void count_batches(elfen_u32 cpu, struct lane_switch *lane)
{
	struct elfen_claim_slot *asked = map_lookup_elem(&elfen_claims, &cpu);
	/*
	 * One more than its CPU, which is also its entry in the task map; 0, the header, says
	 * that this is no batch lane.
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
	 * Readers of one word look at `task` alone; readers of several hold the two
	 * counters against each other.
	 */
	STORE(slot->switches_begun, count);
	STORE(slot->task, task);
	/* A batch that waits for the word has it before the clock is read. */
	now = switch_time(slot, watch);
	STORE(slot->switched_at_ns, now);
	count_busy(slot, task, now);
	STORE(slot->switches, count);
	lane.now = now;
	count_batches(cpu, &lane);
	return 0;
}

char license_name[] SECTION("license") = "GPL";
