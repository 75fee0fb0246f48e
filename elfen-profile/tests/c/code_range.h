/* Where the code of the program is, without its libraries. */
#include <stdio.h>

static char *code_start, *code_end;

static void read_code_range(void)
{
    char line[256];
    FILE *maps = fopen("/proc/self/maps", "r");
    while (fgets(line, sizeof line, maps)) {
        unsigned long start, end;
        char rights[8];
        int fields = sscanf(line, "%lx-%lx %7s", &start, &end, rights);
        if (fields == 3 && rights[2] == 'x' && start <= (unsigned long)read_code_range &&
            (unsigned long)read_code_range < end) {
            code_start = (char *)start;
            code_end = (char *)end;
        }
    }
    fclose(maps);
}
