/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Prints which task runs on a CPU (default: 0), for ten switches or until Ctrl-C.
 *
 * As root, or in group elfen, where elfend runs:
 *
 *   cc -I elfen-rt/include -o who-runs elfen-rt/examples/who-runs.c && ./who-runs 0
 */
#define _GNU_SOURCE
#include <sched.h>

#include "elfen.h"

/*
 * Moves this process to other CPUs: on `cpu` it would only see itself. On a machine with one CPU it
 * stays.
 */
static void stay_away_from(elfen_u32 cpu)
{
	cpu_set_t cpus;

	if (cpu >= CPU_SETSIZE || sched_getaffinity(0, sizeof(cpus), &cpus))
		return;
	CPU_CLR(cpu, &cpus);
	if (CPU_COUNT(&cpus))
		sched_setaffinity(0, sizeof(cpus), &cpus);
}

int main(int argc, char **argv)
{
	elfen_u32 cpu = argc > 1 ? (elfen_u32)strtoul(argv[1], NULL, 10) : 0;
	struct elfen_tasks tasks;
	struct elfen_error error;
	elfen_u64 task, last = ~0ULL;
	char line[160];
	int shown = 0;

	if (elfen_tasks_open(&tasks, &error)) {
		elfen_explain(&error, line, sizeof(line));
		fprintf(stderr, "who-runs: cannot open the task map: %s; "
				"does elfend run? (elfen status)\n", line);
		return 1;
	}
	if (!elfen_task_at(&tasks, cpu)) {
		fprintf(stderr, "who-runs: there is no CPU %u, the last one is %u\n", cpu,
			tasks.cpus - 1);
		return 2;
	}
	stay_away_from(cpu);
	while (shown < 10) {
		task = elfen_task(&tasks, cpu);
		if (task == last)
			continue;
		last = task;
		shown++;
		if (task)
			printf("cpu %u: process %u, thread %u\n", cpu, (elfen_u32)(task >> 32),
			       (elfen_u32)task);
		else
			printf("cpu %u: idle\n", cpu);
		fflush(stdout);
	}
	elfen_tasks_close(&tasks);
	return 0;
}
