/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What tests of fences share: elfend, the fence that it holds, and batches in it. fence.c has them.
 */
#ifndef FENCED_H
#define FENCED_H

#include "harness.h"

#define CGROUPS "/sys/fs/cgroup"
#define FENCE CGROUPS "/fence"
#define RUNS "\"frozen\": null"

#define USUAL                                                                                      \
	"signal = \"tasks\"\n"                                                                    \
	"nap = \"spin\"\n"                                                                        \
	"[[lent]]\n"                                                                               \
	"lanes = \"0:1,2:3\"\n"                                                                   \
	"[[fence]]\n"                                                                              \
	"name = \"batch\"\n"                                                                      \
	"cgroup = \"fence\"\n"

void set_up(const char *settings);        /* cgroups of version 2, and what a daemon reads */
verdict start_with(const char *settings); /* the daemon beside its fences, until one runs */
bool says(const char *what);              /* once `elfen status` says this of a fence */
bool becomes(const char *name, const char *value); /* a file of the fence's, in time */
const char *fence_file(const char *name); /* what it holds, without the end of its line */
pid_t spin_in(const char *cgroup);        /* at nice -20 */
bool runs_on(pid_t process);
void end(pid_t process);

/* What processes get of as many lanes, per mille, for a while; printed. */
long share_of(const pid_t *processes, int count, const char *when);

#endif /* FENCED_H */
