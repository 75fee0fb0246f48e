/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Elfen for C and C++: reads which task runs on every CPU, publishes the requests of a service, and
 * checks in batch programs.
 *
 * Everything is inline; there is nothing to link. Opening uses system calls; reading and publishing
 * do not. Errors are a status with what was found and what was expected; elfen_explain() formats
 * them. elfen-rt/src/signal and elfen-rt/src/service.rs are the same in Rust, and give the reasons.
 */
#ifndef ELFEN_H
#define ELFEN_H

#ifndef _GNU_SOURCE
#ifdef _FEATURES_H
#error "include elfen.h first, or compile with -D_GNU_SOURCE: it needs shmget(2)"
#endif
#define _GNU_SOURCE
#endif
#include "elfen_abi.h"
#include "elfen_check.h"
#include "elfen_mark.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/shm.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define ELFEN_LOAD(word) __atomic_load_n(&(word), __ATOMIC_RELAXED)
#define ELFEN_STORE(word, value) __atomic_store_n(&(word), (value), __ATOMIC_RELAXED)

/* What failed, what was found and what was expected. For ELFEN_SYSTEM, `found` is an errno. */
enum elfen_status {
	ELFEN_OK, ELFEN_SYSTEM, ELFEN_TRUNCATED, ELFEN_UNFINISHED, ELFEN_MAGIC, ELFEN_VERSION,
	ELFEN_SLOT_SIZE, ELFEN_SLOT_COUNT, ELFEN_SIZE, ELFEN_NAME, ELFEN_TAKEN, ELFEN_NAMESPACE,
	ELFEN_NO_SLOT, ELFEN_HELD, ELFEN_FOREIGN
};
struct elfen_error {
	enum elfen_status status;
	elfen_u64 found, expected;
};

static inline enum elfen_status elfen_fail(struct elfen_error *error, enum elfen_status status,
					   elfen_u64 found, elfen_u64 expected)
{
	error->status = status;
	error->found = found;
	error->expected = expected;
	return status;
}

/* Formats an error as one line. */
static inline void elfen_explain(const struct elfen_error *error, char *line, size_t size)
{
	static const char *const what[] = {
		"no error", "a system call failed, errno", "bytes in the page",
		"the page is not finished, magic", "magic", "version of the page",
		"bytes in a slot", "slots in the page", "bytes in the page, by its header",
		"length of the name", "another service's name has the same key",
		"pid namespace of the page", "requested slot",
		"the slot has a living writer, process",
		"the page belongs neither to this user nor to root, but to user"
	};
	snprintf(line, size, "%s: found %#llx, expected %#llx", what[error->status],
		 (unsigned long long)error->found, (unsigned long long)error->expected);
}

/* Checks that `mapped` bytes hold a page of such slots. Loads every field once. */
static inline enum elfen_status elfen_page_check(const struct elfen_page_header *page,
						 size_t mapped, elfen_u64 magic,
						 elfen_u32 slot_size, struct elfen_error *error)
{
	elfen_u64 found, size, slots;

	if (mapped < sizeof(*page))
		return elfen_fail(error, ELFEN_TRUNCATED, mapped, sizeof(*page));
	found = __atomic_load_n(&page->magic, __ATOMIC_ACQUIRE); /* pairs with the release store */
	if (found != magic)
		return elfen_fail(error, found ? ELFEN_MAGIC : ELFEN_UNFINISHED, found, magic);
	found = ELFEN_LOAD(page->version);
	if (found != ELFEN_ABI_VERSION)
		return elfen_fail(error, ELFEN_VERSION, found, ELFEN_ABI_VERSION);
	found = ELFEN_LOAD(page->slot_size);
	if (found != slot_size)
		return elfen_fail(error, ELFEN_SLOT_SIZE, found, slot_size);
	slots = ELFEN_LOAD(page->slot_count);
	if (slots == 0 || slots > ELFEN_SLOTS_MAX)
		return elfen_fail(error, ELFEN_SLOT_COUNT, slots, ELFEN_SLOTS_MAX);
	size = sizeof(*page) + slots * slot_size;
	found = ELFEN_LOAD(page->size);
	if (found != size || mapped < size)
		return elfen_fail(error, ELFEN_SIZE, found != size ? found : mapped, size);
	return elfen_fail(error, ELFEN_OK, slots, slots);
}

#include "elfen_tasks.h"

/* ---- the service ---- */

struct elfen_service {
	struct elfen_page_header *page;
	elfen_u32 lanes;
	elfen_u64 own; /* pid << 42 | start time */
};

/* elfen_identity() of a process that has ended or waits to be reaped. This is not an identity. */
#define ELFEN_ENDED 1

/* pid << 42 | start time of a process, ELFEN_ENDED, or 0 if /proc hides it. */
static inline elfen_u64 elfen_identity(int pid)
{
	char path[32], line[640], *at;
	ssize_t length;
	int fd, field;

	if (kill(pid, 0) && errno != EPERM)
		return ELFEN_ENDED;
	snprintf(path, sizeof(path), "/proc/%d/stat", pid);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return 0;
	length = read(fd, line, sizeof(line) - 1);
	close(fd);
	line[length > 0 ? length : 0] = 0;
	at = strrchr(line, ')'); /* the name before it may hold any character */
	if (!at || at[1] != ' ')
		return 0;
	if (at[2] == 'Z' || at[2] == 'X')
		return ELFEN_ENDED;
	for (field = 2; field < 22 && at; field++)
		at = strchr(at + 1, ' ');
	return at ? (elfen_u64)pid << 42 | (strtoull(at, NULL, 10) & ((1ULL << 42) - 1)) : 0;
}

/* Whether a writer's process has ended, or its id belongs to another process now. */
static inline int elfen_is_dead(elfen_u64 writer)
{
	elfen_u64 now = elfen_identity((int)(writer >> 42));

	return now != 0 && now != writer;
}

static inline elfen_u32 elfen_pid_namespace(void)
{
	struct stat stat_buffer;

	return stat("/proc/self/ns/pid", &stat_buffer) ? 0 : (elfen_u32)stat_buffer.st_ino;
}

/* The key of a name: a prefix and 24 bits of FNV-1a. */
static inline key_t elfen_service_key(const char *name)
{
	elfen_u32 hash = 0x811c9dc5u;

	for (; *name; name++)
		hash = (hash ^ (unsigned char)*name) * 0x01000193u;
	return (key_t)(0xe1000000u | ((hash ^ hash >> 24) & 0xffffffu));
}

static inline size_t elfen_service_bytes(elfen_u32 lanes)
{
	return sizeof(struct elfen_page_header) + (size_t)lanes * sizeof(struct elfen_service_slot);
}

static inline struct elfen_service_slot *elfen_service_at(const struct elfen_service *service,
							  elfen_u32 lane)
{
	return lane < service->lanes ? (struct elfen_service_slot *)(service->page + 1) + lane :
				       NULL;
}

/* Fills in the header of a page of zeroes, the magic last. */
static inline void elfen_service_format(struct elfen_page_header *page, elfen_u32 lanes,
					const char *name)
{
	elfen_u64 words[ELFEN_NAME_BYTES / 8];
	unsigned int i;

	memset(words, 0, sizeof(words));
	memcpy(words, name, strlen(name));
	for (i = 0; i < ELFEN_NAME_BYTES / 8; i++)
		ELFEN_STORE(page->name[i], words[i]);
	ELFEN_STORE(page->version, ELFEN_ABI_VERSION);
	ELFEN_STORE(page->slot_count, lanes);
	ELFEN_STORE(page->size, elfen_service_bytes(lanes));
	ELFEN_STORE(page->slot_size, (elfen_u32)sizeof(struct elfen_service_slot));
	ELFEN_STORE(page->pid_namespace, elfen_pid_namespace());
	__atomic_store_n(&page->magic, ELFEN_MAGIC_SERVICE, __ATOMIC_RELEASE);
}

/* Checks that the mapped page is this service's, in this pid namespace, with this many lanes. */
static inline enum elfen_status elfen_service_check(struct elfen_page_header *page, size_t mapped,
						    elfen_u32 lanes, const char *name,
						    struct elfen_error *error)
{
	char found[ELFEN_NAME_BYTES + 1];
	elfen_u64 word;
	unsigned int i;

	if (elfen_page_check(page, mapped, ELFEN_MAGIC_SERVICE, sizeof(struct elfen_service_slot),
			     error))
		return error->status;
	if (error->found != lanes)
		return elfen_fail(error, ELFEN_SLOT_COUNT, error->found, lanes);
	for (i = 0; i < ELFEN_NAME_BYTES / 8; i++) {
		word = ELFEN_LOAD(page->name[i]);
		memcpy(found + 8 * i, &word, 8);
	}
	found[ELFEN_NAME_BYTES] = 0;
	if (strcmp(found, name))
		return elfen_fail(error, ELFEN_TAKEN, 0, 0);
	word = ELFEN_LOAD(page->pid_namespace);
	if (word != elfen_pid_namespace())
		return elfen_fail(error, ELFEN_NAMESPACE, word, elfen_pid_namespace());
	return ELFEN_OK;
}

/*
 * Maps segment `id` and checks it. A segment without a valid page, and that no other process maps,
 * is a leftover and is removed. An unfinished page is removed only when `given_up`, because its
 * maker may still be working on it.
 */
static inline enum elfen_status elfen_service_join(struct elfen_service *service, int id, int made,
						   int given_up, elfen_u32 lanes,
						   const char *name, struct elfen_error *error)
{
	struct shmid_ds segment;
	void *at = shmat(id, NULL, 0);

	if (at == (void *)-1) /* EINVAL: the segment was removed after its id was found */
		return elfen_fail(error, ELFEN_SYSTEM,
				  (elfen_u64)(errno == EINVAL ? ENOENT : errno), 0);
	service->page = (struct elfen_page_header *)at;
	service->lanes = lanes;
	if (made)
		elfen_service_format(service->page, lanes, name);
	if (shmctl(id, IPC_STAT, &segment)) {
		elfen_fail(error, ELFEN_SYSTEM, (elfen_u64)errno, 0);
	} else {
		elfen_service_check(service->page, segment.shm_segsz, lanes, name, error);
		if (error->status == ELFEN_OK && segment.shm_perm.uid != 0 &&
		    segment.shm_perm.uid != geteuid())
			elfen_fail(error, ELFEN_FOREIGN, segment.shm_perm.uid, geteuid());
		if ((error->status != ELFEN_UNFINISHED || given_up) &&
		    error->status >= ELFEN_TRUNCATED && error->status <= ELFEN_SIZE &&
		    segment.shm_nattch == 1 &&
		    elfen_page_check(service->page, segment.shm_segsz, ELFEN_MAGIC_SERVICE,
				     sizeof(struct elfen_service_slot), error) &&
		    !shmctl(id, IPC_RMID, NULL))
			elfen_fail(error, ELFEN_SYSTEM, ENOENT, 0);
	}
	if (error->status != ELFEN_OK)
		shmdt(at);
	return error->status;
}

/* Opens the page of `name` with a slot for each lane, or makes it, readable by the group. */
static inline enum elfen_status elfen_service_open(struct elfen_service *service, const char *name,
						   elfen_u32 lanes, struct elfen_error *error)
{
	const struct timespec pause = { 0, 1000000 };
	key_t key = elfen_service_key(name);
	int id, made, tries;

	memset(service, 0, sizeof(*service));
	if (!*name || strlen(name) >= ELFEN_NAME_BYTES)
		return elfen_fail(error, ELFEN_NAME, strlen(name), ELFEN_NAME_BYTES - 1);
	if (lanes == 0 || lanes > ELFEN_SLOTS_MAX)
		return elfen_fail(error, ELFEN_SLOT_COUNT, lanes, ELFEN_SLOTS_MAX);
	service->own = elfen_identity((int)getpid());
	if (service->own <= ELFEN_ENDED)
		return elfen_fail(error, ELFEN_SYSTEM, ENOENT, 0);
	elfen_fail(error, ELFEN_UNFINISHED, 0, ELFEN_MAGIC_SERVICE);
	for (tries = 0; tries < 100; tries++) { /* a maker needs microseconds; it gets 100 ms */
		id = shmget(key, elfen_service_bytes(lanes), IPC_CREAT | IPC_EXCL | 0640);
		made = id >= 0;
		if (!made && errno == EEXIST)
			id = shmget(key, 0, 0);
		if (id < 0 && errno != ENOENT)
			return elfen_fail(error, ELFEN_SYSTEM, (elfen_u64)errno, 0);
		if (id >= 0 &&
		    !elfen_service_join(service, id, made, tries == 95, lanes, name, error))
			return ELFEN_OK;
		if (error->status != ELFEN_UNFINISHED &&
		    !(error->status == ELFEN_SYSTEM &&
		      (error->found == ENOENT || error->found == EIDRM)))
			return error->status;
		nanosleep(&pause, NULL);
	}
	return error->status;
}

/* Makes the caller the only writer of a slot. Refused while another writer lives. */
static inline enum elfen_status elfen_service_claim(struct elfen_service *service, elfen_u32 lane,
						    elfen_u32 cpu, struct elfen_error *error)
{
	struct elfen_service_slot *slot = elfen_service_at(service, lane);
	elfen_u64 holder;

	if (!slot)
		return elfen_fail(error, ELFEN_NO_SLOT, lane, service->lanes);
	holder = __atomic_load_n(&slot->writer, __ATOMIC_ACQUIRE);
	do {
		if (holder != 0 && !elfen_is_dead(holder))
			return elfen_fail(error, ELFEN_HELD, holder >> 42, 0);
	} while (!__atomic_compare_exchange_n(&slot->writer, &holder, service->own, 0,
					      __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
	ELFEN_STORE(slot->running_request, 0);
	ELFEN_STORE(slot->queue_len, 0);
	ELFEN_STORE(slot->cpu, cpu);
	elfen_mark_thread = 0; /* a child that serves after a fork has another thread id */
	return elfen_fail(error, ELFEN_OK, 0, 0);
}

/* Publishes how many requests wait for a lane, without the running one. One thread at a time. */
static inline void elfen_service_queue(struct elfen_service *service, elfen_u32 lane,
				       elfen_u64 waiting)
{
	struct elfen_service_slot *slot = elfen_service_at(service, lane);

	if (slot)
		ELFEN_STORE(slot->queue_len, waiting);
}

/*
 * Begins a request that arrived at `arrived_ns` (CLOCK_MONOTONIC; 0 for now). Only the process that
 * claimed the slot may call this.
 */
static inline void elfen_service_begin(struct elfen_service_slot *slot, elfen_u64 request,
				       elfen_u64 arrived_ns)
{
	elfen_u64 now = elfen_now_ns();

	request = request ? request : ~0ULL;
	arrived_ns = arrived_ns ? arrived_ns : now;
	ELFEN_STORE(slot->request_arrived_ns, arrived_ns);
	ELFEN_STORE(slot->request_started_ns, now);
	ELFEN_STORE(slot->marks.kind, 0);
	elfen_mark(&slot->marks, now, request, ELFEN_MARK_BEGIN, arrived_ns);
	__atomic_store_n(&slot->running_request, request, __ATOMIC_RELEASE);
}

static inline void elfen_histogram_record(struct elfen_histogram *histogram, elfen_u64 ns)
{
	elfen_u64 value = ns >> 40 ? (1ULL << 40) - 1 : ns;
	unsigned int top_bit = 63 - (unsigned int)__builtin_clzll(value | 1);
	unsigned int shift = top_bit > 4 ? top_bit - 4 : 0;
	elfen_u64 *count = &histogram->counts[shift * 16 + (value >> shift)];

	ELFEN_STORE(*count, ELFEN_LOAD(*count) + 1);
	ELFEN_STORE(histogram->sum_ns, ELFEN_LOAD(histogram->sum_ns) + ns);
	if (ns > ELFEN_LOAD(histogram->max_ns))
		ELFEN_STORE(histogram->max_ns, ns);
}

/* Ends the running request and records its latency. Does nothing without a running request. */
static inline void elfen_service_end(struct elfen_service_slot *slot)
{
	elfen_u64 now, arrived, finished = ELFEN_LOAD(slot->finished_requests) + 1;
	elfen_u64 request = ELFEN_LOAD(slot->running_request);

	if (request == 0)
		return;
	arrived = ELFEN_LOAD(slot->request_arrived_ns);
	__atomic_store_n(&slot->running_request, 0, __ATOMIC_RELEASE);
	__atomic_store_n(&slot->finished_requests, finished, __ATOMIC_RELEASE);
	now = elfen_now_ns();
	elfen_histogram_record(&slot->latency, now > arrived ? now - arrived : 0);
	elfen_mark(&slot->marks, now, request, ELFEN_MARK_END, ELFEN_LOAD(slot->marks.kind));
}

/*
 * Publishes the serving thread's instructions and cycles so far, from counters of the service, for
 * dynamic-budget where Elfen has no counters. Call it every few milliseconds while requests run.
 */
static inline void elfen_service_count(struct elfen_service_slot *slot, elfen_u64 instructions,
				       elfen_u64 cycles)
{
	ELFEN_STORE(slot->instructions, instructions);
	ELFEN_STORE(slot->counted_at_ns, elfen_now_ns());
	__atomic_store_n(&slot->cycles, cycles, __ATOMIC_RELEASE);
}

/* Releases a claimed slot. */
static inline void elfen_service_release(struct elfen_service_slot *slot)
{
	ELFEN_STORE(slot->running_request, 0);
	ELFEN_STORE(slot->queue_len, 0);
	__atomic_store_n(&slot->writer, 0, __ATOMIC_RELEASE);
}

/* Unmaps the page. The page stays for a restarted service and for readers. */
static inline void elfen_service_close(struct elfen_service *service)
{
	if (service->page)
		shmdt(service->page);
	memset(service, 0, sizeof(*service));
}

#endif /* ELFEN_H */
