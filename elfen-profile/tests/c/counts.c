/* Calls and branches of known numbers. */
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

__attribute__((noipa)) long leaf(long x)
{
    return x * 3 + 1;
}

__attribute__((noipa)) long by_pointer(long x)
{
    return x + 2;
}

__attribute__((noipa)) long branches(long x)
{
    if (x % 3 == 0)
        return leaf(x);
    return x;
}

int main(void)
{
    long (*volatile pointer)(long) = by_pointer;
    long sum = 0;
    for (long i = 0; i < 9000; i++)
        sum += branches(i);
    for (long i = 0; i < 5000; i++)
        sum += pointer(i);
    if (fork() == 0) {
        for (long i = 0; i < 100; i++)
            sum += leaf(i);
        _exit(0);
    }
    wait(0);
    printf("%ld\n", sum);
    return 0;
}
