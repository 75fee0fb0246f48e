/* Three functions with the same loop, which run one, two and three parts of six of the time. It
 * prints these parts. */
#include <stdio.h>
#include <stdlib.h>

#define LOOP(name)                                                        \
    __attribute__((noipa)) static unsigned name(unsigned rounds)          \
    {                                                                     \
        unsigned sum = 1;                                                 \
        for (unsigned i = 0; i < rounds; i++) {                           \
            sum = sum * 1664525 + 1013904223;                             \
            if (sum & 0x40000000)                                         \
                sum ^= i;                                                 \
        }                                                                 \
        return sum;                                                       \
    }

LOOP(first)
LOOP(second)
LOOP(third)

int main(int count, char **arguments)
{
    volatile unsigned sum = 0;
    for (int round = atoi(arguments[1]); round > 0; round--)
        sum += first(50000) + second(100000) + third(150000);
    printf("%f %f %f\n", 1 / 6.0, 2 / 6.0, 3 / 6.0);
    return 0;
}
