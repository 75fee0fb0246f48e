/* Instructions with known addresses. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

long table[1000];
__thread long local;
char from[64], to[64];

/* Reads and writes table[7 * i % 1000] for each i. */
__attribute__((noipa)) void strides(long rounds)
{
    for (long i = 0; i < rounds; i++)
        table[7 * i % 1000] += i;
}

__attribute__((noipa)) void locals(long rounds)
{
    for (long i = 0; i < rounds; i++)
        *(volatile long *)&local += i;
}

/* One instruction of each kind: string, push and pop, gather of bits. */
__attribute__((noipa)) void kinds(void)
{
    char *source = from, *target = to;
    long count = sizeof from;
    __asm__ volatile("rep movsb" : "+S"(source), "+D"(target), "+c"(count) : : "memory");
    __asm__ volatile("lea -128(%%rsp), %%rsp; push %%rax; pop %%rcx; lea 128(%%rsp), %%rsp"
                     : : : "rcx", "memory");
    __asm__ volatile("bt %0, %1" : : "r"(1L), "m"(table[0]) : "cc");
}

int main(int argc, char **argv)
{
    long rounds = argc > 1 ? atol(argv[1]) : 3000;
    strides(rounds);
    locals(100);
    kinds();
    printf("%p %p %p %p %ld %d\n", (void *)table, (void *)&local, (void *)from, (void *)to,
           table[7], memcmp(from, to, sizeof from));
    fflush(stdout);
    return argc > 2 ? atoi(argv[2]) : 0;
}
