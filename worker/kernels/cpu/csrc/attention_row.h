// Attention of a single new token: the query heads that share a key head, over a chunk of keys.
//
// It adds in the order that `attention_tile.h` specifies. The lanes of a vector are keys for scores, so that a lane
// adds the words of a key one after the other, and dimensions for values. Memory bounds it, so every row of the cache
// is prefetched some time before it is used: towards the end of a chunk those of the next one, or of the next unit.
#pragma once

#include "attention_tile.h"

enum {
    AHEAD = 8192,            // bytes between a prefetch and its use,
    MOST_AHEAD = 56,         // which are so many rows at most
    PAST = MOST_AHEAD + 16,  // 16: the most lanes
    HEADS = 4,               // heads whose values are added at a time
    HEAD_VECS = 8,           // vectors of dimensions at a time, of up to 2 heads; half as many of more
};

// The memory of one thread. The caller fills in the rows: keys, then values, then PAST rows that are read next.
typedef struct {
    const void *rows[2 * CHUNK + PAST];
    long ahead;      // rows between a prefetch and its use
    float *queries;  // [head][word], each head padded to whole vectors
    float *scores;   // [head][CHUNK], by position in the chunk; then weights, or words of them
    float *decays;   // [head][CHUNK / KEYS]
    float *parts;    // [2][head][part_size]
    const float *slopes;  // [head], or NULL; the caller fills them in, too, and
    float distance;       // from the query to the first position of the chunk, at most 0
} row_memory;

// Keys of a chunk: `count` from the position `first` in it, a multiple of LANES. The first `hidden` are not seen.
typedef struct {
    long first, count, hidden;
} span;

INLINE long padded(long words) { return ceil_div(words, LANES) * LANES; }

// The state of a head after some keys: the largest score, the sum of weights, and the sum of weighted values.
INLINE long part_size(scoring s) { return 2 + s.dim; }

// `query` [group, dim]
INLINE row_memory *row_begin(scoring s, long group, const void *query) {
    long words = words_of(s), stride = padded(words);
    long floats = group * (stride + CHUNK + CHUNK / KEYS + 2 * part_size(s));
    row_memory *m = scratch(sizeof(row_memory) + floats * sizeof(float));
    m->queries = (float *)(m + 1);
    m->ahead = least(MOST_AHEAD, 1 + AHEAD / (s.dim * width_of(s.kind)));
    m->scores = m->queries + group * stride;
    m->decays = m->scores + group * CHUNK;
    m->parts = m->decays + group * (CHUNK / KEYS);
    for (long head = 0; head < group; head++, query = at(query, s.dim, s.kind))
        for (long i = 0; i < words; i += LANES)
            vec_store(m->queries + head * stride + i, load_words(query, i, words - i, s), FLOAT32);
    return m;
}

INLINE void fetch_row(const void *row, scoring s) {
    const char *bytes = row;
    for (long i = 0; i < s.dim * width_of(s.kind); i += 64) _mm_prefetch(bytes + i, _MM_HINT_T0);
}

// Adds the products of one float32 of LANES keys, or of two neighbours in bfloat16, in words of `query`.
INLINE vec column_fma(const float *query, vec column, vec sum, scoring s) {
    if (s.kind == FLOAT32 || in_pairs(s.kind)) return words_fma(vec_all(*query), column, sum, s);
    sum = vec_fma(vec_all(query[0]), widen_even(column), sum);
    return vec_fma(vec_all(query[1]), widen_odd(column), sum);
}

// Adds the products of columns [i, i + LANES), 4 bytes each, of as many keys to the scores of all heads.
INLINE void score_square(const row_memory *m, scoring s, long group, const void *const *keys, long i, float *scores) {
    const long columns = s.dim * width_of(s.kind) / 4, left = least(LANES, columns - i);
    const long each = s.kind == FLOAT32 || in_pairs(s.kind) ? 1 : 2;  // words in a column
    vec square[LANES];
    for (int r = 0; r < LANES; r++) {
        square[r] = vec_load_upto(at(keys[r], i, FLOAT32), left, FLOAT32);
        if (i % 16 == 0) _mm_prefetch(at(keys[r + m->ahead], i, FLOAT32), _MM_HINT_T0);
    }
    vec_transpose(square);
    const float *query = m->queries + i * each;
    for (long head = 0; head < group; head++, query += padded(words_of(s)), scores += CHUNK) {
        vec sum = i == 0 ? vec_zero() : vec_load(scores, FLOAT32);
        if (left == LANES)
            for (int r = 0; r < LANES; r++) sum = column_fma(query + r * each, square[r], sum, s);
        else
            for (int r = 0; r < left; r++) sum = column_fma(query + r * each, square[r], sum, s);
        vec_store(scores, sum, FLOAT32);
    }
}

INLINE void score_keys(const row_memory *m, scoring s, long group, span k) {
    long columns = s.dim * width_of(s.kind) / 4;
    for (long key = 0; key < k.count; key += LANES)
        for (long i = 0; i < columns; i += LANES)
            score_square(m, s, group, m->rows + key, i, m->scores + k.first + key);
}

// Turns a block's scores into weights, in place.
INLINE void weigh_block(float *scores, long keys, scoring s, float *decay, float *part) {
    vec largest = vec_all(LOWEST), total = vec_zero();
    for (long key = 0; key < keys; key += LANES) largest = vec_max(vec_load(scores + key, FLOAT32), largest);
    float before = part[0], most = vec_largest(largest);
    part[0] = before > most ? before : most;
    for (long key = 0; key < keys; key += LANES) {
        vec weight = vec_exp2(vec_sub(vec_load(scores + key, FLOAT32), vec_all(part[0])), s.kind);
        total = vec_add(total, weight);
        if (in_pairs(s.kind)) pairs_store(scores + key / 2, weight);
        else vec_store(scores + key, weight, FLOAT32);
    }
    *decay = exp2_of(before - part[0]);
    part[1] = part[1] * *decay + vec_sum(total);
}

INLINE void slope_head(const row_memory *m, span k, long head, float *scores) {
    static const float lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vec slope = vec_all(m->slopes[head] * LOG2_E), lane = vec_load(lanes, FLOAT32);
    for (long key = k.first; key < k.first + k.count; key += LANES) {
        vec distance = vec_add(vec_all(m->distance + (float)key), lane);
        vec_store(scores + key, vec_slope(vec_load(scores + key, FLOAT32), slope, distance), FLOAT32);
    }
}

INLINE void weigh_head(const row_memory *m, scoring s, span k, long head, float *part) {
    float *scores = m->scores + head * CHUNK, *decays = m->decays + head * (CHUNK / KEYS);
    long stop = k.first + k.count;
    for (long key = k.first; key < stop; key += LANES) {
        vec score = vec_mul(vec_load(scores + key, FLOAT32), vec_all(s.scale));
        vec_store(scores + key, s.softcap != 0 ? vec_cap(score, s.softcap) : score, FLOAT32);
    }
    if (s.sloping) slope_head(m, k, head, scores);
    for (long key = k.first; key < k.first + k.hidden; key++) scores[key] = UNSEEN;
    for (long key = stop; key % LANES; key++) scores[key] = UNSEEN;
    part[0] = LOWEST, part[1] = 0;
    for (long key = k.first, next; key < stop; key = next) {
        next = least(stop, (key / KEYS + 1) * KEYS);
        weigh_block(scores + key, next - key, s, decays + key / KEYS, part);
    }
}

// Adds the values of a block, weighted: `rows` of [0, keys).
INLINE void add_values(vec sums[HEADS][HEAD_VECS], scoring s, const void *const *rows, long keys,
                        const float *weights, const int heads, long dim, const int vecs, long ahead) {
    const int pairs = in_pairs(s.kind), step = 1 + pairs;
    for (long key = 0; key < keys; key += step, weights++) {
        vec value[HEAD_VECS];
        for (int r = 0; ahead && r < step; r++) fetch_row(rows[key + r + ahead], s);
        for (int c = 0; c < vecs; c++) {
            const void *row = at(rows[key], dim + c * LANES, s.kind);
            if (!pairs) value[c] = vec_load(row, s.kind);
            else if (vecs == 1) value[c] = pairs_load(row, at(rows[key + 1], dim, s.kind));
            else if (c % 2 == 0) pairs_load2(value + c, row, at(rows[key + 1], dim + c * LANES, s.kind));
        }
        for (int h = 0; h < heads; h++) {
            vec weight = vec_all(weights[h * CHUNK]);
            for (int c = 0; c < vecs; c++) sums[h][c] = words_fma(weight, value[c], sums[h][c], s);
        }
    }
}

INLINE void value_heads(const row_memory *m, scoring s, span k, long head, const int heads, long dim, const int vecs,
                        float *parts) {
    vec sums[HEADS][HEAD_VECS];
    for (int h = 0; h < heads; h++)
        for (int c = 0; c < vecs; c++) sums[h][c] = vec_zero();
    long stop = k.first + k.count;
    for (long key = k.first, next; key < stop; key = next) {
        next = least(stop, (key / KEYS + 1) * KEYS);
        for (int h = 0; h < heads; h++) {
            vec decay = vec_all(m->decays[(head + h) * (CHUNK / KEYS) + key / KEYS]);
            for (int c = 0; c < vecs; c++) sums[h][c] = vec_mul(sums[h][c], decay);
        }
        add_values(sums, s, m->rows + k.count + key - k.first, next - key, m->scores + head * CHUNK + key, heads, dim,
                    vecs, head == 0 && dim == 0 ? m->ahead : 0);
    }
    for (int h = 0; h < heads; h++) {
        float *part = parts + (head + h) * part_size(s) + 2 + dim;
        for (int c = 0; c + 1 < vecs && in_pairs(s.kind); c += 2) pairs_order2(sums[h] + c);
        for (int c = 0; c < vecs; c++) vec_store(part + c * LANES, sums[h][c], FLOAT32);
    }
}

INLINE void value_dims(const row_memory *m, scoring s, span k, long head, const int heads, float *parts) {
    const int most = heads <= 2 ? HEAD_VECS : HEAD_VECS / 2;
    long dim = 0;
    for (; dim + most * LANES <= s.dim; dim += most * LANES) value_heads(m, s, k, head, heads, dim, most, parts);
    for (; dim + 2 * LANES <= s.dim; dim += 2 * LANES) value_heads(m, s, k, head, heads, dim, 2, parts);
    for (; dim < s.dim; dim += LANES) value_heads(m, s, k, head, heads, dim, 1, parts);
}

// There is a function for each number of heads: one for all of them would not have enough registers.
#define VALUES(k, h)                                                                                                \
    static __attribute__((noinline)) void value_##k##_##h(const row_memory *m, scoring s, span keys, long head, \
                                                          float *parts) {                                       \
        s.kind = k;                                                                                             \
        value_dims(m, s, keys, head, h, parts);                                                                 \
    }
VALUES(FLOAT32, 1) VALUES(FLOAT32, 2) VALUES(FLOAT32, 3) VALUES(FLOAT32, 4)
VALUES(BFLOAT16, 1) VALUES(BFLOAT16, 2) VALUES(BFLOAT16, 3) VALUES(BFLOAT16, 4)

static void (*const value_loops[][HEADS])(const row_memory *, scoring, span, long, float *) = {
    [FLOAT32] = {value_FLOAT32_1, value_FLOAT32_2, value_FLOAT32_3, value_FLOAT32_4},
    [BFLOAT16] = {value_BFLOAT16_1, value_BFLOAT16_2, value_BFLOAT16_3, value_BFLOAT16_4},
};

// Computes the parts [group][part_size] of keys whose rows the caller has filled in.
INLINE void row_chunk(row_memory *m, scoring s, long group, span k, float *parts) {
    score_keys(m, s, group, k);
    for (long head = 0; head < group; head++) weigh_head(m, s, k, head, parts + head * part_size(s));
    for (long head = 0; head < group; head += HEADS)
        value_loops[s.kind][least(HEADS, group - head) - 1](m, s, k, head, parts);
}

// Merges the state after the next keys into that of the keys before.
INLINE void merge_parts(float *into, const float *next, scoring s, long group) {
    for (long head = 0; head < group; head++, into += part_size(s), next += part_size(s)) {
        float largest = into[0] > next[0] ? into[0] : next[0];
        float old = exp2_of(into[0] - largest), new = exp2_of(next[0] - largest);
        into[0] = largest;
        into[1] = into[1] * old + next[1] * new;
        for (long i = 2; i < part_size(s); i += LANES) {
            vec sum = vec_mul(vec_load(into + i, FLOAT32), vec_all(old));
            vec_store(into + i, vec_fma(vec_load(next + i, FLOAT32), vec_all(new), sum), FLOAT32);
        }
    }
}

// Writes the results; `sinks` are the heads', if there are any.
INLINE void finish_parts(void *out, const float *parts, scoring s, long group, const float *sinks) {
    for (long head = 0; head < group; head++, parts += part_size(s)) {
        vec sink = vec_all(s.sinking ? sinks[head] * LOG2_E : 0);
        vec share = share_of(vec_all(parts[0]), vec_all(parts[1]), sink, s.sinking);
        for (long dim = 0; dim < s.dim; dim += LANES) {
            vec sum = vec_fma(vec_load(parts + 2 + dim, FLOAT32), share, vec_zero());
            vec_store(at_out(out, head * s.dim + dim, s.kind), sum, s.kind);
        }
    }
}
