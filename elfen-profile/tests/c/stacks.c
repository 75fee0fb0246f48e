/* Computes on a stack without room for the frame of a signal, and prints how many bytes around it
 * have changed. By its argument, that is one of a coroutine, or of a thread. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

enum { SMALL = 2048, AROUND = 1 << 16, USED = 12000 };

static unsigned char *memory;
static ucontext_t outside, inside;
static volatile unsigned sum = 1;

static void compute(long rounds)
{
    for (long i = 0; i < rounds; i++)
        sum = sum * 1664525 + 1013904223;
}

static void on_small_stack(void)
{
    for (;;) {
        compute(10000000);
        swapcontext(&inside, &outside);
    }
}

static void *in_thread(void *unused)
{
    volatile char used[USED];
    memset((char *)used, 0x5a, USED);
    compute(1500000000);
    return NULL;
}

int main(int count, char **arguments)
{
    long changed = 0;
    if (strcmp(arguments[1], "thread") == 0) {
        pthread_attr_t attributes;
        pthread_t thread;
        pthread_attr_init(&attributes);
        pthread_attr_setstacksize(&attributes, 16384);
        pthread_create(&thread, &attributes, in_thread, NULL);
        pthread_join(thread, NULL);
    } else {
        /* It lies beside the words of the thread. */
        memory = mmap(NULL, AROUND + SMALL, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
                      0);
        memset(memory, 0x5a, AROUND);
        getcontext(&inside);
        inside.uc_stack.ss_sp = memory + AROUND;
        inside.uc_stack.ss_size = SMALL;
        makecontext(&inside, on_small_stack, 0);
        for (int i = 0; i < 150; i++)
            swapcontext(&outside, &inside);
        for (int i = 0; i < AROUND; i++)
            changed += memory[i] != 0x5a;
    }
    printf("changed %ld\n", changed);
    return 5;
}
