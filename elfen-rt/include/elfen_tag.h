/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Tags for C and C++: a thread publishes its current activity with one store, and `elfen shim`
 * samples it.
 *
 *	elfen_u32 before = elfen_tag("parse");
 *	...
 *	elfen_tag_back(before);
 *
 * Everything is inline. The first tag of a thread claims a slot, and the first tag of a process
 * opens the page of slots. Both make system calls, so they do not belong in a signal handler. A
 * thread that finds no slot stores into words of its own.
 *
 * elfen-rt/src/tag.rs is the same in Rust, and gives the reasons.
 */
#ifndef ELFEN_TAG_H
#define ELFEN_TAG_H

#ifndef _GNU_SOURCE
#ifdef _FEATURES_H
#error "include elfen_tag.h first, or compile with -D_GNU_SOURCE: it needs syscall(2)"
#endif
#define _GNU_SOURCE
#endif
#include "elfen_abi.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/auxv.h>
#include <sys/shm.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Weak, because every file with tags defines them. Hidden, because each library has its own. */
#define ELFEN_TAG_ONCE __attribute__((weak, visibility("hidden")))
ELFEN_TAG_ONCE __thread struct elfen_thread_words *elfen_tag_words = 0;
ELFEN_TAG_ONCE __thread struct elfen_thread_words elfen_tag_own = {
	0, 0, 0, { 0, 0, 0, 0, 0, 0 }, 0, 0, 0, { 0, 0, 0, 0, 0 }
};
/* The page. Each object with tags opens it; slots are found by the thread's id. */
ELFEN_TAG_ONCE struct elfen_page_header *elfen_tag_page = 0;
ELFEN_TAG_ONCE pthread_once_t elfen_tag_opened = PTHREAD_ONCE_INIT;

/* Makes a forked child's thread look for a slot again, because it has another id. */
static __attribute__((unused)) void elfen_tag_forked(void)
{
	elfen_tag_words = 0;
}

/* The page of the `elfen shim` that started this process, or NULL. */
static inline struct elfen_page_header *elfen_tag_inherited(void)
{
	const char *text = getauxval(AT_SECURE) ? NULL : getenv("ELFEN_SHIM");
	struct elfen_page_header *page;
	struct shmid_ds stat;
	int segment, front;

	if (!text || sscanf(text, "1 %d %d", &segment, &front) != 2 || front != getppid())
		return NULL;
	page = (struct elfen_page_header *)shmat(segment, NULL, 0);
	if ((intptr_t)page == -1)
		return NULL;
	if (shmctl(segment, IPC_STAT, &stat) == 0 && stat.shm_segsz >= sizeof(*page) &&
	    __atomic_load_n(&page->magic, __ATOMIC_ACQUIRE) == ELFEN_MAGIC_THREAD &&
	    page->version == ELFEN_ABI_VERSION && page->slot_count <= ELFEN_SLOTS_MAX &&
	    page->slot_size == sizeof(struct elfen_thread_slot) &&
	    stat.shm_segsz >=
		    sizeof(*page) + page->slot_count * sizeof(struct elfen_thread_slot))
		return page;
	shmdt(page);
	return NULL;
}

/* Makes a page without a name, which ends with the process. */
static inline struct elfen_page_header *elfen_tag_made(void)
{
	const size_t size = sizeof(struct elfen_page_header) +
			    ELFEN_THREADS * sizeof(struct elfen_thread_slot);
	const int segment = shmget(IPC_PRIVATE, size, 0600);
	struct elfen_page_header *page;
	struct stat space;

	if (segment < 0)
		return NULL;
	page = (struct elfen_page_header *)shmat(segment, NULL, 0);
	shmctl(segment, IPC_RMID, NULL);
	if ((intptr_t)page == -1)
		return NULL;
	page->version = ELFEN_ABI_VERSION;
	page->slot_count = ELFEN_THREADS;
	page->size = size;
	page->slot_size = sizeof(struct elfen_thread_slot);
	page->pid_namespace =
		stat("/proc/self/ns/pid", &space) == 0 ? (elfen_u32)space.st_ino : 0;
	__atomic_store_n(&page->magic, ELFEN_MAGIC_THREAD, __ATOMIC_RELEASE);
	return page;
}

static __attribute__((unused)) void elfen_tag_open(void)
{
	pthread_atfork(NULL, NULL, elfen_tag_forked);
	elfen_tag_page = elfen_tag_inherited();
	if (!elfen_tag_page)
		elfen_tag_page = elfen_tag_made();
}

static inline int elfen_tag_take(struct elfen_thread_slot *slot, elfen_u64 from, elfen_u64 own)
{
	return __atomic_compare_exchange_n(&slot->thread, &from, own, 0, __ATOMIC_RELAXED,
					   __ATOMIC_RELAXED);
}

/* Claims the thread's own slot, a free one, or the slot of a thread that has ended; or NULL. */
static inline struct elfen_thread_slot *elfen_tag_claim(struct elfen_page_header *page,
							elfen_u64 own)
{
	struct elfen_thread_slot *const first = (struct elfen_thread_slot *)(page + 1);
	struct elfen_thread_slot *const end = first + page->slot_count;
	struct elfen_thread_slot *slot;
	elfen_u64 holder;

	for (slot = first; slot < end; slot++)
		if (__atomic_load_n(&slot->thread, __ATOMIC_RELAXED) == own)
			return slot;
	for (slot = first; slot < end; slot++)
		if (elfen_tag_take(slot, 0, own))
			goto taken;
	for (slot = first; slot < end; slot++) {
		holder = __atomic_load_n(&slot->thread, __ATOMIC_RELAXED);
		if (syscall(SYS_tgkill, (pid_t)(holder >> 32), (pid_t)holder, 0) != 0 &&
		    errno == ESRCH && elfen_tag_take(slot, holder, own))
			goto taken;
	}
	__atomic_fetch_add(&first->refused, 1, __ATOMIC_RELAXED);
	return NULL;
taken:
	slot->words = elfen_tag_own;
	__atomic_fetch_add(&first->claims, 1, __ATOMIC_RELAXED);
	return slot;
}

static __attribute__((noinline, cold, unused)) struct elfen_thread_words *elfen_tag_find(void)
{
	const int before = errno;
	struct elfen_thread_slot *slot = NULL;

	pthread_once(&elfen_tag_opened, elfen_tag_open);
	if (elfen_tag_page)
		slot = elfen_tag_claim(elfen_tag_page, (elfen_u64)getpid() << 32 |
						       (elfen_u64)syscall(SYS_gettid));
	elfen_tag_words = slot ? &slot->words : &elfen_tag_own;
	errno = before;
	return elfen_tag_words;
}

static inline struct elfen_thread_words *elfen_tag_at(void)
{
	struct elfen_thread_words *const words = elfen_tag_words;

	return __builtin_expect(words != 0, 1) ? words : elfen_tag_find();
}

/* The thread's current tag. */
static inline elfen_u32 elfen_tag_now(void)
{
	return __atomic_load_n(&elfen_tag_at()->tag, __ATOMIC_RELAXED);
}

/* Restores a tag that elfen_tag() returned. */
static inline void elfen_tag_back(elfen_u32 tag)
{
	__atomic_store_n(&elfen_tag_at()->tag, tag, __ATOMIC_RELAXED);
}

static inline elfen_u32 elfen_tag_set(const char *name)
{
	struct elfen_thread_words *const words = elfen_tag_at();
	const elfen_u32 before = __atomic_load_n(&words->tag, __ATOMIC_RELAXED);

	__atomic_store_n(&words->tag, (elfen_u32)(uintptr_t)name, __ATOMIC_RELAXED);
	return before;
}

/* Publishes the literal `name` as the thread's activity. Returns the previous tag. */
#define elfen_tag(name) elfen_tag_set("" name)

/* Publishes a value of the thread, for example a length, a depth, or the id of a request. */
static inline void elfen_value(elfen_u64 value)
{
	__atomic_store_n(&elfen_tag_at()->value, value, __ATOMIC_RELAXED);
}

/* Publishes how many calls the thread has made so far, for rates. */
static inline void elfen_calls(elfen_u64 calls)
{
	__atomic_store_n(&elfen_tag_at()->calls, calls, __ATOMIC_RELAXED);
}

#ifdef __cplusplus
}
#endif

#endif /* ELFEN_TAG_H */
