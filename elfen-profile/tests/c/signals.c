/* What a program can notice of a code cache: signals a thousand times a second, faults, longjmp,
 * threads, children, generated code, and its own use of %gs. It prints what it saw, which is
 * always the same. */
#define _GNU_SOURCE
#include <asm/prctl.h>
#include <errno.h>
#include <execinfo.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>
#include "code_range.h"

extern char **environ;
static volatile long ticks, short_unwinds, outside;
static sigjmp_buf back;
static char *fault_at;

static char *at(void *context)
{
    return (char *)((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP];
}

/* The interrupted address has to be the program's own, or a library's. */
static void tick(int signal, siginfo_t *info, void *context)
{
    void *frames[20];
    int error = errno;
    char *ip = at(context);
    ticks++;
    short_unwinds += backtrace(frames, 20) < 3;
    /* Libraries are above the program. */
    outside += (ip < code_start || code_end <= ip) && (unsigned long)ip < 0x700000000000;
    errno = error;
}

static void fault(int signal, siginfo_t *info, void *context)
{
    fault_at = at(context);
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

__attribute__((noipa)) static int descend(int depth)
{
    if (depth == 0)
        longjmp(back, 7);
    return descend(depth - 1) + 1;
}

__attribute__((noipa)) static void poke(int *at)
{
    *at = 1;
}

static void *thread(void *number)
{
    unsigned sum = 0;
    for (int i = 0; i < 50; i++)
        sum += work(20000 + (long)number);
    return (void *)(long)sum;
}

/* Code that belongs to no file: it is executed where it is, step by step. */
static long flags_of_generated_code(void)
{
    /* pushf; pop %rax; push %rax; popf; pushf; pop %rax; ret */
    static const char code[] = {0x9c, 0x58, 0x50, 0x9d, 0x9c, 0x58, 0xc3};
    int rights = PROT_READ | PROT_WRITE | PROT_EXEC;
    void *page = mmap(0, 4096, rights, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memcpy(page, code, sizeof code);
    long flags = ((long (*)(void))page)();
    for (int i = 0; i < 9; i++)
        flags |= ((long (*)(void))page)();
    munmap(page, 4096);
    return flags;
}

static void set_timer(long us)
{
    struct itimerval timer = {{0, us}, {0, us}};
    setitimer(ITIMER_REAL, &timer, 0);
}

int main(void)
{
    void *frames[4];
    int status, ends[2];
    char text[9] = {0};
    backtrace(frames, 4);
    read_code_range();

    struct sigaction action = {.sa_sigaction = tick, .sa_flags = SA_SIGINFO | SA_RESTART};
    sigaction(SIGALRM, &action, 0);
    set_timer(1000);
    unsigned sum = 0;
    while (ticks < 60)
        sum |= work(100000);
    printf("work %u\n", work(100000));
    if (pipe(ends))
        return 1;
    pid_t child = fork();
    if (child == 0) {
        close(ends[0]);
        set_timer(0);
        usleep(30000);
        if (write(ends[1], "hello", 5) != 5)
            _exit(9);
        _exit(work(1000) % 7);
    }
    close(ends[1]);
    int got = read(ends[0], text, 8);
    while (waitpid(child, &status, 0) < 0 && errno == EINTR)
        ;
    printf("read %d %s, child %d\n", got, text, WEXITSTATUS(status));
    set_timer(0);
    printf("ticks %d, short unwinds %ld, outside %ld\n", ticks >= 60, short_unwinds, outside);

    action.sa_sigaction = fault;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, 0);
    for (long address = 8; address < 11; address++)
        if (!sigsetjmp(back, 1))
            poke((int *)address);
    printf("fault in poke %d\n", (char *)poke <= fault_at && fault_at < (char *)poke + 32);
    if (!sigsetjmp(back, 1))
        ((void (*)(void))0x1234)();
    printf("jump to %p\n", fault_at);
    int jumped = setjmp(back);
    if (!jumped)
        descend(50);
    printf("longjmp %d\n", jumped);

    pthread_t threads[4];
    unsigned all = 0;
    for (long i = 0; i < 4; i++)
        pthread_create(&threads[i], 0, thread, (void *)i);
    for (int i = 0; i < 4; i++) {
        void *result;
        pthread_join(threads[i], &result);
        all += (unsigned)(long)result;
    }
    printf("threads %u\n", all);

    char *echo[] = {"/bin/echo", "spawned", 0};
    fflush(stdout);
    posix_spawn(&child, echo[0], 0, 0, echo, environ);
    waitpid(child, &status, 0);
    printf("spawn %d\n", status);

    /* Natively an ignored signal does not end this call; a stop by a tracer would. */
    int poll = epoll_create1(0);
    struct epoll_event event;
    if (fork() == 0) {
        usleep(20000);
        _exit(0);
    }
    printf("epoll %d\n", epoll_wait(poll, &event, 1, 200));
    wait(&status);
    printf("trap flag %d\n", (int)(flags_of_generated_code() >> 8 & 1));
    static long area[2] = {11, 22};
    long value;
    unsigned long base = 0;
    syscall(SYS_arch_prctl, ARCH_SET_GS, area);
    __asm__ volatile("mov %%gs:8, %0" : "=r"(value));
    syscall(SYS_arch_prctl, ARCH_GET_GS, &base);
    printf("gs %ld %d\n", value, base == (unsigned long)area);
    fflush(stdout);
    if (fork() == 0) {
        signal(SIGSEGV, SIG_DFL);
        poke(0);
    }
    wait(&status);
    printf("killed by %d\n", WTERMSIG(status));
    fflush(stdout);
    if (fork() == 0) {
        signal(SIGSEGV, SIG_DFL);
        __asm__ volatile("movabs $0x8000000000000000, %rax; push %rax; ret");
    }
    wait(&status);
    printf("returned nowhere: %d\n", WTERMSIG(status));
    fflush(stdout);
    char *shell[] = {"/bin/sh", "-c", "echo executed; exit 3", 0};
    execve(shell[0], shell, environ);
    return 2;
}
