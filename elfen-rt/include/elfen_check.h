/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Checks for batch programs in C and C++: elfen_check() samples the request lane of the lane that
 * the thread runs on, and naps if the policy says so.
 *
 * Everything is inline, and there is nothing to link. The slow path is in the library that `elfen
 * run` preloads. Programs without that library (started by hand, or static) find this out at the
 * first check of a thread; after that, a check costs a load, a comparison and a branch.
 *
 * elfen-rt/src/check.rs is the same in Rust, and gives the reasons. elfen.h includes this file; a
 * batch program needs only this file.
 */
#ifndef ELFEN_CHECK_H
#define ELFEN_CHECK_H

#include "elfen_abi.h"

#ifdef __cplusplus
extern "C" {
#endif

/*
 * A block for each thread and each object (program, shared library) that has checks. Only the slow
 * path and the critical sections below write it.
 */
struct elfen_thread {
	const elfen_u64 *word; /* points at 0 unless the thread must take the slow path */
	const elfen_u32 *cpu;  /* points at the thread's CPU, which the kernel maintains */
	elfen_u32 chosen_on;   /* the CPU for which `word` was chosen */
	elfen_u32 critical_depth; /* how many nested critical sections the thread is in */
	elfen_u64 critical_since_ns;
	elfen_u64 quiet_until;
};
ELFEN_ASSERT(sizeof(struct elfen_thread) == 40);
ELFEN_AT(elfen_thread, cpu, 8);
ELFEN_AT(elfen_thread, chosen_on, 16);
ELFEN_AT(elfen_thread, critical_depth, 20);
ELFEN_AT(elfen_thread, critical_since_ns, 24);
ELFEN_AT(elfen_thread, quiet_until, 32);

/*
 * Weak, because every source file with checks defines these symbols. Hidden, because each library
 * has its own.
 */
#define ELFEN_ONCE __attribute__((weak, visibility("hidden")))
ELFEN_ONCE elfen_u64 elfen_unknown = 1;
ELFEN_ONCE elfen_u64 elfen_never = 0;
ELFEN_ONCE elfen_u32 elfen_nowhere = 0;
ELFEN_ONCE __thread struct elfen_thread elfen_block = {
	&elfen_unknown, &elfen_nowhere, 0, 0, 0, 0
};

typedef void elfen_look_function(struct elfen_thread *thread);
typedef void elfen_hold_function(int entered);

/*
 * Loads the address of a function of the preload library; NULL without that library. The number in
 * the function's name is the version of struct elfen_thread. The address must come from the global
 * offset table only: if a program at a fixed address has any other reference to the symbol, the
 * linker resolves it to NULL for good.
 */
#ifdef __x86_64__
#define ELFEN_PRELOADED(type, name, pointer) \
	type *pointer; \
	__asm__(".weak " #name "\n\tmovq " #name "@GOTPCREL(%%rip), %0" : "=r"(pointer))
#else
#define ELFEN_PRELOADED(type, name, pointer) type *pointer = 0
#endif

static __attribute__((noinline, cold, unused)) void elfen_look(void)
{
	ELFEN_PRELOADED(elfen_look_function, elfen_look_1, look);

	if (look)
		look(&elfen_block);
	else
		elfen_block.word = &elfen_never;
}

static __attribute__((noinline, unused)) void elfen_hold(int entered)
{
	ELFEN_PRELOADED(elfen_hold_function, elfen_hold_1, hold);

	if (hold)
		hold(entered);
}

/* Samples the request lane. Belongs where a program spends its time: function entries and loops. */
static inline void elfen_check(void)
{
	const elfen_u64 busy = __atomic_load_n(elfen_block.word, __ATOMIC_RELAXED);
	const elfen_u32 cpu = __atomic_load_n(elfen_block.cpu, __ATOMIC_RELAXED);
	const elfen_u32 moved = cpu ^ elfen_block.chosen_on;

	if (__builtin_expect((busy | moved) != 0, 0))
		elfen_look();
}

/*
 * Enters a critical section: this thread's checks let it run, because it holds a lock that other
 * threads may wait for. 1 ms after the first check that would nap, the thread naps all the same.
 * Critical sections nest.
 */
static inline void elfen_critical_enter(void)
{
	elfen_block.critical_depth++;
	elfen_hold(1);
}

/* Leaves a critical section, and checks. */
static inline void elfen_critical_exit(void)
{
	if (elfen_block.critical_depth > 0 && --elfen_block.critical_depth == 0) {
		elfen_block.critical_since_ns = 0;
		elfen_block.quiet_until = 0;
	}
	elfen_hold(0);
	elfen_check();
}

#ifdef __cplusplus
}
#endif

#endif /* ELFEN_CHECK_H */
