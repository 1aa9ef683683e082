// A pool of threads that help the caller of a kernel.
//
// The caller publishes a job and works on it itself; helpers take units while there are any. The caller waits for
// units, not for helpers, so a helper whose core is in use by another process delays nobody. OpenMP would wait for it
// at the end of every loop, for milliseconds. Between jobs a helper spins for about 0.1 ms, which is the time from
// one kernel to the next, and then sleeps. Threads that wait yield their core.
#define _GNU_SOURCE
#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>

enum { WATCH_TICKS = 300000, LOOKS = 32, PATIENCE = 2000 };

int threads = 1;

typedef struct {
    work work;
    const void *task;
    long units;
    long grain;
} job;

// On separate cache lines: each is written by one side while the other reads another.
static _Alignas(64) job current;
// The number of the current job in the upper half, and its next unit in the lower. A unit is taken by exchanging
// both, which fails if the job has ended meanwhile: then the copy of `current` is not used.
static _Alignas(64) _Atomic uint64_t ticket;
static const uint32_t CLOSED = UINT32_MAX;  // instead of a unit: the job has ended
static _Alignas(64) _Atomic long done;
static atomic_flag busy = ATOMIC_FLAG_INIT;

static pthread_t *helpers;
static pthread_mutex_t sleep_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
static _Atomic int sleeping;
static _Atomic int leaving;

INLINE uint32_t job_of(uint64_t seen) { return (uint32_t)(seen >> 32); }
INLINE uint32_t unit_of(uint64_t seen) { return (uint32_t)seen; }
INLINE uint64_t ticket_for(uint32_t job, uint32_t unit) { return (uint64_t)job << 32 | unit; }

static void work_on(uint32_t number) {
    for (;;) {
        uint64_t seen = atomic_load(&ticket);
        job mine = current;
        if (job_of(seen) != number || unit_of(seen) >= mine.units) return;
        long first = unit_of(seen), last = least(first + mine.grain, mine.units);
        if (!atomic_compare_exchange_strong(&ticket, &seen, ticket_for(number, (uint32_t)last))) continue;
        mine.work(mine.task, first, last);
        atomic_fetch_add(&done, last - first);
    }
}

INLINE int is_new(uint64_t seen, uint32_t last) { return job_of(seen) != last && unit_of(seen) != CLOSED; }

// The number of the next job after `last`, or `last` if there will be none.
static uint32_t next_job(uint32_t last) {
    uint64_t start = __rdtsc(), seen;
    while (__rdtsc() - start < WATCH_TICKS) {
        for (int look = 0; look < LOOKS; look++) {
            if (is_new(seen = atomic_load(&ticket), last)) return job_of(seen);
            _mm_pause();
        }
        sched_yield();
    }
    pthread_mutex_lock(&sleep_lock);
    atomic_fetch_add(&sleeping, 1);
    while (!is_new(seen = atomic_load(&ticket), last) && !atomic_load(&leaving)) pthread_cond_wait(&wake, &sleep_lock);
    atomic_fetch_sub(&sleeping, 1);
    pthread_mutex_unlock(&sleep_lock);
    return atomic_load(&leaving) ? last : job_of(seen);
}

static void *help(void *unused) {
    (void)unused;
    for (uint32_t last = 0, next; (next = next_job(last)) != last; last = next) work_on(next);
    return NULL;
}

static void wake_helpers(void) {
    if (atomic_load(&sleeping) == 0) return;
    pthread_mutex_lock(&sleep_lock);
    pthread_cond_broadcast(&wake);
    pthread_mutex_unlock(&sleep_lock);
}

void spread(long units, long grain, work work, const void *task) {
    if (units <= 0) return;
    if (threads == 1 || units <= grain || atomic_flag_test_and_set(&busy)) {  // the helpers work for another thread
        work(task, 0, units);
        return;
    }
    uint32_t number = job_of(atomic_load(&ticket)) + 1;
    current = (job){work, task, units, grain};
    atomic_store(&done, 0);
    atomic_store(&ticket, ticket_for(number, 0));
    wake_helpers();
    work_on(number);
    for (long spins = 0; atomic_load(&done) < units; spins++) {
        if (spins < PATIENCE) _mm_pause();
        else sched_yield();  // a helper may need this very core
    }
    atomic_store(&ticket, ticket_for(number, CLOSED));
    atomic_flag_clear(&busy);
}

EXPORT void set_threads(int count) {
    atomic_store(&leaving, 1);
    wake_helpers();
    for (int i = 0; i + 1 < threads; i++) pthread_join(helpers[i], NULL);
    atomic_store(&leaving, 0);
    helpers = realloc(helpers, sizeof *helpers * (size_t)count);
    if (helpers == NULL) abort();
    sigset_t all, before;  // Python's threads handle signals
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    for (threads = 1; threads < count; threads++)
        if (pthread_create(&helpers[threads - 1], NULL, help, NULL) != 0) break;  // there are fewer threads then
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

typedef struct {
    void *memory;
    size_t bytes;
} room;

static _Thread_local room first_room, second_room;

static void *at_least(room *r, size_t bytes) {
    if (bytes > r->bytes) {
        free(r->memory);
        r->bytes = (bytes + 4095) & ~(size_t)4095;
        r->memory = aligned_alloc(64, r->bytes);
        if (r->memory == NULL) abort();  // out of memory, where torch would throw
    }
    return r->memory;
}

void *scratch(size_t bytes) { return at_least(&first_room, bytes); }

void *scratch_beside(size_t bytes) { return at_least(&second_room, bytes); }
