/* Loads two libraries in turn, and checks in each call which one it reached. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

int main(int count, char **arguments)
{
    long same = 0, before = 0, wrong = 0, rounds = atoi(arguments[1]);
    for (int round = 0; round < rounds; round++) {
        void *library = dlopen(arguments[2 + round % 2], RTLD_NOW);
        if (!library)
            return 1;
        long (*volatile value)(long) = (long (*)(long))dlsym(library, "value");
        same += (long)value == before;
        before = (long)value;
        long constant = 1 + round % 2;
        for (long i = 0; i < 30000; i++) {
            long x = i;
            for (int k = 0; k < 50; k++)
                x = x * 3 + (x & 1 ? constant : 7);
            wrong += value(i) != x * 10 + constant;
        }
        dlclose(library);
    }
    printf("wrong %ld, same address %d\n", wrong, same > rounds / 2);
    return 0;
}
