/* Does for ever what its argument says, and makes the process hard to stop outside of a handler. */
#define _GNU_SOURCE
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

static __thread sigjmp_buf back;
static volatile unsigned sum;

static void jump(int signal) { siglongjmp(back, 1); }

static void nothing(int signal) {}

static void *fault(void *unused)
{
    for (;;)
        if (!sigsetjmp(back, 1))
            *(volatile int *)8 = 1;
}

int main(int count, char **arguments)
{
    const char *kind = arguments[1];
    pthread_t thread;
    signal(SIGSEGV, jump);
    signal(SIGUSR1, nothing);
    puts("up");
    fflush(stdout);
    if (strcmp(kind, "faults") == 0)
        fault(NULL);
    if (strcmp(kind, "threads") == 0) {
        for (int i = 0; i < 3; i++)
            pthread_create(&thread, NULL, fault, NULL);
        fault(NULL);
    }
    if (strcmp(kind, "protects") == 0) {
        char *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        for (;;) {
            mprotect(page, 4096, PROT_NONE);
            mprotect(page, 4096, PROT_READ | PROT_WRITE);
            page[5] = 1;
        }
    }
    if (strcmp(kind, "signals") == 0)
        for (;;)
            raise(SIGUSR1);
    for (;;)
        sum++;
}
