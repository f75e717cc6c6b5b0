/* A library without a door whose initialiser misbehaves as a -D flag says; without one it is no plugin at all. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#ifdef UNDEFINED
void nobody_defines_this(void);
void uses_it(void) { nobody_defines_this(); }
#endif

__attribute__((constructor)) static void on_load(void)
{
#ifdef MARK
    FILE *file = fopen(MARK, "w");
    if (file)
        fclose(file);
#endif
#if defined(ABORTS)
    abort();
#elif defined(HANGS)
    for (;;)
        pause();
#elif defined(SPINS)
    for (volatile int i = 0;;)
        i = !i;
#elif defined(EXITS)
    exit(0);
#elif defined(SEGFAULTS)
    *(volatile int *)8 = 1;
#elif defined(FORKS)
    if (fork() == 0)
        for (;;)
            pause();
    abort();
#elif defined(PRINTS)
    puts("{\"structures_scan\":1,\"description\":\"forged\"}");
    fflush(stdout);
#endif
}
