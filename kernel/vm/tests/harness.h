/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Shared by the tests in the guest: the device, the map, pinned threads, and verdicts.
 *
 * A test is a function that returns NULL, or the reason why it failed. It runs in a process of its
 * own, as root, with the module of its table entry freshly loaded.
 */
#ifndef HARNESS_H
#define HARNESS_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "elfen_abi.h"
#include "nanonap.h"

#define US 1000ULL
#define MS 1000000ULL

typedef const char *verdict; /* NULL: passed */

struct test {
	const char *name;
	const char *module;     /* file to load before, or NULL */
	const char *parameters;
	verdict (*run)(void);
};

extern const struct test map_tests[], nap_tests[], lane_tests[], lifetime_tests[], argument_tests[];
extern const struct test command_tests[], fuzz_tests[], bare_tests[], wide_tests[];
extern const struct test fence_tests[], meddled_tests[], cpusetless_tests[];
extern const struct test service_tests[], node_tests[];

verdict because(const char *format, ...) __attribute__((format(printf, 1, 2)));
#define CHECK(fact)                                                                                \
	do {                                                                                       \
		if (!(fact))                                                                       \
			return because("line %d: not %s (errno %d)", __LINE__, #fact, errno);      \
	} while (0)

/* harness.c. These end the test if they fail, and write the reason to this pipe. */
extern int verdict_pipe;
#define PRODUCT "/nanonap.ko"
#define CPU1_ONLINE "/sys/devices/system/cpu/cpu1/online"
int load(const char *file, const char *parameters); /* 0 or -1 with errno */
int unload(void);
int open_device(void); /* opened and greeted */
const struct elfen_task_slot *map_slots(int fd);
void pin(int cpu);
void pin_all(void);
uint64_t now_ns(void);
uint64_t own_task(void); /* as a slot holds it */
void write_text(const char *path, const char *text);
long read_text(const char *path, char *text, long bytes);
int nap_on(int fd, unsigned int request_cpu, uint64_t seen, uint64_t bound_ns);
uint64_t cpu_ns(pthread_t thread);
uint32_t random_below(uint32_t limit); /* per thread, from the seed */
void seed_random(uint64_t seed);
extern uint64_t test_seed;
int hotplug_rounds(void); /* from `kernel/vm/run -r` */

/* Runs a program with these words; collects its output and errors, and returns its status. */
int output_of(char *const words[], char *text, size_t bytes);
long number_of(const char *json, const char *key); /* after `"key": `; -1 if there is none */
int batch(char **words);                           /* wide.c: this program as a batch */
int confined(char **words);                        /* the same with a seccomp filter */

static inline uint64_t peek(const uint64_t *word)
{
	return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

/* A thread that makes a CPU busy on command, in place of a service. */
struct lane_thread {
	pthread_t thread;
	int cpu;
	uint64_t task;      /* its word in the slot; 0 before it runs */
	int asked;          /* rounds requested; a futex */
	int begun;          /* rounds begun */
	int finished;       /* rounds done */
	uint64_t round_ns;  /* how long a round keeps the lane busy; 0: until `release` */
	int release;
	int stop;
};
void lane_thread_start(struct lane_thread *lane, int cpu);
void lane_thread_busy(struct lane_thread *lane, uint64_t round_ns); /* begins a round */
void lane_thread_idle(struct lane_thread *lane);                    /* ends an unlimited round */
void lane_thread_await(const struct lane_thread *lane);             /* until its round begins */
bool lane_thread_finished(const struct lane_thread *lane);          /* it may still be awake */
void lane_thread_stop(struct lane_thread *lane);

#endif /* HARNESS_H */
