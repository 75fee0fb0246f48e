/*
 * Uses many features that a check in the code could break: loops without calls, callbacks,
 * signals, longjmp, threads, children, exec. Prints the same results in every run.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

static volatile sig_atomic_t ticks;
static sigjmp_buf back;

static void on_tick(int signal)
{
	(void)signal;
	ticks++;
}

static void on_trap(int signal)
{
	(void)signal;
	siglongjmp(back, 1);
}

static unsigned long loop(unsigned long seed, long rounds)
{
	unsigned long sum = seed;
	long i;

	for (i = 0; i < rounds; i++) {
		sum = sum * 6364136223846793005UL + 1442695040888963407UL;
		if (sum >> 60 == 7)
			sum ^= sum >> 13;
		else if ((sum & 0xff) == 3)
			sum += i;
	}
	return sum;
}

static int compare(const void *one, const void *other)
{
	unsigned long a = *(const unsigned long *)one, b = *(const unsigned long *)other;

	return a < b ? -1 : a > b;
}

static unsigned long sorted(unsigned long seed)
{
	static unsigned long numbers[20000];
	unsigned long sum = 0;
	size_t i;

	for (i = 0; i < 20000; i++)
		numbers[i] = seed = loop(seed, 3);
	qsort(numbers, 20000, sizeof(*numbers), compare);
	for (i = 0; i < 20000; i++)
		sum = sum * 31 + numbers[i];
	return sum;
}

/* Appends to a text, searches it and compares it, with functions of the C library. */
static unsigned long text(unsigned long seed)
{
	char *line = malloc(1 << 16);
	unsigned long sum = 0, length = 0;

	while (length < 60000)
		length += sprintf(line + length, "%lx,%ld;", seed = loop(seed, 2), (long)seed % 97);
	for (char *at = strchr(line, ';'); at; at = strchr(at + 1, ';'))
		sum = sum * 17 + (unsigned char)at[-1] + strlen(at) % 5;
	free(line);
	return sum;
}

static void *thread(void *argument)
{
	unsigned long *seed = argument;

	for (int i = 0; i < 6; i++)
		*seed ^= sorted(*seed) + loop(*seed, 400000);
	return NULL;
}

static unsigned long jumps(unsigned long seed)
{
	volatile unsigned long sum = seed;

	for (int i = 0; i < 2000; i++) {
		if (sigsetjmp(back, 1))
			sum += i;
		else if (loop(sum, 50) & 1)
			raise(SIGUSR1);
	}
	return sum;
}

int main(int count, char **words)
{
	struct itimerval every = { { 0, 1000 }, { 0, 1000 } };
	struct sigaction tick = { .sa_handler = on_tick, .sa_flags = SA_RESTART };
	struct sigaction trap = { .sa_handler = on_trap };
	unsigned long seed = 1, other = 2, rounds = count > 1 ? strtoul(words[1], NULL, 10) : 6;
	pthread_t one;

	sigaction(SIGALRM, &tick, NULL);
	sigaction(SIGUSR1, &trap, NULL);
	setitimer(ITIMER_REAL, &every, NULL);
	for (unsigned long i = 0; i < rounds; i++) {
		int status = 0;
		pid_t child;

		seed = loop(seed, 30000000) ^ text(seed) ^ jumps(seed);
		child = fork();
		if (!child)
			_exit(loop(seed, 3000000) & 0x7f);
		while (waitpid(child, &status, 0) < 0)
			;
		seed += WEXITSTATUS(status);
	}
	pthread_create(&one, NULL, thread, &other);
	seed += loop(seed, 20000000);
	pthread_join(one, NULL);
	printf("%lx %lx %d\n", seed, other, ticks > 0);
	fflush(stdout);
	if (rounds > 1) {
		setitimer(ITIMER_REAL, &(struct itimerval){ 0 }, NULL);
		execl("/proc/self/exe", words[0], "1", NULL);
	}
	return rounds == 1 ? 3 : 1;
}
