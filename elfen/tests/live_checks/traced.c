/*
 * A program that works in rounds. Its child traces it for the first half second, and then detaches.
 * The argument is the number of rounds.
 *
 * A process has one tracer at a time, and that is Elfen for the millisecond in which it maps its
 * pages. So the child tries again.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

static void trace(pid_t whom, int told)
{
	int tries = 1000;

	while (ptrace(PTRACE_SEIZE, whom, 0, 0)) {
		if (errno != EPERM || !tries--)
			_exit(1);
		usleep(1000);
	}
	if (write(told, "", 1) != 1)
		_exit(1);
	usleep(500000);
	_exit(0);
}

__attribute__((noinline)) static unsigned long mix(unsigned long of)
{
	for (int round = 0; round < 64; round++)
		of = of * 6364136223846793005UL + (of >> 29 | 1);
	return of;
}

int main(int argc, char **argv)
{
	long rounds = argc > 1 ? atol(argv[1]) : 0;
	pid_t own = getpid();
	unsigned long sum = 1;
	int pipes[2], status;
	char byte;

	if (pipe(pipes))
		return 1;
	prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
	pid_t tracer = fork();
	if (tracer < 0)
		return 1;
	if (!tracer)
		trace(own, pipes[1]);
	close(pipes[1]);
	if (read(pipes[0], &byte, 1) != 1)
		return 1;
	while (rounds--)
		sum = mix(sum);
	if (waitpid(tracer, &status, 0) != tracer || status)
		return 1;
	printf("%lu\n", sum);
	return 3;
}
