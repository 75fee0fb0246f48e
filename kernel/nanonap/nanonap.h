/* SPDX-License-Identifier: GPL-2.0 WITH Linux-syscall-note */
/*
 * The calls that /dev/nanonap understands.
 *
 * A program opens the device, says NANONAP_VERSION first, and may then map the task map and nap.
 * The map is `struct elfen_page_header`, then one `struct elfen_task_slot` a CPU, as elfen_abi.h
 * lays them out: it starts at offset 0, is NANONAP_VERSION's `map_bytes` long, and can be mapped
 * PROT_READ alone. A mapping keeps the module, so the map of a living reader never freezes. Its
 * switch counts are its own: those of another task map mean nothing here.
 *
 * Process ids in the map are those of the initial pid namespace, for every reader (the map's header
 * says namespace 0). A process that may open the device may see which ids run; the device shows
 * nothing else. A reader in another pid namespace can tell busy from idle with it, and cannot tell
 * whose task it is.
 */
#ifndef NANONAP_H
#define NANONAP_H

#include <linux/ioctl.h>
#include <linux/types.h>

/* Goes up when any number or structure below changes its meaning. */
#define NANONAP_ABI 1

/* How a nap waits; NANONAP_VERSION tells which. */
#define NANONAP_WAIT_NONE 0  /* it cannot, and NANONAP_NAP fails with EOPNOTSUPP */
#define NANONAP_WAIT_MWAIT 1
#define NANONAP_WAIT_SPIN 2  /* for tests in machines without MWAIT: gives nothing to the sibling */

struct nanonap_version {
	__u32 version;   /* in: the NANONAP_ABI spoken by the caller; out: by the module */
	__u32 wait;      /* NANONAP_WAIT_* */
	__u32 hint;      /* of MWAIT: the C-state that a nap asks for */
	__u32 cpus;      /* slots in the task map */
	__u64 map_bytes; /* whole pages */
	__u32 ties;      /* (request lane, batch lane) that wake each other: 0 without SMT */
	__u32 reserved;
};

/*
 * Longest nap: the lane's other tasks never wait for it, but grace periods of the whole machine do.
 */
#define NANONAP_BOUND_MAX_NS 100000000ULL

/*
 * The caller gives its lane away until request lane `request_cpu` has been idle at any time after
 * `seen_switches`.
 */
struct nanonap_nap {
	__u32 request_cpu;
	__u32 reserved;      /* 0 */
	__u64 seen_switches; /* of the request lane's slot, loaded before its `task` was */
	__u64 bound_ns;      /* 1 to NANONAP_BOUND_MAX_NS */
};

/* What NANONAP_NAP returns: why the nap ended. */
#define NANONAP_WOKE_IDLE 1    /* the request lane is idle, or was since `seen_switches` */
#define NANONAP_WOKE_RESCHED 2 /* the scheduler wants the lane for another thread */
#define NANONAP_WOKE_SIGNAL 3  /* a signal, or work for the caller's return to user space */
#define NANONAP_WOKE_BOUND 4   /* the bound has passed */
#define NANONAP_WOKE_REASONS 8 /* room for those to come */

struct nanonap_watch {
	__u32 cpu;
	__u32 on; /* 1: have its switches timed, at most until the file is closed; 0: no longer */
};

#define NANONAP_ALL_CPUS 0xffffffffU

struct nanonap_stats {
	__u32 cpu; /* in: of one batch lane, or NANONAP_ALL_CPUS for the sum */
	__u32 reserved; /* 0 */
	__u64 naps;
	__u64 napped_ns;
	__u64 waits; /* times a lane fell asleep: over `naps` where interrupts woke it early */
	__u64 woke[NANONAP_WOKE_REASONS];
};

/*
 * Before NANONAP_VERSION has succeeded on a file, all others fail with EPROTO. EINVAL: a CPU,
 * bound, flag or reserved field that cannot be. ENXIO: the caller does not run on a sibling of
 * `request_cpu`. EOPNOTSUPP: no way to wait. EFAULT, ENOTTY as everywhere.
 */
#define NANONAP_VERSION _IOWR(0xE1, 0, struct nanonap_version)
#define NANONAP_NAP _IOW(0xE1, 1, struct nanonap_nap)
#define NANONAP_WATCH _IOW(0xE1, 2, struct nanonap_watch)
#define NANONAP_STATS _IOWR(0xE1, 3, struct nanonap_stats)

#endif /* NANONAP_H */
