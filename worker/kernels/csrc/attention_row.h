// Attention of a single new token: the query heads that share a key head, over a chunk of keys.
//
// Memory bounds it, so every row of the cache is prefetched some time before it is used. The lanes of a vector are
// dimensions. Chunks begin at multiples of CHUNK in the sequence and are merged in their order, whether one thread
// computed them or several, so the bits of a result do not depend on that.
#pragma once

#include "attention_tile.h"

enum {
    CHUNK = 256,
    AHEAD = 40,     // rows between a prefetch and its use
    PAST = AHEAD + 4,
    HEADS = 4,      // heads that are computed at a time
    HEAD_VECS = 8,  // vectors of dimensions at a time, of up to 2 heads; half as many of more
};

// The memory of one thread. The caller fills in the rows: keys, then values, then PAST rows of anything.
typedef struct {
    const void *rows[2 * CHUNK + PAST];
    float *queries;  // [head][word], each head padded to whole vectors
    float *scores;   // [head][CHUNK], then weights
    float *parts;    // [2][head][part_size]
} row_memory;

INLINE long padded(long words) { return ceil_div(words, LANES) * LANES; }

// The state of a head after some keys: the largest score, the sum of weights, and the sum of weighted values.
INLINE long part_size(scoring s) { return 2 + s.dim; }

// `query` [group, dim]
INLINE row_memory *row_begin(scoring s, long group, const void *query) {
    long words = words_of(s), stride = padded(words);
    row_memory *m = scratch(sizeof(row_memory) + group * (stride + CHUNK + 2 * part_size(s)) * sizeof(float));
    m->queries = (float *)(m + 1);
    m->scores = m->queries + group * stride;
    m->parts = m->scores + group * CHUNK;
    for (long head = 0; head < group; head++, query = at(query, s.dim, s.kind))
        for (long i = 0; i < words; i += LANES)
            vec_store(m->queries + head * stride + i, load_words(query, i, words - i, s), FLOAT32);
    return m;
}

INLINE void fetch_words(const void *row, long i, scoring s) { _mm_prefetch(word_at(row, i, s), _MM_HINT_T0); }

INLINE void fetch_row(const void *row, scoring s) {
    const char *bytes = row;
    for (long i = 0; i < s.dim * width_of(s.kind); i += 64) _mm_prefetch(bytes + i, _MM_HINT_T0);
}

// Adds the products of words [i, i + LANES) of four keys.
INLINE void add_words(vec sums[HEADS][4], const void *const *keys, const float *queries, long i, long left, scoring s,
                      const int heads, int fetch) {
    long stride = padded(words_of(s));
    for (int r = 0; r < 4; r++) {
        vec key = load_words(keys[r], i, left, s);
        if (fetch) fetch_words(keys[r + AHEAD], i, s);
        for (int h = 0; h < heads; h++)
            sums[h][r] = words_fma(key, vec_load(queries + h * stride + i, FLOAT32), sums[h][r], s);
    }
}

// Four keys at a time. Past the last key come values, whose scores are not read.
INLINE void score_heads(const row_memory *m, scoring s, long keys, long head, const int heads) {
    long words = words_of(s), whole = words / LANES * LANES;
    const float *queries = m->queries + head * padded(words);
    for (long key = 0; key < keys; key += 4) {
        const void *const *rows = m->rows + key;
        vec sums[HEADS][4];
        for (int h = 0; h < heads; h++)
            for (int r = 0; r < 4; r++) sums[h][r] = vec_zero();
        for (long i = 0; i < whole; i += LANES) add_words(sums, rows, queries, i, LANES, s, heads, head == 0);
        if (whole < words) add_words(sums, rows, queries, whole, words - whole, s, heads, head == 0);
        for (int h = 0; h < heads; h++) vec_sum4(m->scores + (head + h) * CHUNK + key, sums[h]);
    }
}

INLINE void weigh_head(const row_memory *m, scoring s, long keys, long head, float *part) {
    float *scores = m->scores + head * CHUNK;
    for (long key = 0; key < keys; key += LANES) {
        vec score = vec_mul(vec_load(scores + key, FLOAT32), vec_all(s.scale));
        vec_store(scores + key, s.softcap != 0 ? vec_cap(score, s.softcap) : score, FLOAT32);
    }
    for (long key = keys; key % LANES; key++) scores[key] = UNSEEN;
    vec largest = vec_all(LOWEST), total = vec_zero();
    for (long key = 0; key < keys; key += LANES) largest = vec_max(vec_load(scores + key, FLOAT32), largest);
    part[0] = vec_largest(largest);
    for (long key = 0; key < keys; key += LANES) {
        vec weight = vec_exp2(vec_sub(vec_load(scores + key, FLOAT32), vec_all(part[0])), s.kind);
        vec_store(scores + key, weight, FLOAT32);
        total = vec_add(total, weight);
    }
    part[1] = vec_sum(total);
}

INLINE void value_heads(const row_memory *m, scoring s, const void *const *rows, long keys, long head, const int heads,
                        long dim, const int vecs, float *parts) {
    vec sums[HEADS][HEAD_VECS];
    for (int h = 0; h < heads; h++)
        for (int c = 0; c < vecs; c++) sums[h][c] = vec_zero();
    const float *weights = m->scores + head * CHUNK;
    for (long key = 0; key < keys; key++) {
        if (head == 0 && dim == 0) fetch_row(rows[key + AHEAD], s);
        vec value[HEAD_VECS];
        for (int c = 0; c < vecs; c++) value[c] = vec_load(at(rows[key], dim + c * LANES, s.kind), s.kind);
        for (int h = 0; h < heads; h++) {
            vec weight = vec_all(weights[h * CHUNK + key]);
            for (int c = 0; c < vecs; c++) sums[h][c] = vec_fma(weight, value[c], sums[h][c]);
        }
    }
    for (int h = 0; h < heads; h++) {
        float *part = parts + (head + h) * part_size(s) + 2 + dim;
        for (int c = 0; c < vecs; c++) vec_store(part + c * LANES, sums[h][c], FLOAT32);
    }
}

INLINE void value_dims(const row_memory *m, scoring s, const void *const *rows, long keys, long head, const int heads,
                       float *parts) {
    const int most = heads <= 2 ? HEAD_VECS : HEAD_VECS / 2;
    long dim = 0;
    for (; dim + most * LANES <= s.dim; dim += most * LANES)
        value_heads(m, s, rows, keys, head, heads, dim, most, parts);
    for (; dim + 2 * LANES <= s.dim; dim += 2 * LANES) value_heads(m, s, rows, keys, head, heads, dim, 2, parts);
    for (; dim < s.dim; dim += LANES) value_heads(m, s, rows, keys, head, heads, dim, 1, parts);
}

// There is a function for each number of heads: one for all of them would not have enough registers.
typedef struct {
    void (*score)(const row_memory *m, scoring s, long keys, long head);
    void (*value)(const row_memory *m, scoring s, const void *const *rows, long keys, long head, float *parts);
} loops;

#define LOOPS(k, h)                                                                                              \
    static __attribute__((noinline)) void score_##k##_##h(const row_memory *m, scoring s, long keys, long head) { \
        s.kind = k;                                                                                              \
        score_heads(m, s, keys, head, h);                                                                        \
    }                                                                                                            \
    static __attribute__((noinline)) void value_##k##_##h(const row_memory *m, scoring s, const void *const *rows, \
                                                          long keys, long head, float *parts) {                  \
        s.kind = k;                                                                                              \
        value_dims(m, s, rows, keys, head, h, parts);                                                            \
    }
LOOPS(FLOAT32, 1) LOOPS(FLOAT32, 2) LOOPS(FLOAT32, 3) LOOPS(FLOAT32, 4)
LOOPS(BFLOAT16, 1) LOOPS(BFLOAT16, 2) LOOPS(BFLOAT16, 3) LOOPS(BFLOAT16, 4)

#define LOOP(k, h) {score_##k##_##h, value_##k##_##h}
static const loops row_loops[][HEADS] = {
    [FLOAT32] = {LOOP(FLOAT32, 1), LOOP(FLOAT32, 2), LOOP(FLOAT32, 3), LOOP(FLOAT32, 4)},
    [BFLOAT16] = {LOOP(BFLOAT16, 1), LOOP(BFLOAT16, 2), LOOP(BFLOAT16, 3), LOOP(BFLOAT16, 4)},
};

// Computes the parts [group][part_size] of the `keys` whose rows the caller has filled in.
INLINE void row_chunk(row_memory *m, scoring s, long group, long keys, float *parts) {
    for (long head = 0; head < group; head += HEADS)
        row_loops[s.kind][least(HEADS, group - head) - 1].score(m, s, keys, head);
    for (long head = 0; head < group; head++) weigh_head(m, s, keys, head, parts + head * part_size(s));
    for (long head = 0; head < group; head += HEADS)
        row_loops[s.kind][least(HEADS, group - head) - 1].value(m, s, m->rows + keys, keys, head, parts);
}

// Merges the state after the next keys into that of the keys before.
INLINE void merge_parts(float *into, const float *next, scoring s, long group) {
    for (long head = 0; head < group; head++, into += part_size(s), next += part_size(s)) {
        float largest = into[0] > next[0] ? into[0] : next[0];
        float old = exp2f(into[0] - largest), new = exp2f(next[0] - largest);
        into[0] = largest;
        into[1] = into[1] * old + next[1] * new;
        for (long i = 2; i < part_size(s); i += LANES) {
            vec sum = vec_mul(vec_load(into + i, FLOAT32), vec_all(old));
            vec_store(into + i, vec_fma(vec_load(next + i, FLOAT32), vec_all(new), sum), FLOAT32);
        }
    }
}

INLINE void finish_parts(void *out, const float *parts, scoring s, long group) {
    for (long head = 0; head < group; head++, parts += part_size(s)) {
        vec share = vec_all(1.0f / parts[1]);
        for (long dim = 0; dim < s.dim; dim += LANES) {
            vec sum = vec_mul(vec_load(parts + 2 + dim, FLOAT32), share);
            vec_store(at_out(out, head * s.dim + dim, s.kind), sum, s.kind);
        }
    }
}
