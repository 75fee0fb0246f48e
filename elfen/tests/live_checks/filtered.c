/*
 * Works for a while, drops rights as sandboxes do, and works again. Arguments: what to drop, and
 * the milliseconds of CPU time before and after. The first argument is the number of a system call
 * that becomes fatal, or one of the words below. The status is 3 on success.
 */
#define _GNU_SOURCE
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static volatile unsigned long sum;

__attribute__((noinline)) static void work(unsigned long round)
{
	for (unsigned long i = 0; i < 20000; i++)
		sum += i * round ^ sum >> 3;
}

static long now_us(void)
{
	struct timespec now;

	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
	return now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

static int filter(unsigned call, unsigned if_call, unsigned otherwise, int by_seccomp)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, if_call),
		BPF_STMT(BPF_RET | BPF_K, otherwise),
	};
	struct sock_fprog all = { sizeof(code) / sizeof(code[0]), code };

	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
		return 1;
	if (by_seccomp)
		return syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &all) != 0;
	return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &all) != 0;
}

static int give_up(const char *what)
{
	if (!strcmp(what, "strict"))
		return prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT) != 0;
	if (!strcmp(what, "all-but-exit") || !strcmp(what, "all-but-exit-by-seccomp"))
		return filter(SYS_exit, SECCOMP_RET_ALLOW, SECCOMP_RET_KILL_PROCESS,
			      strlen(what) > 12);
	if (!strcmp(what, "no-new-privs"))
		return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0;
	if (!strcmp(what, "user-namespace"))
		return unshare(CLONE_NEWUSER) != 0;
	if (!strcmp(what, "chroot"))
		return chdir("/proc/self/fdinfo") || chroot(".");
	return filter(atoi(what), SECCOMP_RET_KILL_PROCESS, SECCOMP_RET_ALLOW, 0);
}

int main(int argc, char **argv)
{
	unsigned long rounds = 0, after;
	long start, us;

	if (argc < 4)
		return 9;
	/* After the rights are dropped, no clock can be read, so time is measured in rounds. */
	start = now_us();
	do {
		work(rounds++);
		us = now_us() - start;
	} while (us < 1000 * atol(argv[2]) || us < 1000);
	after = rounds * 1000 * atol(argv[3]) / us;
	if (give_up(argv[1]))
		return 8;
	while (after--)
		work(rounds++);
	/* Seccomp's strict mode forbids exit_group. */
	syscall(SYS_exit, 3);
}
