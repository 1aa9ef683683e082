// How kernels use several cores, and memory that each thread reuses.
#pragma once

#include <stddef.h>

#include "vec.h"

// The number of threads that kernels use; set by `set_threads`.
extern int threads;

// At least `bytes` of memory that only this thread uses, aligned to 64. The thread's next call of `scratch` returns the
// same memory.
void *scratch(size_t bytes);

// The same in a second place, for what is called while the memory of `scratch` is in use.
void *scratch_beside(size_t bytes);

typedef void (*work)(const void *task, long first, long last);

// Computes units [0, units) of a task, `grain` at a time. Threads take the next units when they have finished theirs,
// so a thread that loses its core for a while does not hold up the others.
void spread(long units, long grain, work work, const void *task);

// The same for units that are read from memory in their order: each thread begins with a part of its own and goes on from
// there, so that the processor sees where it is reading and fetches ahead; who is done takes units of others.
void spread_streams(long units, long grain, work work, const void *task);

// The `grain` of units with so many elements each, if `worth` elements are worth handing to another thread.
INLINE long grain_of(long worth, long elements) { return 1 + worth / (elements > 0 ? elements : 1); }
