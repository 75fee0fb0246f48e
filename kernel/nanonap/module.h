/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The functions and words that the files of this module share. Each file uses only files below it:
 *
 *   device.c  the device file; only this file checks arguments from user space
 *   nap.c     waiting: arm, re-check, wait, and every reason to stop
 *   map.c     the task map: the sched_switch probe writes it, readers map it
 *   pairs.c   which lanes wake which: from the topology, or from the parameter `pairs`
 */
#ifndef NANONAP_MODULE_H
#define NANONAP_MODULE_H

#include <linux/cache.h>
#include <linux/percpu.h>
#include <linux/types.h>

#include "elfen_abi.h"
#include "nanonap.h"

struct vm_area_struct;

/*
 * Two cache lines for each CPU. MONITOR watches whole lines, so no other word may share the first.
 */
struct nanonap_wake_words {
	/*
	 * The probes of the siblings write this word when their CPU goes idle, and a nap on this
	 * CPU waits for the write. No value is written twice.
	 */
	u64 nap_word __aligned(128);
	/* This CPU's probe writes its switch count here when this CPU goes idle. */
	u64 idle_switch __aligned(128);
};
DECLARE_PER_CPU(struct nanonap_wake_words, nanonap_wake_words);

/* pairs.c */
#define SIBLINGS_MAX 15
struct nanonap_siblings {
	unsigned int count; /* only grows; stored after the new entry */
	u16 cpus[SIBLINGS_MAX];
};
DECLARE_PER_CPU(struct nanonap_siblings, nanonap_siblings);
int nanonap_pairs_init(void);
void nanonap_pairs_exit(void);
bool nanonap_pairs_tied(unsigned int request, unsigned int batch);
unsigned int nanonap_pairs_count(void);

/* map.c */
int nanonap_map_init(void);
void nanonap_map_exit(void);
int nanonap_map_mmap(struct vm_area_struct *vma);
size_t nanonap_map_bytes(void);
bool nanonap_map_idle_since(unsigned int cpu, u64 seen_switches);
void nanonap_map_watch(unsigned int cpu);
void nanonap_map_unwatch(unsigned int cpu);

/* nap.c */
int nanonap_nap_init(void);
u32 nanonap_wait_kind(void);
u32 nanonap_mwait_hint(void);
int nanonap_nap(const struct nanonap_nap *request);
void nanonap_add_stats(unsigned int cpu, struct nanonap_stats *sum);

#endif /* NANONAP_MODULE_H */
