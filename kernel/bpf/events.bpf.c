/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Writes down what the kernel did around the requests of a service: who ran where, who woke whom,
 * and what went through its sockets. `elfen tailor record` attaches these programs while it
 * records; nothing of them is there before and after.
 *
 * Each CPU has a ring of 32-byte events. A writer takes a place by an atomic addition, since an
 * interrupt's program may come between, fills it, and stores last the word that makes it valid.
 * Nobody waits for the reader: what it has not read in a lap is overwritten, and the lap in each
 * event tells it so.
 */
#include "bpf.h"

#define WATCHED_WORDS 64
#define CPU_WORDS 64

/* Written by the recorder alone. */
struct elfen_event_config {
	elfen_u64 ring; /* events of a CPU, a power of two */
	elfen_u64 port; /* local port of the service; 0 for none */
	elfen_u64 least_ns; /* shorter interrupts are not written down */
	elfen_u64 cpus[CPU_WORDS]; /* where switches are of interest */
	elfen_u64 watched[WATCHED_WORDS]; /* processes, by the lowest bits of their ids */
};

struct elfen_event_cpu {
	elfen_u64 head; /* events ever written */
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

/* Kinds and flags, as elfen-rt/src/signal/event.rs has them. */
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

#define SWITCH_PREEMPTED 1
#define SWITCH_IOWAIT 2
#define RECEIVED_PEEK 1

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
	/* The ring's size is a power of two: the first lap is 1, as memory begins with 0. */
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

/* Of a virtual machine's CPU: how long the hypervisor ran others, so far. */
INLINE elfen_u64 stolen_ns(struct task_struct *task)
{
	struct rq *rq;

	if (!EXISTS(((struct cfs_rq *)0)->rq) || !EXISTS(((struct rq *)0)->prev_steal_time_rq))
		return 0;
	rq = task->se.cfs_rq->rq;
	return rq->prev_steal_time_rq;
}

/* A bit field has no address: the word around it, and the loader's shifts. */
INLINE int waits_for_io(struct task_struct *task)
{
	unsigned int offset = __builtin_preserve_field_info(task->in_iowait, 0);
	elfen_u64 word = *(elfen_u32 *)((void *)task + offset);

	word <<= __builtin_preserve_field_info(task->in_iowait, 4);
	word >>= __builtin_preserve_field_info(task->in_iowait, 5);
	return word & 1;
}

/* sched_switch(preempt, prev, next, prev_state) */
SECTION("tp_btf/sched_switch")
int elfen_ev_switch(elfen_u64 *arguments)
{
	struct elfen_event_config *config = config_of();
	struct task_struct *prev = (struct task_struct *)arguments[1];
	struct task_struct *next = (struct task_struct *)arguments[2];
	elfen_u32 state = (elfen_u32)arguments[3], call = NO_CALL, flags = 0;
	elfen_u32 cpu = get_smp_processor_id();
	elfen_u64 stolen;

	if (!config || !(config->cpus[cpu / 64 & (CPU_WORDS - 1)] >> (cpu & 63) & 1))
		return 0;
	if (arguments[0])
		flags |= SWITCH_PREEMPTED;
	if (state && is_watched(config, prev->tgid)) {
		call = (elfen_u32)task_pt_regs(prev)->orig_ax & 0xffff;
		if (waits_for_io(prev))
			flags |= SWITCH_IOWAIT;
	}
	/* In units of 1,024 ns, of which 40 bits hold 35 years. */
	stolen = stolen_ns(prev) >> 10 & 0xffffffffffull;
	note(config, SWITCH, flags, next->pid, ktime_get_ns(),
	     (elfen_u64)(elfen_u32)prev->pid << 32 | (elfen_u32)next->tgid,
	     stolen << 24 | (elfen_u64)(state & 0xff) << 16 | call);
	return 0;
}

/* sched_waking(task) */
SECTION("tp_btf/sched_waking")
int elfen_ev_waking(elfen_u64 *arguments)
{
	struct elfen_event_config *config = config_of();
	struct task_struct *task = (struct task_struct *)arguments[0];
	struct task_struct *waker;

	if (!config || !is_watched(config, task->tgid))
		return 0;
	waker = get_current_task();
	note(config, WAKING, 0, task->pid, ktime_get_ns(),
	     (elfen_u64)(elfen_u32)waker->tgid << 32 | (elfen_u32)waker->pid, task->tgid);
	return 0;
}

/* sched_process_exit(task, ...): the last moment at which a thread's name can be learned. */
SECTION("tp_btf/sched_process_exit")
int elfen_ev_exit(elfen_u64 *arguments)
{
	struct elfen_event_config *config = config_of();
	struct task_struct *task = (struct task_struct *)arguments[0];
	elfen_u64 name[2];

	if (!config || probe_read_kernel(name, sizeof(name), task->comm))
		return 0;
	note(config, EXIT, 0, task->pid, ktime_get_ns(), name[0], name[1]);
	return 0;
}

/* Whether the socket is a connection of the service; not the one that it listens on. */
INLINE int is_served(struct elfen_event_config *config, struct sock *sk)
{
	return config && sk && config->port && sk->__sk_common.skc_num == config->port &&
	       sk->sk_protocol == IPPROTO_TCP && sk->__sk_common.skc_state != TCP_LISTEN;
}

/* Which connection: address and port of the client. */
INLINE elfen_u64 connection_of(struct sock *sk)
{
	elfen_u32 address = sk->__sk_common.skc_daddr;
	struct in6_addr *six = &sk->__sk_common.skc_v6_daddr;

	if (sk->__sk_common.skc_family == AF_INET6)
		address = six->words[0] ^ six->words[1] ^ six->words[2] ^ six->words[3];
	return (elfen_u64)address << 32 | __builtin_bswap16(sk->__sk_common.skc_dport);
}

INLINE elfen_u32 running_thread(void)
{
	return get_current_task()->pid;
}

/* sk_data_ready(sk): bytes have come that nobody has read. */
SECTION("tp_btf/sk_data_ready")
int elfen_ev_ready(elfen_u64 *arguments)
{
	struct elfen_event_config *config = config_of();
	struct sock *sk = (struct sock *)arguments[0];
	struct tcp_sock *tcp;

	if (!is_served(config, sk))
		return 0;
	tcp = skc_to_tcp_sock(sk);
	if (!tcp)
		return 0;
	note(config, READY, 0, running_thread(), ktime_get_ns(), connection_of(sk),
	     tcp->rcv_nxt - tcp->copied_seq);
	return 0;
}

/* sock_recv_length(sk, result, flags) */
SECTION("tp_btf/sock_recv_length")
int elfen_ev_recv(elfen_u64 *arguments)
{
	struct elfen_event_config *config = config_of();
	struct sock *sk = (struct sock *)arguments[0];
	int result = (int)arguments[1];

	if (!is_served(config, sk) || result < 0)
		return 0;
	note(config, RECEIVED, (int)arguments[2] & MSG_PEEK ? RECEIVED_PEEK : 0, running_thread(),
	     ktime_get_ns(), connection_of(sk), (elfen_u32)result);
	return 0;
}

/* sock_send_length(sk, result, flags): what was written, and where in the stream that ends. */
SECTION("tp_btf/sock_send_length")
int elfen_ev_send(elfen_u64 *arguments)
{
	struct elfen_event_config *config = config_of();
	struct sock *sk = (struct sock *)arguments[0];
	int result = (int)arguments[1];
	struct tcp_sock *tcp;

	if (!is_served(config, sk) || result <= 0)
		return 0;
	tcp = skc_to_tcp_sock(sk);
	if (!tcp)
		return 0;
	note(config, SENT, 0, running_thread(), ktime_get_ns(), connection_of(sk),
	     (elfen_u64)tcp->write_seq << 32 | (elfen_u32)result);
	return 0;
}

/* net_dev_queue(skb): bytes go to the device, and where in the stream they end. */
SECTION("tp_btf/net_dev_queue")
int elfen_ev_transmit(elfen_u64 *arguments)
{
	struct elfen_event_config *config = config_of();
	struct sk_buff *skb = (struct sk_buff *)arguments[0];
	struct sock *sk = skb->sk;
	struct tcp_head head;
	elfen_u32 before, bytes;

	if (!is_served(config, sk) ||
	    probe_read_kernel(&head, sizeof(head), skb->head + skb->transport_header))
		return 0;
	/* On its way to the device, a packet's data begin with the device's own header. */
	before = (elfen_u32)(skb->transport_header - skb->mac_header);
	bytes = skb->len - before - (head.offset >> 4) * 4;
	if (!bytes || bytes > skb->len)
		return 0;
	note(config, TRANSMITTED, 0, running_thread(), ktime_get_ns(), connection_of(sk),
	     (elfen_u64)(__builtin_bswap32(head.seq) + bytes) << 32 | bytes);
	return 0;
}

INLINE struct elfen_event_cpu *this_cpu(void)
{
	elfen_u32 cpu = get_smp_processor_id();

	return map_lookup_elem(&elfen_ev_cpus, &cpu);
}

/* An interrupt is one event, at its end, and only if it was long enough to matter. */
INLINE void note_interrupt(elfen_u32 kind, elfen_u64 since_ns, elfen_u64 which)
{
	struct elfen_event_config *config = config_of();
	elfen_u64 now = ktime_get_ns();

	if (config && since_ns && now - since_ns >= config->least_ns)
		note(config, kind, 0, running_thread(), now, since_ns, which);
}

SECTION("tp_btf/irq_handler_entry")
int elfen_ev_irq_in(elfen_u64 *arguments)
{
	struct elfen_event_cpu *here = this_cpu();

	(void)arguments;
	if (here)
		STORE(here->irq_ns, ktime_get_ns());
	return 0;
}

/* irq_handler_exit(irq, ...) */
SECTION("tp_btf/irq_handler_exit")
int elfen_ev_irq(elfen_u64 *arguments)
{
	struct elfen_event_cpu *here = this_cpu();

	if (here)
		note_interrupt(IRQ, here->irq_ns, (elfen_u32)arguments[0]);
	return 0;
}

SECTION("tp_btf/softirq_entry")
int elfen_ev_soft_in(elfen_u64 *arguments)
{
	struct elfen_event_cpu *here = this_cpu();

	(void)arguments;
	if (here)
		STORE(here->softirq_ns, ktime_get_ns());
	return 0;
}

/* softirq_exit(vector) */
SECTION("tp_btf/softirq_exit")
int elfen_ev_soft(elfen_u64 *arguments)
{
	struct elfen_event_cpu *here = this_cpu();

	if (here)
		note_interrupt(SOFTIRQ, here->softirq_ns, (elfen_u32)arguments[0]);
	return 0;
}

/* Of a probe: its number, and where in the registers a name is, behind the highest bit. */
#define COOKIE_NUMBER 0xff
#define COOKIE_REGISTER(cookie) ((cookie) >> 8 & 0xff)
#define COOKIE_HAS_NAME (1ull << 16)

/* A place in a language's runtime that a thread of a watched process has come to: a probe. */
SECTION("uprobe")
int elfen_ev_runtime(void *registers)
{
	struct elfen_event_config *config = config_of();
	elfen_u64 cookie = get_attach_cookie(registers), at, text, name[2] = { 0, 0 };
	struct task_struct *task = get_current_task();

	if (!config || !is_watched(config, task->tgid))
		return 0;
	if (cookie & COOKIE_HAS_NAME) {
		at = (elfen_u64)task_pt_regs(task) + COOKIE_REGISTER(cookie);
		if (!probe_read_kernel(&text, sizeof(text), (void *)at))
			probe_read_user_str(name, sizeof(name), (void *)text);
	}
	note(config, RUNTIME, cookie & COOKIE_NUMBER, task->pid, ktime_get_ns(), name[0], name[1]);
	return 0;
}

char license_name[] SECTION("license") = "GPL";
