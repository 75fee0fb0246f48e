// SPDX-License-Identifier: GPL-2.0-only
/*
 * Which lanes wake which.
 *
 * This comes from the kernel's topology, for any SMT width. A virtual machine may hide the
 * topology, so the parameter `pairs` can replace it. Ties are never removed: while a CPU is taken
 * down, it leaves the topology before its last switch to idle, and that switch must still wake naps
 * on its siblings.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/cpu.h>
#include <linux/cpuhotplug.h>
#include <linux/cpumask.h>
#include <linux/moduleparam.h>
#include <linux/slab.h>
#include <linux/string.h>
#include <linux/topology.h>

#include "module.h"

static char *nanonap_pairs;
module_param_named(pairs, nanonap_pairs, charp, 0444);
MODULE_PARM_DESC(pairs, "REQUEST:BATCH[,...], as in 0:1,2:3 or 0:1-3; the topology's if empty");

DEFINE_PER_CPU(struct nanonap_siblings, nanonap_siblings);
static int nanonap_pairs_hotplug;

bool nanonap_pairs_tied(unsigned int request, unsigned int batch)
{
	const struct nanonap_siblings *list = per_cpu_ptr(&nanonap_siblings, request);
	/* Acquire: pairs with the release in nanonap_tie(). */
	unsigned int count = smp_load_acquire(&list->count);
	unsigned int i;

	for (i = 0; i < count; i++)
		if (list->cpus[i] == batch)
			return true;
	return false;
}

unsigned int nanonap_pairs_count(void)
{
	unsigned int cpu, sum = 0;

	for_each_possible_cpu(cpu)
		sum += READ_ONCE(per_cpu(nanonap_siblings, cpu).count);
	return sum;
}

/* Only one caller at a time: at module load, or under the hotplug lock. */
static int nanonap_tie(unsigned int request, unsigned int batch)
{
	struct nanonap_siblings *list = per_cpu_ptr(&nanonap_siblings, request);
	unsigned int count = list->count;

	if (request == batch || nanonap_pairs_tied(request, batch))
		return 0;
	if (count == SIBLINGS_MAX)
		return -E2BIG;
	list->cpus[count] = batch;
	/* Release: a probe that sees the count sees the entry; pairs with the acquire loads. */
	smp_store_release(&list->count, count + 1);
	return 0;
}

static int nanonap_tie_topology(unsigned int cpu)
{
	unsigned int sibling;

	for_each_cpu(sibling, topology_sibling_cpumask(cpu))
		if (nanonap_tie(cpu, sibling) || nanonap_tie(sibling, cpu))
			pr_warn_once("CPU %u has more than %d siblings; not all are woken\n", cpu,
				     SIBLINGS_MAX);
	return 0;
}

/* Ties one word of the list: `REQUEST:BATCH`, or `BATCH` for the same request lane as before. */
static int nanonap_tie_word(char *word, unsigned int *request, struct cpumask *batch)
{
	char *lanes = word;
	unsigned int cpu;
	int error;

	if (strchr(word, ':')) {
		error = kstrtouint(strsep(&lanes, ":"), 10, request);
		if (error)
			return error;
	}
	if (*request >= nr_cpu_ids || !cpu_possible(*request))
		return -EINVAL;
	error = cpulist_parse(lanes, batch);
	if (error)
		return error;
	if (cpumask_empty(batch) || !cpumask_subset(batch, cpu_possible_mask) ||
	    cpumask_test_cpu(*request, batch))
		return -EINVAL;
	for_each_cpu(cpu, batch) {
		error = nanonap_tie(*request, cpu);
		if (error)
			return error;
	}
	return 0;
}

static int nanonap_tie_by_hand(void)
{
	unsigned int request = nr_cpu_ids; /* no request lane yet */
	char *copy, *rest, *word;
	cpumask_var_t batch;
	int error = -ENOMEM;

	copy = kstrdup(nanonap_pairs, GFP_KERNEL);
	if (!copy)
		return -ENOMEM;
	if (!zalloc_cpumask_var(&batch, GFP_KERNEL))
		goto free_copy;
	rest = copy;
	do {
		word = strsep(&rest, ",");
		error = nanonap_tie_word(strim(word), &request, batch);
	} while (!error && rest);
	if (error)
		pr_err("pairs=%s: not REQUEST:BATCH[,...] of possible CPUs\n", nanonap_pairs);
	free_cpumask_var(batch);
free_copy:
	kfree(copy);
	return error;
}

int nanonap_pairs_init(void)
{
	unsigned int cpu;

	if (nanonap_pairs && *nanonap_pairs)
		return nanonap_tie_by_hand();
	cpus_read_lock();
	for_each_online_cpu(cpu)
		nanonap_tie_topology(cpu);
	nanonap_pairs_hotplug = cpuhp_setup_state_nocalls_cpuslocked(
		CPUHP_AP_ONLINE_DYN, "nanonap:online", nanonap_tie_topology, NULL);
	cpus_read_unlock();
	if (nanonap_pairs_hotplug < 0)
		return nanonap_pairs_hotplug;
	if (!nanonap_pairs_count())
		pr_info("the topology shows no SMT siblings; the parameter pairs= can name them\n");
	return 0;
}

void nanonap_pairs_exit(void)
{
	if (nanonap_pairs_hotplug > 0)
		cpuhp_remove_state_nocalls(nanonap_pairs_hotplug);
}
