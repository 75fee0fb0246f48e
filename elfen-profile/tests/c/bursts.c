/* What a program can notice of bursts, for as many rounds as its argument says. It prints what it
 * saw, which is always the same. */
#define _GNU_SOURCE
#include <asm/prctl.h>
#include <errno.h>
#include <execinfo.h>
#include <immintrin.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>
#include "code_range.h"

static volatile long ticks, short_unwinds, outside, masks;
static sigjmp_buf back;
static char *fault_at;
static long sent;
static sigset_t usual;

/* The interrupted address has to be the program's own, or a library's, and no signal blocked. */
static void tick(int signal, siginfo_t *info, void *context)
{
    void *frames[20];
    int error = errno;
    ucontext_t *frame = context;
    char *ip = (char *)frame->uc_mcontext.gregs[REG_RIP];
    ticks++;
    short_unwinds += backtrace(frames, 20) < 3;
    /* Libraries are above the program. */
    outside += (ip < code_start || code_end <= ip) && (unsigned long)ip < 0x700000000000;
    masks += memcmp(&frame->uc_sigmask, &usual, 8) != 0;
    errno = error;
}

static void fault(int signal, siginfo_t *info, void *context)
{
    if (info->si_code <= 0) {
        sent++;
        return;
    }
    fault_at = (char *)((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP];
    siglongjmp(back, 1);
}

__attribute__((noipa)) static unsigned work(unsigned rounds)
{
    unsigned sum = 1;
    for (unsigned i = 0; i < rounds; i++) {
        sum = sum * 1664525 + 1013904223;
        if (sum & 0x80000000)
            sum ^= i;
    }
    return sum;
}

/* Vector registers and flags live across many branches. */
__attribute__((noipa, target("avx2"))) static unsigned vectors(unsigned rounds)
{
    __m256i sum = _mm256_set1_epi32(1), step = _mm256_set_epi32(1, 2, 3, 4, 5, 6, 7, 8);
    double parts = 0.5;
    for (unsigned i = 0; i < rounds; i++) {
        sum = _mm256_add_epi32(_mm256_mullo_epi32(sum, step), step);
        if (_mm256_extract_epi32(sum, 3) & 1)
            step = _mm256_xor_si256(step, _mm256_set1_epi32(2 * i));
        parts = parts * 1.25 - (parts > 4);
    }
    unsigned all[8], result = (unsigned)(parts * 1e6);
    _mm256_storeu_si256((__m256i *)all, sum);
    for (int i = 0; i < 8; i++)
        result = result * 31 + all[i];
    return result;
}

__attribute__((noipa)) static unsigned carries(unsigned rounds)
{
    unsigned long low = 1, high = 0;
    for (unsigned i = 0; i < rounds; i++)
        __asm__("add %2, %0; adc %3, %1; jno 1f; xor $1, %0; 1:"
                : "+r"(low), "+r"(high)
                : "r"(0x9e3779b97f4a7c15ul * (i + 1)), "r"((unsigned long)i)
                : "cc");
    return low ^ high;
}

__attribute__((noipa)) static int descend(int depth)
{
    if (depth == 0)
        longjmp(back, 7);
    return descend(depth - 1) + 1;
}

__attribute__((noipa)) static int add(int a, int b) { return a + b; }
__attribute__((noipa)) static int take(int a, int b) { return a - b; }
__attribute__((noipa)) static int mix(int a, int b) { return a * 3 ^ b; }
static int (*const volatile operations[])(int, int) = {add, take, mix, add, mix};

__attribute__((noipa)) static int dispatch(int rounds)
{
    int sum = 0;
    for (int i = 0; i < rounds; i++)
        sum = operations[(unsigned)(sum ^ i) % 5](sum, i);
    return sum;
}

__attribute__((noipa)) static int poke(int *at, int rounds)
{
    int sum = 0;
    for (int i = 0; i < rounds; i++)
        sum += i & sum;
    *at = sum;
    return sum;
}

#pragma GCC diagnostic ignored "-Winfinite-recursion"
/* Ends by a fault of the stack, whose handler has a stack of its own. */
__attribute__((noipa)) static int overflow(int depth)
{
    volatile char frame[200];
    frame[depth % 200] = 1;
    return overflow(depth + 1) + frame[3];
}

static void *thread(void *number)
{
    unsigned sum = 0;
    for (int i = 0; i < 20; i++)
        sum += work(20000 + (long)number) + dispatch(1000);
    return (void *)(long)sum;
}

static void *small_stack(void *argument)
{
    return (void *)(long)dispatch(100000);
}

int main(int count, char **arguments)
{
    int rounds = atoi(arguments[1]);
    unsigned sum = 0, faults = 0, jumps = 0, overflows = 0, interrupted = 0, statuses = 0;
    static char own_stack[1 << 16];
    void *frames[4];
    backtrace(frames, 4);
    read_code_range();

    struct sigaction action = {.sa_sigaction = tick, .sa_flags = SA_SIGINFO | SA_RESTART};
    sigaction(SIGALRM, &action, 0);
    stack_t stack = {.ss_sp = own_stack, .ss_size = sizeof own_stack};
    sigaltstack(&stack, 0);
    action.sa_sigaction = fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaction(SIGSEGV, &action, 0);
    sigprocmask(SIG_SETMASK, 0, &usual);
    struct itimerval timer = {{0, 1000}, {0, 1000}}, never = {{0, 0}, {0, 0}};

    for (int round = 0; round < rounds; round++) {
        setitimer(ITIMER_REAL, &timer, 0);
        sum = sum * 31 + work(200000);
        sum = sum * 31 + vectors(50000);
        sum = sum * 31 + carries(50000);
        sum = sum * 31 + dispatch(50000);
        for (long address = 8; address < 12; address++) {
            if (sigsetjmp(back, 1))
                faults += (char *)poke <= fault_at && fault_at < (char *)poke + 64;
            else
                poke((int *)address, 20000);
        }
        if (sigsetjmp(back, 1))
            overflows++;
        else
            overflow(0);
        for (int i = 0; i < 20; i++) {
            int jumped = setjmp(back);
            if (!jumped)
                descend(50);
            jumps += jumped;
        }
        kill(getpid(), SIGSEGV);
        setitimer(ITIMER_REAL, &never, 0);

        /* Without signals, no call is interrupted. */
        int poll = epoll_create1(0);
        struct epoll_event event;
        interrupted += epoll_wait(poll, &event, 1, 1) != 0;
        close(poll);

        pthread_t threads[3];
        void *result;
        for (long i = 0; i < 2; i++)
            pthread_create(&threads[i], 0, thread, (void *)i);
        pthread_attr_t small;
        pthread_attr_init(&small);
        pthread_attr_setstacksize(&small, 1 << 15);
        pthread_create(&threads[2], &small, small_stack, 0);
        for (int i = 0; i < 3; i++) {
            pthread_join(threads[i], &result);
            sum = sum * 31 + (unsigned)(long)result;
        }
        pid_t child = fork();
        if (child == 0)
            _exit(work(100000) % 7);
        int status;
        waitpid(child, &status, 0);
        statuses += WEXITSTATUS(status);
        sigset_t now;
        sigprocmask(SIG_SETMASK, 0, &now);
        masks += memcmp(&now, &usual, 8) != 0;
    }
    unsigned long base = 1;
    syscall(SYS_arch_prctl, ARCH_GET_GS, &base);
    printf("sum %u, ticks %d, short unwinds %ld, outside %ld, masks %ld\n", sum, ticks > rounds,
           short_unwinds, outside, masks);
    printf("faults %u, overflows %u, jumps %u, sent %ld, interrupted %u, statuses %u, gs %lu\n",
           faults, overflows, jumps, sent, interrupted, statuses, base);
    fflush(stdout);
    if (fork() == 0) {
        signal(SIGSEGV, SIG_DFL);
        for (;;)
            poke(0, 100000000);
    }
    int status;
    wait(&status);
    printf("killed by %d\n", WTERMSIG(status));
    return 7;
}
