/* What torch's CPU allocator holds: blocks of posix_memalign with its alignment of 64 bytes. Preloaded; read with ctypes. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#define SLOTS (1u << 20)
static struct { void *at; size_t size; } blocks[SLOTS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static long long now, peak;
static int (*real_memalign)(void **, size_t, size_t);
static void (*real_free)(void *);
static unsigned home(void *p) { return (unsigned)(((uintptr_t)p >> 6) * 2654435761u) & (SLOTS - 1); }
int posix_memalign(void **out, size_t alignment, size_t size) {
    if (!real_memalign) real_memalign = dlsym(RTLD_NEXT, "posix_memalign");
    int status = real_memalign(out, alignment, size);
    if (status || alignment != 64) return status;
    pthread_mutex_lock(&lock);
    unsigned i = home(*out);
    while (blocks[i].at) i = (i + 1) & (SLOTS - 1);
    blocks[i].at = *out; blocks[i].size = size;
    if ((now += size) > peak) peak = now;
    pthread_mutex_unlock(&lock);
    return status;
}
void free(void *p) {
    if (!real_free) real_free = dlsym(RTLD_NEXT, "free");
    if (p && !((uintptr_t)p & 63)) {
        pthread_mutex_lock(&lock);
        unsigned i = home(p);
        while (blocks[i].at && blocks[i].at != p) i = (i + 1) & (SLOTS - 1);
        if (blocks[i].at) {
            now -= blocks[i].size;
            unsigned hole = i, j = i;
            for (;;) { /* close the hole, so that a search never ends too early */
                blocks[hole].at = NULL;
                unsigned k;
                do {
                    j = (j + 1) & (SLOTS - 1);
                    if (!blocks[j].at) goto closed;
                    k = home(blocks[j].at);
                } while (hole <= j ? (hole < k && k <= j) : (hole < k || k <= j));
                blocks[hole] = blocks[j];
                hole = j;
            }
        closed:;
        }
        pthread_mutex_unlock(&lock);
    }
    real_free(p);
}
long long allocated_bytes(void) { return now; }
long long peak_bytes(void) { return peak; }
void forget_peak(void) { peak = now; }
