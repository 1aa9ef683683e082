// Products of a tile of query rows with keys, and of their weights with values. The order of their sums:
// `attention_tile.h`.
#pragma once

#include "attention_amx.h"
#include "codes.h"
#include "threads.h"

#if defined(__AMX_BF16__)
enum { TILE = 256 };  // rows, for which values are transposed, and keys and values prefetched, once
#else
enum { TILE = 64 };
#endif
enum { SLICE = 64, KEYS = 64, CHUNK = 256, MAX_DIM = 512 };

enum { PACE = 16 };  // words that are multiplied between two prefetches
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
    float out[MAX_DIM * TILE];  // [slice][dimension][row]
} tile_state;

// The memory of one thread. The caller fills in the rows.
typedef struct {
    float queries[MAX_DIM * TILE];                         // [slice][word][row]
    float scores[CHUNK * 2 * SPAN];                        // [key][row] of a slice; later weights [word of keys][row]
    float decay[TILE];                                     // what a block multiplies the sums before it by
    tile_state states[2], *chunk, *merged;                 // this chunk's; that of the chunks before it, or NULL
    float first[TILE], last[TILE];                         // positions that each row sees, in ascending order
    float sinks[TILE];                                     // the scores of sinks, if rows have them
    float slopes[TILE];                                    // times log2(e), if rows have them
    const void *query_rows[TILE];                          // `laid_rows`
    void *out_rows[TILE];
    const void *key_rows[CHUNK + TALL], *value_rows[CHUNK];  // rows of a block
    float bias[TILE + CHUNK];                                // bias[CHUNK + r - i] is that of row r and key i
    float wide_keys[KEYS * MAX_DIM * 2], wide_values[KEYS * MAX_DIM * 2];
    float factors[TILE];  // of queries in words: their scales times `scale`
    float key_scales[KEYS + TALL], value_scales[KEYS];
    const void *next_rows[2 * CHUNK];  // the keys and values of the next block,
    row_stream stream;                 // which are prefetched while this one is computed,
    long lines;                        // so many lines each time
    spaced spans[CHUNK / SPAN];        // keys for AMX,
    float sums[2 * SPAN * 2 * SPAN];   // and what it adds up for some dimensions of a block
} tile;

// The rows of a tile that are laid out: whole vectors, past the last row of which it is repeated.
INLINE long laid_rows(long rows) { return ceil_div(rows, LANES) * LANES; }

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

// The keys of a block: they have one largest score.
INLINE long block_of(scoring s) { return by_amx(s) ? CHUNK : KEYS; }

// So many rows of a tile are computed at a time, and their numbers lie beside each other.
INLINE long slice_of(scoring s) { return by_amx(s) ? 2 * SPAN : SLICE; }

// Where a row's numbers begin in [slice][height][row].
INLINE long place_in(scoring s, long height, long row) { return row / slice_of(s) * slice_of(s) * height + row % slice_of(s); }

// What scores are multiplied by as they become weights. 1: they are scaled before.
INLINE float late_scale(scoring s) { return by_amx(s) && s.softcap == 0 && !s.biased && !s.sloping ? s.scale : 1; }

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

// Prefetches some lines of the next block.
INLINE void fetch_lines(tile *t) {
    for (long n = t->lines; n > 0 && t->stream.left > 0; n--) fetch_line(&t->stream);
}

// Computes scores[key][lane] of `rows` keys and `vecs` vectors of queries.
INLINE void score_block(tile *t, scoring s, long key, long lane, const int rows, const int vecs) {
    vec sums[TALL][VECS];
    const long words = words_of(s), stride = slice_of(s);
    const float *k[TALL], *q = t->queries + place_in(s, words, lane);
    float *scores = t->scores + key * stride + lane % stride;
    for (int r = 0; r < rows; r++) {
        k[r] = t->key_rows[key + r];
        for (int c = 0; c < vecs; c++) sums[r][c] = vec_zero();
    }
    for (long i = 0, stop; i < words; i = stop) {
        stop = least(words, i + PACE);
        fetch_lines(t);
        for (long word = i; word < stop; word++, q += stride)
            for (int r = 0; r < rows; r++) {
                vec same = vec_all(k[r][word]);
                for (int c = 0; c < vecs; c++)
                    sums[r][c] = score_fma(vec_load(q + c * LANES, FLOAT32), same, sums[r][c], s);
            }
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < vecs; c++) {
            vec score = sums[r][c], factor = vec_all(s.scale);
            if (s.kind == INT8) {
                score = vec_mul(vec_of_whole(bits_of_vec(score)), vec_all(t->key_scales[key + r]));
                factor = vec_load(t->factors + lane + c * LANES, FLOAT32);
            }
            vec_store(scores + r * stride + c * LANES, vec_mul(score, factor), FLOAT32);
        }
}

// Adds weighted values to out[dimension][lane] for `words` of keys.
INLINE void value_block(tile *t, scoring s, long words, int fresh, long dim, long lane, const int rows,
                        const int vecs) {
    vec sums[TALL][VECS];
    const long stride = slice_of(s);
    const float *w = t->scores + lane % stride;
    float *out = t->chunk->out + place_in(s, s.dim, lane) + dim * stride;
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < vecs; c++) {
            vec decay = vec_load(t->decay + lane + c * LANES, FLOAT32);
            sums[r][c] = fresh ? vec_zero() : vec_mul(vec_load(out + r * stride + c * LANES, FLOAT32), decay);
        }
    for (long i = 0, stop; i < words; i = stop) {
        stop = least(words, i + PACE);
        fetch_lines(t);
        for (long word = i; word < stop; word++, w += stride) {
            const float *v = (const float *)t->value_rows[word] + dim;
            for (int r = 0; r < rows; r++) {
                vec same = vec_all(v[r]);
                for (int c = 0; c < vecs; c++)
                    sums[r][c] = words_fma(vec_load(w + c * LANES, FLOAT32), same, sums[r][c], s);
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < vecs; c++) vec_store(out + r * stride + c * LANES, sums[r][c], FLOAT32);
}

// The same as `score_block`, of all keys and a slice of queries, but for `scale`.
INLINE void score_by_amx(tile *t, scoring s, long keys, long lane, int beside) {
    products p = {.row_step = DEPTH * 2, .columns = t->queries + place_in(s, words_of(s), lane), .column_step = SPAN * 2 * SPAN,
                  .steps = s.dim / DEPTH, .beside = beside};
    for (long key = 0; key < keys; key += 2 * SPAN) {
        p.rows[0] = t->spans[key / SPAN], p.rows[1] = t->spans[key / SPAN + 1], p.below = key + SPAN < keys;
        fetch_lines(t);
        multiply(&p, t->scores + key * 2 * SPAN);
    }
}

// The same as `value_block`, of all dimensions and a slice of queries.
INLINE void value_by_amx(tile *t, scoring s, long words, int fresh, long lane, int beside) {
    products p = {.row_step = SPAN * 64, .columns = t->scores, .column_step = SPAN * 2 * SPAN, .steps = ceil_div(words, SPAN),
                  .below = 1, .beside = beside};
    const char *values = (const char *)t->wide_values;
    float *out = t->chunk->out + place_in(s, s.dim, lane);
    for (long dim = 0; dim < s.dim; dim += 2 * SPAN, out += 2 * SPAN * 2 * SPAN) {
        p.rows[0] = (spaced){values + dim * CHUNK * 2, 64}, p.rows[1] = (spaced){values + (dim + SPAN) * CHUNK * 2, 64};
        fetch_lines(t);
        multiply(&p, fresh ? out : t->sums);
        for (long i = 0; i <= beside * SPAN && !fresh; i += LANES) {
            vec decay = vec_load(t->decay + lane + i, FLOAT32);
            for (long place = i; place < 2 * SPAN * 2 * SPAN; place += 2 * SPAN) {
                vec before = vec_load(out + place, FLOAT32);
                vec_store(out + place, vec_fma(before, decay, vec_load(t->sums + place, FLOAT32)), FLOAT32);
            }
        }
    }
}

// The same of all keys, and of all dimensions, for the last vectors of queries, which are fewer than VECS.
INLINE void score_rest(tile *t, scoring s, long keys, long lane, const int vecs) {
    for (long key = 0; key < keys; key += TALL) score_block(t, s, key, lane, TALL, vecs);
}
INLINE void value_rest(tile *t, scoring s, long words, int fresh, long lane, const int vecs) {
    for (long dim = 0; dim < s.dim; dim += TALL) value_block(t, s, words, fresh, dim, lane, TALL, vecs);
}

// The scores of the queries of a slice, [lane, lanes). Those by AMX are not multiplied by `scale` yet.
INLINE void score_slice(tile *t, scoring s, long keys, long lane, long lanes) {
    if (by_amx(s)) {
        score_by_amx(t, s, keys, lane, lane + SPAN < lanes);
        return;
    }
    for (; lane + VECS * LANES <= lanes; lane += VECS * LANES)
        for (long key = 0; key < keys; key += ROWS) score_block(t, s, key, lane, ROWS, VECS);
    const long rest = ceil_div(lanes - lane, LANES);
    if (VECS > 3 && rest == 3) score_rest(t, s, keys, lane, 3);
    else if (VECS > 2 && rest == 2) score_rest(t, s, keys, lane, 2);
    else if (rest == 1) score_rest(t, s, keys, lane, 1);
}

INLINE void value_slice(tile *t, scoring s, long words, int fresh, long lane, long lanes) {
    if (by_amx(s)) {
        value_by_amx(t, s, words, fresh, lane, lane + SPAN < lanes);
        return;
    }
    for (; lane + VECS * LANES <= lanes; lane += VECS * LANES)
        for (long dim = 0; dim < s.dim; dim += ROWS) value_block(t, s, words, fresh, dim, lane, ROWS, VECS);
    const long rest = ceil_div(lanes - lane, LANES);
    if (VECS > 3 && rest == 3) value_rest(t, s, words, fresh, lane, 3);
    else if (VECS > 2 && rest == 2) value_rest(t, s, words, fresh, lane, 2);
    else if (rest == 1) value_rest(t, s, words, fresh, lane, 1);
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
            float *to = t->wide_values + dim * CHUNK / 2 + first / DEPTH * SPAN * SPAN;
            vec pair[2], low[LANES], high[LANES];
            for (int i = 0; i < LANES; i++, row += 2) {
                pairs_load2(pair, at(row[0], dim, BFLOAT16), at(row[1], dim, BFLOAT16));
                low[i] = pair[0], high[i] = pair[1];
            }
            vec_transpose(low), vec_transpose(high);
            for (int i = 0; i < LANES; i++) {  // where `pairs_load2` laid dimension d of each eight
                long d = i / 4 * 8 + i % 4;
                float *place = to + d / SPAN * SPAN * CHUNK / 2 + d % SPAN * SPAN;
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
