// The one way in which kernels use several cores, and memory that each thread keeps.
#pragma once

#include <stddef.h>

#include "vec.h"

// How many threads every kernel uses; set by `set_threads`.
extern int threads;

// At least `bytes` of this thread's own, aligned to 64. Kept between calls: the next call to `scratch` of the same
// thread gives the same memory.
void *scratch(size_t bytes);

typedef void (*work)(const void *task, long first, long last);

// Does units [0, units) of a task, `grain` at a time. Threads take the next units when they have finished theirs,
// so one that loses its core for a while does not hold up the others.
void spread(long units, long grain, work work, const void *task);

// The `grain` of units with so many elements each, if `worth` elements are worth handing to another thread.
INLINE long grain_of(long worth, long elements) { return 1 + worth / (elements > 0 ? elements : 1); }
