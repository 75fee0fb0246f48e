/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Shared by the programs of events.bpf.c: the recorder's configuration, the rings, and how an event
 * is written. A writer claims an index by an atomic addition, because a program in an interrupt may
 * interrupt it. Then it fills the event, and stores the word that makes the event valid last.
 */
#ifndef ELFEN_EVENTS_H
#define ELFEN_EVENTS_H

#include "bpf.h"

#define WATCHED_WORDS 64
#define CPU_WORDS 64

/* Only the recorder writes this. */
struct elfen_event_config {
	elfen_u64 ring; /* events of a CPU, a power of two */
	elfen_u64 port; /* local port of the service; 0 for none */
	elfen_u64 least_ns; /* shorter interrupts are not recorded */
	elfen_u64 epoch; /* waits that began in another epoch may have ended unseen */
	elfen_u64 cpus[CPU_WORDS]; /* bits of the CPUs whose switches are recorded */
	elfen_u64 watched[WATCHED_WORDS]; /* bits of processes, by the lowest bits of their ids */
};

struct elfen_event_cpu {
	elfen_u64 head; /* how many events were ever written */
	elfen_u64 irq_ns;
	elfen_u64 softirq_ns;
	elfen_u64 reserved[5];
};

struct elfen_event {
	elfen_u64 at_ns;
	elfen_u64 a;
	elfen_u64 b;
	elfen_u64 word; /* thread << 32 | lap << 16 | kind << 8 | flags; stored last */
};

struct {
	int (*type)[BPF_MAP_TYPE_ARRAY];
	int (*max_entries)[1];
	elfen_u32 *key;
	struct elfen_event_config *value;
} elfen_ev_config SECTION(".maps");

struct {
	int (*type)[BPF_MAP_TYPE_ARRAY];
	int (*max_entries)[1];
	int (*map_flags)[BPF_F_MMAPABLE];
	elfen_u32 *key;
	struct elfen_event_cpu *value;
} elfen_ev_cpus SECTION(".maps");

struct {
	int (*type)[BPF_MAP_TYPE_ARRAY];
	int (*max_entries)[1];
	int (*map_flags)[BPF_F_MMAPABLE];
	elfen_u32 *key;
	struct elfen_event *value;
} elfen_ev_ring SECTION(".maps");

/* When a thread began each kind of wait for the kernel; 0 while it does not wait. */
struct elfen_event_waits {
	elfen_u64 epoch;
	elfen_u64 contended_ns;
	elfen_u64 lock;
	elfen_u64 sort;
	elfen_u64 reclaim_ns;
	elfen_u64 compaction_ns;
	elfen_u64 fault_ns;
	elfen_u64 address;
};

/* By thread id. When the map is full, the kernel drops the thread that was unused for longest. */
struct {
	int (*type)[BPF_MAP_TYPE_LRU_HASH];
	int (*max_entries)[4096];
	elfen_u32 *key;
	struct elfen_event_waits *value;
} elfen_ev_waits SECTION(".maps");

/* Kinds and flags, as in elfen-rt/src/signal/event.rs. */
#define SWITCH 1
#define WAKING 2
#define EXIT 3
#define READY 4
#define RECEIVED 5
#define SENT 6
#define TRANSMITTED 7
#define IRQ 8
#define SOFTIRQ 9
#define RUNTIME 10
#define CONTENTION 11
#define RECLAIM 12
#define COMPACTION 13
#define FAULT 14
#define BLOCKED 15
#define SAMPLE 16

/* A stack begins with the frames of the switch itself. The eight after them are recorded. */
#define FRAMES 8
#define FRAMES_SKIPPED 2

#define SWITCH_PREEMPTED 1
#define SWITCH_IOWAIT 2
#define RECEIVED_PEEK 1
#define SAMPLE_KERNEL 1

#define NO_CALL 0xffff

struct rq {
	elfen_u64 prev_steal_time_rq;
} __attribute__((preserve_access_index));

struct cfs_rq {
	struct rq *rq;
} __attribute__((preserve_access_index));

struct sched_entity {
	struct cfs_rq *cfs_rq;
} __attribute__((preserve_access_index));

struct task_struct {
	int pid;
	int tgid;
	char comm[16];
	struct sched_entity se;
	unsigned in_iowait : 1;
} __attribute__((preserve_access_index));

struct pt_regs {
	unsigned long orig_ax;
	unsigned long ip;
} __attribute__((preserve_access_index));

struct in6_addr {
	elfen_u32 words[4];
};

struct sock_common {
	unsigned short skc_num;
	unsigned short skc_dport;
	elfen_u32 skc_daddr;
	unsigned short skc_family;
	unsigned char skc_state;
	struct in6_addr skc_v6_daddr;
} __attribute__((preserve_access_index));

struct sock {
	struct sock_common __sk_common;
	unsigned short sk_protocol;
} __attribute__((preserve_access_index));

struct tcp_sock {
	elfen_u32 write_seq;
	elfen_u32 rcv_nxt;
	elfen_u32 copied_seq;
} __attribute__((preserve_access_index));

struct sk_buff {
	struct sock *sk;
	unsigned int len;
	unsigned short transport_header;
	unsigned short mac_header;
	unsigned char *head;
} __attribute__((preserve_access_index));

struct tcp_head {
	unsigned short source;
	unsigned short dest;
	elfen_u32 seq;
	elfen_u32 ack_seq;
	unsigned char offset;
	unsigned char flags;
	unsigned short window;
};

static struct task_struct *(*const get_current_task)(void) = (void *)158;
static struct pt_regs *(*const task_pt_regs)(struct task_struct *task) = (void *)175;
static long (*const get_task_stack)(struct task_struct *task, void *to, elfen_u32 size,
				    elfen_u64 flags) = (void *)141;
static struct tcp_sock *(*const skc_to_tcp_sock)(void *sk) = (void *)137;
static long (*const probe_read_kernel)(void *to, elfen_u32 size, const void *from) = (void *)113;
static long (*const probe_read_user_str)(void *to, elfen_u32 size, const void *from) = (void *)114;
static elfen_u64 (*const get_attach_cookie)(void *context) = (void *)174;

#define EXISTS(field) __builtin_preserve_field_info(field, 2)

#define TCP_LISTEN 10
#define IPPROTO_TCP 6
#define AF_INET6 10
#define MSG_PEEK 2

INLINE struct elfen_event_config *config_of(void)
{
	elfen_u32 zero = 0;

	return map_lookup_elem(&elfen_ev_config, &zero);
}

INLINE void note(struct elfen_event_config *config, elfen_u32 kind, elfen_u32 flags,
		 elfen_u32 thread, elfen_u64 at_ns, elfen_u64 a, elfen_u64 b)
{
	elfen_u32 cpu = get_smp_processor_id(), place;
	struct elfen_event_cpu *here = map_lookup_elem(&elfen_ev_cpus, &cpu);
	elfen_u64 ring = config->ring, at, lap;
	struct elfen_event *event;

	if (!here || !ring)
		return;
	at = __sync_fetch_and_add(&here->head, 1);
	place = cpu * (elfen_u32)ring + (elfen_u32)(at & (ring - 1));
	event = map_lookup_elem(&elfen_ev_ring, &place);
	if (!event)
		return;
	/* The first lap is 1, because a ring that was never written holds 0. */
	lap = (at / ring + 1) & 0xffff;
	STORE(event->word, 0);
	STORE(event->at_ns, at_ns);
	STORE(event->a, a);
	STORE(event->b, b);
	STORE(event->word, (elfen_u64)thread << 32 | lap << 16 | kind << 8 | flags);
}

INLINE int is_watched(struct elfen_event_config *config, elfen_u32 process)
{
	return config->watched[process / 64 & (WATCHED_WORDS - 1)] >> (process & 63) & 1;
}

#endif
