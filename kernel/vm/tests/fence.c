// SPDX-License-Identifier: GPL-2.0-only
/*
 * Fences with cgroups of version 2 and CPU hotplug: `elfend`, two pairs of lanes, and batches that
 * are put into the fence by writing its cgroup.procs, like a container engine does.
 *
 * Shares are printed on the guest's console. Durations on an emulated machine mean nothing.
 */
#define _GNU_SOURCE
#include "fenced.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define BATCHES 2

/* Long enough for an emulated machine next to another one. */
#define PATIENCE_NS (60000 * MS)

/* Only lane 3, whose memory is on the other node. */
#define FAR "lanes = \"3\"\n"

static char said[262144];
static pid_t daemon_pid;

static void make_file(const char *path, const char *text)
{
	close(open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0644));
	write_text(path, text);
}

static void put_into(const char *cgroup)
{
	char path[128];

	snprintf(path, sizeof(path), CGROUPS "/%s/cgroup.procs", cgroup);
	write_text(path, "0");
}

const char *fence_file(const char *name)
{
	static char text[256];
	char path[128];
	long bytes;

	snprintf(path, sizeof(path), FENCE "/%s", name);
	bytes = read_text(path, text, sizeof(text) - 1);
	text[bytes > 0 ? bytes : 0] = 0;
	text[strcspn(text, "\n")] = 0;
	return text;
}

bool becomes(const char *name, const char *value)
{
	uint64_t end = now_ns() + PATIENCE_NS;

	while (now_ns() < end) {
		if (!strcmp(fence_file(name), value))
			return true;
		usleep(20000);
	}
	return false;
}

bool says(const char *what)
{
	char *const words[] = { "/elfen", "status", "--json", NULL };
	uint64_t end = now_ns() + PATIENCE_NS;

	while (now_ns() < end) {
		if (!output_of(words, said, sizeof(said)) && strstr(said, what))
			return true;
		usleep(100000);
	}
	return false;
}

void set_up(const char *settings)
{
	mkdir(CGROUPS, 0755);
	mount("cgroup2", CGROUPS, "cgroup2", 0, NULL);
	mkdir(CGROUPS "/home", 0755);
	/* This cgroup has no controllers, like a unit that requests none. */
	mkdir(CGROUPS "/home/elfend", 0755);
	mkdir("/etc", 0755);
	make_file("/etc/passwd", "root:x:0:0::/:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n");
	make_file("/tmp/elfend.toml", settings);
	setenv("ELFEN_SETTINGS", "/tmp/elfend.toml", 1);
	setenv("ELFEN_RUN_DIR", "/tmp/elfend", 1);
}

verdict start_with(const char *settings)
{
	set_up(settings);
	write_text(CGROUPS "/cgroup.subtree_control", "+cpu +cpuset +pids");
	daemon_pid = fork();
	if (!daemon_pid) {
		put_into("home/elfend");
		execl("/elfend", "/elfend", NULL);
		_exit(127);
	}
	return says(RUNS) ? NULL : because("elfend does not hold the fence: %.400s", said);
}

static verdict start(void)
{
	return start_with(USUAL);
}

pid_t spin_in(const char *cgroup)
{
	pid_t child = fork();

	if (child)
		return child;
	setpriority(PRIO_PROCESS, 0, -20);
	put_into(cgroup);
	for (;;)
		;
}

/* The run time of a process, by the scheduler's account. */
static uint64_t ran_ns(pid_t process)
{
	char path[64], text[128];

	snprintf(path, sizeof(path), "/proc/%d/schedstat", process);
	return read_text(path, text, sizeof(text)) > 0 ? strtoull(text, NULL, 10) : 0;
}

bool runs_on(pid_t process)
{
	uint64_t before = ran_ns(process), end = now_ns() + PATIENCE_NS;

	while (now_ns() < end) {
		if (ran_ns(process) > before + 20 * MS)
			return true;
		usleep(20000);
	}
	return false;
}

long share_of(const pid_t *processes, int count, const char *when)
{
	uint64_t ran = 0, began;
	long share;
	int at;

	usleep(500000);
	for (at = 0; at < count; at++)
		ran -= ran_ns(processes[at]);
	began = now_ns();
	usleep(2000000);
	for (at = 0; at < count; at++)
		ran += ran_ns(processes[at]);
	share = (long)(ran * 1000 / (now_ns() - began) / count);
	printf("fence: %ld per mille %s\n", share, when);
	return share;
}

void end(pid_t process)
{
	kill(process, SIGKILL);
	waitpid(process, NULL, 0);
}

/*
 * Goal: tasks in the fence run only on its lanes, and get next to nothing of held lanes, whatever
 * their nice value. Their time is counted. Method: the scheduler's account of two batches. So that
 * the test can fail, the same outside of the fence.
 */
static verdict held(void)
{
	char *const inside[] = { "/elfen", "run", "--fence", "batch", "--user", "nobody", "--",
				 "/bin/busybox", "cat", "/proc/self/cgroup", NULL };
	struct lane_thread lanes[2];
	pid_t batches[BATCHES], outside;
	verdict why = start();
	const char *accounts;
	long alone, beside;
	int at;

	if (why)
		return why;
	CHECK(!strcmp(fence_file("cpuset.cpus.effective"), "1,3"));
	CHECK(!strcmp(fence_file("cpu.idle"), "1"));
	if (output_of(inside, said, sizeof(said)) || !strstr(said, "0::/fence"))
		return because("elfen run --fence: %.400s", said);
	for (at = 0; at < BATCHES; at++)
		CHECK(runs_on(batches[at] = spin_in("fence")));
	alone = share_of(batches, BATCHES, "while the request lanes idle");
	for (at = 0; at < 2; at++) {
		lane_thread_start(&lanes[at], 2 * at);
		lane_thread_busy(&lanes[at], 0);
	}
	beside = share_of(batches, BATCHES, "of held lanes");
	/* The host may have fewer CPUs than the emulated machine, hence the low limit. */
	if (alone < 150 || beside > 30)
		return because("%ld per mille alone, %ld beside requests", alone, beside);
	mkdir(CGROUPS "/beside", 0755);
	outside = spin_in("beside");
	CHECK(!sched_setaffinity(outside, sizeof(cpu_set_t), &(cpu_set_t){ { 1 << 1 } }));
	beside = share_of(&outside, 1, "of a held lane outside of the fence");
	CHECK(beside >= 60);
	end(outside);
	CHECK(says(RUNS));
	accounts = strstr(said, "\"accounts\"");
	CHECK(accounts && number_of(accounts, "\"borrowed_ns\": ") > 0);
	CHECK(number_of(accounts, "\"overlapped_ns\": ") > 0);
	for (at = 0; at < 2; at++)
		lane_thread_stop(&lanes[at]);
	return NULL;
}

/*
 * Goal: elfend restores settings that another process changes. What elfend must not change itself
 * freezes the fence until it is correct again. Method: write the settings that only version 2 has,
 * and the files that both versions have.
 */
static verdict promises(void)
{
	const struct sched_param first = { .sched_priority = 1 }, none = { .sched_priority = 0 };
	static const char *const changed[][3] = {
		{ "cpu.idle", "0", "1" },
		{ "cpuset.cpus", "0-3", "1,3" },
		{ "cpuset.cpus.partition", "root", "member" },
	};
	char path[128];
	verdict why = start();
	pid_t batch, sleeper;
	size_t at;

	if (why)
		return why;
	batch = spin_in("fence");
	CHECK(runs_on(batch));
	for (at = 0; at < sizeof(changed) / sizeof(*changed); at++) {
		snprintf(path, sizeof(path), FENCE "/%s", changed[at][0]);
		write_text(path, changed[at][1]);
		if (!becomes(changed[at][0], changed[at][2]))
			return because("%s stays %s", changed[at][0], fence_file(changed[at][0]));
	}
	CHECK(becomes("cpuset.cpus.effective", "1,3") && says(RUNS));
	CHECK(strstr(said, "\"guarantee\": \"rank\"") && strstr(said, "\"guarantee\": \"place\""));

	/* A sleeping task, because the kernel would warn about a running one of this class. */
	sleeper = fork();
	if (!sleeper) {
		put_into("fence");
		for (;;)
			pause();
	}
	CHECK(!sched_setscheduler(sleeper, SCHED_FIFO, &first));
	CHECK(says("SCHED_FIFO") && becomes("cgroup.freeze", "1"));
	CHECK(!sched_setscheduler(sleeper, SCHED_OTHER, &none) && says(RUNS));

	CHECK(!chown(FENCE "/cgroup.procs", 65534, 0));
	CHECK(says("other than root may write") && becomes("cgroup.freeze", "1"));
	CHECK(!chown(FENCE "/cgroup.procs", 0, 0) && says(RUNS));

	/* In a threaded cgroup, threads of a process could be in several cgroups. */
	CHECK(!mkdir(FENCE "/threads", 0755));
	write_text(FENCE "/threads/cgroup.type", "threaded");
	CHECK(becomes("cgroup.freeze", "1") && says("threaded"));
	CHECK(!rmdir(FENCE "/threads") && says(RUNS));
	CHECK(runs_on(batch));
	return NULL;
}

/*
 * Waits until a batch has at least 150 per mille of a lane. elfend, the guards and this test run on
 * the one lane without a spinning thread, and take more of it the slower the host is. On a held
 * lane a batch has at most 30.
 */
static verdict borrows(pid_t batch, const char *when)
{
	long share = 0;
	int tries;

	for (tries = 0; tries < 20 && share < 150; tries++)
		share = share_of(&batch, 1, when);
	return share >= 150 ? NULL : because("%ld per mille %s", share, when);
}

static verdict set_online(int cpu, bool online)
{
	char path[64], text[8] = "";

	snprintf(path, sizeof(path), "/sys/devices/system/cpu/cpu%d/online", cpu);
	write_text(path, online ? "1" : "0");
	if (read_text(path, text, sizeof(text)) <= 0 || text[0] != (online ? '1' : '0'))
		return because("CPU %d does not go %s", cpu, online ? "online" : "offline");
	return NULL;
}

/*
 * Goal: tasks on the lane of one node have that node's memory, also while the lane is offline, and
 * all memory after a release. Method: a fence on one of two nodes; another process gives it both.
 */
static verdict memory(void)
{
	char *const release[] = { "/elfend", "--release", NULL };
	verdict why = start_with(USUAL FAR);
	pid_t batch;

	if (why)
		return why;
	CHECK(!strcmp(fence_file("cpuset.mems.effective"), "1"));
	batch = spin_in("fence");
	CHECK(runs_on(batch));
	write_text(FENCE "/cpuset.mems", "0-1");
	CHECK(becomes("cpuset.mems", "1") && says("\"guarantee\": \"place\"") && says(RUNS));
	if ((why = set_online(3, false)))
		return why;
	CHECK(says("no-lane") && becomes("cgroup.freeze", "1"));
	CHECK(!strcmp(fence_file("cpuset.mems.effective"), "1"));
	if ((why = set_online(3, true)))
		return why;
	CHECK(says(RUNS) && runs_on(batch));
	CHECK(!strcmp(fence_file("cpuset.mems.effective"), "1"));
	kill(daemon_pid, SIGTERM);
	waitpid(daemon_pid, NULL, 0);
	if (output_of(release, said, sizeof(said)))
		return because("elfend --release: %.400s", said);
	CHECK(!strcmp(fence_file("cpuset.mems.effective"), "0-1"));
	CHECK(!strcmp(fence_file("cpuset.cpus.effective"), "0-3"));
	return NULL;
}

/*
 * Goal: a fence runs on the lanes that are online, is frozen without any, and runs again when one
 * is back. An offline request lane counts as idle, and as busy again when it is back and busy.
 * Method: lanes are taken offline one after the other, then in random order.
 */
static verdict hotplug(void)
{
	struct lane_thread lanes[2];
	uint64_t stands, before;
	verdict why = start();
	pid_t batch;
	long share;
	int round;

	if (why)
		return why;
	batch = spin_in("fence");
	CHECK(runs_on(batch));
	if ((why = set_online(1, false)))
		return why;
	CHECK(becomes("cpuset.cpus.effective", "3") && runs_on(batch) && says(RUNS));
	before = ran_ns(batch);
	if ((why = set_online(3, false)))
		return why;
	CHECK(says("no-lane") && becomes("cgroup.freeze", "1"));
	usleep(200000);
	stands = ran_ns(batch);
	printf("fence: %llu ms without a lane until it stood still\n",
	       (unsigned long long)((stands - before) / MS));
	usleep(500000);
	CHECK(ran_ns(batch) == stands);
	if ((why = set_online(1, true)) || (why = set_online(3, true)))
		return why;
	CHECK(becomes("cpuset.cpus.effective", "1,3") && says(RUNS) && runs_on(batch));

	/*
	 * The batch runs on CPU 3, whose request lane is offline. The request lane of CPU 1 is
	 * busy.
	 */
	if ((why = set_online(2, false)))
		return why;
	lane_thread_start(&lanes[0], 0);
	lane_thread_busy(&lanes[0], 0);
	CHECK(!sched_setaffinity(batch, sizeof(cpu_set_t), &(cpu_set_t){ { 1 << 3 } }));
	if ((why = borrows(batch, "while its request lane is off")))
		return why;
	CHECK(says(RUNS));
	if ((why = set_online(2, true)))
		return why;
	lane_thread_start(&lanes[1], 2);
	lane_thread_busy(&lanes[1], 0);
	/* On a busy host, a guard runs late. */
	for (share = 1000, round = 0; round < 5 && share > 30; round++)
		share = share_of(&batch, 1, "with it back and busy");
	if (share > 30)
		return because("%ld per mille beside a request lane that is back", share);
	lane_thread_stop(&lanes[1]);
	lane_thread_stop(&lanes[0]);
	CHECK(!sched_setaffinity(batch, sizeof(cpu_set_t), &(cpu_set_t){ { 1 << 1 | 1 << 3 } }));

	for (round = 1; round <= hotplug_rounds(); round++) {
		int cpu = 1 + random_below(3);

		if ((why = set_online(cpu, false)))
			return why;
		usleep(random_below(300000));
		if ((why = set_online(cpu, true)))
			return why;
		if (!becomes("cpuset.cpus.effective", "1,3") || !says(RUNS) || !runs_on(batch))
			return because("CPU %d, round %d: %.400s", cpu, round, said);
	}
	printf("fence: after each of %d rounds it ran, on all of its lanes\n", round - 1);
	return NULL;
}

#define BOMB "200"

/* On emulated CPUs, freezing so large a cgroup may take longer than `elfen pause` waits. */
static int pause_all(void)
{
	char *const pause[] = { "/elfen", "pause", NULL };
	int tries, status = -1;

	for (tries = 0; tries < 3 && status; tries++)
		status = output_of(pause, said, sizeof(said));
	return status;
}

/* Forks for ever; where that fails, tries again. */
static void fork_on(void)
{
	for (;;)
		if (fork() < 0)
			sched_yield();
}

/*
 * Goal: `elfen pause` stops a fork bomb. Method: a fork bomb that reaches the limit of its cgroup.
 * The request lane responds meanwhile, and all processes can be killed.
 */
static verdict crowd(void)
{
	char *const resume[] = { "/elfen", "resume", NULL };
	uint64_t began;
	verdict why = start();

	if (why)
		return why;
	write_text(FENCE "/pids.max", BOMB);
	if (!fork()) {
		/* Moved to the fence, where it grows. */
		put_into("fence");
		fork_on();
	}
	CHECK(becomes("pids.current", BOMB));
	pin(0);
	began = now_ns();
	if (pause_all())
		return because("elfen pause: %.400s", said);
	printf("fence: %llu ms until " BOMB " processes stood still\n",
	       (unsigned long long)((now_ns() - began) / MS));
	CHECK(becomes("cgroup.freeze", "1"));
	began = now_ns();
	write_text(FENCE "/cgroup.kill", "1");
	CHECK(becomes("cgroup.events", "populated 0"));
	printf("fence: %llu ms until they were gone\n",
	       (unsigned long long)((now_ns() - began) / MS));
	write_text(FENCE "/pids.max", "max");
	if (output_of(resume, said, sizeof(said)))
		return because("elfen resume: %.400s", said);
	CHECK(says(RUNS));
	return NULL;
}

const struct test fence_tests[] = {
	{ "fence-held-lanes", NULL, "", held },
	{ "fence-promises", NULL, "", promises },
	{ "fence-hotplug", NULL, "", hotplug },
	{ "fence-crowd", NULL, "", crowd },
	{ 0 },
};

const struct test node_tests[] = {
	{ "fence-memory", NULL, "", memory },
	{ 0 },
};
