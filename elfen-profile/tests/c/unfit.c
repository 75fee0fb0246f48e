/* A process in which no bursts are possible, for the reason that its argument names. */
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

static void handle(int signal) {}

int main(int count, char **arguments)
{
    const char *kind = arguments[1];
    struct sock_filter allow[] = {BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
    struct sock_fprog filter = {1, allow};
    if (strcmp(kind, "urgent") == 0)
        signal(SIGURG, handle);
    if (strcmp(kind, "filtered") == 0) {
        prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter);
    }
    if (strcmp(kind, "locked") == 0) {
        static char page[4096];
        mlock(page, sizeof page);
    }
    if (strcmp(kind, "traced") == 0) {
        int parent = getpid();
        prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
        if (fork() == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
            ptrace(PTRACE_SEIZE, parent, 0, 0);
            for (;;)
                pause();
        }
    }
    if (strcmp(kind, "filtered later") == 0) {
        for (volatile long i = 0; i < 500000000; i++)
            ;
        prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter);
        for (volatile long i = 0;; i++)
            ;
    }
    for (;;)
        usleep(1000);
}
