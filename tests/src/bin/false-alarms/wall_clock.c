/* Loaded before other libraries (LD_PRELOAD), this lets the wall clock of a process jump: it is an
   hour late for some seconds, then an hour early. Other clocks are left alone. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>

int clock_gettime(clockid_t clock, struct timespec *time) {
    static int (*next)(clockid_t, struct timespec *);
    if (!next)
        *(void **)&next = dlsym(RTLD_NEXT, "clock_gettime");
    int code = next(clock, time);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) {
        struct timespec now;
        next(CLOCK_MONOTONIC, &now);
        time->tv_sec += now.tv_sec / SECONDS % 2 ? 3600 : -3600;
    }
    return code;
}
