/* Computes, forks three children that compute, and goes on. The second one leaves the family. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static volatile unsigned sum = 1;

__attribute__((noipa)) static void of_parent(long rounds)
{
    for (long i = 0; i < rounds; i++)
        sum = sum * 1664525 + 1013904223;
}

__attribute__((noipa)) static void of_child(long rounds)
{
    for (long i = 0; i < rounds; i++)
        sum = sum * 1664525 + 1013904223;
}

int main(void)
{
    int parent = getpid();
    puts("up");
    fflush(stdout);
    of_parent(300000000);
    for (int i = 0; i < 3; i++) {
        int child = fork();
        if (child == 0 && i == 1 && fork())
            _exit(0);
        if (child == 0) {
            printf("%d\n", getpid());
            fflush(stdout);
            while (kill(parent, 0) == 0)
                of_child(1000000);
            _exit(0);
        }
    }
    for (;;)
        of_parent(1000000);
}
