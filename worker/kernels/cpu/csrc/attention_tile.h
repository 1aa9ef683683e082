// Attention of a tile of query rows over blocks of keys, with an online softmax; and the order of its sums.
//
// The lanes of every vector are query rows, so a key is read where it lies, a word at a time for all rows, and a row's
// arithmetic is the same whatever rows are beside it.
//
// One order of sums, for a tile and for a row of its own (`attention_row.h`):
// - A score is summed over words in their order, in one accumulator, by fused multiplication and addition. If the
//   processor multiplies pairs of bfloat16, a word is such a pair: neighbours in a query and a key, or the same
//   dimension of two values. Otherwise it is one float32, and bfloat16 keys and values are widened first. Of a cache of
//   8 bits it is a pair of whole numbers, and the sum is exact; it is multiplied by the key's scale, then by the query's
//   times `scale`. Values are widened to float32, and their scales multiplied with weights, each in the block of its own.
// - Keys are taken in chunks of CHUNK, which begin at multiples of CHUNK in the sequence, and chunks in blocks of KEYS.
//   Each chunk has a state of its own, which begins empty. A block multiplies the chunk's sums by 2 to the power of
//   (largest score before it - largest score with it) and adds its own, with weights relative to the latter.
// - A block's weights are summed by key modulo LANES, in the order of keys, and these sums as `vec_sum` sums lanes.
// - A dimension of the values is summed over words of keys in their order, from the decayed sum on.
// - The states of chunks are merged in ascending order into that of the first; each is multiplied by 2 to the power of
//   (its largest score - the larger one). At the end the sum of values is multiplied by 1 / the sum of weights.
// - A sink is one more key whose value is zero. It is merged last, into the sum of weights alone.
// - Keys, blocks and chunks that a query does not see have weights of 0 and leave its bits unchanged, so it does not
//   matter which of them are computed for the sake of other rows. (A -0 may become 0 on the way, but 0 is added last.)
//
// Encoders see all of a text in one chunk.
#pragma once

#include "attention_amx.h"
#include "codes.h"
#include "threads.h"

enum { TILE = 64, KEYS = 64, CHUNK = 256, MAX_DIM = 512 };

enum { TALL = 8 };  // rows of sums that the registers hold, if a row is one vector wide
#if defined(__AVX512F__)
enum { ROWS = 4, VECS = 4 };  // rows and vectors of sums that fill the registers best
#else
enum { ROWS = 4, VECS = 2 };
#endif

#define LOG2_E 1.44269504f
#define LOWEST -1.0e30f  // the largest score of a row that has seen no key
#define UNSEEN -3.0e38f  // the score of a key that is not seen: its weight is 0 even beside LOWEST

typedef struct {
    kind kind;  // of keys and values
    long dim;
    float scale;    // times log2(e): all scores here are exponents of 2
    float softcap;  // 0: scores are not capped
    int biased;     // whether a tile's `bias` is added
    int sinking;    // whether rows have sinks
    int sloping;    // whether rows have slopes
    kind outer;     // of queries and results
} scoring;

// The states of the rows after some keys: the largest score, the sum of weights, and the sum of weighted values.
typedef struct {
    float largest[TILE], total[TILE];
    float out[MAX_DIM * TILE];  // [dimension][row]
} tile_state;

// The memory of one thread. The caller fills in the rows.
typedef struct {
    float queries[MAX_DIM * TILE];                         // [word][row]
    float scores[KEYS * TILE];                             // [key][row]; later weights [word of keys][row]
    float decay[TILE];                                     // what a block multiplies the sums before it by
    tile_state states[2], *chunk, *merged;                 // this chunk's; that of the chunks before it, or NULL
    float first[TILE], last[TILE];                         // positions that each row sees, in ascending order
    float sinks[TILE];                                     // the scores of sinks, if rows have them
    float slopes[TILE];                                    // times log2(e), if rows have them
    const void *query_rows[TILE];                          // past the tile's last row, another one is repeated
    void *out_rows[TILE];
    const void *key_rows[KEYS + TALL], *value_rows[KEYS];  // rows of a block
    float bias[TILE + KEYS];                               // bias[KEYS + r - i] is that of row r and key i
    float wide_keys[KEYS * MAX_DIM], wide_values[KEYS * MAX_DIM];
    float factors[TILE];  // of queries in words: their scales times `scale`
    float key_scales[KEYS + TALL], value_scales[KEYS];
    spaced spans[KEYS / SPAN];  // keys for AMX
} tile;

// Whether a word of queries and keys is a pair of neighbours.
INLINE int is_paired(scoring s) { return s.kind == INT8 || in_pairs(s.kind); }
INLINE long words_of(scoring s) { return is_paired(s) ? s.dim / 2 : s.dim; }

// The address of word i of a query or a key, and the vector of words [i, i + LANES), of which `left` exist.
INLINE kind word_kind(scoring s) { return is_paired(s) ? FLOAT32 : s.kind; }
INLINE const void *word_at(const void *row, long i, scoring s) { return at(row, i, word_kind(s)); }
INLINE vec load_words(const void *row, long i, long left, scoring s) {
    return vec_load_upto(word_at(row, i, s), left, word_kind(s));
}

// Whether products are made by AMX.
INLINE int by_amx(scoring s) { return has_amx() && s.kind == BFLOAT16 && s.dim % DEPTH == 0; }

// How many keys get weights, if there are so many.
INLINE long weighed(scoring s, long keys) {
    long unit = by_amx(s) ? DEPTH : LANES;
    return ceil_div(keys, unit) * unit;
}

INLINE vec words_fma(vec a, vec b, vec sum, scoring s) {
    return in_pairs(s.kind) ? pairs_fma(a, b, sum) : vec_fma(a, b, sum);
}

// The same for queries and keys, of which the bits of a vector may be whole numbers.
INLINE vec score_fma(vec a, vec b, vec sum, scoring s) {
    return s.kind == INT8 ? vec_of_bits(add_words(bits_of_vec(sum), bits_of_vec(a), bits_of_vec(b))) : words_fma(a, b, sum, s);
}

INLINE float exp2_of(float x) { return vec_lane(vec_exp2(vec_all(x), FLOAT32)); }

// softcap * tanh(score / softcap)
INLINE vec vec_cap(vec score, float softcap) {
    vec grown = vec_exp(vec_mul(score, vec_all(2.0f / (softcap * LOG2_E))));
    vec tanh = vec_sub(vec_all(1.0f), vec_div(vec_all(2.0f), vec_add(grown, vec_all(1.0f))));
    return vec_mul(tanh, vec_all(softcap * LOG2_E));
}

INLINE void tile_fresh(tile *t, tile_state *chunk) {
    for (long row = 0; row < TILE; row++) chunk->largest[row] = LOWEST, chunk->total[row] = 0;
    t->chunk = chunk;
}

// Brings queries into words, for a cache of 8 bits.
INLINE void code_queries(tile *t, scoring s) {
    for (long row = 0; row < TILE; row++) {
        int16_t *words = (int16_t *)t->wide_values + row * MAX_DIM;
        t->factors[row] = write_words(words, t->query_rows[row], s.dim, s.outer) * s.scale;
        t->query_rows[row] = words;
    }
}

INLINE void tile_begin(tile *t, scoring s) {
    long words = words_of(s);
    if (s.kind == INT8) code_queries(t, s);
    for (long row = 0; row < TILE; row += LANES)
        for (long i = 0; i < words; i += LANES) {
            vec square[LANES];
            for (int r = 0; r < LANES; r++) square[r] = load_words(t->query_rows[row + r], i, words - i, s);
            vec_transpose(square);
            for (int r = 0; r < least(LANES, words - i); r++)
                vec_store(t->queries + (i + r) * TILE + row, square[r], FLOAT32);
        }
    t->merged = NULL;
    tile_fresh(t, &t->states[0]);
}

// Computes scores[key][lane] of `rows` keys and `vecs` vectors of queries.
INLINE void score_block(tile *t, scoring s, long key, long lane, const int rows, const int vecs) {
    vec sums[TALL][VECS];
    const float *k[TALL], *q = t->queries + lane;
    float *scores = t->scores + key * TILE + lane;
    long words = words_of(s);
    for (int r = 0; r < rows; r++) {
        k[r] = t->key_rows[key + r];
        for (int c = 0; c < vecs; c++) sums[r][c] = vec_zero();
    }
    for (long i = 0; i < words; i++, q += TILE)
        for (int r = 0; r < rows; r++) {
            vec same = vec_all(k[r][i]);
            for (int c = 0; c < vecs; c++)
                sums[r][c] = score_fma(vec_load(q + c * LANES, FLOAT32), same, sums[r][c], s);
        }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < vecs; c++) {
            vec score = sums[r][c], factor = vec_all(s.scale);
            if (s.kind == INT8) {
                score = vec_mul(vec_of_whole(bits_of_vec(score)), vec_all(t->key_scales[key + r]));
                factor = vec_load(t->factors + lane + c * LANES, FLOAT32);
            }
            vec_store(scores + r * TILE + c * LANES, vec_mul(score, factor), FLOAT32);
        }
}

// Adds weighted values to out[dimension][lane] for `words` of keys.
INLINE void value_block(tile *t, scoring s, long words, int fresh, long dim, long lane, const int rows,
                        const int vecs) {
    vec sums[TALL][VECS];
    const float *w = t->scores + lane;
    float *out = t->chunk->out + dim * TILE + lane;
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < vecs; c++) {
            vec decay = vec_load(t->decay + lane + c * LANES, FLOAT32);
            sums[r][c] = fresh ? vec_zero() : vec_mul(vec_load(out + r * TILE + c * LANES, FLOAT32), decay);
        }
    for (long i = 0; i < words; i++, w += TILE) {
        const float *v = (const float *)t->value_rows[i] + dim;
        for (int r = 0; r < rows; r++) {
            vec same = vec_all(v[r]);
            for (int c = 0; c < vecs; c++)
                sums[r][c] = words_fma(vec_load(w + c * LANES, FLOAT32), same, sums[r][c], s);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < vecs; c++) vec_store(out + r * TILE + c * LANES, sums[r][c], FLOAT32);
}

// The same as `score_block`, of all keys and queries.
INLINE void score_by_amx(tile *t, scoring s, long keys, long lanes) {
    products p = {.row_step = DEPTH * 2, .stride = TILE, .column_step = SPAN * TILE, .steps = s.dim / DEPTH};
    for (long key = 0; key < keys; key += 2 * SPAN) {
        p.rows[0] = t->spans[key / SPAN], p.rows[1] = t->spans[key / SPAN + 1], p.below = key + SPAN < keys;
        for (long lane = 0; lane < lanes; lane += 2 * SPAN) {
            p.columns = t->queries + lane, p.beside = lane + SPAN < lanes;
            multiply(&p, t->scores + key * TILE + lane, 1);
        }
    }
    for (long key = 0; key < keys; key++)
        for (long lane = 0; lane < lanes; lane += LANES) {
            float *score = t->scores + key * TILE + lane;
            vec_store(score, vec_mul(vec_load(score, FLOAT32), vec_all(s.scale)), FLOAT32);
        }
}

// The same as `value_block`, of all dimensions and queries.
INLINE void value_by_amx(tile *t, scoring s, long words, int fresh, long lanes) {
    products p = {.row_step = SPAN * 64, .stride = TILE, .column_step = SPAN * TILE, .steps = ceil_div(words, SPAN)};
    const char *values = (const char *)t->wide_values;
    float *out = t->chunk->out;
    p.below = 1;
    for (long lane = 0; lane < lanes && !fresh; lane += LANES) {
        vec decay = vec_load(t->decay + lane, FLOAT32);
        if (are_ones(decay)) continue;
        for (long i = lane; i < s.dim * TILE; i += TILE) vec_store(out + i, vec_mul(vec_load(out + i, FLOAT32), decay), FLOAT32);
    }
    for (long dim = 0; dim < s.dim; dim += 2 * SPAN) {
        p.rows[0] = (spaced){values + dim * KEYS * 2, 64}, p.rows[1] = (spaced){values + (dim + SPAN) * KEYS * 2, 64};
        for (long lane = 0; lane < lanes; lane += 2 * SPAN) {
            p.columns = t->scores + lane, p.beside = lane + SPAN < lanes;
            multiply(&p, out + dim * TILE + lane, fresh);
        }
    }
}

INLINE void score_all(tile *t, scoring s, long keys, long lanes) {
    if (by_amx(s)) {
        score_by_amx(t, s, keys, lanes);
        return;
    }
    long lane = 0;
    for (; lane + VECS * LANES <= lanes; lane += VECS * LANES)
        for (long key = 0; key < keys; key += ROWS) score_block(t, s, key, lane, ROWS, VECS);
    for (; lane < lanes; lane += LANES)
        for (long key = 0; key < keys; key += TALL) score_block(t, s, key, lane, TALL, 1);
}

INLINE void value_all(tile *t, scoring s, long words, int fresh, long lanes) {
    if (by_amx(s)) {
        value_by_amx(t, s, words, fresh, lanes);
        return;
    }
    long lane = 0;
    for (; lane + VECS * LANES <= lanes; lane += VECS * LANES)
        for (long dim = 0; dim < s.dim; dim += ROWS) value_block(t, s, words, fresh, dim, lane, ROWS, VECS);
    for (; lane < lanes; lane += LANES)
        for (long dim = 0; dim < s.dim; dim += TALL) value_block(t, s, words, fresh, dim, lane, TALL, 1);
}

// The weight that a key's value is multiplied by.
INLINE vec value_weight(const tile *t, scoring s, vec weight, long key) {
    return s.kind == INT8 ? vec_mul(weight, vec_all(t->value_scales[key])) : weight;
}

// Turns the scores of a vector of rows into weights, in place; `keys` is a multiple of LANES.
INLINE void weigh(tile *t, scoring s, long keys, long lane) {
    float *column = t->scores + lane, *total = t->chunk->total + lane;
    vec before = vec_load(t->chunk->largest + lane, FLOAT32), largest = before, sums[LANES];
    for (long key = 0; key < keys; key++) largest = vec_max(vec_load(column + key * TILE, FLOAT32), largest);
    for (int i = 0; i < LANES; i++) sums[i] = vec_zero();
    for (long key = 0; key < keys; key += LANES) {
#pragma GCC unroll 8
        for (int i = 0; i < LANES; i += 2) {
            float *score = column + (key + i) * TILE;
            vec weight = vec_exp2(vec_sub(vec_load(score, FLOAT32), largest), s.kind);
            vec next = vec_exp2(vec_sub(vec_load(score + TILE, FLOAT32), largest), s.kind);
            sums[i] = vec_add(sums[i], weight);
            sums[i + 1] = vec_add(sums[i + 1], next);
            if (in_pairs(s.kind)) vec_store(column + (key + i) / 2 * TILE, pairs_narrow(weight, next), FLOAT32);
            else {
                vec_store(score, value_weight(t, s, weight, key + i), FLOAT32);
                vec_store(score + TILE, value_weight(t, s, next, key + i + 1), FLOAT32);
            }
        }
    }
    vec decay = vec_exp2(vec_sub(before, largest), FLOAT32);
    vec_store(t->chunk->largest + lane, largest, FLOAT32);
    vec_store(total, vec_add(vec_mul(vec_load(total, FLOAT32), decay), vec_sum_lanewise(sums)), FLOAT32);
    vec_store(t->decay + lane, decay, FLOAT32);
}

INLINE void cap_scores(tile *t, long keys, long lane, float softcap) {
    for (long key = 0; key < keys; key++) {
        float *score = t->scores + key * TILE + lane;
        vec_store(score, vec_cap(vec_load(score, FLOAT32), softcap), FLOAT32);
    }
}

// The biases of a head of [heads, 2 * reach + 1], and the one that is added to the score of a key that stands
// `distance` after its query.
INLINE const float *bias_of(const float *bias, long reach, long head) { return bias + head * (2 * reach + 1) + reach; }
INLINE float bias_at(const float *bias, long reach, long distance) {
    return bias[distance > reach ? reach : distance < -reach ? -reach : distance] * LOG2_E;
}

// Fills in the biases of a tile whose first key stands `distance` after its first row.
INLINE void lay_bias(tile *t, const float *bias, long reach, long distance) {
    for (long i = 1; i < KEYS + TILE; i++) t->bias[i] = bias_at(bias, reach, distance + KEYS - i);
}

INLINE void add_bias(tile *t, long keys, long lane) {
    for (long key = 0; key < keys; key++) {
        float *score = t->scores + key * TILE + lane;
        vec_store(score, vec_add(vec_load(score, FLOAT32), vec_load(t->bias + KEYS + lane - key, FLOAT32)), FLOAT32);
    }
}

// The score of a key that is `distance`, at most 0, from its query.
INLINE vec vec_slope(vec score, vec slope, vec distance) { return vec_fma(slope, distance, score); }

// In causal attention, where the last position that a row sees is its own.
INLINE void slope_scores(tile *t, long start, long keys, long lane) {
    vec slope = vec_load(t->slopes + lane, FLOAT32), own = vec_load(t->last + lane, FLOAT32);
    for (long key = 0; key < keys; key++) {
        float *score = t->scores + key * TILE + lane;
        vec distance = vec_sub(vec_all((float)(start + key)), own);
        vec_store(score, vec_slope(vec_load(score, FLOAT32), slope, distance), FLOAT32);
    }
}

INLINE void hide_scores(tile *t, long start, long keys, long lane) {
    vec first = vec_load(t->first + lane, FLOAT32), last = vec_load(t->last + lane, FLOAT32), unseen = vec_all(UNSEEN);
    for (long key = 0; key < keys; key++) {
        float *score = t->scores + key * TILE + lane;
        vec position = vec_all((float)(start + key));
        vec seen = vec_where_greater(first, position, unseen, vec_load(score, FLOAT32));
        vec_store(score, vec_where_greater(position, last, unseen, seen), FLOAT32);
    }
}

// Keys and values in the form that products read: rows of words.
INLINE void widen_row(float *wide, const void *row, long dim, kind k) {
    for (long d = 0; d < dim; d += LANES)
        vec_store_upto(wide + d, vec_load_upto(at(row, d, k), dim - d, k), dim - d, FLOAT32);
}

INLINE void widen_codes(int16_t *words, const int8_t *row, long dim) {
    for (long d = 0; d < dim; d += 2 * LANES) whole_store(words + d, words_of_bytes(row + d, dim - d));
}

INLINE void join_rows(float *words, const void *even, const void *odd, long dim) {
    for (long d = 0; d < dim; d += LANES) {
        vec a = vec_load_upto(at(even, d, BFLOAT16), dim - d, BFLOAT16);
        vec b = odd ? vec_load_upto(at(odd, d, BFLOAT16), dim - d, BFLOAT16) : vec_zero();
        vec_store_upto(words + d, pairs_join(a, b), dim - d, FLOAT32);
    }
}

// Finds the keys of a block for AMX.
INLINE void find_spans(tile *t, scoring s, long keys) {
    for (long key = 0; key < keys; key += SPAN)
        t->spans[key / SPAN] = spaced_rows(t->key_rows + key, keys - key, s.dim * 2, t->wide_keys + key * s.dim / 2);
}

// Lays values as [SPAN of dimensions][SPAN of words of keys][dimension][word]; those of keys that are none are zeros.
INLINE void transpose_values(tile *t, scoring s, long keys) {
    static const bf16 zeros[MAX_DIM];
    for (long key = keys; key % DEPTH; key++) t->value_rows[key] = zeros;
    for (long first = 0; first < keys; first += DEPTH)
        for (long dim = 0; dim < s.dim; dim += DEPTH) {
            const void *const *row = t->value_rows + first;
            float *to = t->wide_values + dim * KEYS / 2 + first / DEPTH * SPAN * SPAN;
            vec pair[2], low[LANES], high[LANES];
            for (int i = 0; i < LANES; i++, row += 2) {
                pairs_load2(pair, at(row[0], dim, BFLOAT16), at(row[1], dim, BFLOAT16));
                low[i] = pair[0], high[i] = pair[1];
            }
            vec_transpose(low), vec_transpose(high);
            for (int i = 0; i < LANES; i++) {  // where `pairs_load2` laid dimension d of each eight
                long d = i / 4 * 8 + i % 4;
                float *place = to + d / SPAN * SPAN * KEYS / 2 + d % SPAN * SPAN;
                vec_store(place, low[i], FLOAT32), vec_store(place + 4 * SPAN, high[i], FLOAT32);
            }
        }
}

INLINE void prepare_rows(tile *t, scoring s, long keys) {
    if (by_amx(s)) {
        find_spans(t, s, keys);
        transpose_values(t, s, keys);
        return;
    }
    if (in_pairs(s.kind)) {
        for (long key = 0; key < keys; key += 2) {
            float *words = t->wide_values + key / 2 * s.dim;
            join_rows(words, t->value_rows[key], key + 1 < keys ? t->value_rows[key + 1] : NULL, s.dim);
            t->value_rows[key / 2] = words;
        }
    } else if (s.kind != FLOAT32) {
        for (long key = 0; key < keys; key++) {
            if (s.kind == INT8) {
                t->key_scales[key] = scale_behind(t->key_rows[key], s.dim);
                t->value_scales[key] = scale_behind(t->value_rows[key], s.dim);
                widen_codes((int16_t *)(t->wide_keys + key * s.dim), t->key_rows[key], s.dim);
            } else widen_row(t->wide_keys + key * s.dim, t->key_rows[key], s.dim, s.kind);
            widen_row(t->wide_values + key * s.dim, t->value_rows[key], s.dim, s.kind);
            t->key_rows[key] = t->wide_keys + key * s.dim;
            t->value_rows[key] = t->wide_values + key * s.dim;
        }
    }
    for (long key = keys; key % TALL; key++) t->key_rows[key] = t->key_rows[keys - 1];
}

// Computes a block of keys at positions [start, start + keys), whose rows the caller has filled in, for `rows` queries.
INLINE void tile_block(tile *t, scoring s, long start, long keys, long rows, int fresh) {
    long lanes = ceil_div(rows, LANES) * LANES, all = weighed(s, keys);
    prepare_rows(t, s, keys);
    score_all(t, s, keys, lanes);
    int partly = (float)start < t->first[rows - 1] || (float)(start + all - 1) > t->last[0];
    for (long lane = 0; lane < lanes; lane += LANES) {
        if (s.softcap != 0) cap_scores(t, keys, lane, s.softcap);
        if (s.biased) add_bias(t, keys, lane);
        if (s.sloping) slope_scores(t, start, keys, lane);
        if (partly) hide_scores(t, start, all, lane);
        weigh(t, s, all, lane);
    }
    value_all(t, s, in_pairs(s.kind) ? ceil_div(keys, 2) : keys, fresh, lanes);
}

// Ends a chunk: merges it with those before it, and begins the next.
INLINE void tile_merge(tile *t, scoring s, long rows) {
    tile_state *into = t->merged, *next = t->chunk;
    if (into == NULL) {
        t->merged = next;
        tile_fresh(t, &t->states[1]);
        return;
    }
    for (long lane = 0; lane < rows; lane += LANES) {
        vec before = vec_load(into->largest + lane, FLOAT32), last = vec_load(next->largest + lane, FLOAT32);
        vec largest = vec_max(before, last);
        vec old = vec_exp2(vec_sub(before, largest), FLOAT32), new = vec_exp2(vec_sub(last, largest), FLOAT32);
        vec total = vec_mul(vec_load(into->total + lane, FLOAT32), old);
        total = vec_add(total, vec_mul(vec_load(next->total + lane, FLOAT32), new));
        vec_store(into->largest + lane, largest, FLOAT32);
        vec_store(into->total + lane, total, FLOAT32);
        for (long i = lane; i < s.dim * TILE; i += TILE) {
            vec sum = vec_mul(vec_load(into->out + i, FLOAT32), old);
            vec_store(into->out + i, vec_fma(vec_load(next->out + i, FLOAT32), new, sum), FLOAT32);
        }
    }
    tile_fresh(t, next);
}

// What the sums of values are multiplied by at the end, from the largest scores, the sums of weights and the sinks.
INLINE vec share_of(vec largest, vec total, vec sink, int sinking) {
    if (!sinking) return vec_div(vec_all(1.0f), total);
    vec top = vec_max(largest, sink), kept = vec_exp2(vec_sub(largest, top), FLOAT32);
    return vec_div(kept, vec_add(vec_mul(total, kept), vec_exp2(vec_sub(sink, top), FLOAT32)));
}

// Ends the last chunk. Adding zero turns -0 into 0, as a key that is not seen does.
INLINE void tile_end(tile *t, scoring s, long rows) {
    tile_merge(t, s, rows);
    for (long row = 0; row < rows; row += LANES) {
        vec largest = vec_load(t->merged->largest + row, FLOAT32), total = vec_load(t->merged->total + row, FLOAT32);
        vec share = share_of(largest, total, vec_load(t->sinks + row, FLOAT32), s.sinking);
        for (long dim = 0; dim < s.dim; dim += LANES) {
            vec square[LANES];
            for (int d = 0; d < LANES; d++) {  // past the last dimension are garbage values, which are not stored
                square[d] = vec_fma(vec_load(t->merged->out + (dim + d) * TILE + row, FLOAT32), share, vec_zero());
            }
            vec_transpose(square);
            for (int r = 0; r < least(LANES, rows - row); r++)
                vec_store_upto(at_out(t->out_rows[row + r], dim, s.outer), square[r], s.dim - dim, s.outer);
        }
    }
}
