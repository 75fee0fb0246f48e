/* Unloads a library and loads another, which the loader puts at the same address. */
#include <dlfcn.h>
#include <stdio.h>

int main(int count, char **libraries)
{
    long same = 0, before = 0, sum = 0;
    for (int round = 0; round < 20; round++) {
        void *library = dlopen(libraries[1 + round % 2], RTLD_NOW);
        if (!library)
            return 1;
        long (*value)(long) = (long (*)(long))dlsym(library, "value");
        same += (long)value == before;
        before = (long)value;
        for (int i = 0; i < 100; i++)
            sum += value(i);
        dlclose(library);
    }
    printf("%ld, same address %d\n", sum, same > 5);
    return 0;
}
