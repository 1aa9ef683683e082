// Products of a tile of queries with cached rows, for latent attention and for what chooses the rows that it reads.
//
// The lanes of a vector are keys, so that a lane adds the words of a key one after the other: no lane is idle however
// many heads there are. Rows of queries are of one token or of several; each is computed by itself, so its bits do not
// depend on the others. A score is summed over words in their order, in one accumulator, as in `attention_tile.h`, which
// says what a word is.
#pragma once

#include "attention_tile.h"

enum {
    LATENT_ROWS = 64,           // the most rows of a tile
    SIDE = 2 * LANES,           // keys whose scores are computed at a time, over
    STRETCH = 96,               // so many words: those of all keys stay in the first-level cache
    SCORE_STRIDE = CHUNK + 16,  // from one row of scores to the next: other cache sets
    BATCH = 16,                 // words of keys between two batches of prefetches
    STATE_HEAD = 16,            // floats before the values of a state: the largest score, the sum of weights
};

// Rows of sums that fill the registers beside two vectors of keys.
#if defined(__AVX512F__)
enum { SCORE_ROWS = 12 };
#else
enum { SCORE_ROWS = 4 };
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

// The paged cache, one row for each token.
typedef struct {
    char *cache;  // [blocks, block_size, row]
    long block_size, row_bytes;
    const int *block_table;  // [sequences, table_width]
    long table_width;
} paged_rows;

// Finds the cached rows of keys [start, stop) of a sequence.
INLINE void cached_rows(const paged_rows *p, long sequence, long start, long stop, const char **to) {
    const int *blocks = p->block_table + sequence * p->table_width;
    for (long block = start / p->block_size, next; start < stop; start = next, block++) {
        next = least(stop, (block + 1) * p->block_size);
        const char *from = p->cache + (blocks[block] * p->block_size + start - block * p->block_size) * p->row_bytes;
        for (long i = start; i < next; i++, from += p->row_bytes) *to++ = from;
    }
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

// There is a function for each number of rows: one for all of them would not have enough registers.
typedef void (*score_loop)(latent_memory *, scoring, stretch, const float *, float *);

#define SCORES(k, n)                                                                                         \
    static __attribute__((noinline)) void score_##k##_##n(latent_memory *m, scoring s, stretch of,           \
                                                          const float *queries, float *scores) {             \
        s.kind = k;                                                                                          \
        score_rows(m, s, of, queries, n, scores);                                                            \
    }
#define FOUR(what, k) what(k, 1) what(k, 2) what(k, 3) what(k, 4)
#define NAMED(what, k) what##_##k##_1, what##_##k##_2, what##_##k##_3, what##_##k##_4
FOUR(SCORES, FLOAT32) FOUR(SCORES, BFLOAT16)
#if defined(__AVX512F__)
#define EIGHT_MORE(k)                                                                                         \
    SCORES(k, 5) SCORES(k, 6) SCORES(k, 7) SCORES(k, 8) SCORES(k, 9) SCORES(k, 10) SCORES(k, 11) SCORES(k, 12)
EIGHT_MORE(FLOAT32) EIGHT_MORE(BFLOAT16)
#define MORE_SCORES(k)                                                                                         \
    score_##k##_5, score_##k##_6, score_##k##_7, score_##k##_8, score_##k##_9, score_##k##_10, score_##k##_11, \
        score_##k##_12
#else
#define MORE_SCORES(k)
#endif
static const score_loop score_loops[][SCORE_ROWS] = {
    [FLOAT32] = {NAMED(score, FLOAT32), MORE_SCORES(FLOAT32)},
    [BFLOAT16] = {NAMED(score, BFLOAT16), MORE_SCORES(BFLOAT16)},
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
