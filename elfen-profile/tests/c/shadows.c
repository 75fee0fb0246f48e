// Looks for traces of its shadows, in everything that others could see of them: children, accounts,
// descriptors, locks, pipes, shared memory, files, signals. Prints the same with and without them.
//
// usage: shadows MILLISECONDS FOLDER
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <sys/times.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static uint64_t now_us(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000ull + now.tv_nsec / 1000;
}

static uint64_t until;
static int is_over(void) { return now_us() >= until; }
static void for_ms(unsigned ms) { until = now_us() + ms * 1000ull; }

static uint64_t __attribute__((noipa)) mix(uint64_t value, unsigned times)
{
	for (unsigned i = 0; i < times; i++)
		value = (value ^ value >> 29) * 0xbf58476d1ce4e5b9ull + i;
	return value;
}

static volatile sig_atomic_t ticks;
static void on_tick(int signal) { (void)signal; ticks++; }

static int entries_of(const char *path)
{
	int count = 0;
	DIR *folder = opendir(path);
	while (readdir(folder))
		count++;
	closedir(folder);
	return count;
}

static int has_name(const char *path, const char *name)
{
	static char text[1 << 20];
	int file = open(path, O_RDONLY);
	ssize_t length = read(file, text, sizeof text - 1);
	close(file);
	text[length < 0 ? 0 : length] = 0;
	return strstr(text, name) != NULL;
}

// Phases. Each returns how often something was wrong.

static int no_children(void)
{
	int wrong = 0;
	struct rusage usage, none = {0};
	struct tms times_of;
	while (!is_over()) {
		mix(1, 20000);
		wrong += waitpid(-1, NULL, WNOHANG) != -1 || errno != ECHILD;
		getrusage(RUSAGE_CHILDREN, &usage);
		wrong += memcmp(&usage, &none, sizeof none) != 0;
		times(&times_of);
		wrong += times_of.tms_cutime + times_of.tms_cstime != 0;
	}
	return wrong;
}

static int own_children(void)
{
	int wrong = 0;
	while (!is_over()) {
		pid_t child = fork();
		if (!child) {
			_exit(mix(2, 5000) & 1 ? 7 : 7);
		}
		int status = 0;
		mix(3, 20000);
		wrong += wait(&status) != child || !WIFEXITED(status) || WEXITSTATUS(status) != 7;
		wrong += wait(&status) != -1 || errno != ECHILD;
	}
	return wrong;
}

static int shared_memory(void)
{
	volatile uint64_t *shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE,
					 MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	uint64_t own = 0;
	int wrong = 0;
	while (!is_over()) {
		for (int i = 0; i < 1000; i++) {
			wrong += ++*shared != ++own;
			mix(4, 20);
		}
	}
	munmap((void *)shared, 4096);
	return wrong;
}

// The same, but mostly the memory is read-only: a shadow finds it so, and makes it writable too.
static int guarded_memory(void)
{
	volatile uint64_t *shared = mmap(NULL, 4096, PROT_READ, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	uint64_t own = 0;
	int wrong = 0;
	while (!is_over()) {
		mix(7, 5000);
		mprotect((void *)shared, 4096, PROT_READ | PROT_WRITE);
		wrong += ++*shared != ++own;
		mprotect((void *)shared, 4096, PROT_READ);
	}
	munmap((void *)shared, 4096);
	return wrong;
}

static int files(const char *folder)
{
	char path[4096], line[64], back[64];
	snprintf(path, sizeof path, "%s/lines", folder);
	int file = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600), wrong = 0;
	off_t at = 0;
	for (uint64_t number = 0; !is_over(); number++) {
		unsigned long long value = mix(number, 3000);
		int length = snprintf(line, sizeof line, "%llu\n", value);
		wrong += write(file, line, length) != length;
		wrong += pread(file, back, length, at) != length;
		wrong += memcmp(line, back, length) != 0;
		at += length;
		wrong += lseek(file, 0, SEEK_END) != at;
	}
	close(file);
	unlink(path);
	return wrong;
}

static int compare(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
	return x < y ? -1 : x > y;
}

static void must(int is_done)
{
	if (!is_done)
		exit(3);
}

// Reads until a byte or the end, and tells when.
static void tell(int from, int to, ssize_t expected)
{
	char byte;
	must(read(from, &byte, 1) == expected);
	uint64_t seen = now_us();
	must(write(to, &seen, sizeof seen) == sizeof seen);
}

static uint64_t told_after(uint64_t then, int from)
{
	uint64_t seen = 0;
	must(read(from, &seen, sizeof seen) == sizeof seen);
	return seen > then ? seen - then : 0;
}

// The median time until another process sees a byte in a pipe, and until it sees the pipe's end, in
// microseconds. A busy machine delays both.
static void pipes(uint64_t medians[2])
{
	static uint64_t took[2][100000];
	size_t count = 0;
	while (!is_over() && count < 100000) {
		int out[2], back[2];
		must(pipe(out) == 0 && pipe(back) == 0);
		pid_t child = fork();
		if (!child) {
			close(out[1]);
			close(back[0]);
			tell(out[0], back[1], 1);
			tell(out[0], back[1], 0);
			_exit(0);
		}
		close(out[0]);
		close(back[1]);
		mix(5, 25000);
		uint64_t then = now_us();
		must(write(out[1], "x", 1) == 1);
		took[0][count] = told_after(then, back[0]);
		mix(5, 25000);
		then = now_us();
		close(out[1]);
		took[1][count] = told_after(then, back[0]);
		close(back[0]);
		waitpid(child, NULL, 0);
		count++;
	}
	for (int i = 0; i < 2; i++) {
		qsort(took[i], count, sizeof took[i][0], compare);
		medians[i] = took[i][count / 2];
	}
}

static int locks(const char *folder)
{
	char path[4096];
	snprintf(path, sizeof path, "%s/lock", folder);
	int wrong = 0;
	while (!is_over()) {
		// Each has its own description, so the second succeeds only once the first is gone.
		for (int i = 0; i < 20; i++) {
			int file = open(path, O_RDWR | O_CREAT, 0600);
			wrong += flock(file, LOCK_EX | LOCK_NB) != 0;
			mix(6, 5000);
			close(file);
		}
	}
	unlink(path);
	return wrong;
}

static void *work(void *result)
{
	uint64_t sum = 0;
	while (!is_over())
		sum += mix(sum, 10000);
	*(uint64_t *)result = sum != 0;
	return NULL;
}

static int threads(void)
{
	pthread_t thread[3];
	uint64_t done[3] = {0};
	for (int i = 0; i < 3; i++)
		pthread_create(&thread[i], NULL, work, &done[i]);
	for (int i = 0; i < 3; i++)
		pthread_join(thread[i], NULL);
	return done[0] + done[1] + done[2] != 3;
}

int main(int count, char **words)
{
	unsigned ms = atoi(words[1]);
	const char *folder = words[2];
	(void)count;
	for_ms(ms);
	printf("children that it has not: %d\n", no_children());
	int descriptors = entries_of("/proc/self/fd");
	struct sigaction action = {.sa_handler = on_tick, .sa_flags = SA_RESTART};
	sigaction(SIGALRM, &action, NULL);
	struct itimerval timer = {{0, 1000}, {0, 1000}};
	setitimer(ITIMER_REAL, &timer, NULL);
	for_ms(ms);
	printf("own children: %d\n", own_children());
	for_ms(ms);
	printf("shared memory: %d\n", shared_memory());
	for_ms(ms);
	printf("guarded memory: %d\n", guarded_memory());
	for_ms(ms);
	printf("files: %d\n", files(folder));
	for_ms(ms);
	printf("threads: %d\n", threads());
	for_ms(ms);
	printf("locks: %d\n", locks(folder));
	for_ms(ms);
	uint64_t medians[2];
	pipes(medians);
	printf("pipes: %d\n", medians[1] > medians[0] + 1000);
	fprintf(stderr, "a byte in a pipe: %llu us, its end: %llu us\n",
		(unsigned long long)medians[0], (unsigned long long)medians[1]);
	printf("signals: %d\n", ticks < (int)ms);
	printf("descriptors: %d\n", entries_of("/proc/self/fd") - descriptors);
	printf("mappings: %d\n", has_name("/proc/self/maps", "elfen-profile"));
	printf("tracer: %d\n", !has_name("/proc/self/status", "TracerPid:\t0"));
	return 42;
}
