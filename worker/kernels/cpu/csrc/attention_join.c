// Merges the states of chunks of keys, which several ranks have computed, in the order of `attention_tile.h`.
#include "attention_row.h"
#include "threads.h"

typedef struct {
    float *states;      // [heads, rows, chunks, part_size]
    const int *counts;  // [rows]
    void *out;          // [rows, heads, dim]
    const float *sinks;
    long heads, rows, chunks;
    scoring scoring;
} joining;

static void join(const void *task, long first, long last) {
    const joining *j = task;
    scoring s = j->scoring;
    for (long i = first; i < last; i++) {
        long head = i / j->rows, row = i % j->rows;
        float *into = j->states + i * j->chunks * part_size(s);
        for (long c = 1; c < j->counts[row]; c++) merge_parts(into, into + c * part_size(s), s, 1);
        void *out = at_out(j->out, (row * j->heads + head) * s.dim, s.outer);
        finish_parts(out, into, s, 1, j->sinks ? j->sinks + head : NULL);
    }
}

// Each row has counts[row] states, 1 at least; all are overwritten. sinks [heads] is NULL if there are none.
EXPORT void join_states(float *states, const int *counts, void *out, const float *sinks, long heads, long rows,
                        long chunks, long dim, int kind) {
    joining j = {states, counts, out, sinks, heads, rows, chunks, {.dim = dim, .sinking = sinks != NULL, .outer = kind}};
    spread(heads * rows, grain_of(1 << 14, chunks * dim), join, &j);
}
