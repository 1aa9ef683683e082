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
enum { MOST_STREAMS = 16 };  // with more threads several share one: each job opens and closes all of them

int threads = 1;

typedef struct {
    work work;
    const void *task;
    long units, grain;
    long streams;  // parts of the units, one behind the other; threads begin in different ones
} job;

// On separate cache lines: each is written by one side while the others read another.
static _Alignas(64) job current = {.streams = 1};
// The number of the current job in the upper half, and the next unit of a stream in the lower. A unit is taken by
// exchanging both, which fails if the job has ended meanwhile: then the copy of `current` is not used.
typedef struct {
    _Alignas(64) _Atomic uint64_t next;
} ticket;
static ticket tickets[MOST_STREAMS];
static const uint32_t CLOSED = UINT32_MAX;  // instead of a unit: the job has ended
static _Alignas(64) _Atomic uint32_t announced;  // the number of the current job, or of the last one
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
INLINE long stream_start(const job *j, long stream) { return j->units * stream / j->streams; }

// Takes units of a stream until there are no more, and then those of the others. place: of this thread among all.
static void work_on(uint32_t number, long place) {
    const job mine = current;
    for (long tried = 0; tried < mine.streams;) {
        long stream = (place + tried) % mine.streams, end = stream_start(&mine, stream + 1);
        uint64_t seen = atomic_load(&tickets[stream].next);
        if (job_of(seen) != number) return;
        if (unit_of(seen) >= end) {
            tried++;
            continue;
        }
        long first = unit_of(seen), last = least(first + mine.grain, end);
        if (!atomic_compare_exchange_strong(&tickets[stream].next, &seen, ticket_for(number, (uint32_t)last))) continue;
        mine.work(mine.task, first, last);
        atomic_fetch_add(&done, last - first);
    }
}

// The number of the next job after `last`, or `last` if there will be none.
static uint32_t next_job(uint32_t last) {
    uint64_t start = __rdtsc();
    uint32_t seen;
    while (__rdtsc() - start < WATCH_TICKS) {
        for (int look = 0; look < LOOKS; look++) {
            if ((seen = atomic_load(&announced)) != last) return seen;
            _mm_pause();
        }
        sched_yield();
    }
    pthread_mutex_lock(&sleep_lock);
    atomic_fetch_add(&sleeping, 1);
    while ((seen = atomic_load(&announced)) == last && !atomic_load(&leaving)) pthread_cond_wait(&wake, &sleep_lock);
    atomic_fetch_sub(&sleeping, 1);
    pthread_mutex_unlock(&sleep_lock);
    return atomic_load(&leaving) ? last : seen;
}

static void *help(void *place) {
    uint32_t last = 0;
    for (uint32_t next; (next = next_job(last)) != last; last = next) work_on(next, (long)(intptr_t)place);
    return NULL;
}

static void wake_helpers(void) {
    if (atomic_load(&sleeping) == 0) return;
    pthread_mutex_lock(&sleep_lock);
    pthread_cond_broadcast(&wake);
    pthread_mutex_unlock(&sleep_lock);
}

static void run(long units, long grain, long streams, work work, const void *task) {
    if (units <= 0) return;
    if (threads == 1 || units <= grain || atomic_flag_test_and_set(&busy)) {  // the helpers work for another thread
        work(task, 0, units);
        return;
    }
    uint32_t number = atomic_load(&announced) + 1;
    current = (job){work, task, units, grain, streams};
    atomic_store(&done, 0);
    for (long s = 0; s < streams; s++)
        atomic_store(&tickets[s].next, ticket_for(number, (uint32_t)stream_start(&current, s)));
    atomic_store(&announced, number);
    wake_helpers();
    work_on(number, 0);
    for (long spins = 0; atomic_load(&done) < units; spins++) {
        if (spins < PATIENCE) _mm_pause();
        else sched_yield();  // a helper may need this very core
    }
    for (long s = 0; s < streams; s++) atomic_store(&tickets[s].next, ticket_for(number, CLOSED));
    atomic_flag_clear(&busy);
}

void spread(long units, long grain, work work, const void *task) { run(units, grain, 1, work, task); }

void spread_streams(long units, long grain, work work, const void *task) {
    run(units, grain, least(threads, MOST_STREAMS), work, task);
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
    for (threads = 1; threads < count; threads++) {
        void *place = (void *)(intptr_t)threads;
        if (pthread_create(&helpers[threads - 1], NULL, help, place) != 0) break;  // there are fewer threads then
    }
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
