// The sequences of a step that go on from states which earlier steps left.
#pragma once

#include <stdint.h>

#include "vec.h"

enum { KEPT = 3 };  // MOST_KEPT of models/context.py

typedef struct {
    const int32_t *starts;     // [rows + 1]: row b has tokens starts[b] to starts[b + 1]
    const int64_t *positions;  // [tokens]: of each token in its sequence
    const int32_t *table;      // [3 + 2 * KEPT, rows]: sources, targets, counts and places of what is kept, more tokens
    long stride;               // between rows of the table
} sequences;

// Whether a row begins its sequence: its state is 0, whatever lies there.
INLINE int begins(const sequences *s, long row) { return s->positions[s->starts[row]] == 0; }

INLINE long source_of(const sequences *s, long row) { return s->table[row]; }
INLINE long target_of(const sequences *s, long row) { return s->table[s->stride + row]; }  // -1: nothing is written

// The tokens that a row's sequence has beside its own: guesses, whose rows follow.
INLINE long more_of(const sequences *s, long row) { return s->table[(2 + 2 * KEPT) * s->stride + row]; }

// The tokens by which the state goes on; 0: the row is a guess, or nothing of it is wanted.
INLINE long count_of(const sequences *s, long row) {
    return source_of(s, row) < 0 ? 0 : s->starts[row + 1] - s->starts[row] + more_of(s, row);
}

// The tokens after which the state is kept, or 0, and where.
INLINE long kept_count(const sequences *s, long row, int i) { return s->table[(2 + 2 * i) * s->stride + row]; }
INLINE long kept_place(const sequences *s, long row, int i) { return s->table[(3 + 2 * i) * s->stride + row]; }

INLINE float number_at(const void *x, long i, kind k) {
    return k == BFLOAT16 ? widen(((const bf16 *)x)[i]) : ((const float *)x)[i];
}

INLINE void widen_row(float *to, const void *from, long n, kind k) {
    for (long i = 0; i < n; i += LANES) vec_store_upto(to + i, vec_load_upto(at(from, i, k), n - i, k), n - i, FLOAT32);
}

// Copies some columns of a state, which has `size` rows.
INLINE void copy_columns(float *to, long to_stride, const float *from, long stride, long size, long columns) {
    for (long i = 0; i < size; i++) memcpy(to + i * to_stride, from + i * stride, columns * sizeof(float));
}
