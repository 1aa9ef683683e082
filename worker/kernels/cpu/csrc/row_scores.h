// Scores of the keys of a chunk, for all heads that share a key head. The order of sums: `attention_tile.h`.
#pragma once

#include "row_memory.h"

// Computes the scores of LANES keys in 8 bits for some heads, but for the queries' factors.
INLINE void score_codes(row_memory *m, scoring s, const void *const *keys, long head, const int heads, int fetch,
                        float *scores) {
    const long words = words_of(s), stride = padded(words);
    const float *query = m->queries + head * stride;
    row_stream f = m->stream;
    float scales[LANES];
    vec sums[HEADS][LANES];
    for (int key = 0; key < LANES; key += 2) {
        const int8_t *one = keys[key], *two = keys[key + 1];
        whole first[HEADS], second[HEADS];
        for (int h = 0; h < heads; h++) first[h] = second[h] = whole_all(0);
        for (long i = 0; i < words; i += LANES) {
            whole a = words_of_bytes(one + 2 * i, s.dim - 2 * i), b = words_of_bytes(two + 2 * i, s.dim - 2 * i);
            for (int h = 0; h < heads; h++) {
                whole q = whole_load(query + h * stride + i);
                first[h] = add_words(first[h], a, q);
                second[h] = add_words(second[h], b, q);
            }
        }
        for (int h = 0; h < heads; h++) sums[h][key] = vec_of_bits(first[h]), sums[h][key + 1] = vec_of_bits(second[h]);
        scales[key] = scale_behind(one, s.dim), scales[key + 1] = scale_behind(two, s.dim);
        for (long i = 0; fetch && i < s.dim; i += 32) fetch_line(&f);
    }
    if (fetch) m->stream = f;
    for (int h = 0; h < heads; h++) {
        whole total = whole_all(0);
        vec_transpose(sums[h]);
        for (int key = 0; key < LANES; key++) total += bits_of_vec(sums[h][key]);
        vec_store(scores + h * CHUNK, vec_mul(vec_of_whole(total), vec_load(scales, FLOAT32)), FLOAT32);
    }
}

#define CODES(h)                                                                                                  \
    static __attribute__((noinline)) void codes_##h(row_memory *m, scoring s, const void *const *keys, long head, \
                                                    int fetch, float *scores) {                                   \
        s.kind = INT8;                                                                                            \
        score_codes(m, s, keys, head, h, fetch, scores);                                                          \
    }
CODES(1) CODES(2) CODES(3) CODES(4)
static void (*const code_loops[HEADS])(row_memory *, scoring, const void *const *, long, int, float *) = {
    codes_1, codes_2, codes_3, codes_4};

// Columns of keys, 4 bytes each, transposed: a vector is a column of as many keys as it has lanes.
typedef struct {
    vec columns[SQUARES][STRIPE];
    long first, count;  // the first column of the keys, and how many there are
} stripe;

// Adds the products of a stripe to the scores of some heads. A column is a float32, a word of two neighbours in
// bfloat16, or two words, which are widened once for all heads.
INLINE void score_heads(row_memory *m, scoring s, const stripe *q, long head, const int heads, const int keys,
                        int fetch, float *scores) {
    const int each = s.kind == FLOAT32 || in_pairs(s.kind) ? 1 : 2;  // words in a column
    const long stride = padded(words_of(s));
    const float *query = m->queries + head * stride + q->first * each;
    row_stream f = m->stream;
    vec sums[HEADS][SQUARES];
    for (int h = 0; h < heads; h++)
        for (int k = 0; k < keys; k++)
            sums[h][k] = q->first == 0 ? vec_zero() : vec_load(scores + h * CHUNK + k * LANES, FLOAT32);
    for (long i = 0; i < q->count; i++, query += each) {
        for (int r = 0; fetch && r < keys * LANES; r += 16) fetch_line(&f);
        for (int half = 0; half < each; half++) {
            vec words[SQUARES];
            for (int k = 0; k < keys; k++) {
                words[k] = q->columns[k][i];
                if (each == 2) words[k] = half ? widen_odd(words[k]) : widen_even(words[k]);
            }
            for (int h = 0; h < heads; h++) {
                vec same = vec_all(query[h * stride + half]);
                for (int k = 0; k < keys; k++) sums[h][k] = words_fma(same, words[k], sums[h][k], s);
            }
        }
    }
    if (fetch) m->stream = f;
    for (int h = 0; h < heads; h++)
        for (int k = 0; k < keys; k++) vec_store(scores + h * CHUNK + k * LANES, sums[h][k], FLOAT32);
}

// There is a function for each number of heads: one for all of them would not have enough registers.
#define SCORES(k, h, keys)                                                                                    \
    static __attribute__((noinline)) void score_##k##_##h##_##keys(row_memory *m, scoring s, const stripe *q, \
                                                                   long head, int fetch, float *scores) {     \
        s.kind = k;                                                                                           \
        score_heads(m, s, q, head, h, keys, fetch, scores);                                                   \
    }
#define SCORES_OF(k, keys) SCORES(k, 1, keys) SCORES(k, 2, keys) SCORES(k, 3, keys) SCORES(k, 4, keys)
SCORES_OF(FLOAT32, 1) SCORES_OF(FLOAT32, 2) SCORES_OF(BFLOAT16, 1) SCORES_OF(BFLOAT16, 2)

#define SCORE_LOOPS(k, keys) {score_##k##_1_##keys, score_##k##_2_##keys, score_##k##_3_##keys, score_##k##_4_##keys}
static void (*const score_loops[][SQUARES][HEADS])(row_memory *, scoring, const stripe *, long, int, float *) = {
    [FLOAT32] = {SCORE_LOOPS(FLOAT32, 1), SCORE_LOOPS(FLOAT32, 2)},
    [BFLOAT16] = {SCORE_LOOPS(BFLOAT16, 1), SCORE_LOOPS(BFLOAT16, 2)},
};

// Computes the scores of some vectors of keys for heads [head, last).
INLINE void score_vectors(row_memory *m, scoring s, const void *const *keys, const int count, long head, long last,
                          float *scores) {
    const long columns = s.dim * width_of(s.kind) / 4;
    stripe q;
    for (q.first = 0; q.first < columns; q.first += STRIPE) {
        q.count = least(STRIPE, columns - q.first);
        for (int k = 0; k < count; k++)
            for (long i = 0; i < q.count; i += LANES) {
                vec square[LANES];
                for (int r = 0; r < LANES; r++) {
                    const void *words = at(keys[k * LANES + r], q.first + i, FLOAT32);
                    square[r] = vec_load_upto(words, q.count - i, FLOAT32);
                }
                vec_transpose(square);
                for (int r = 0; r < LANES; r++) q.columns[k][i + r] = square[r];
            }
        for (long h = head, heads; h < last; h += heads) {
            heads = heads_of(h, last);
            score_loops[s.kind][count - 1][heads - 1](m, s, &q, h, h == head, scores + (h - head) * CHUNK);
        }
    }
}

INLINE void score_coded_keys(row_memory *m, scoring s, long head, long last, span k) {
    for (long key = 0; key < k.count; key += LANES)
        for (long h = head, heads; h < last; h += heads) {
            heads = heads_of(h, last);
            code_loops[heads - 1](m, s, m->rows + key, h, h == head, m->scores + h * CHUNK + k.first + key);
        }
}

INLINE void score_keys(row_memory *m, scoring s, long head, long last, span k) {
    float *scores = m->scores + head * CHUNK + k.first;
    long key = 0;
    for (; key + LANES < k.count; key += SQUARES * LANES)
        score_vectors(m, s, m->rows + key, SQUARES, head, last, scores + key);
    if (key < k.count) score_vectors(m, s, m->rows + key, 1, head, last, scores + key);
}
