/* SPDX-License-Identifier: GPL-2.0 WITH Linux-syscall-note */
/*
 * The ioctls of /dev/nanonap.
 *
 * A program opens the device, calls NANONAP_VERSION first, and may then map the task map and nap.
 * The map is `struct elfen_page_header`, then one `struct elfen_task_slot` for each CPU, as in
 * elfen_abi.h. It starts at offset 0, has NANONAP_VERSION's `map_bytes`, and can be mapped with
 * PROT_READ only. A mapping keeps the module loaded, so a mapped map is always updated. Its switch
 * counts are valid for this device only, and not comparable with those of another task map.
 *
 * Process ids in the map belong to the initial pid namespace, for every reader (the map's header
 * has namespace 0). A process that may open the device sees which ids run, and nothing else. A
 * reader in another pid namespace can distinguish busy from idle CPUs, but cannot identify tasks.
 */
#ifndef NANONAP_H
#define NANONAP_H

#include <linux/ioctl.h>
#include <linux/types.h>

/* Goes up when the meaning of any number or structure below changes. */
#define NANONAP_ABI 1

/* How a nap waits, as NANONAP_VERSION reports. */
#define NANONAP_WAIT_NONE 0  /* naps are impossible: NANONAP_NAP fails with EOPNOTSUPP */
#define NANONAP_WAIT_MWAIT 1
#define NANONAP_WAIT_SPIN 2  /* for tests on machines without MWAIT; leaves the sibling nothing */

struct nanonap_version {
	__u32 version;   /* in: the caller's NANONAP_ABI; out: the module's */
	__u32 wait;      /* NANONAP_WAIT_* */
	__u32 hint;      /* MWAIT's hint: the C-state that a nap requests */
	__u32 cpus;      /* slots in the task map */
	__u64 map_bytes; /* whole pages */
	__u32 ties;      /* how many (request lane, batch lane) wake each other; 0 without SMT */
	__u32 reserved;
};

/*
 * The longest nap. The lane's other tasks never wait for it, but RCU grace periods of the whole
 * machine do.
 */
#define NANONAP_BOUND_MAX_NS 100000000ULL

/*
 * Naps on the caller's lane until request lane `request_cpu` has been idle at any time after
 * `seen_switches`.
 */
struct nanonap_nap {
	__u32 request_cpu;
	__u32 reserved;      /* 0 */
	__u64 seen_switches; /* from the request lane's slot, loaded before its `task` */
	__u64 bound_ns;      /* 1 to NANONAP_BOUND_MAX_NS */
};

/* The results of NANONAP_NAP: why the nap ended. */
#define NANONAP_WOKE_IDLE 1    /* the request lane is idle, or was since `seen_switches` */
#define NANONAP_WOKE_RESCHED 2 /* the scheduler needs the lane for another thread */
#define NANONAP_WOKE_SIGNAL 3  /* a signal, or work for the caller's return to user space */
#define NANONAP_WOKE_BOUND 4   /* the bound has passed */
#define NANONAP_WOKE_REASONS 8 /* room for future results */

struct nanonap_watch {
	__u32 cpu;
	__u32 on; /* 1: time the CPU's switches until the file is closed at the latest; 0: stop */
};

#define NANONAP_ALL_CPUS 0xffffffffU

struct nanonap_stats {
	__u32 cpu; /* in: a batch lane, or NANONAP_ALL_CPUS for the sum */
	__u32 reserved; /* 0 */
	__u64 naps;
	__u64 napped_ns;
	__u64 waits; /* times a lane fell asleep: more than `naps` if interrupts woke it early */
	__u64 woke[NANONAP_WOKE_REASONS];
};

/*
 * Errors. EPROTO: NANONAP_VERSION has not succeeded on this file yet. EINVAL: an invalid CPU,
 * bound, flag or reserved field. ENXIO: the caller does not run on a sibling of `request_cpu`.
 * EOPNOTSUPP: the CPU has no way to wait. EFAULT and ENOTTY have their usual meaning.
 */
#define NANONAP_VERSION _IOWR(0xE1, 0, struct nanonap_version)
#define NANONAP_NAP _IOW(0xE1, 1, struct nanonap_nap)
#define NANONAP_WATCH _IOW(0xE1, 2, struct nanonap_watch)
#define NANONAP_STATS _IOWR(0xE1, 3, struct nanonap_stats)

#endif /* NANONAP_H */
