/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * The layouts of Elfen's channels in C, for the eBPF program and the kernel module. Programs
 * include elfen.h instead.
 *
 * Each structure has a Rust version in elfen-rt/src/signal. Both sides assert every offset, and a
 * test compares pages written by either side. All fields are shared between address spaces: load
 * and store them atomically.
 */
#ifndef ELFEN_ABI_H
#define ELFEN_ABI_H

#define ELFEN_ABI_VERSION 7

typedef __UINT32_TYPE__ elfen_u32;
typedef __UINT64_TYPE__ elfen_u64;

#ifdef __cplusplus
#define ELFEN_ASSERT(fact) static_assert(fact, #fact)
#else
#define ELFEN_ASSERT(fact) _Static_assert(fact, #fact)
#endif
#define ELFEN_AT(type, field, offset) \
	ELFEN_ASSERT(__builtin_offsetof(struct type, field) == (offset))
#define ELFEN_ALIGNED __attribute__((aligned(128)))

/* Eight ASCII letters read as a little-endian word. */
#define ELFEN_MAGIC_TASK 0x4b5341544e464c45ULL    /* "ELFNTASK" */
#define ELFEN_MAGIC_SERVICE 0x565245534e464c45ULL /* "ELFNSERV" */
#define ELFEN_MAGIC_LANE 0x454e414c4e464c45ULL    /* "ELFNLANE" */
#define ELFEN_MAGIC_CONTROL 0x4c5254434e464c45ULL /* "ELFNCTRL" */
#define ELFEN_MAGIC_THREAD 0x445248544e464c45ULL  /* "ELFNTHRD" */

#define ELFEN_NAME_BYTES 32
#define ELFEN_SLOTS_MAX 8192

/* The first 128 bytes of every page; slots of one type follow. */
struct elfen_page_header {
	elfen_u64 magic; /* stored last, with release */
	elfen_u32 version;
	elfen_u32 slot_count;
	elfen_u64 size; /* in bytes: this header and all slots */
	elfen_u32 slot_size;
	elfen_u32 pid_namespace; /* inode; 0 for the kernel's own */
	elfen_u64 name[ELFEN_NAME_BYTES / 8];
	elfen_u64 counts_cgroups; /* in a task map: 1 if its writer supports ELFEN_CLAIM_CGROUP */
	elfen_u64 reserved[7];
} ELFEN_ALIGNED;
ELFEN_ASSERT(sizeof(struct elfen_page_header) == 128);
ELFEN_AT(elfen_page_header, version, 8);
ELFEN_AT(elfen_page_header, slot_count, 12);
ELFEN_AT(elfen_page_header, size, 16);
ELFEN_AT(elfen_page_header, slot_size, 24);
ELFEN_AT(elfen_page_header, pid_namespace, 28);
ELFEN_AT(elfen_page_header, name, 32);
ELFEN_AT(elfen_page_header, counts_cgroups, 64);

/*
 * How long the tasks of one run's batch ran on a batch lane. The kernel writes it on that lane's
 * CPU. In the eBPF program's map, the accounts follow the page of task slots: ELFEN_ACCOUNTS for
 * CPU 0, then the same number for CPU 1, and so on.
 */
#define ELFEN_ACCOUNTS 3
/* A bit in the upper half of a claim: its two processes are counted as well. */
#define ELFEN_CLAIM_SELF 0x80000000U
/* The claim is a cgroup and not two processes: the other bits are the id of the cgroup. */
#define ELFEN_CLAIM_CGROUP (1ULL << 62)
struct elfen_account {
	elfen_u64 claim;      /* launcher << 32 | supervisor (descendants count), a cgroup, or 0 */
	elfen_u64 begun;      /* stored before the words below */
	elfen_u64 done;       /* stored after the words below */
	elfen_u64 ran_ns;     /* up to the last switch to or from a task of the batch */
	elfen_u64 shared_ns;  /* the part of ran_ns while the request lane was busy */
	elfen_u64 since_ns;   /* when the batch task that runs now was switched in; 0 for none */
	elfen_u64 busy_at_ns; /* the request lane's total busy time at since_ns */
	elfen_u64 claimed;    /* for the writer only */
	elfen_u64 reserved[8];
} ELFEN_ALIGNED;
ELFEN_ASSERT(sizeof(struct elfen_account) == 128);
ELFEN_AT(elfen_account, begun, 8);
ELFEN_AT(elfen_account, done, 16);
ELFEN_AT(elfen_account, ran_ns, 24);
ELFEN_AT(elfen_account, shared_ns, 32);
ELFEN_AT(elfen_account, since_ns, 40);
ELFEN_AT(elfen_account, busy_at_ns, 48);

/* One CPU. The kernel writes the slot on every context switch of that CPU. */
struct elfen_task_slot {
	elfen_u64 task;           /* tgid << 32 | tid (initial pid namespace), 0, or _UNKNOWN */
	elfen_u64 switched_at_ns; /* CLOCK_MONOTONIC; 0 if the CPU was not timed */
	elfen_u64 switches;       /* stored after the words above */
	elfen_u64 switches_begun; /* stored before the words above */
	elfen_u64 lease_renewal;  /* for the writer only */
	elfen_u64 lease_end_ns;   /* for the writer only */
	elfen_u64 busy_ns;        /* busy while timed, up to the last switch to or from idle */
	elfen_u64 busy_since_ns;  /* when the CPU turned busy; 0 while it idles or is not timed */
	elfen_u64 reserved[8];
} ELFEN_ALIGNED;
ELFEN_ASSERT(sizeof(struct elfen_task_slot) == 128);
ELFEN_AT(elfen_task_slot, task, 0);
ELFEN_AT(elfen_task_slot, switched_at_ns, 8);
ELFEN_AT(elfen_task_slot, switches, 16);
ELFEN_AT(elfen_task_slot, switches_begun, 24);
ELFEN_AT(elfen_task_slot, lease_renewal, 32);
ELFEN_AT(elfen_task_slot, lease_end_ns, 40);
ELFEN_AT(elfen_task_slot, busy_ns, 48);
ELFEN_AT(elfen_task_slot, busy_since_ns, 56);

/* The task of a CPU before its first switch. The CPU counts as busy. */
#define ELFEN_TASK_UNKNOWN (~0ULL)

/* The lease on one CPU, which readers write. */
struct elfen_watch_slot {
	elfen_u64 renewals; /* when this counts up, switches are timed for ELFEN_LEASE_NS */
	elfen_u64 reserved[7];
} __attribute__((aligned(64)));
ELFEN_ASSERT(sizeof(struct elfen_watch_slot) == 64);

/* Which tasks are counted on a batch lane. Only root writes it, in a map of its own. */
struct elfen_claim_slot {
	elfen_u64 request; /* the CPU of its request lane, plus 1 */
	elfen_u64 claims[ELFEN_ACCOUNTS]; /* as elfen_account.claim, or 0 */
	elfen_u64 reserved[4];
} __attribute__((aligned(64)));
ELFEN_ASSERT(sizeof(struct elfen_claim_slot) == 64);
ELFEN_AT(elfen_claim_slot, claims, 8);
#define ELFEN_LEASE_NS 4000000000ULL

/* 16 buckets for every power of two up to 2^40 ns; exact below 32 ns. */
#define ELFEN_HISTOGRAM_BUCKETS 592
struct elfen_histogram {
	elfen_u64 counts[ELFEN_HISTOGRAM_BUCKETS];
	elfen_u64 sum_ns;
	elfen_u64 max_ns;
	elfen_u64 reserved[14];
} ELFEN_ALIGNED;
ELFEN_ASSERT(sizeof(struct elfen_histogram) == 4864);
ELFEN_AT(elfen_histogram, sum_ns, 4736);
ELFEN_AT(elfen_histogram, max_ns, 4744);

/* The steps of a service's requests: a ring of marks of four words. */
#define ELFEN_MARKS 4096
enum elfen_mark_step {
	ELFEN_MARK_BEGIN = 1, /* its value is the time of arrival */
	ELFEN_MARK_STAGE = 2, /* its value is the stage that begins */
	ELFEN_MARK_END = 3    /* its value is the request's class */
};
struct elfen_marks {
	elfen_u64 head;       /* how many marks were ever written */
	elfen_u64 kind;       /* the running request's class, chosen by the service; 0 for none */
	elfen_u64 reserved[14];
	/* time, request, value; the last word is tid << 32 | lap << 16 | step << 8 */
	elfen_u64 ring[ELFEN_MARKS][4];
} ELFEN_ALIGNED;
ELFEN_ASSERT(sizeof(struct elfen_marks) == 128 + 32 * ELFEN_MARKS);
ELFEN_AT(elfen_marks, kind, 8);
ELFEN_AT(elfen_marks, ring, 128);

/* One request lane of a service. */
struct elfen_service_slot {
	elfen_u64 writer; /* pid << 42 | start time in clock ticks; 0 for none */
	elfen_u64 cpu;
	elfen_u64 reserved_claim[14];
	/* the serving thread's line */
	elfen_u64 running_request; /* 0 for none */
	elfen_u64 request_started_ns;
	elfen_u64 finished_requests;
	elfen_u64 request_arrived_ns; /* earlier than its start, if the request waited */
	elfen_u64 instructions; /* of the serving thread; 0 if the service does not count */
	elfen_u64 cycles; /* of the serving thread; 0 if the service does not count */
	elfen_u64 counted_at_ns; /* when the two were counted */
	elfen_u64 reserved_request[9];
	/* the queueing thread's line */
	elfen_u64 queue_len;
	elfen_u64 reserved_queue[15];
	struct elfen_histogram latency; /* from arrival to end */
	struct elfen_marks marks;
} ELFEN_ALIGNED;
ELFEN_ASSERT(sizeof(struct elfen_service_slot) == 5248 + 131200);
ELFEN_AT(elfen_service_slot, writer, 0);
ELFEN_AT(elfen_service_slot, cpu, 8);
ELFEN_AT(elfen_service_slot, running_request, 128);
ELFEN_AT(elfen_service_slot, request_started_ns, 136);
ELFEN_AT(elfen_service_slot, finished_requests, 144);
ELFEN_AT(elfen_service_slot, request_arrived_ns, 152);
ELFEN_AT(elfen_service_slot, instructions, 160);
ELFEN_AT(elfen_service_slot, cycles, 168);
ELFEN_AT(elfen_service_slot, counted_at_ns, 176);
ELFEN_AT(elfen_service_slot, queue_len, 256);
ELFEN_AT(elfen_service_slot, latency, 384);
ELFEN_AT(elfen_service_slot, marks, 5248);

/* One batch lane. Its guard and the batch threads on it write the slot. */
enum elfen_lane_state {
	ELFEN_LANE_OFF = 0, ELFEN_LANE_RUNNING = 1, ELFEN_LANE_NAPPING = 2, ELFEN_LANE_HELD = 3
};
struct elfen_lane_slot {
	elfen_u64 state; /* enum elfen_lane_state */
	elfen_u64 state_since_ns;
	elfen_u64 batch_cpu;
	elfen_u64 request_cpu;
	elfen_u64 naps;
	elfen_u64 borrowed_ns;
	elfen_u64 overlapped_ns;
	elfen_u64 napped_ns;
	/* The inputs of verdicts of threads with checks; guards have a copy of their own. */
	elfen_u64 policy_state[4]; /* the policy's state between checks */
	elfen_u64 hotplug;	   /* ELFEN_LANE_.._OFFLINE */
	/*
	 * the request lane's instructions per 1000 cycles over a window; ipc_since_ns is 0 while
	 * the other two words change
	 */
	elfen_u64 ipc_milli;
	elfen_u64 ipc_since_ns;
	elfen_u64 ipc_until_ns;
	/* How much of the kernel's account is in borrowed_ns and overlapped_ns. */
	elfen_u64 counted_ran_ns;
	elfen_u64 counted_shared_ns;
	elfen_u64 wakes;	 /* counts up when the request lane idles */
	elfen_u64 critical;	 /* not 0 while a batch thread here is in a critical section */
	elfen_u64 account_claim; /* claim of the kernel's account of this lane; 0 for none */
	elfen_u64 account_index;
	elfen_u64 check_nap; /* how batch threads with checks nap here; 0 if no thread has checks */
	elfen_u64 guard_nap; /* how the guard naps here; 0 before it has begun */
	/* For checks that are patched into the program. The lower half of doorbell is a futex. */
	elfen_u64 doorbell; /* 1 while the guard sleeps; a check sets it to 0 and wakes the guard */
	elfen_u64 probe; /* 1 while the guard probes which site checks; a check sets it to 0 */
	elfen_u64 answer_tsc; /* when a check answered the probe */
	elfen_u64 answer_address; /* the address behind that check */
	elfen_u64 reserved[4];
	struct elfen_histogram reaction;
	struct elfen_histogram wake;
} ELFEN_ALIGNED;
#define ELFEN_LANE_REQUEST_OFFLINE 1
#define ELFEN_LANE_BATCH_OFFLINE 2
ELFEN_ASSERT(sizeof(struct elfen_lane_slot) == 9984);
ELFEN_AT(elfen_lane_slot, state, 0);
ELFEN_AT(elfen_lane_slot, state_since_ns, 8);
ELFEN_AT(elfen_lane_slot, batch_cpu, 16);
ELFEN_AT(elfen_lane_slot, request_cpu, 24);
ELFEN_AT(elfen_lane_slot, naps, 32);
ELFEN_AT(elfen_lane_slot, borrowed_ns, 40);
ELFEN_AT(elfen_lane_slot, overlapped_ns, 48);
ELFEN_AT(elfen_lane_slot, napped_ns, 56);
ELFEN_AT(elfen_lane_slot, policy_state, 64);
ELFEN_AT(elfen_lane_slot, hotplug, 96);
ELFEN_AT(elfen_lane_slot, ipc_milli, 104);
ELFEN_AT(elfen_lane_slot, ipc_since_ns, 112);
ELFEN_AT(elfen_lane_slot, ipc_until_ns, 120);
ELFEN_AT(elfen_lane_slot, counted_ran_ns, 128);
ELFEN_AT(elfen_lane_slot, counted_shared_ns, 136);
ELFEN_AT(elfen_lane_slot, wakes, 144);
ELFEN_AT(elfen_lane_slot, critical, 152);
ELFEN_AT(elfen_lane_slot, account_claim, 160);
ELFEN_AT(elfen_lane_slot, account_index, 168);
ELFEN_AT(elfen_lane_slot, check_nap, 176);
ELFEN_AT(elfen_lane_slot, guard_nap, 184);
ELFEN_AT(elfen_lane_slot, doorbell, 192);
ELFEN_AT(elfen_lane_slot, probe, 200);
ELFEN_AT(elfen_lane_slot, answer_tsc, 208);
ELFEN_AT(elfen_lane_slot, answer_address, 216);
ELFEN_AT(elfen_lane_slot, reaction, 256);
ELFEN_AT(elfen_lane_slot, wake, 5120);

/* The settings of a batch. `elfen run` writes them. */
enum elfen_policy_kind {
	ELFEN_POLICY_BORROW_IDLE = 1,
	ELFEN_POLICY_FIXED_BUDGET = 2,
	ELFEN_POLICY_REFRESH_BUDGET = 3,
	ELFEN_POLICY_DYNAMIC_BUDGET = 4,
	ELFEN_POLICY_SLO_BUDGET = 5
};
struct elfen_control_slot {
	elfen_u64 generation;       /* stored after the words below */
	elfen_u64 generation_begun; /* stored before them */
	elfen_u64 policy;           /* enum elfen_policy_kind */
	elfen_u64 budget_ns;
	elfen_u64 budget_until_ns; /* slo-budget: the budget is 0 from this time on */
	elfen_u64 slo_latency_ns;
	elfen_u64 slo_per_million;
	elfen_u64 ref_ipc_milli;
	elfen_u64 reserved_settings[2];
	/* about the run, written once */
	elfen_u64 lanes_segment; /* id of the lane page's segment */
	elfen_u64 supervisor;    /* pid << 42 | start time of the supervisor process */
	elfen_u64 batch;         /* the same of the program that it started */
	elfen_u64 nap; /* how to nap; 0 for the first way that works */
	elfen_u64 termination_requested_ns; /* of the batch; 0 if it was never requested */
	elfen_u64 service_segment; /* id of the service's segment plus 1; 0 without a service */
} ELFEN_ALIGNED;
ELFEN_ASSERT(sizeof(struct elfen_control_slot) == 128);
ELFEN_AT(elfen_control_slot, generation, 0);
ELFEN_AT(elfen_control_slot, generation_begun, 8);
ELFEN_AT(elfen_control_slot, policy, 16);
ELFEN_AT(elfen_control_slot, budget_ns, 24);
ELFEN_AT(elfen_control_slot, budget_until_ns, 32);
ELFEN_AT(elfen_control_slot, slo_latency_ns, 40);
ELFEN_AT(elfen_control_slot, slo_per_million, 48);
ELFEN_AT(elfen_control_slot, ref_ipc_milli, 56);
ELFEN_AT(elfen_control_slot, lanes_segment, 80);
ELFEN_AT(elfen_control_slot, supervisor, 88);
ELFEN_AT(elfen_control_slot, batch, 96);
ELFEN_AT(elfen_control_slot, nap, 104);
ELFEN_AT(elfen_control_slot, termination_requested_ns, 112);
ELFEN_AT(elfen_control_slot, service_segment, 120);

/* What a thread publishes about itself for `elfen shim`. A page has ELFEN_THREADS slots. */
#define ELFEN_THREADS 1024
struct elfen_thread_words {
	elfen_u32 function; /* lower half of a code address; 0 for none */
	elfen_u32 tag;      /* lower half of the address of a name; 0 for none */
	elfen_u64 value;
	elfen_u64 reserved[6];
	elfen_u64 calls; /* on another cache line, because counters are read to be written */
	elfen_u64 instructions;
	elfen_u64 cycles;
	elfen_u64 reserved_counts[5];
};
ELFEN_ASSERT(sizeof(struct elfen_thread_words) == 128);
ELFEN_AT(elfen_thread_words, tag, 4);
ELFEN_AT(elfen_thread_words, value, 8);
ELFEN_AT(elfen_thread_words, calls, 64);
ELFEN_AT(elfen_thread_words, instructions, 72);
ELFEN_AT(elfen_thread_words, cycles, 80);

struct elfen_thread_slot {
	struct elfen_thread_words words;
	elfen_u64 thread;  /* tgid << 32 | tid of its writer; 0 for none */
	/* The words below are used in slot 0 only. */
	elfen_u64 claims;  /* how often a slot of the page was claimed */
	elfen_u64 refused; /* threads that found no slot */
	/* The preload library counts these. */
	elfen_u64 entries;   /* function entries that are patched to publish their function */
	elfen_u64 ambiguous; /* entries that are not patched: their half address is taken */
	elfen_u64 returns;   /* files whose functions also publish their returns */
	elfen_u64 counting;  /* entries that publish instructions and cycles */
	elfen_u64 uncounted; /* threads that should count those, but have no counters */
	elfen_u64 reserved[8];
} ELFEN_ALIGNED;
ELFEN_ASSERT(sizeof(struct elfen_thread_slot) == 256);
ELFEN_AT(elfen_thread_slot, thread, 128);
ELFEN_AT(elfen_thread_slot, claims, 136);
ELFEN_AT(elfen_thread_slot, refused, 144);
ELFEN_AT(elfen_thread_slot, entries, 152);
ELFEN_AT(elfen_thread_slot, ambiguous, 160);
ELFEN_AT(elfen_thread_slot, returns, 168);
ELFEN_AT(elfen_thread_slot, counting, 176);
ELFEN_AT(elfen_thread_slot, uncounted, 184);

#endif /* ELFEN_ABI_H */
