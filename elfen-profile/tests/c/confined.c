/* Computes, then lets a filter kill it for all system calls but two, or becomes strict, and
 * computes on. */
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#define NUMBER offsetof(struct seccomp_data, nr)
#define ALLOW(call) \
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)

static void compute(void)
{
    for (volatile long i = 0; i < 300000000; i++)
        ;
}

int main(int count, char **arguments)
{
    struct sock_filter rules[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, NUMBER),
        ALLOW(SYS_exit),
        ALLOW(SYS_rt_sigreturn),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
    };
    struct sock_fprog filter = {sizeof rules / sizeof rules[0], rules};
    compute();
    if (count > 1) {
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT);
    } else {
        prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter);
    }
    compute();
    syscall(SYS_exit, 0);
}
