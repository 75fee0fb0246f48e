/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Helpers, sections and map types for Elfen's eBPF programs, instead of the headers of libbpf.
 */
#ifndef ELFEN_BPF_H
#define ELFEN_BPF_H

#include "elfen_abi.h"

#define SECTION(name) __attribute__((section(name), used))
#define STORE(word, value) (*(volatile elfen_u64 *)&(word) = (value))
#define LOAD(word) (*(volatile elfen_u64 *)&(word))
#define INLINE static inline __attribute__((always_inline))

/* Helpers by their number in the kernel's stable list. */
static void *(*const map_lookup_elem)(void *map, const void *key) = (void *)1;
static long (*const map_update_elem)(void *map, const void *key, const void *value,
				     elfen_u64 flags) = (void *)2;
static long (*const map_delete_elem)(void *map, const void *key) = (void *)3;
static elfen_u64 (*const ktime_get_ns)(void) = (void *)5;
static elfen_u32 (*const get_smp_processor_id)(void) = (void *)8;

/* The relocation that tests whether a field exists. */
#define FIELD_EXISTS 2

#define BPF_MAP_TYPE_ARRAY 2
#define BPF_MAP_TYPE_PERF_EVENT_ARRAY 4
#define BPF_MAP_TYPE_LRU_HASH 9
#define BPF_F_MMAPABLE 1024
#define BPF_NOEXIST 1

#endif
