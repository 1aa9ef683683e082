// Attention of a tile of rows to cached rows that are key and value at once: all of a row is the key, and its first
// columns are the value.
//
// The lanes of a vector are keys for scores, so that a lane adds the words of a key one after the other, and columns
// for values: no lane is idle however many heads there are. Rows of queries are of one token or of several; each is
// computed by itself, so its bits do not depend on the others.
//
// The order of sums:
// - A score is summed over words in their order, in one accumulator, as in `attention_tile.h`, which says what a word is.
// - Keys are taken in chunks of CHUNK, which begin at multiples of CHUNK in the sequence. Weights are relative to the
//   largest score of their chunk. They are summed by key modulo LANES, and these sums as `vec_sum` sums lanes.
// - A column of the values is summed over words of keys in their order.
// - The states of chunks are merged in ascending order into that of the first, as `attention_tile.h` says.
// - Keys that a row does not see have weights of 0 and leave its bits unchanged.
#pragma once

#include "attention_tile.h"

enum {
    LATENT_ROWS = 64,            // the most rows of a tile
    SIDE = 2 * LANES,            // keys whose scores are computed at a time, over
    STRETCH = 96,                // so many words: those of all keys stay in the first-level cache
    SCORE_STRIDE = CHUNK + 16,   // from one row of scores to the next: other cache sets
    BATCH = 16,                  // words of keys between two batches of prefetches
    STATE_HEAD = 16,             // floats before the values of a state: the largest score, the sum of weights
};

// Rows of sums that fill the registers beside two vectors of keys, and beside VALUE_VECS of values.
#if defined(__AVX512F__)
enum { SCORE_ROWS = 12, VALUE_ROWS = 6, VALUE_VECS = 4 };
#else
enum { SCORE_ROWS = 4, VALUE_ROWS = 4, VALUE_VECS = 2 };
#endif

// The sizes of a tile: `scoring.dim` columns of a cached row, of which the first `rank` are the value.
typedef struct {
    scoring scoring;
    long rank, rows;
} latent_form;

// Rows that are prefetched line by line while others are multiplied. In one go they would occupy all of the buffers
// that loads wait in.
typedef struct {
    const char *const *row, *const *end;
    long line;   // the next one of `row`
    long lines;  // of each row
    long batch;  // lines that are prefetched at a time
} fetched;

// The memory of one thread.
typedef struct {
    const char *keys[2 * CHUNK];  // rows of a chunk, up to whole sides, and those that are read next
    long seen[LATENT_ROWS];       // keys of the sequence that each row sees
    fetched fetched;
    float *queries;               // for each group of rows [word][row]
    float *words;                 // [STRETCH][SIDE]: those of some keys
    float *scores;                // [row][SCORE_STRIDE]; later weights, or words of them
    float *states;                // [2][row][state_size]
} latent_memory;

INLINE long filled(long keys) { return ceil_div(keys, SIDE) * SIDE; }

// The state of a row after some keys.
INLINE long state_size(const latent_form *f) { return STATE_HEAD + f->rank; }

// Rows are scored in groups as equal as possible.
INLINE long score_groups(const latent_form *f) { return ceil_div(f->rows, SCORE_ROWS); }
INLINE long group_start(const latent_form *f, long group) { return f->rows * group / score_groups(f); }

INLINE latent_memory *latent_begin(const latent_form *f) {
    long words = words_of(f->scoring), each = words + SCORE_STRIDE + 2 * state_size(f);
    long head = (sizeof(latent_memory) + 63) / 64 * 64;
    latent_memory *m = scratch(head + (STRETCH * SIDE + f->rows * each) * sizeof(float));
    m->words = (float *)((char *)m + head);
    m->scores = m->words + STRETCH * SIDE;
    m->states = m->scores + f->rows * SCORE_STRIDE;
    m->queries = m->states + 2 * f->rows * state_size(f);
    return m;
}

// Lays the queries of a tile as their groups are read; `query` [rows, dim].
INLINE void lay_queries(const latent_memory *m, const latent_form *f, scoring s, const void *query) {
    long words = words_of(s);
    for (long group = 0; group < score_groups(f); group++) {
        long start = group_start(f, group), rows = group_start(f, group + 1) - start;
        float *to = m->queries + start * words;
        for (long r = 0; r < rows; r++, query = at(query, s.dim, s.kind))
            for (long i = 0; i < words; i += LANES) {
                float some[LANES];
                vec_store(some, load_words(query, i, words - i, s), FLOAT32);
                for (long w = i; w < least(words, i + LANES); w++) to[w * rows + r] = some[w - i];
            }
    }
}

// Words [start, stop) of a cached row.
typedef struct {
    long start, stop;
} stretch;

// Lays words of SIDE keys side by side.
INLINE void lay_keys(const latent_memory *m, scoring s, const char *const *keys, stretch of) {
    const int each = s.kind == FLOAT32 || in_pairs(s.kind) ? 1 : 2;  // words in a column of 4 bytes
    for (long i = of.start / each, end = of.stop / each; i < end; i += LANES)
        for (int half = 0; half < SIDE; half += LANES) {
            long left = least(LANES, end - i);
            vec square[LANES];
            for (int r = 0; r < LANES; r++) square[r] = vec_load_upto(keys[half + r] + i * 4, left, FLOAT32);
            vec_transpose(square);
            float *place = m->words + (i * each - of.start) * SIDE + half;
            for (int c = 0; c < LANES; c++, place += each * SIDE) {
                if (c >= left) break;
                vec_store(place, each == 1 ? square[c] : widen_even(square[c]), FLOAT32);
                if (each == 2) vec_store(place + SIDE, widen_odd(square[c]), FLOAT32);
            }
        }
}

INLINE void fetch_batch(fetched *f) {
    for (long i = 0; i < f->batch && f->row < f->end; i++) {
        _mm_prefetch(*f->row + f->line * 64, _MM_HINT_T1);
        if (++f->line == f->lines) f->line = 0, f->row++;
    }
}

// Adds products to the scores of a group of rows and SIDE keys.
INLINE void score_rows(latent_memory *m, scoring s, stretch of, const float *queries, const int rows, float *scores) {
    const float *keys = m->words;
    vec sums[SCORE_ROWS][2];
    for (int r = 0; r < rows; r++)
        for (int half = 0; half < 2; half++)
            sums[r][half] = of.start ? vec_load(scores + r * SCORE_STRIDE + half * LANES, FLOAT32) : vec_zero();
    for (long start = of.start; start < of.stop; start += BATCH) {
        fetch_batch(&m->fetched);
        for (long w = least(BATCH, of.stop - start); w > 0; w--, keys += SIDE, queries += rows) {
            vec first = vec_load(keys, FLOAT32), second = vec_load(keys + LANES, FLOAT32);
            for (int r = 0; r < rows; r++) {
                vec same = vec_all(queries[r]);
                sums[r][0] = words_fma(first, same, sums[r][0], s);
                sums[r][1] = words_fma(second, same, sums[r][1], s);
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int half = 0; half < 2; half++) vec_store(scores + r * SCORE_STRIDE + half * LANES, sums[r][half], FLOAT32);
}

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

// There is a function for each number of rows: one for all of them would not have enough registers.
typedef void (*score_loop)(latent_memory *, scoring, stretch, const float *, float *);
typedef void (*value_loop)(latent_memory *, scoring, const value_part *, float *, long);

#define SCORES(k, n)                                                                                         \
    static __attribute__((noinline)) void score_##k##_##n(latent_memory *m, scoring s, stretch of,           \
                                                          const float *queries, float *scores) {             \
        s.kind = k;                                                                                          \
        score_rows(m, s, of, queries, n, scores);                                                            \
    }
#define VALUES(k, n)                                                                                        \
    static __attribute__((noinline)) void value_##k##_##n(latent_memory *m, scoring s, const value_part *v, \
                                                          float *states, long stride) {                     \
        s.kind = k;                                                                                         \
        if (v->vecs == VALUE_VECS) value_rows(m, s, v, n, VALUE_VECS, states, stride);                      \
        else value_rows(m, s, v, n, 1, states, stride);                                                     \
    }
#define BOTH(k, n) SCORES(k, n) VALUES(k, n)
#define FOUR(what, k) what(k, 1) what(k, 2) what(k, 3) what(k, 4)
#define NAMED(what, k) what##_##k##_1, what##_##k##_2, what##_##k##_3, what##_##k##_4
FOUR(BOTH, FLOAT32) FOUR(BOTH, BFLOAT16)
#if defined(__AVX512F__)
#define EIGHT_MORE(k)                                                                         \
    BOTH(k, 5) BOTH(k, 6) SCORES(k, 7) SCORES(k, 8) SCORES(k, 9) SCORES(k, 10) SCORES(k, 11) \
    SCORES(k, 12)
EIGHT_MORE(FLOAT32) EIGHT_MORE(BFLOAT16)
#define MORE_SCORES(k)                                                                                         \
    score_##k##_5, score_##k##_6, score_##k##_7, score_##k##_8, score_##k##_9, score_##k##_10, score_##k##_11, \
        score_##k##_12
#define MORE_VALUES(k) value_##k##_5, value_##k##_6
#else
#define MORE_SCORES(k)
#define MORE_VALUES(k)
#endif
static const score_loop score_loops[][SCORE_ROWS] = {
    [FLOAT32] = {NAMED(score, FLOAT32), MORE_SCORES(FLOAT32)},
    [BFLOAT16] = {NAMED(score, BFLOAT16), MORE_SCORES(BFLOAT16)},
};
static const value_loop value_loops[][VALUE_ROWS] = {
    [FLOAT32] = {NAMED(value, FLOAT32), MORE_VALUES(FLOAT32)},
    [BFLOAT16] = {NAMED(value, BFLOAT16), MORE_VALUES(BFLOAT16)},
};

// Computes the scores of SIDE keys from `key` on.
INLINE void score_tile(latent_memory *m, const latent_form *f, scoring s, long key) {
    long words = words_of(s);
    for (stretch of = {0, 0}; of.stop < words; of.start = of.stop) {
        of.stop = least(words, of.start + STRETCH);
        lay_keys(m, s, m->keys + key, of);
        for (long group = 0; group < score_groups(f); group++) {
            long first = group_start(f, group), rows = group_start(f, group + 1) - first;
            const float *queries = m->queries + first * words + of.start * rows;
            score_loops[s.kind][rows - 1](m, s, of, queries, m->scores + first * SCORE_STRIDE + key);
        }
    }
}

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
