/* Loads from a table: three of four loads find 9, the others 5. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static volatile uint64_t table[4] = {9, 9, 9, 5};

__attribute__((noipa)) static uint64_t load(uint64_t index)
{
    return table[index & 3];
}

int main(int count, char **arguments)
{
    uint64_t sum = 0;
    for (uint64_t round = strtoull(arguments[1], NULL, 10); round > 0; round--)
        sum += load(round);
    printf("%llu\n", (unsigned long long)sum);
    return 0;
}
