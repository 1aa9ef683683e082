// Attention of a tile of rows to cached rows that are key and value at once: all of a row is the key, and its first
// columns are the value.
//
// The lanes of a vector are keys for scores (`latent_scores.h`), and columns for values.
//
// The order of sums:
// - A score is summed as `latent_scores.h` says.
// - Keys are taken in chunks of CHUNK, which begin at multiples of CHUNK in the sequence. Weights are relative to the
//   largest score of their chunk. They are summed by key modulo LANES, and these sums as `vec_sum` sums lanes.
// - A column of the values is summed over words of keys in their order.
// - The states of chunks are merged in ascending order into that of the first, as `attention_tile.h` says.
// - Keys that a row does not see have weights of 0 and leave its bits unchanged.
#pragma once

#include "latent_scores.h"

// Rows of sums that fill the registers beside VALUE_VECS vectors of values.
#if defined(__AVX512F__)
enum { VALUE_ROWS = 6, VALUE_VECS = 4 };
#else
enum { VALUE_ROWS = 4, VALUE_VECS = 2 };
#endif

// Turns a row's scores of `keys` into weights, in place; it sees the first `seen`, which may be none or more.
INLINE void weigh_row(float *scores, scoring s, long keys, long seen, float *state) {
    vec largest = vec_all(LOWEST), total = vec_zero();
    for (long key = 0; key < keys; key += LANES)
        vec_store(scores + key, vec_mul(vec_load(scores + key, FLOAT32), vec_all(s.scale)), FLOAT32);
    for (long key = seen > 0 ? seen : 0; key < keys; key++) scores[key] = UNSEEN;
    for (long key = 0; key < keys; key += LANES) largest = vec_max(vec_load(scores + key, FLOAT32), largest);
    state[0] = vec_largest(largest);
    for (long key = 0; key < keys; key += LANES) {
        vec weight = vec_exp2(vec_sub(vec_load(scores + key, FLOAT32), vec_all(state[0])), s.kind);
        total = vec_add(total, weight);
        if (in_pairs(s.kind)) pairs_store(scores + key / 2, weight);
        else vec_store(scores + key, weight, FLOAT32);
    }
    state[1] = vec_sum(total);
}

// Some rows times some columns of the values of a chunk.
typedef struct {
    long keys, row, column, vecs;
} value_part;

INLINE void load_values(vec *values, const char *const *keys, long column, scoring s, const int vecs) {
    for (int c = 0; c < vecs; c++) {
        const void *row = at(keys[0], column + c * LANES, s.kind);
        if (!in_pairs(s.kind)) values[c] = vec_load(row, s.kind);
        else if (vecs == 1) values[c] = pairs_load(row, at(keys[1], column, s.kind));
        else if (c % 2 == 0) pairs_load2(values + c, row, at(keys[1], column + c * LANES, s.kind));
    }
}

INLINE void value_rows(latent_memory *m, scoring s, const value_part *v, const int rows, const int vecs, float *states,
                       long stride) {
    const int step = in_pairs(s.kind) ? 2 : 1;
    const float *weights = m->scores + v->row * SCORE_STRIDE;
    vec sums[VALUE_ROWS][VALUE_VECS];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < vecs; c++) sums[r][c] = vec_zero();
    for (long start = 0, all = ceil_div(v->keys, step); start < all; start += BATCH) {
        fetch_batch(&m->fetched);
        for (long i = start; i < least(all, start + BATCH); i++) {
            vec values[VALUE_VECS];
            load_values(values, m->keys + i * step, v->column, s, vecs);
            for (int r = 0; r < rows; r++) {
                vec weight = vec_all(weights[r * SCORE_STRIDE + i]);
                for (int c = 0; c < vecs; c++) sums[r][c] = words_fma(values[c], weight, sums[r][c], s);
            }
        }
    }
    for (int r = 0; r < rows; r++) {
        float *to = states + (v->row + r) * stride + STATE_HEAD + v->column;
        for (int c = 0; c + 1 < vecs && in_pairs(s.kind); c += 2) pairs_order2(sums[r] + c);
        for (int c = 0; c < vecs; c++) vec_store(to + c * LANES, sums[r][c], FLOAT32);
    }
}

// As for scores, there is a function for each number of rows.
typedef void (*value_loop)(latent_memory *, scoring, const value_part *, float *, long);

#define VALUES(k, n)                                                                                        \
    static __attribute__((noinline)) void value_##k##_##n(latent_memory *m, scoring s, const value_part *v, \
                                                          float *states, long stride) {                     \
        s.kind = k;                                                                                         \
        if (v->vecs == VALUE_VECS) value_rows(m, s, v, n, VALUE_VECS, states, stride);                      \
        else value_rows(m, s, v, n, 1, states, stride);                                                     \
    }
FOUR(VALUES, FLOAT32) FOUR(VALUES, BFLOAT16)
#if defined(__AVX512F__)
VALUES(FLOAT32, 5) VALUES(FLOAT32, 6) VALUES(BFLOAT16, 5) VALUES(BFLOAT16, 6)
#define MORE_VALUES(k) value_##k##_5, value_##k##_6
#else
#define MORE_VALUES(k)
#endif
static const value_loop value_loops[][VALUE_ROWS] = {
    [FLOAT32] = {NAMED(value, FLOAT32), MORE_VALUES(FLOAT32)},
    [BFLOAT16] = {NAMED(value, BFLOAT16), MORE_VALUES(BFLOAT16)},
};

// Adds up the weighted values of `keys` keys. The columns of a chunk that are multiplied at a time stay in the
// first-level cache.
INLINE void value_tile(latent_memory *m, const latent_form *f, scoring s, long keys, float *states) {
    long groups = ceil_div(f->rows, VALUE_ROWS);
    value_part v = {.keys = keys};
    for (long column = 0; column < f->rank; column += v.vecs * LANES) {
        v.column = column;
        v.vecs = column + VALUE_VECS * LANES <= f->rank ? VALUE_VECS : 1;
        for (long group = 0; group < groups; group++) {
            v.row = f->rows * group / groups;
            long rows = f->rows * (group + 1) / groups - v.row;
            value_loops[s.kind][rows - 1](m, s, &v, states, state_size(f));
        }
    }
}

// Prefetches rows [first, last) of `keys` while `all` keys are computed, at an even rate.
INLINE void fetch_rows(latent_memory *m, const latent_form *f, scoring s, long first, long last, long all) {
    long scores = all / SIDE * score_groups(f) * ceil_div(words_of(s), BATCH);
    long values = ceil_div(f->rank, VALUE_VECS * LANES) * ceil_div(f->rows, VALUE_ROWS) * all / (2 * BATCH);
    long lines = s.dim * width_of(s.kind) / 64 + 1;
    m->fetched = (fetched){m->keys + first, m->keys + last, 0, lines, 1 + (last - first) * lines / (scores + values)};
}

// Computes the states of `keys` keys from `position` on, whose rows the caller has filled in: `all` with those that fill
// the last side.
INLINE void latent_chunk(latent_memory *m, const latent_form *f, scoring s, long position, long keys, long all,
                         float *states) {
    for (long key = 0; key < all; key += SIDE) score_tile(m, f, s, key);
    for (long row = 0; row < f->rows; row++) {
        float *state = states + row * state_size(f);
        weigh_row(m->scores + row * SCORE_STRIDE, s, all, least(keys, m->seen[row] - position), state);
    }
    value_tile(m, f, s, keys, states);
}

// Merges the states after the next chunk into those of the chunks before.
INLINE void merge_states(float *into, const float *next, const latent_form *f) {
    for (long row = 0; row < f->rows; row++, into += state_size(f), next += state_size(f)) {
        float largest = into[0] > next[0] ? into[0] : next[0];
        float old = exp2_of(into[0] - largest), new = exp2_of(next[0] - largest);
        into[0] = largest;
        into[1] = into[1] * old + next[1] * new;
        for (long i = STATE_HEAD; i < state_size(f); i += LANES) {
            vec sum = vec_mul(vec_load(into + i, FLOAT32), vec_all(old));
            vec_store(into + i, vec_fma(vec_load(next + i, FLOAT32), vec_all(new), sum), FLOAT32);
        }
    }
}

// Writes a row's sum. Adding zero turns -0 into 0, as a key that is not seen does.
INLINE void finish_row(void *out, const float *state, const latent_form *f, scoring s) {
    vec share = vec_div(vec_all(1.0f), vec_all(state[1]));
    for (long i = 0; i < f->rank; i += LANES) {
        vec sum = vec_fma(vec_load(state + STATE_HEAD + i, FLOAT32), share, vec_zero());
        vec_store(at_out(out, i, s.kind), sum, s.kind);
    }
}
