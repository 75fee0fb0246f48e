// SPDX-License-Identifier: GPL-2.0-only
/*
 * Two services on one machine: each has its request lane, its page and its SLO, and lends its batch
 * lane to a fence. Their latencies are printed on the guest's console.
 */
#define _GNU_SOURCE
#include "fenced.h"
#include "elfen.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

static const char SETTINGS[] = "nap = \"spin\"\n"
			       "[[service]]\nname = \"a\"\nlanes = \"0:1\"\n"
			       "policy = \"slo-budget\"\nslo = \"p99=100ms\"\n"
			       "[[service]]\nname = \"b\"\nlanes = \"2:3\"\n"
			       "policy = \"slo-budget\"\nslo = \"p99=200ms\"\n"
			       "[[fence]]\nname = \"a\"\ncgroup = \"fence\"\nlanes = \"1\"\n"
			       "[[fence]]\nname = \"b\"\ncgroup = \"other\"\nlanes = \"3\"\n";

#define REQUESTS 40
#define PERIOD_NS (100 * MS)
#define WORK_NS (2 * MS)

/* Shared by a service's process and the test. */
struct served {
	int hold;     /* a request that begins while this is set lasts until it is cleared */
	int holds;    /* such a request runs */
	int measure;  /* rounds requested */
	int measured; /* rounds done */
	uint64_t latency_ns[REQUESTS];
};

static void work(const struct served *served, int held)
{
	uint64_t end = now_ns() + WORK_NS;

	while (now_ns() < end || (held && __atomic_load_n(&served->hold, __ATOMIC_RELAXED)))
		;
}

/* Serves requests that arrive at fixed times, whether or not the previous request has ended. */
static void serve(const char *name, int cpu, struct served *served)
{
	struct elfen_service service;
	struct elfen_error error;
	struct elfen_service_slot *slot;
	uint64_t came, request = 0;
	int held, at = 0;

	pin(cpu);
	if (elfen_service_open(&service, name, 1, &error) ||
	    elfen_service_claim(&service, 0, cpu, &error))
		_exit(1);
	slot = elfen_service_at(&service, 0);
	for (came = now_ns();; came += PERIOD_NS) {
		while (now_ns() < came)
			usleep((came - now_ns()) / US + 1);
		elfen_service_begin(slot, ++request, came);
		held = __atomic_load_n(&served->hold, __ATOMIC_ACQUIRE);
		__atomic_store_n(&served->holds, held, __ATOMIC_RELEASE);
		work(served, held);
		elfen_service_end(slot);
		if (__atomic_exchange_n(&served->holds, 0, __ATOMIC_RELEASE))
			came = now_ns();
		if (__atomic_load_n(&served->measure, __ATOMIC_ACQUIRE) == served->measured)
			continue;
		served->latency_ns[at++] = now_ns() - came;
		if (at == REQUESTS) {
			at = 0;
			__atomic_add_fetch(&served->measured, 1, __ATOMIC_RELEASE);
		}
	}
}

static struct served *start_service(const char *name, int cpu)
{
	struct served *served = mmap(NULL, sizeof(*served), PROT_READ | PROT_WRITE,
				     MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	if (!fork())
		serve(name, cpu, served);
	return served;
}

static int by_size(const void *one, const void *other)
{
	uint64_t a = *(const uint64_t *)one, b = *(const uint64_t *)other;

	return (a > b) - (a < b);
}

static void measure(struct served *const *all, const char *when)
{
	int each;

	for (each = 0; each < 2; each++)
		__atomic_add_fetch(&all[each]->measure, 1, __ATOMIC_RELEASE);
	for (each = 0; each < 2; each++) {
		struct served *served = all[each];

		while (__atomic_load_n(&served->measured, __ATOMIC_ACQUIRE) != served->measure)
			usleep(10000);
		qsort(served->latency_ns, REQUESTS, sizeof(uint64_t), by_size);
		printf("fence: service %c, SLO p99=%d00ms: p50 %llu us, worst of %d %llu us %s\n",
		       'a' + each, each + 1,
		       (unsigned long long)(served->latency_ns[REQUESTS / 2] / US), REQUESTS,
		       (unsigned long long)(served->latency_ns[REQUESTS - 1] / US), when);
	}
}

/*
 * Goal: a long request of one service holds only its own pair, and the other service's batch runs
 * on. Method: two services under load, with a batch in the fence of each. One after the other has a
 * request without an end.
 */
static verdict two(void)
{
	char *const pause[] = { "/elfen", "pause", NULL };
	char *const resume[] = { "/elfen", "resume", NULL };
	struct served *const all[] = { start_service("a", 0), start_service("b", 2) };
	static char said[4096];
	pid_t batches[2];
	verdict why;
	int each;

	why = start_with(SETTINGS);
	if (why)
		return why;
	batches[0] = spin_in("fence");
	batches[1] = spin_in("other");
	CHECK(runs_on(batches[0]) && runs_on(batches[1]));
	measure(all, "beside batches");
	CHECK(!output_of(pause, said, sizeof(said)));
	measure(all, "while these are paused");
	CHECK(!output_of(resume, said, sizeof(said)));
	CHECK(runs_on(batches[0]) && runs_on(batches[1]));
	for (each = 0; each < 2; each++) {
		struct served *served = all[each];
		long own, other, before;
		int tries = 0;

		before = share_of(&batches[!each], 1, "of a lane whose service has requests");
		__atomic_store_n(&served->hold, 1, __ATOMIC_RELEASE);
		while (!__atomic_load_n(&served->holds, __ATOMIC_ACQUIRE))
			usleep(1000);
		/*
		 * The CPUs of an emulated machine share those of the host, so a spinning thread
		 * slows all others. On a slow host the other service may fall behind.
		 */
		do {
			own = share_of(&batches[each], 1, "beside a request without an end");
			other = share_of(&batches[!each], 1,
					 "meanwhile, of the other service's lane");
		} while (++tries < 5 && (own > 30 || other < 2 * own));
		__atomic_store_n(&served->hold, 0, __ATOMIC_RELEASE);
		if (own > 30 || other < 2 * own)
			return because("%c: %ld per mille, the other %ld, %ld before", 'a' + each,
				       own, other, before);
		CHECK(runs_on(batches[each]));
	}
	return NULL;
}

const struct test service_tests[] = {
	{ "services-hold-their-own", NULL, "", two },
	{ 0 },
};
