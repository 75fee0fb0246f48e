/* The sigaction(2) of a C library. With OTHER, it makes its system call in another way. */
#include <signal.h>
#include <stddef.h>

#ifdef OTHER
#define CALL "movl $13, %%ecx; movl %%ecx, %%eax; syscall"
#else
#define CALL "movl $13, %%eax; syscall"
#endif

struct kernel_action {
    void (*handler)(int);
    unsigned long flags;
    void (*restorer)(void);
    unsigned long mask;
};

void restore(void);
__asm__("restore: movl $15, %eax; syscall");

int sigaction(int signal, const struct sigaction *act, struct sigaction *old)
{
    struct kernel_action next, before;
    register long bytes __asm__("r10") = 8;
    long result;
    if (act) {
        next.handler = act->sa_handler;
        next.flags = (unsigned)act->sa_flags | 0x04000000;
        next.restorer = restore;
        next.mask = act->sa_mask.__val[0];
    }
    __asm__ volatile(CALL
                     : "=a"(result)
                     : "D"((long)signal), "S"(act ? &next : NULL), "d"(old ? &before : NULL),
                       "r"(bytes)
                     : "rcx", "r11", "memory");
    if (old && !result) {
        old->sa_handler = before.handler;
        old->sa_flags = before.flags;
        old->sa_mask.__val[0] = before.mask;
    }
    return result ? -1 : 0;
}
