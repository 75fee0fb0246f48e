/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Shared by the tests of fences: elfend, its fence, and batches in the fence. Defined in fence.c.
 */
#ifndef FENCED_H
#define FENCED_H

#include "harness.h"

#define CGROUPS "/sys/fs/cgroup"
#define FENCE CGROUPS "/fence"
#define RUNS "\"frozen\": null"

#define USUAL                                                                                      \
	"source = \"tasks\"\n"                                                                    \
	"nap = \"spin\"\n"                                                                        \
	"[[lent]]\n"                                                                               \
	"lanes = \"0:1,2:3\"\n"                                                                   \
	"[[fence]]\n"                                                                              \
	"name = \"batch\"\n"                                                                      \
	"cgroup = \"fence\"\n"

void set_up(const char *settings);        /* mounts cgroups of version 2, writes the settings */
verdict start_with(const char *settings); /* starts the daemon, waits until a fence runs */
bool says(const char *what);              /* waits until `elfen status` prints this */
bool becomes(const char *name, const char *value); /* waits for a file of the fence */
const char *fence_file(const char *name); /* a file's contents without the newline */
pid_t spin_in(const char *cgroup);        /* starts a spinning process at nice -20 */
bool runs_on(pid_t process);              /* waits until the process has run for 20 ms */
void end(pid_t process);

/* Measures and prints the processes' share of this many lanes, per mille. */
long share_of(const pid_t *processes, int count, const char *when);

#endif /* FENCED_H */
