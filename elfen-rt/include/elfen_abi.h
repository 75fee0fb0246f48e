/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * The layouts of Elfen's channels, for everybody who speaks C: the eBPF program, the kernel module,
 * and programs, which include elfen.h instead.
 *
 * Each structure has a twin in elfen-rt/src/signal. Both sides assert every offset, and a
 * test compares pages written by either. All fields are shared between address spaces: load
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
	elfen_u64 size; /* bytes of the page: this header and all slots */
	elfen_u32 slot_size;
	elfen_u32 pid_namespace; /* inode; 0 for the kernel's own */
	elfen_u64 name[ELFEN_NAME_BYTES / 8];
	elfen_u64 counts_cgroups; /* of a task map: 1 if its writer heeds ELFEN_CLAIM_CGROUP */
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
 * How long one run's batch had a batch lane. Written by the kernel on that lane's CPU. In the
 * eBPF program's map, the accounts of all CPUs follow the page of task slots: ELFEN_ACCOUNTS
 * for CPU 0, then for CPU 1.
 */
#define ELFEN_ACCOUNTS 3
/* In the upper half of a claim: its two processes are counted as well. */
#define ELFEN_CLAIM_SELF 0x80000000U
/* A claim with this is no two processes: the rest is the id of a cgroup of the cpu controller. */
#define ELFEN_CLAIM_CGROUP (1ULL << 62)
struct elfen_account {
	elfen_u64 claim;      /* front << 32 | keeper, who have descendants; a cgroup; or 0 */
	elfen_u64 begun;      /* stored before the words below */
	elfen_u64 done;       /* stored after them */
	elfen_u64 ran_ns;     /* up to the last switch to or from a task of the batch */
	elfen_u64 shared_ns;  /* of that: while the request lane was busy */
	elfen_u64 since_ns;   /* when the task that runs now was switched in; 0 while none does */
	elfen_u64 busy_at_ns; /* how long the request lane had been busy then */
	elfen_u64 claimed;    /* the writer's own */
	elfen_u64 reserved[8];
} ELFEN_ALIGNED;
ELFEN_ASSERT(sizeof(struct elfen_account) == 128);
ELFEN_AT(elfen_account, begun, 8);
ELFEN_AT(elfen_account, done, 16);
ELFEN_AT(elfen_account, ran_ns, 24);
ELFEN_AT(elfen_account, shared_ns, 32);
ELFEN_AT(elfen_account, since_ns, 40);
ELFEN_AT(elfen_account, busy_at_ns, 48);

/* One CPU. Written by the kernel on every context switch of that CPU. */
struct elfen_task_slot {
	elfen_u64 task;           /* tgid << 32 | tid (initial pid namespace), 0, or _UNKNOWN */
	elfen_u64 switched_at_ns; /* CLOCK_MONOTONIC; 0 if nobody watched the CPU */
	elfen_u64 switches;       /* stored after the words above */
	elfen_u64 switches_begun; /* stored before them */
	elfen_u64 lease_renewal;  /* the writer's own */
	elfen_u64 lease_end_ns;   /* the writer's own */
	elfen_u64 busy_ns;        /* not idle while watched, up to the last switch to or from it */
	elfen_u64 busy_since_ns;  /* when the CPU turned busy; 0 while it idles or nobody watches */
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

/* Until a CPU's first switch nobody knows who runs there: it counts as busy. */
#define ELFEN_TASK_UNKNOWN (~0ULL)

/* What readers ask of the kernel about one CPU. */
struct elfen_watch_slot {
	elfen_u64 renewals; /* counted up: the next switches are timed, for a lease */
	elfen_u64 reserved[7];
} __attribute__((aligned(64)));
ELFEN_ASSERT(sizeof(struct elfen_watch_slot) == 64);

/* Of a batch lane: whom to count. Only root writes it, in a map of its own. */
struct elfen_claim_slot {
	elfen_u64 request; /* one more than its request lane's CPU */
	elfen_u64 claims[ELFEN_ACCOUNTS]; /* whose descendants to count, or 0 */
	elfen_u64 reserved[4];
} __attribute__((aligned(64)));
ELFEN_ASSERT(sizeof(struct elfen_claim_slot) == 64);
ELFEN_AT(elfen_claim_slot, claims, 8);
#define ELFEN_LEASE_NS 4000000000ULL

/* 16 buckets to every power of two, exact below 32 ns, up to 2^40 ns. */
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

/* What a service did with its requests and when: a ring of four words each. */
#define ELFEN_MARKS 4096
enum elfen_mark_step {
	ELFEN_MARK_BEGIN = 1, /* with when it arrived */
	ELFEN_MARK_STAGE = 2, /* with the stage that it goes on to */
	ELFEN_MARK_END = 3    /* with its class */
};
struct elfen_marks {
	elfen_u64 head;       /* marks ever written */
	elfen_u64 kind;       /* the running request's class, in the service's own numbers; or 0 */
	elfen_u64 reserved[14];
	/* time, request, value, and last tid << 32 | lap << 16 | step << 8 */
	elfen_u64 ring[ELFEN_MARKS][4];
} ELFEN_ALIGNED;
ELFEN_ASSERT(sizeof(struct elfen_marks) == 128 + 32 * ELFEN_MARKS);
ELFEN_AT(elfen_marks, kind, 8);
ELFEN_AT(elfen_marks, ring, 128);

/* One request lane of a service. */
struct elfen_service_slot {
	elfen_u64 writer; /* pid << 42 | start time in clock ticks; 0 for nobody */
	elfen_u64 cpu;
	elfen_u64 reserved_claim[14];
	/* the serving thread's line */
	elfen_u64 running_request; /* 0 for none */
	elfen_u64 request_started_ns;
	elfen_u64 finished_requests;
	elfen_u64 request_arrived_ns; /* before it started, if it waited */
	elfen_u64 instructions; /* of the serving thread, in `cycles`; both 0 if nobody counts */
	elfen_u64 cycles;
	elfen_u64 counted_at_ns; /* when they were counted */
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

/* One batch lane; written by its guard and by the batch threads that run on it. */
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
	/* What threads with checks decide by; guards have their own copy of these. */
	elfen_u64 policy_state[4]; /* what the policy remembers from check to check */
	elfen_u64 hotplug;	   /* ELFEN_LANE_.._OFFLINE */
	/*
	 * the request lane's instructions per 1000 cycles over a window; since is
	 * 0 while the others change
	 */
	elfen_u64 ipc_milli;
	elfen_u64 ipc_since_ns;
	elfen_u64 ipc_until_ns;
	/* How far the kernel's account is in borrowed and overlapped time. */
	elfen_u64 counted_ran_ns;
	elfen_u64 counted_shared_ns;
	elfen_u64 wakes;	 /* counts up when the request lane idles */
	elfen_u64 critical;	 /* not 0 while a batch thread here is in a critical section */
	elfen_u64 account_claim; /* the kernel's account of this lane for this run; 0 for none */
	elfen_u64 account_index;
	elfen_u64 check_nap; /* how batch threads that check nap here; 0 if none has */
	elfen_u64 guard_nap; /* how the guard naps here; 0 before it has begun */
	/* For checks that the guard has written; bell is a futex, by its lower half. */
	elfen_u64 bell; /* 1 while the guard sleeps; a check makes that 0 and wakes it */
	elfen_u64 drill; /* 1 while the guard asks who checks; a check makes that 0 */
	elfen_u64 answer_tsc; /* when, and which check: the address behind it */
	elfen_u64 answer_place;
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
ELFEN_AT(elfen_lane_slot, bell, 192);
ELFEN_AT(elfen_lane_slot, drill, 200);
ELFEN_AT(elfen_lane_slot, answer_tsc, 208);
ELFEN_AT(elfen_lane_slot, answer_place, 216);
ELFEN_AT(elfen_lane_slot, reaction, 256);
ELFEN_AT(elfen_lane_slot, wake, 5120);

/* What the operator wants of a batch; written by the `elfen` parent. */
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
	elfen_u64 budget_until_ns; /* slo-budget: the budget counts until then */
	elfen_u64 slo_latency_ns;
	elfen_u64 slo_per_million;
	elfen_u64 ref_ipc_milli;
	elfen_u64 reserved_settings[2];
	/* about the run, written once */
	elfen_u64 lanes_segment; /* id of the lane page's segment */
	elfen_u64 keeper;        /* pid << 42 | start time of the process that keeps the lanes */
	elfen_u64 batch;         /* and of the program it started */
	elfen_u64 nap; /* how to nap; 0 for the first way that works */
	elfen_u64 told_to_end_ns; /* when the batch was last told to end; 0 if never */
	elfen_u64 service_segment; /* one more than the id of its service's segment, or 0 */
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
ELFEN_AT(elfen_control_slot, keeper, 88);
ELFEN_AT(elfen_control_slot, batch, 96);
ELFEN_AT(elfen_control_slot, nap, 104);
ELFEN_AT(elfen_control_slot, told_to_end_ns, 112);
ELFEN_AT(elfen_control_slot, service_segment, 120);

/* What a thread says of itself, for `elfen shim`; a page has ELFEN_THREADS slots. */
#define ELFEN_THREADS 1024
struct elfen_thread_words {
	elfen_u32 function; /* lower half of an address of code; 0 for none */
	elfen_u32 tag;      /* lower half of the address of a name; 0 for none */
	elfen_u64 value;
	elfen_u64 reserved[6];
	elfen_u64 calls; /* another line: counters are read to be written */
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
	elfen_u64 thread;  /* tgid << 32 | tid of its writer; 0 while there is none */
	elfen_u64 claims;  /* of slot 0: how often a slot of the page was claimed */
	elfen_u64 refused; /* of slot 0: threads that found none */
	/* of slot 0, by the preload library: entries of functions that say so, those that were
	 * left alone, and files whose functions say that they return */
	elfen_u64 entries;
	elfen_u64 ambiguous;
	elfen_u64 returns;
	/* of slot 0: entries that publish what their thread has executed, and threads that were
	 * to count and have no counters */
	elfen_u64 counting;
	elfen_u64 uncounted;
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
