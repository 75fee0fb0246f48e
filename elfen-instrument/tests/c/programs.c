/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Batch programs that are hard on injected code. Their output depends only on their work, so a run
 * with checks can be compared with a run without.
 *
 * Built once for each way of checking. With -DINLINE the checks are in the source.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/shm.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

#ifdef INLINE
#include "elfen_check.h"
#define CHECK() elfen_check()
#else
#define CHECK() ((void)0)
#endif

#define NOINLINE __attribute__((noinline, noclone))

typedef unsigned long word;

/*
 * Work with a function entry every few nanoseconds. Not static, so that it starts with endbr64
 * under control-flow protection.
 */
NOINLINE word mix(word value, word with)
{
	CHECK();
	return (value ^ with) * 0x9e3779b97f4a7c15ul + (value >> 29);
}

/*
 * A loop right after the entry. Its first instruction is a NOP of the program, which must not be
 * overwritten.
 */
NOINLINE static void spin(int turns)
{
	__asm__ volatile("1:\n\tnop\n\tdecl %0\n\tjnz 1b" : "+D"(turns));
}

NOINLINE word work(word seed, int rounds)
{
	word value = seed;
	int i;

	CHECK();
	spin((int)(seed & 3) + 1);
	for (i = 0; i < rounds; i++)
		value = mix(value, (word)i);
	return value;
}

/*
 * ---- loop: counts in shared memory until the board says stop; loop-closed has no descriptor
 * open meanwhile ----
 */

static int loop(const char *segment, int closed)
{
	word *board = (word *)shmat(atoi(segment), NULL, 0);
	int fd;

	if (board == (word *)-1)
		return 1;
	/* The first check opens the inherited descriptors, so descriptors are closed after it. */
	board[2] = work(1, 1000);
	for (fd = 0; closed && fd < 4096; fd++)
		close(fd);
	while (!__atomic_load_n(&board[1], __ATOMIC_RELAXED)) {
		board[2] = mix(board[2], 1);
		__atomic_fetch_add(&board[0], 1, __ATOMIC_RELAXED);
	}
	return 0;
}

/* ---- crowd: many threads, each of which counts in its own word until the board says stop ---- */

static word *crowd_board;

static void *one_of_crowd(void *at)
{
	word *count = (word *)at;
	/* volatile: otherwise the result is unused, and the compiler drops the call. */
	volatile word value = 1;

	while (!__atomic_load_n(&crowd_board[1], __ATOMIC_RELAXED)) {
		value = mix(value, 1);
		__atomic_fetch_add(count, 1, __ATOMIC_RELAXED);
		/* Without this, a turn on the lane would last a whole time slice. */
		sched_yield();
	}
	return NULL;
}

static int crowd(const char *segment, int threads)
{
	pthread_t *ids = calloc((size_t)threads, sizeof(*ids));
	int i;

	crowd_board = (word *)shmat(atoi(segment), NULL, 0);
	if (!ids || crowd_board == (word *)-1)
		return 1;
	for (i = 0; i < threads; i++)
		if (pthread_create(&ids[i], NULL, one_of_crowd, &crowd_board[4 + i]))
			return 1;
	for (i = 0; i < threads; i++)
		pthread_join(ids[i], NULL);
	free(ids);
	return 0;
}

/* ---- threads: a thousand of the C library, and some made directly by clone(2) ---- */

static word sums[1000];

static void *thread(void *at)
{
	word *sum = (word *)at;

	*sum = work((word)(sum - sums), 2000);
	return NULL;
}

static int raw_thread(void *at)
{
	thread(at);
	return 0;
}

/*
 * Starts threads without a thread area of their own, as some runtimes do for helpers. Such a thread
 * shares its parent's thread-local variables.
 */
static void raw_threads(void)
{
	const int flags = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_SYSVSEM |
			  SIGCHLD;
	enum { STACK = 64 * 1024 };
	char *stack = malloc(STACK);
	int i, status;

	for (i = 0; i < 20; i++) {
		pid_t child = clone(raw_thread, stack + STACK, flags, &sums[i]);

		if (child < 0 || waitpid(child, &status, 0) != child || status)
			printf("clone: %s\n", strerror(errno));
	}
	free(stack);
}

static int threads(void)
{
	enum { AT_ONCE = 50, ALL = 1000 };
	pthread_t ids[AT_ONCE];
	word sum = 0;
	int i, j;

	for (i = 0; i < ALL; i += AT_ONCE) {
		for (j = 0; j < AT_ONCE; j++)
			if (pthread_create(&ids[j], NULL, thread, &sums[i + j]))
				return 1;
		for (j = 0; j < AT_ONCE; j++)
			pthread_join(ids[j], NULL);
	}
	raw_threads();
	for (i = 0; i < ALL; i++)
		sum = mix(sum, sums[i]);
	printf("threads %lx\n", sum);
	return 0;
}

/* ---- forks: two hundred children, some of them by vfork(2), which exit at once ---- */

static int forks(void)
{
	word sum = 0;
	int i, status;

	for (i = 0; i < 200; i++) {
		pid_t child = i % 10 == 9 ? vfork() : fork();

		if (child == 0) {
			if (i % 10 == 9)
				_exit(9);
			_exit((int)(work((word)i, 20000) & 63));
		}
		if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status))
			return 1;
		sum = mix(sum, (word)WEXITSTATUS(status));
	}
	printf("forks %lx\n", sum);
	return 0;
}

/* ---- chain: a chain of execve(2); each step closes all descriptors except the first three ---- */

static int chain(const char *program, const char *steps, const char *value)
{
	char next[32], sum[32];
	int left = atoi(steps), fd;
	word result = work(strtoul(value, NULL, 16), 20000);

	if (left == 0) {
		printf("chain %lx\n", result);
		return 0;
	}
	for (fd = 3; fd < 1024; fd++)
		close(fd);
	result = work(result, 20000);
	/* The lowest free descriptor must still be the one that the program expects. */
	if (dup(1) != 3)
		return 1;
	close(3);
	snprintf(next, sizeof(next), "%d", left - 1);
	snprintf(sum, sizeof(sum), "%lx", result);
	execl(program, program, "chain", next, sum, (char *)NULL);
	return 1;
}

/* ---- signals: handlers that work, on an alternate stack, and interrupt each other ---- */

static volatile sig_atomic_t delivered;
static volatile word handled;

static void handler(int number)
{
	int saved = errno;

	handled = work(handled + (word)number, 300);
	delivered++;
	errno = saved;
}

static int signals(void)
{
	struct sigaction action;
	stack_t stack;
	word value = 1;
	int i;

	/* A frame takes as much as the kernel reports; the handler gets half as much again. */
	stack.ss_size = (size_t)sysconf(_SC_MINSIGSTKSZ) * 3 / 2 + 4096;
	stack.ss_sp = malloc(stack.ss_size);
	stack.ss_flags = 0;
	sigaltstack(&stack, NULL);
	memset(&action, 0, sizeof(action));
	action.sa_handler = handler;
	action.sa_flags = SA_ONSTACK | SA_NODEFER;
	sigaction(SIGUSR1, &action, NULL);
	sigaction(SIGUSR2, &action, NULL);
	for (i = 0; i < 2000; i++) {
		value = work(value, 100);
		raise(i & 1 ? SIGUSR1 : SIGUSR2);
	}
	printf("signals %d %lx %lx\n", (int)delivered, (word)handled, value);
	return 0;
}

/* ---- contexts: coroutines on small stacks with a guard page below ---- */

enum { COROUTINES = 16, COROUTINE_STACK = 16 * 1024 };
static ucontext_t scheduler, coroutines[COROUTINES];
static word states[COROUTINES];

static void coroutine(int index)
{
	int i;

	for (i = 0; i < 50; i++) {
		states[index] = work(states[index] + (word)index, 200);
		swapcontext(&coroutines[index], &scheduler);
	}
}

static int contexts(void)
{
	word sum = 0;
	int i, turn;

	for (i = 0; i < COROUTINES; i++) {
		char *room = mmap(NULL, COROUTINE_STACK + 4096, PROT_READ | PROT_WRITE,
				  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

		if (room == MAP_FAILED || mprotect(room, 4096, PROT_NONE))
			return 1;
		getcontext(&coroutines[i]);
		coroutines[i].uc_stack.ss_sp = room + 4096;
		coroutines[i].uc_stack.ss_size = COROUTINE_STACK;
		coroutines[i].uc_link = &scheduler;
		makecontext(&coroutines[i], (void (*)(void))coroutine, 1, i);
	}
	for (turn = 0; turn < 50; turn++)
		for (i = 0; i < COROUTINES; i++)
			swapcontext(&scheduler, &coroutines[i]);
	for (i = 0; i < COROUTINES; i++)
		sum = mix(sum, states[i]);
	printf("contexts %lx\n", sum);
	return 0;
}

/* ---- masked: all signals blocked, and an affinity that is changed and restored ---- */

static int masked(void)
{
	cpu_set_t before, one;
	sigset_t all;
	word value = 7;
	int i, cpu;

	sigfillset(&all);
	sigprocmask(SIG_BLOCK, &all, NULL);
	sched_getaffinity(0, sizeof(before), &before);
	for (i = 0; i < 200; i++) {
		value = work(value, 3000);
		for (cpu = 0; !CPU_ISSET(cpu, &before); cpu++)
			;
		CPU_ZERO(&one);
		CPU_SET(cpu, &one);
		sched_setaffinity(0, sizeof(one), &one);
		errno = 77;
		value = work(value, 3000);
		if (errno != 77)
			printf("errno changed\n");
		sched_setaffinity(0, sizeof(before), &before);
	}
	printf("masked %lx\n", value);
	return 0;
}

/* ---- cancel: a cancelled thread that works until it reaches a cancellation point ---- */

static volatile word finished;

static void *cancelled(void *unused)
{
	word value = 3;
	int i;

	(void)unused;
	for (i = 0; i < 4000; i++)
		value = work(value, 1000);
	finished = value;
	for (;;)
		pthread_testcancel();
	return NULL;
}

static int cancel(void)
{
	pthread_t id;
	void *result;

	if (pthread_create(&id, NULL, cancelled, NULL) || pthread_cancel(id) ||
	    pthread_join(id, &result))
		return 1;
	printf("cancel %d %lx\n", result == PTHREAD_CANCELED, finished);
	return 0;
}

int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "";

	if (!strncmp(what, "loop", 4) && argc == 3)
		return loop(argv[2], !strcmp(what, "loop-closed"));
	if (!strcmp(what, "crowd") && argc == 4)
		return crowd(argv[2], atoi(argv[3]));
	if (!strcmp(what, "threads"))
		return threads();
	if (!strcmp(what, "forks"))
		return forks();
	if (!strcmp(what, "chain") && argc == 4)
		return chain(argv[0], argv[2], argv[3]);
	if (!strcmp(what, "signals"))
		return signals();
	if (!strcmp(what, "contexts"))
		return contexts();
	if (!strcmp(what, "cancel"))
		return cancel();
	if (!strcmp(what, "masked"))
		return masked();
	return 2;
}
