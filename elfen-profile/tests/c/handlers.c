/* Sets handlers while it computes, and at SIGUSR1 puts those back that it had first. It prints how
 * often a handler was not the one it had set, how often a fault was at a strange address, and how
 * many urgent signals it had not sent. Then it dies of a fault. With an argument, it does little
 * else than to set handlers of faults, and ignores urgent signals. */
#define _GNU_SOURCE
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static const int faults[] = {SIGILL, SIGBUS, SIGFPE, SIGSEGV};
static volatile long strange, outside, urgent, sent;
static volatile int is_over;
static sigjmp_buf back;
static volatile unsigned sum = 1;
extern char fault_here[];

static void on_fault(int signal, siginfo_t *info, void *context)
{
    ucontext_t *frame = context;
    outside += frame->uc_mcontext.gregs[REG_RIP] != (long)fault_here;
    siglongjmp(back, 1);
}

static void on_urgent(int signal) { urgent++; }

static void on_end(int signal) { is_over = 1; }

static void compute(long rounds)
{
    for (long i = 0; i < rounds; i++)
        sum = sum * 1664525 + 1013904223;
}

static void set(int signal, struct sigaction *next, void *expected)
{
    struct sigaction old, now;
    sigaction(signal, next, &old);
    strange += (void *)old.sa_handler != expected;
    sigaction(signal, NULL, &now);
    strange += now.sa_handler != next->sa_handler;
}

int main(int count, char **words)
{
    struct sigaction first[4], urgent_first, act, plain = {.sa_handler = SIG_DFL};
    signal(SIGUSR1, on_end);
    if (count > 1)
        signal(SIGURG, SIG_IGN);
    puts("up");
    fflush(stdout);
    compute(count > 1 ? 0 : 700000000);
    for (int i = 0; i < 4; i++)
        sigaction(faults[i], NULL, &first[i]);
    sigaction(SIGURG, NULL, &urgent_first);
    while (!is_over) {
        memset(&act, 0, sizeof act);
        act.sa_sigaction = on_fault;
        act.sa_flags = SA_SIGINFO;
        for (int i = 0; i < 4; i++)
            set(faults[i], &act, NULL);
        act.sa_handler = on_urgent;
        act.sa_flags = 0;
        if (count == 1)
            set(SIGURG, &act, NULL);
        for (int i = 0; i < (count > 1 ? 0 : 20); i++) {
            compute(500000);
            if (!sigsetjmp(back, 1))
                __asm__ volatile(".globl fault_here\nfault_here: movl $1, (%0)" : : "r"(8l));
            raise(SIGURG);
            sent++;
        }
        for (int i = 0; i < 4; i++)
            set(faults[i], &plain, on_fault);
        if (count == 1)
            set(SIGURG, &plain, on_urgent);
        sigaction(SIGURG, NULL, &act);
        strange += act.sa_handler != (count > 1 ? SIG_IGN : SIG_DFL);
        compute(count > 1 ? 200 : 5000000);
    }
    for (int i = 0; i < 4; i++)
        sigaction(faults[i], &first[i], NULL);
    sigaction(SIGURG, &urgent_first, NULL);
    raise(SIGURG);
    if (fork() == 0)
        *(volatile int *)8 = 1;
    int status;
    wait(&status);
    strange += !WIFSIGNALED(status) || WTERMSIG(status) != SIGSEGV;
    printf("strange %ld, outside %ld, not urgent %ld\n", strange, outside, urgent - sent);
    return 3;
}
