// Attention of rows with a single new token: the query heads that share a key head, over a chunk of keys. Rows of one
// sequence, as guesses are, take a chunk together, as if the later ones were more heads of the first.
//
// It adds in the order that `attention_tile.h` specifies. The lanes of a vector are keys for scores, so that a lane
// adds the words of a key one after the other, and dimensions for values. Memory bounds a row alone, so every row of
// the cache is prefetched some time before it is used: towards the end of a chunk those of the next one, or of the
// next unit. Whole numbers may be added in any order: of a cache of 8 bits the lanes are dimensions for scores, too.
#pragma once

#include "attention_tile.h"

enum {
    AHEAD = 8192,            // bytes between a prefetch and its use,
    MOST_AHEAD = 56,         // which are so many rows at most
    PAST = MOST_AHEAD + 16,  // 16: the most lanes
    HEADS = 4,               // heads that are computed at a time
    SQUARES = 2,             // vectors of keys that they are multiplied with at a time,
    STRIPE = 64,             // over so many columns: those stay in the first-level cache
    HEAD_VECS = 8,           // vectors of dimensions at a time, at most
};

// Vectors of dimensions whose sums fill the registers best, beside those of so many heads.
INLINE int vecs_beside(int heads) {
    if (LANES == 16) return heads <= 2 ? HEAD_VECS : HEAD_VECS / 2;
    return heads == 1 ? 8 : heads == 4 ? 2 : 4;
}

// The memory of one thread. The caller fills in the rows: keys, then values, then PAST rows that are read next. A head
// is one of those of any of the queries that are computed together.
typedef struct {
    const void *rows[2 * CHUNK + PAST];
    const void *const *values;  // those of `rows`
    long ahead;                 // rows between a prefetch and its use
    float *queries;             // [head][word], each head padded to whole vectors
    float *factors;             // [head]: of queries in words, their scales times `scale`
    float *scores;              // [head][CHUNK], by position in the chunk; then weights, or words of them
    float *decays;              // [head][CHUNK / KEYS]
    float *parts;               // [2][head][part_size]
    const float *slopes;        // [head], or NULL; the caller fills them in, too, and
    float distance;             // from the query to the first position of the chunk, at most 0
} row_memory;

// Keys of a chunk: `count` from the position `first` in it, a multiple of LANES. The first `hidden` are not seen.
typedef struct {
    long first, count, hidden;
} span;

INLINE long padded(long words) { return ceil_div(words, LANES) * LANES; }

// The state of a head after some keys: the largest score, the sum of weights, and the sum of weighted values.
INLINE long part_size(scoring s) { return 2 + s.dim; }

INLINE row_memory *row_begin(scoring s, long heads) {
    long stride = padded(words_of(s)), floats = heads * (stride + 1 + CHUNK + CHUNK / KEYS + 2 * part_size(s));
    row_memory *m = scratch(sizeof(row_memory) + floats * sizeof(float));
    m->queries = (float *)(m + 1);
    m->ahead = least(MOST_AHEAD, 1 + AHEAD / (row_numbers(s.dim, s.kind) * width_of(s.kind)));
    m->scores = m->queries + heads * stride;
    m->decays = m->scores + heads * CHUNK;
    m->parts = m->decays + heads * (CHUNK / KEYS);
    m->factors = m->parts + heads * 2 * part_size(s);
    return m;
}

// The queries of a row [group, dim], whose first head is `head`.
INLINE void row_queries(const row_memory *m, scoring s, long group, long head, const void *query) {
    long words = words_of(s), stride = padded(words);
    for (long last = head + group; head < last; head++, query = at(query, s.dim, s.outer)) {
        float *to = m->queries + head * stride;
        if (s.kind == INT8) {
            m->factors[head] = write_words((int16_t *)to, query, s.dim, s.outer) * s.scale;
            memset(to + words, 0, (stride - words) * sizeof(float));
        } else
            for (long i = 0; i < words; i += LANES)
                vec_store(to + i, load_words(query, i, words - i, s), FLOAT32);
    }
}

INLINE void fetch_row(const void *row, scoring s) {
    const char *bytes = row;
    for (long i = 0; i < row_numbers(s.dim, s.kind) * width_of(s.kind); i += 64) _mm_prefetch(bytes + i, _MM_HINT_T0);
}

// Computes the scores of LANES keys in 8 bits for some heads, but for the queries' factors.
INLINE void score_codes(const row_memory *m, scoring s, const void *const *keys, long head, const int heads, int fetch,
                        float *scores) {
    const long words = words_of(s), stride = padded(words);
    const float *query = m->queries + head * stride;
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
        for (int h = 0; h < heads; h++) sums[h][key] = (vec)first[h], sums[h][key + 1] = (vec)second[h];
        scales[key] = scale_behind(one, s.dim), scales[key + 1] = scale_behind(two, s.dim);
        for (int r = 0; fetch && r < 2; r++) fetch_row(keys[key + r + m->ahead], s);
    }
    for (int h = 0; h < heads; h++) {
        whole total = whole_all(0);
        vec_transpose(sums[h]);
        for (int key = 0; key < LANES; key++) total += (whole)sums[h][key];
        vec_store(scores + h * CHUNK, vec_mul(vec_of_whole(total), vec_load(scales, FLOAT32)), FLOAT32);
    }
}

#define CODES(h)                                                                                              \
    static __attribute__((noinline)) void codes_##h(const row_memory *m, scoring s, const void *const *keys, \
                                                    long head, int fetch, float *scores) {                   \
        s.kind = INT8;                                                                                        \
        score_codes(m, s, keys, head, h, fetch, scores);                                                      \
    }
CODES(1) CODES(2) CODES(3) CODES(4)
static void (*const code_loops[HEADS])(const row_memory *, scoring, const void *const *, long, int, float *) = {
    codes_1, codes_2, codes_3, codes_4};

// Columns of keys, 4 bytes each, transposed: a vector is a column of as many keys as it has lanes.
typedef struct {
    vec columns[SQUARES][STRIPE];
    long first, count;  // the first column of the keys, and how many there are
} stripe;

// Adds the products of a stripe to the scores of some heads. A column is a float32, a word of two neighbours in
// bfloat16, or two words, which are widened once for all heads.
INLINE void score_heads(const row_memory *m, scoring s, const stripe *q, long head, const int heads, const int keys,
                        float *scores) {
    const int each = s.kind == FLOAT32 || in_pairs(s.kind) ? 1 : 2;  // words in a column
    const long stride = padded(words_of(s));
    const float *query = m->queries + head * stride + q->first * each;
    vec sums[HEADS][SQUARES];
    for (int h = 0; h < heads; h++)
        for (int k = 0; k < keys; k++)
            sums[h][k] = q->first == 0 ? vec_zero() : vec_load(scores + h * CHUNK + k * LANES, FLOAT32);
    for (long i = 0; i < q->count; i++, query += each)
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
    for (int h = 0; h < heads; h++)
        for (int k = 0; k < keys; k++) vec_store(scores + h * CHUNK + k * LANES, sums[h][k], FLOAT32);
}

// There is a function for each number of heads: one for all of them would not have enough registers.
#define SCORES(k, h, keys)                                                                                        \
    static __attribute__((noinline)) void score_##k##_##h##_##keys(const row_memory *m, scoring s, const stripe *q, \
                                                                   long head, float *scores) {                    \
        s.kind = k;                                                                                               \
        score_heads(m, s, q, head, h, keys, scores);                                                              \
    }
#define SCORES_OF(k, keys) SCORES(k, 1, keys) SCORES(k, 2, keys) SCORES(k, 3, keys) SCORES(k, 4, keys)
SCORES_OF(FLOAT32, 1) SCORES_OF(FLOAT32, 2) SCORES_OF(BFLOAT16, 1) SCORES_OF(BFLOAT16, 2)

#define SCORE_LOOPS(k, keys) {score_##k##_1_##keys, score_##k##_2_##keys, score_##k##_3_##keys, score_##k##_4_##keys}
static void (*const score_loops[][SQUARES][HEADS])(const row_memory *, scoring, const stripe *, long, float *) = {
    [FLOAT32] = {SCORE_LOOPS(FLOAT32, 1), SCORE_LOOPS(FLOAT32, 2)},
    [BFLOAT16] = {SCORE_LOOPS(BFLOAT16, 1), SCORE_LOOPS(BFLOAT16, 2)},
};

// Computes the scores of some vectors of keys for heads [head, last).
INLINE void score_vectors(const row_memory *m, scoring s, const void *const *keys, const int count, long head,
                          long last, float *scores) {
    const long columns = s.dim * width_of(s.kind) / 4;
    stripe q;
    for (q.first = 0; q.first < columns; q.first += STRIPE) {
        q.count = least(STRIPE, columns - q.first);
        for (int k = 0; k < count; k++)
            for (long i = 0; i < q.count; i += LANES) {
                vec square[LANES];
                for (int r = 0; r < LANES; r++) {
                    const void *const *row = keys + k * LANES + r;
                    square[r] = vec_load_upto(at(*row, q.first + i, FLOAT32), q.count - i, FLOAT32);
                    if (i % 16 == 0) _mm_prefetch(at(row[m->ahead], q.first + i, FLOAT32), _MM_HINT_T0);
                }
                vec_transpose(square);
                for (int r = 0; r < LANES; r++) q.columns[k][i + r] = square[r];
            }
        for (long h = head; h < last; h += HEADS)
            score_loops[s.kind][count - 1][least(HEADS, last - h) - 1](m, s, &q, h, scores + (h - head) * CHUNK);
    }
}

INLINE void score_coded_keys(const row_memory *m, scoring s, long head, long last, span k) {
    for (long key = 0; key < k.count; key += LANES)
        for (long h = head; h < last; h += HEADS) {
            float *scores = m->scores + h * CHUNK + k.first + key;
            code_loops[least(HEADS, last - h) - 1](m, s, m->rows + key, h, h == head, scores);
        }
}

INLINE void score_keys(const row_memory *m, scoring s, long head, long last, span k) {
    float *scores = m->scores + head * CHUNK + k.first;
    long key = 0;
    for (; key + LANES < k.count; key += SQUARES * LANES)
        score_vectors(m, s, m->rows + key, SQUARES, head, last, scores + key);
    if (key < k.count) score_vectors(m, s, m->rows + key, 1, head, last, scores + key);
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
        vec score = vec_mul(vec_load(scores + key, FLOAT32), vec_all(s.kind == INT8 ? m->factors[head] : s.scale));
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

// Adds the values of a block, weighted: `rows` of [0, keys). Weights are multiplied by scales where they are read first.
INLINE void add_values(vec sums[HEADS][HEAD_VECS], scoring s, const void *const *rows, long keys, float *weights,
                        const int heads, long dim, const int vecs, long ahead) {
    const int pairs = in_pairs(s.kind), step = 1 + pairs;
    for (long key = 0; key < keys; key += step, weights++) {
        vec value[HEAD_VECS], weight[HEADS];
        const void *other = rows[key + pairs < keys ? key + pairs : key];  // a last row alone has itself beside it
        for (int r = 0; ahead && r < step; r++) fetch_row(rows[key + r + ahead], s);
        if (s.kind == INT8 && dim == 0) {
            float scale = scale_behind(rows[key], s.dim);
            for (int h = 0; h < heads; h++) weights[h * CHUNK] *= scale;
        }
        for (int h = 0; h < heads; h++) weight[h] = vec_all(weights[h * CHUNK]);
        for (int c = 0; c < vecs; c++) {
            const void *row = at(rows[key], dim + c * LANES, s.kind);
            if (!pairs) value[c] = vec_load(row, s.kind);
            else if (vecs == 1) value[c] = pairs_load(row, at(other, dim, s.kind));
            else if (c % 2 == 0) pairs_load2(value + c, row, at(other, dim + c * LANES, s.kind));
            for (int h = 0; h < heads; h++) sums[h][c] = words_fma(weight[h], value[c], sums[h][c], s);
        }
    }
}

INLINE void value_heads(const row_memory *m, scoring s, span k, long head, const int heads, long dim, const int vecs,
                        long ahead, float *parts) {
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
        add_values(sums, s, m->values + key - k.first, next - key, m->scores + head * CHUNK + key, heads, dim, vecs,
                   ahead);
    }
    for (int h = 0; h < heads; h++) {
        float *part = parts + (head + h) * part_size(s) + 2 + dim;
        for (int c = 0; c + 1 < vecs && in_pairs(s.kind); c += 2) pairs_order2(sums[h] + c);
        for (int c = 0; c < vecs; c++) vec_store(part + c * LANES, sums[h][c], FLOAT32);
    }
}

INLINE void value_dims(const row_memory *m, scoring s, span k, long head, const int heads, long ahead, float *parts) {
    const int most = vecs_beside(heads);
    long dim = 0, all = s.dim;
    for (; dim + most * LANES <= all; dim += most * LANES, ahead = 0)
        value_heads(m, s, k, head, heads, dim, most, ahead, parts);
    for (; dim + 2 * LANES <= all; dim += 2 * LANES, ahead = 0)
        value_heads(m, s, k, head, heads, dim, 2, ahead, parts);
    for (; dim < all; dim += LANES, ahead = 0) value_heads(m, s, k, head, heads, dim, 1, ahead, parts);
}

#define VALUES(k, h)                                                                                                \
    static __attribute__((noinline)) void value_##k##_##h(const row_memory *m, scoring s, span keys, long head, \
                                                          long ahead, float *parts) {                           \
        s.kind = k;                                                                                             \
        value_dims(m, s, keys, head, h, ahead, parts);                                                          \
    }
VALUES(FLOAT32, 1) VALUES(FLOAT32, 2) VALUES(FLOAT32, 3) VALUES(FLOAT32, 4)
VALUES(BFLOAT16, 1) VALUES(BFLOAT16, 2) VALUES(BFLOAT16, 3) VALUES(BFLOAT16, 4)
VALUES(INT8, 1) VALUES(INT8, 2) VALUES(INT8, 3) VALUES(INT8, 4)

static void (*const value_loops[][HEADS])(const row_memory *, scoring, span, long, long, float *) = {
    [FLOAT32] = {value_FLOAT32_1, value_FLOAT32_2, value_FLOAT32_3, value_FLOAT32_4},
    [BFLOAT16] = {value_BFLOAT16_1, value_BFLOAT16_2, value_BFLOAT16_3, value_BFLOAT16_4},
    [INT8] = {value_INT8_1, value_INT8_2, value_INT8_3, value_INT8_4},
};

INLINE void value_keys(const row_memory *m, scoring s, span k, long head, long last, long ahead, float *parts) {
    for (; head < last; head += HEADS, ahead = 0)
        value_loops[s.kind][least(HEADS, last - head) - 1](m, s, k, head, ahead, parts);
}

// The keys of a span that a row sees. The first row lacks `over` of them, and each row one less than the one before it.
INLINE span seen_by(span k, long row, long over) {
    if (over > row) k.count -= over - row;
    return k;
}

// Computes the parts [head][part_size] of keys whose rows the caller has filled in, for rows [row, rows) with `group`
// heads each, of which the last sees all keys. Scores of keys that a row does not see are computed for nothing. Values
// are left out: they may not be finite.
INLINE void row_chunk(row_memory *m, scoring s, long group, long row, long rows, span k, long over, float *parts) {
    if (s.kind == INT8) score_coded_keys(m, s, row * group, rows * group, k);
    else score_keys(m, s, row * group, rows * group, k);
    m->values = m->rows + k.count;
    for (long head = row * group; head < rows * group; head++)
        weigh_head(m, s, seen_by(k, head / group, over), head, parts + head * part_size(s));
    for (long ahead = m->ahead, next; row < rows; row = next, ahead = 0) {
        next = row < over ? row + 1 : rows;
        value_keys(m, s, seen_by(k, row, over), row * group, next * group, ahead, parts);
    }
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
            vec_store(at_out(out, head * s.dim + dim, s.outer), sum, s.outer);
        }
    }
}
