// SPDX-License-Identifier: GPL-2.0-only
/*
 * Refusals of the device: arguments, order of calls, module parameters, permissions. Also 32-bit
 * callers.
 */
#define _GNU_SOURCE
#include "harness.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define REFUSED(call, error) CHECK((call) == -1 && errno == (error))

/*
 * Goal: NANONAP_VERSION comes first, and other versions are refused. Method: every call before it,
 * then an unknown version.
 */
static verdict version_first(void)
{
	struct nanonap_version version = { .version = NANONAP_ABI + 1 };
	struct nanonap_nap nap = { .bound_ns = 1 };
	struct nanonap_watch watch = { .on = 1 };
	struct nanonap_stats stats = { 0 };
	int fd = open("/dev/nanonap", O_RDWR | O_CLOEXEC);

	CHECK(fd >= 0);
	REFUSED(ioctl(fd, NANONAP_NAP, &nap), EPROTO);
	REFUSED(ioctl(fd, NANONAP_WATCH, &watch), EPROTO);
	REFUSED(ioctl(fd, NANONAP_STATS, &stats), EPROTO);
	REFUSED(ioctl(fd, NANONAP_VERSION, &version), EPROTO);
	CHECK(version.version == NANONAP_ABI); /* the module's own */
	REFUSED(ioctl(fd, NANONAP_STATS, &stats), EPROTO);
	REFUSED(ioctl(fd, NANONAP_VERSION, NULL), EFAULT);
	CHECK(!ioctl(fd, NANONAP_VERSION, &version));
	CHECK(!ioctl(fd, NANONAP_STATS, &stats));
	return NULL;
}

/*
 * Goal: every argument is checked. Method: each field at and beyond its limits, bad pointers,
 * unknown calls.
 */
static verdict refused(void)
{
	const struct nanonap_nap good = { .request_cpu = 0, .bound_ns = MS };
	struct nanonap_watch watch = { 0 };
	struct nanonap_stats stats = { 0 };
	struct nanonap_nap nap;
	int fd = open_device();

	pin(1);
#define NAP_WITH(field, value) (nap = good, nap.field = (value), ioctl(fd, NANONAP_NAP, &nap))
	REFUSED(NAP_WITH(bound_ns, 0), EINVAL);
	REFUSED(NAP_WITH(bound_ns, NANONAP_BOUND_MAX_NS + 1), EINVAL);
	REFUSED(NAP_WITH(bound_ns, ~0ULL), EINVAL);
	CHECK(NAP_WITH(bound_ns, NANONAP_BOUND_MAX_NS) > 0);
	REFUSED(NAP_WITH(reserved, 1), EINVAL);
	REFUSED(NAP_WITH(request_cpu, 2), EINVAL);
	REFUSED(NAP_WITH(request_cpu, 0x80000000U), EINVAL);
	REFUSED(NAP_WITH(request_cpu, ~0U), EINVAL);
	REFUSED(NAP_WITH(request_cpu, 1), ENXIO); /* the caller's own lane */
	CHECK(NAP_WITH(seen_switches, ~0ULL) > 0);
	CHECK(NAP_WITH(seen_switches, 1ULL << 63) > 0);

	watch = (struct nanonap_watch){ .cpu = 2, .on = 1 };
	REFUSED(ioctl(fd, NANONAP_WATCH, &watch), EINVAL);
	watch = (struct nanonap_watch){ .cpu = 0, .on = 2 };
	REFUSED(ioctl(fd, NANONAP_WATCH, &watch), EINVAL);
	stats.cpu = 2;
	REFUSED(ioctl(fd, NANONAP_STATS, &stats), EINVAL);
	stats = (struct nanonap_stats){ .cpu = 0, .reserved = 1 };
	REFUSED(ioctl(fd, NANONAP_STATS, &stats), EINVAL);

	REFUSED(ioctl(fd, NANONAP_NAP, NULL), EFAULT);
	REFUSED(ioctl(fd, NANONAP_NAP, 0xffff888000000000UL), EFAULT);
	REFUSED(ioctl(fd, NANONAP_WATCH, 0xffffffffff600000UL), EFAULT);
	REFUSED(ioctl(fd, _IO(0xE1, 4), 0), ENOTTY);
	REFUSED(ioctl(fd, _IOW(0xE1, 1, uint64_t), &nap), ENOTTY);
	REFUSED(ioctl(fd, 0, 0), ENOTTY);
	return NULL;
}

/*
 * Goal: the calls work for a 32-bit program. Method: the 32-bit system call entry, with all memory
 * below 4 GiB.
 */
static verdict compat(void)
{
	struct {
		struct nanonap_version version;
		struct nanonap_nap nap;
		struct nanonap_stats stats;
	} *low;
	long result;
	int fd = open("/dev/nanonap", O_RDWR | O_CLOEXEC);

	low = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1,
		   0);
	CHECK(fd >= 0 && low != MAP_FAILED);
	pin(1);
#define IOCTL_32(command, pointer)                                                                 \
	({                                                                                         \
		asm volatile("int $0x80"                                                           \
			     : "=a"(result)                                                        \
			     : "a"(54), "b"(fd), "c"((uint32_t)(command)), "d"(pointer)            \
			     : "memory", "r8", "r9", "r10", "r11");                                \
		(int)result;                                                                       \
	})
	low->version.version = NANONAP_ABI;
	CHECK(IOCTL_32(NANONAP_VERSION, &low->version) == 0);
	CHECK(low->version.map_bytes == 4096 && low->version.cpus == 2);
	low->nap = (struct nanonap_nap){ .request_cpu = 0, .seen_switches = 0, .bound_ns = MS };
	CHECK(IOCTL_32(NANONAP_NAP, &low->nap) > 0);
	low->nap.bound_ns = 0;
	CHECK(IOCTL_32(NANONAP_NAP, &low->nap) == -EINVAL);
	low->stats.cpu = 1;
	CHECK(IOCTL_32(NANONAP_STATS, &low->stats) == 0 && low->stats.naps == 1);
	return NULL;
}

/* Whether an unprivileged process in this group can open the device. */
static bool opens(gid_t group)
{
	pid_t child = fork();
	int status;

	if (!child)
		_exit(setgroups(1, &group) || setgid(65534) || setuid(65534) ||
		      open("/dev/nanonap", O_RDWR) < 0);
	waitpid(child, &status, 0);
	return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

/*
 * Goal: only root and one group can open the device. Method: the mode, and an unprivileged user
 * inside and outside of the group.
 */
static verdict permissions(void)
{
	struct stat stat_of_device;

	CHECK(!stat("/dev/nanonap", &stat_of_device));
	CHECK(S_ISCHR(stat_of_device.st_mode) && (stat_of_device.st_mode & 07777) == 0660);
	CHECK(stat_of_device.st_uid == 0 && stat_of_device.st_gid == 0);
	CHECK(!opens(1234));
	CHECK(!chown("/dev/nanonap", 0, 1234)); /* as nanonap.rules does */
	CHECK(opens(1234) && !opens(1235));
	return NULL;
}

/*
 * Goal: invalid parameters are refused at load. Method: invalid values; then pairs by hand, in one
 * direction and in both.
 */
static verdict parameters(void)
{
	static const char *const wrong[] = {
		"wait=hlt",    "wait=",       "pairs=0",    "pairs=0:",    "pairs=:1",
		"pairs=0:0",   "pairs=0:2",   "pairs=2:0",  "pairs=0:1,",  "pairs=0:1:1",
		"pairs=a:b",   "pairs=-1:1",  "hint=0x100", "hint=0xff",   "hint=1x",
		"pairs=0:0-1", "pairs=0:99999999999",
	};
	unsigned int i;
	int fd;

	for (i = 0; i < sizeof(wrong) / sizeof(*wrong); i++)
		if (!load(PRODUCT, wrong[i]))
			return because("%s was accepted", wrong[i]);
	CHECK(!load(PRODUCT, "wait=spin pairs=0:1"));
	fd = open_device();
	pin(1);
	CHECK(nap_on(fd, 0, 0, MS) > 0);
	pin(0);
	REFUSED(nap_on(fd, 1, 0, MS), ENXIO);
	close(fd);
	CHECK(!unload());
	CHECK(!load(PRODUCT, "wait=spin pairs=0:1,1:0"));
	fd = open_device();
	CHECK(nap_on(fd, 1, 0, MS) > 0);
	return NULL;
}

const struct test argument_tests[] = {
	{ "version-comes-first", PRODUCT, "", version_first },
	{ "arguments-are-checked", PRODUCT, "wait=spin", refused },
	{ "compat-ioctl", PRODUCT, "wait=spin", compat },
	{ "permissions", PRODUCT, "", permissions },
	{ "parameters-are-checked", NULL, "", parameters },
	{ 0 },
};
