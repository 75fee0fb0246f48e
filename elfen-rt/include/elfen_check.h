/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Checks for batch programs in C and C++: elfen_check() samples the request lane of the lane that
 * the thread runs on, and naps if the policy says so.
 *
 * Everything is inline, and there is nothing to link: the slow path is in the library that `elfen
 * run` preloads. Without it (a program started by hand, a static one) the first check of a thread
 * finds that out, and the others are a load, a comparison and a branch. The same in Rust, with the
 * reasons, is elfen-rt/src/check.rs. Part of elfen.h; a batch program may include this file alone.
 */
#ifndef ELFEN_CHECK_H
#define ELFEN_CHECK_H

#include "elfen_abi.h"

#ifdef __cplusplus
extern "C" {
#endif

/*
 * One for each thread and each object (program, shared library) that has checks. The
 * slow path alone writes it.
 */
struct elfen_thread {
	const elfen_u64 *word; /* not 0 while the thread must take the slow path */
	const elfen_u32 *cpu;  /* the CPU that the thread runs on, kept by the kernel */
	elfen_u32 chosen_on;   /* the CPU for which `word` was chosen */
	elfen_u32 held;        /* critical sections that the thread is in */
	elfen_u64 held_since_ns;
	elfen_u64 quiet_until;
};
ELFEN_ASSERT(sizeof(struct elfen_thread) == 40);
ELFEN_AT(elfen_thread, cpu, 8);
ELFEN_AT(elfen_thread, chosen_on, 16);
ELFEN_AT(elfen_thread, held, 20);
ELFEN_AT(elfen_thread, held_since_ns, 24);
ELFEN_AT(elfen_thread, quiet_until, 32);

/*
 * Weak, because every file of a program that has checks brings them; hidden,
 * because a library's are its own.
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
 * The preload library's, or NULL without it; the numbers are the version of struct elfen_thread.
 * Through the global offset table, and nowhere else by name: a linker that finds any other
 * reference in a program at a fixed address makes it NULL for good.
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

/* Samples the request lane. To be put where a program spends its time: function entries, loops. */
static inline void elfen_check(void)
{
	const elfen_u64 busy = __atomic_load_n(elfen_block.word, __ATOMIC_RELAXED);
	const elfen_u32 cpu = __atomic_load_n(elfen_block.cpu, __ATOMIC_RELAXED);
	const elfen_u32 moved = cpu ^ elfen_block.chosen_on;

	if (__builtin_expect((busy | moved) != 0, 0))
		elfen_look();
}

/*
 * A stretch in which this thread's checks let it run, as it holds a lock that others wait for. For
 * 1 ms from the first check that would nap, at most: then it naps all the same. They nest.
 */
static inline void elfen_critical_enter(void)
{
	elfen_block.held++;
	elfen_hold(1);
}

/* Ends it, with a check. */
static inline void elfen_critical_exit(void)
{
	if (elfen_block.held > 0 && --elfen_block.held == 0) {
		elfen_block.held_since_ns = 0;
		elfen_block.quiet_until = 0;
	}
	elfen_hold(0);
	elfen_check();
}

#ifdef __cplusplus
}
#endif

#endif /* ELFEN_CHECK_H */
