/*
 * Works for a while, filters its system calls, and works for another while, as sandboxes do.
 * Arguments: milliseconds of CPU time before and after, and the call that is fatal from then on.
 */
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>

static volatile unsigned long sum;

__attribute__((noinline)) static void work(unsigned long round)
{
	for (unsigned long i = 0; i < 20000; i++)
		sum += i * round ^ sum >> 3;
}

static long now_ms(void)
{
	struct timespec now;

	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
	return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void work_for(long ms)
{
	const long end = now_ms() + ms;

	for (unsigned long round = 0; now_ms() < end; round++)
		work(round);
}

int main(int argc, char **argv)
{
	const unsigned fatal = argc > 3 ? atoi(argv[3]) : SYS_mmap;
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, fatal, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog filter = { sizeof(code) / sizeof(code[0]), code };

	if (argc < 3)
		return 9;
	work_for(atol(argv[1]));
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) ||
	    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter))
		return 8;
	work_for(atol(argv[2]));
	return 3;
}
