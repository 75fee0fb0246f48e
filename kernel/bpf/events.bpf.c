/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Records kernel events around the requests of a service: which thread ran where, which thread woke
 * which, and the data of its sockets. `elfen tailor record` attaches these programs while it
 * records, and detaches them afterwards.
 *
 * Each CPU has a ring of 32-byte events (events.h). The writers never wait for the reader: events
 * that it has not read within a lap are overwritten. It recognizes them by the lap in each event.
 */
#include "events.h"

/* How long the hypervisor has taken this virtual machine's CPU away, in total. */
INLINE elfen_u64 stolen_ns(struct task_struct *task)
{
	struct rq *rq;

	if (!EXISTS(((struct cfs_rq *)0)->rq) || !EXISTS(((struct rq *)0)->prev_steal_time_rq))
		return 0;
	rq = task->se.cfs_rq->rq;
	return rq->prev_steal_time_rq;
}

/* A bit field has no address, so this reads the word around it and applies the loader's shifts. */
INLINE int waits_for_io(struct task_struct *task)
{
	unsigned int offset = __builtin_preserve_field_info(task->in_iowait, 0);
	elfen_u64 word = *(elfen_u32 *)((void *)task + offset);

	word <<= __builtin_preserve_field_info(task->in_iowait, 4);
	word >>= __builtin_preserve_field_info(task->in_iowait, 5);
	return word & 1;
}

/*
 * Records the stack of a thread that slept for a disk and runs again: two events of four addresses
 * each. The lower halves of addresses suffice to distinguish functions.
 */
INLINE void note_stack(struct elfen_event_config *config, struct task_struct *task, elfen_u64 now)
{
	elfen_u64 frames[FRAMES] = { 0 };

	if (get_task_stack(task, frames, sizeof(frames), FRAMES_SKIPPED) <= 0)
		return;
	note(config, BLOCKED, 0, task->pid, now, frames[1] << 32 | (elfen_u32)frames[0],
	     frames[3] << 32 | (elfen_u32)frames[2]);
	note(config, BLOCKED, 1, task->pid, now, frames[5] << 32 | (elfen_u32)frames[4],
	     frames[7] << 32 | (elfen_u32)frames[6]);
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
	elfen_u64 stolen, now;

	if (!config || !(config->cpus[cpu / 64 & (CPU_WORDS - 1)] >> (cpu & 63) & 1))
		return 0;
	if (arguments[0])
		flags |= SWITCH_PREEMPTED;
	if (state && is_watched(config, prev->tgid)) {
		call = (elfen_u32)task_pt_regs(prev)->orig_ax & 0xffff;
		if (waits_for_io(prev))
			flags |= SWITCH_IOWAIT;
	}
	now = ktime_get_ns();
	/* The flag stays set until the thread runs again. */
	if (waits_for_io(next) && is_watched(config, next->tgid))
		note_stack(config, next, now);
	/* In units of 1,024 ns; 40 bits hold 35 years. */
	stolen = stolen_ns(prev) >> 10 & 0xffffffffffull;
	note(config, SWITCH, flags, next->pid, now,
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

/* sched_process_exit(task, ...): the last moment at which a thread's name can be read. */
SECTION("tp_btf/sched_process_exit")
int elfen_ev_exit(elfen_u64 *arguments)
{
	struct elfen_event_config *config = config_of();
	struct task_struct *task = (struct task_struct *)arguments[0];
	elfen_u32 thread = task->pid;
	elfen_u64 name[2];

	/* Another thread will get this id. */
	map_delete_elem(&elfen_ev_waits, &thread);
	if (!config || probe_read_kernel(name, sizeof(name), task->comm))
		return 0;
	note(config, EXIT, 0, task->pid, ktime_get_ns(), name[0], name[1]);
	return 0;
}

/* Whether the socket is a connection of the service, and not its listening socket. */
INLINE int is_served(struct elfen_event_config *config, struct sock *sk)
{
	return config && sk && config->port && sk->__sk_common.skc_num == config->port &&
	       sk->sk_protocol == IPPROTO_TCP && sk->__sk_common.skc_state != TCP_LISTEN;
}

/* Identifies a connection by the address and port of the client. */
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

/* sk_data_ready(sk): data has arrived that no thread has read. */
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

/* sock_send_length(sk, result, flags): how many bytes were written, and their end in the stream. */
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

/* net_dev_queue(skb): how many bytes go to the device, and their end in the stream. */
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
	/* On its way to the device, a packet's data begins with the device's header. */
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

/*
 * Records an interrupt or a wait as one event, at its end, if it was long enough to matter. Clears
 * the beginning, so that an end without a seen beginning is not recorded.
 */
INLINE void note_end(elfen_u32 kind, elfen_u64 *since, elfen_u64 which)
{
	struct elfen_event_config *config = config_of();
	elfen_u64 now = ktime_get_ns(), since_ns = *since;

	STORE(*since, 0);
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
		note_end(IRQ, &here->irq_ns, (elfen_u32)arguments[0]);
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
		note_end(SOFTIRQ, &here->softirq_ns, (elfen_u32)arguments[0]);
	return 0;
}

/*
 * The waits of the running thread, if it is watched. The kernel skips a program in an interrupt
 * while another one runs. The recorder notices this and begins a new epoch.
 */
INLINE struct elfen_event_waits *waits_of_this(void)
{
	struct elfen_event_config *config = config_of();
	struct task_struct *task = get_current_task();
	elfen_u32 thread = task->pid;
	struct elfen_event_waits none = { 0 }, *waits;

	if (!config || !is_watched(config, task->tgid))
		return 0;
	none.epoch = config->epoch;
	waits = map_lookup_elem(&elfen_ev_waits, &thread);
	if (!waits) {
		map_update_elem(&elfen_ev_waits, &thread, &none, BPF_NOEXIST);
		return map_lookup_elem(&elfen_ev_waits, &thread);
	}
	if (waits->epoch != none.epoch)
		*waits = none;
	return waits;
}

/* contention_begin(lock, flags): comes twice if a thread first spins and then sleeps. */
SECTION("tp_btf/contention_begin")
int elfen_ev_contend(elfen_u64 *arguments)
{
	struct elfen_event_waits *waits = waits_of_this();

	if (!waits || (waits->contended_ns && waits->lock != arguments[0]))
		return 0;
	if (!waits->contended_ns)
		STORE(waits->contended_ns, ktime_get_ns());
	STORE(waits->lock, arguments[0]);
	waits->sort = (elfen_u32)arguments[1];
	return 0;
}

/*
 * contention_end(lock, result): ends the wait for the noted lock, and not one of an interrupt in
 * between. An interrupt between the two stores below finds no noted lock, and changes nothing.
 */
SECTION("tp_btf/contention_end")
int elfen_ev_contended(elfen_u64 *arguments)
{
	struct elfen_event_waits *waits = waits_of_this();

	if (!waits || waits->lock != arguments[0])
		return 0;
	STORE(waits->lock, 0);
	note_end(CONTENTION, &waits->contended_ns, waits->sort & 0xff);
	return 0;
}

SECTION("tp_btf/mm_vmscan_direct_reclaim_begin")
int elfen_ev_reclaim_in(elfen_u64 *arguments)
{
	struct elfen_event_waits *waits = waits_of_this();

	(void)arguments;
	if (waits)
		waits->reclaim_ns = ktime_get_ns();
	return 0;
}

SECTION("tp_btf/mm_vmscan_direct_reclaim_end")
int elfen_ev_reclaim(elfen_u64 *arguments)
{
	struct elfen_event_waits *waits = waits_of_this();

	(void)arguments;
	if (waits)
		note_end(RECLAIM, &waits->reclaim_ns, 0);
	return 0;
}

SECTION("tp_btf/mm_compaction_begin")
int elfen_ev_compact_in(elfen_u64 *arguments)
{
	struct elfen_event_waits *waits = waits_of_this();

	(void)arguments;
	if (waits)
		waits->compaction_ns = ktime_get_ns();
	return 0;
}

SECTION("tp_btf/mm_compaction_end")
int elfen_ev_compact(elfen_u64 *arguments)
{
	struct elfen_event_waits *waits = waits_of_this();

	(void)arguments;
	if (waits)
		note_end(COMPACTION, &waits->compaction_ns, 0);
	return 0;
}

/* page_fault_user(address, ...): a page fault begins. */
SECTION("tp_btf/page_fault_user")
int elfen_ev_fault(elfen_u64 *arguments)
{
	struct elfen_event_waits *waits = waits_of_this();

	if (!waits)
		return 0;
	STORE(waits->fault_ns, ktime_get_ns());
	waits->address = arguments[0];
	return 0;
}

/* The kernel has counted a page fault, which it does after it has resolved the fault. */
SECTION("perf_event")
int elfen_ev_faulted(void *context)
{
	struct elfen_event_config *config = config_of();
	struct elfen_event_waits *waits = waits_of_this();
	elfen_u64 since_ns;

	(void)context;
	if (!config || !waits || !waits->fault_ns)
		return 0;
	since_ns = waits->fault_ns;
	STORE(waits->fault_ns, 0);
	note(config, FAULT, 0, running_thread(), ktime_get_ns(), since_ns, waits->address);
	return 0;
}

/* The code segment of what was interrupted, in the registers that a perf event has. */
#define CONTEXT_CS 136
#define USER_MODE 3

/*
 * A clock of the CPU: where the running thread is in its own code. In the kernel, that is where it
 * has entered the kernel.
 */
SECTION("perf_event")
int elfen_ev_sampled(void *context)
{
	struct elfen_event_config *config = config_of();
	struct task_struct *task = get_current_task();
	elfen_u64 segment = *(elfen_u64 *)(context + CONTEXT_CS);
	struct pt_regs *registers;

	if (!config || !is_watched(config, task->tgid))
		return 0;
	registers = task_pt_regs(task);
	note(config, SAMPLE, (segment & USER_MODE) == USER_MODE ? 0 : SAMPLE_KERNEL, task->pid,
	     ktime_get_ns(), registers->ip, (elfen_u32)task->tgid);
	return 0;
}

/* A probe's cookie: its number, the register that points to a name, and whether there is one. */
#define COOKIE_NUMBER 0xff
#define COOKIE_REGISTER(cookie) ((cookie) >> 8 & 0xff)
#define COOKIE_HAS_NAME (1ull << 16)

/* A thread of a watched process has reached a probe in its language's runtime. */
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
