/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Reports to `elfen-hedge` at once when one of two servers is halted and when it continues, by a
 * signal or by its JVM. Each event wakes the reader; such events are rare.
 */
#include "bpf.h"

#define SERVERS 2
#define PROCESSES 16

/* Only the proxy writes this. */
struct elfen_hazard_config {
	elfen_u64 processes[SERVERS][PROCESSES];
};

struct {
	int (*type)[BPF_MAP_TYPE_ARRAY];
	int (*max_entries)[1];
	elfen_u32 *key;
	struct elfen_hazard_config *value;
} elfen_hz_config SECTION(".maps");

#define BPF_MAP_TYPE_RINGBUF 27
#define BPF_RB_FORCE_WAKEUP 2

struct {
	int (*type)[BPF_MAP_TYPE_RINGBUF];
	int (*max_entries)[4096];
} elfen_hz_ring SECTION(".maps");

/* One event, as kernel/src/hazard.rs reads it. */
struct elfen_hazard {
	elfen_u64 server;
	elfen_u64 step;
};

#define STOPPED 1
#define CONTINUED 2
#define HALTED 3
#define RELEASED 4

#define SIGCONT 18
#define SIGSTOP 19

struct task_struct {
	int tgid;
} __attribute__((preserve_access_index));

static struct task_struct *(*const get_current_task)(void) = (void *)158;
static long (*const ringbuf_output)(void *ring, void *data, elfen_u64 size,
				    elfen_u64 flags) = (void *)130;
static elfen_u64 (*const get_attach_cookie)(void *context) = (void *)174;

INLINE void tell(struct task_struct *task, elfen_u64 step)
{
	elfen_u32 zero = 0, process = task->tgid;
	struct elfen_hazard_config *config = map_lookup_elem(&elfen_hz_config, &zero);
	struct elfen_hazard hazard = { SERVERS, step };

	if (!config)
		return;
#pragma unroll
	for (int at = 0; at < PROCESSES; at++) {
		if (config->processes[0][at] == process)
			hazard.server = 0;
		if (config->processes[1][at] == process)
			hazard.server = 1;
	}
	if (hazard.server < SERVERS)
		ringbuf_output(&elfen_hz_ring, &hazard, sizeof(hazard), BPF_RB_FORCE_WAKEUP);
}

/* signal_generate(signal, info, task, ...) */
SECTION("tp_btf/signal_generate")
int elfen_hz_signal(elfen_u64 *arguments)
{
	struct task_struct *task = (struct task_struct *)arguments[2];
	int signal = (int)arguments[0];

	if (signal == SIGSTOP)
		tell(task, STOPPED);
	else if (signal == SIGCONT)
		tell(task, CONTINUED);
	return 0;
}

/* A JVM stops its threads or lets them run again, by the probe's cookie. */
SECTION("uprobe")
int elfen_hz_runtime(void *registers)
{
	tell(get_current_task(), get_attach_cookie(registers) == 1 ? HALTED : RELEASED);
	return 0;
}

char license_name[] SECTION("license") = "GPL";
