/* Walks a list in a fixed order, and reads random words of a table between two walks.
   chase ROUNDS NODES: the list has NODES nodes; 1 to 32 words are read between two walks. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

struct node {
    struct node *next;
    uint64_t value;
};

static volatile uint32_t table[1 << 20];

/* Two loads a node. */
__attribute__((noipa)) static uint64_t walk(const struct node *at)
{
    uint64_t sum = 0;
    for (; at; at = at->next)
        sum += at->value;
    return sum;
}

/* One load for each word. */
__attribute__((noipa)) static uint64_t noise(uint64_t *state, uint64_t words)
{
    uint64_t sum = 0, random = *state;
    for (; words > 0; words--) {
        random = random * 6364136223846793005 + 1442695040888963407;
        sum += table[random >> 44];
    }
    *state = random;
    return sum;
}

int main(int count, char **words)
{
    uint64_t rounds = strtoull(words[1], NULL, 10), nodes = strtoull(words[2], NULL, 10);
    uint64_t state = 1, sum = 0;
    struct node *list = calloc(nodes, sizeof *list);
    /* Each seventh one, so NODES must not be a multiple of 7. */
    for (uint64_t at = 0; at < nodes; at++) {
        list[at * 7 % nodes].value = at;
        list[at * 7 % nodes].next = at + 1 < nodes ? &list[(at + 1) * 7 % nodes] : NULL;
    }
    for (; rounds > 0; rounds--) {
        sum += walk(list);
        sum += noise(&state, 1 + (state >> 59));
    }
    printf("%llu\n", (unsigned long long)sum);
    return 0;
}
