// SPDX-License-Identifier: GPL-2.0-only
/*
 * Invalid changes to a fence by other processes, with cgroups of version 2; and a kernel without
 * cpusets.
 */
#define _GNU_SOURCE
#include "fenced.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char said[65536];

/* Writes a file of the fence. Returns 0 or errno. */
static int write_fence(const char *name, const char *text)
{
	char path[128];
	int fd, why;

	snprintf(path, sizeof(path), FENCE "/%s", name);
	fd = open(path, O_WRONLY | O_CLOEXEC);
	why = write(fd, text, strlen(text)) < 0 ? errno : 0;
	close(fd);
	return why;
}

/* Waits until the fence's folder exists again. */
static bool comes_back(void)
{
	int tries;

	for (tries = 0; tries < 3000 && access(FENCE "/cpuset.cpus", F_OK); tries++)
		usleep(20000);
	return tries < 3000;
}

/*
 * Goal: elfend restores a fence after it was thawed, lost its CPUs, became a partition, was
 * removed, or became threaded. Until then the fence is frozen, and elfend reports why. Method: each
 * of these changes, with a batch inside where the kernel allows it.
 */
static verdict meddled(void)
{
	char *const pause[] = { "/elfen", "pause", NULL };
	char *const resume[] = { "/elfen", "resume", NULL };
	static const char *const partitions[] = { "isolated", "root" };
	verdict why = start_with(USUAL);
	pid_t batch;
	size_t at;

	if (why)
		return why;
	batch = spin_in("fence");
	CHECK(runs_on(batch));
	for (at = 0; at < sizeof(partitions) / sizeof(*partitions); at++) {
		CHECK(!write_fence("cpuset.cpus.partition", partitions[at]));
		CHECK(becomes("cpuset.cpus.partition", "member"));
		CHECK(becomes("cpuset.cpus.effective", "1,3") && says(RUNS));
	}
	CHECK(write_fence("cgroup.type", "threaded") == EOPNOTSUPP);
	CHECK(write_fence("cpuset.cpus", "\n") == ENOSPC);
	CHECK(rmdir(FENCE) && errno == EBUSY);

	if (output_of(pause, said, sizeof(said)))
		return because("elfen pause: %.400s", said);
	CHECK(!write_fence("cgroup.freeze", "0") && becomes("cgroup.freeze", "1"));
	if (output_of(resume, said, sizeof(said)))
		return because("elfen resume: %.400s", said);
	CHECK(says(RUNS) && runs_on(batch));
	end(batch);
	CHECK(becomes("cgroup.events", "populated 0"));

	CHECK(!write_fence("cpuset.cpus", "\n"));
	CHECK(becomes("cpuset.cpus", "1,3") && becomes("cpuset.cpus.effective", "1,3"));
	CHECK(!rmdir(FENCE) && comes_back());
	CHECK(becomes("cpu.idle", "1") && becomes("cpuset.cpus.effective", "1,3") && says(RUNS));
	/* A threaded cgroup cannot become a domain again, so it must be removed. */
	CHECK(!write_fence("cgroup.type", "threaded"));
	CHECK(says("requires a cgroup of whole processes") && becomes("cgroup.freeze", "1"));
	CHECK(!rmdir(FENCE) && comes_back());
	CHECK(becomes("cgroup.type", "domain") && becomes("cpu.idle", "1") && says(RUNS));
	batch = spin_in("fence");
	CHECK(runs_on(batch));
	end(batch);
	return NULL;
}

/*
 * Goal: without cpusets, elfend refuses to start and gives the reason, and a run uses the level
 * affinity. Method: a kernel booted without cpusets.
 */
static verdict without_cpusets(void)
{
	char *const daemon[] = { "/elfend", NULL };
	char *const run[] = { "/elfen",	      "run",  "--lanes", "0:1", "--",
			      "/bin/busybox", "echo", "it runs", NULL };
	static char controllers[256];
	int status;

	set_up("[[lent]]\nlanes = \"0:1\"\n"
	       "[[fence]]\nname = \"batch\"\ncgroup = \"fence\"\n");
	CHECK(read_text(CGROUPS "/cgroup.controllers", controllers, sizeof(controllers)) > 0);
	CHECK(strstr(controllers, "cpu") && !strstr(controllers, "cpuset"));
	status = output_of(daemon, said, sizeof(said));
	if (status != 3 << 8 || !strstr(said, "no hierarchy here has the cpuset controller"))
		return because("elfend ended with %#x: %.400s", status, said);
	CHECK(access(FENCE, F_OK) && access("/tmp/elfend", F_OK));
	status = output_of(run, said, sizeof(said));
	if (status || !strstr(said, "level affinity") || !strstr(said, "it runs"))
		return because("elfen run ended with %#x: %.400s", status, said);
	return NULL;
}

const struct test meddled_tests[] = {
	{ "fence-meddled", NULL, "", meddled },
	{ 0 },
};

const struct test cpusetless_tests[] = {
	{ "fence-without-cpusets", NULL, "", without_cpusets },
	{ 0 },
};
