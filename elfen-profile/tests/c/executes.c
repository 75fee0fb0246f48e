/* Computes for a moment and executes itself again, as often as told. Prints what
 * it has computed. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static unsigned now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000u + now.tv_nsec / 1000;
}

int main(int count, char **arguments)
{
    unsigned left = atoi(arguments[1]), sum = atoi(arguments[2]), began = now_us();
    (void)count;
    while (now_us() - began < 700)
        ;
    for (unsigned i = 0; i < 1000; i++)
        sum = sum * 1664525 + left + i;
    if (left == 0) {
        printf("%u\n", sum);
        return 7;
    }
    char left_text[16], sum_text[16];
    snprintf(left_text, sizeof left_text, "%u", left - 1);
    snprintf(sum_text, sizeof sum_text, "%d", (int)sum);
    execl(arguments[0], arguments[0], left_text, sum_text, (char *)NULL);
    return 1;
}
