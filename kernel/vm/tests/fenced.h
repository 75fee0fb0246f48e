/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What tests of fences share: elfend, the fence that it holds, and batches in it. fence.c has them.
 */
#ifndef FENCED_H
#define FENCED_H

#include "harness.h"

#define CGROUPS "/sys/fs/cgroup"
#define RUNS "\"frozen\": null"

verdict start_with(const char *settings); /* the daemon beside its fences, until one runs */
bool says(const char *what);              /* once `elfen status` says this of a fence */
pid_t spin_in(const char *cgroup);        /* at nice -20 */
bool runs_on(pid_t process);
void end(pid_t process);

/* What processes get of as many lanes, per mille, for a while; printed. */
long share_of(const pid_t *processes, int count, const char *when);

#endif /* FENCED_H */
