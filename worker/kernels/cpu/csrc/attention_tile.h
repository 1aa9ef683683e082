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
// - AMX (`attention_amx.h`) computes bfloat16, if heads are a multiple of DEPTH dimensions wide. It adds DEPTH products at
//   a time: those of even numbers in their order, from zero on; those of odd ones in the same way; then both sums; and
//   the result to what was added before. The numbers of a score are dimensions, and those of a dimension of the values
//   are the keys of a block from a multiple of DEPTH in the sequence on. A block's values are summed from zero on, and
//   the sum before the block, multiplied by its decay, is added by fused multiplication and addition. Scores that nothing
//   is added to are multiplied by `scale` as the largest one is subtracted, by fused multiplication and addition.
// - Keys are taken in chunks of CHUNK, which begin at multiples of CHUNK in the sequence, and chunks in blocks of KEYS,
//   or for AMX as one block: its sums then leave the registers once. Each chunk has a state of its own, which begins
//   empty. A block multiplies the chunk's sums by 2 to the power of (largest score before it - largest score with it)
//   and adds its own, with weights relative to the latter.
// - A block's weights are summed by key modulo LANES, in the order of keys, and these sums as `vec_sum` sums lanes.
// - Without AMX a dimension of the values is summed over words of keys in their order, from the decayed sum on.
// - The states of chunks are merged in ascending order into that of the first; each is multiplied by 2 to the power of
//   (its largest score - the larger one). At the end the sum of values is multiplied by 1 / the sum of weights.
// - A sink is one more key whose value is zero. It is merged last, into the sum of weights alone.
// - Keys, blocks and chunks that a query does not see have weights of 0 and leave its bits unchanged, so it does not
//   matter which of them are computed for the sake of other rows. (A -0 may become 0 on the way, but 0 is added last.)
//
// Encoders see all of a text in one chunk, in blocks of as many keys.
#pragma once

#include "tile_products.h"

enum { UNITS_OF_THREAD = 4 };  // at least, if tiles can be cut into as many

// The queries of a tile: as many as it has room for, or fewer if threads would get few tiles of so many tokens.
INLINE long queries_of_tile(long tokens, long group, long kv_heads) {
    long count = TILE / group;
    while (count * group > SLICE && ceil_div(tokens, count) * kv_heads < UNITS_OF_THREAD * threads) count = ceil_div(count, 2);
    return count;
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
INLINE void code_queries(tile *t, scoring s, long rows) {
    for (long row = 0; row < laid_rows(rows); row++) {
        int16_t *words = (int16_t *)t->wide_values + row * MAX_DIM;
        t->factors[row] = write_words(words, t->query_rows[row], s.dim, s.outer) * s.scale;
        t->query_rows[row] = words;
    }
}

INLINE void tile_begin(tile *t, scoring s, long rows) {
    long words = words_of(s);
    if (s.kind == INT8) code_queries(t, s, rows);
    for (long row = 0; row < rows; row += LANES) {
        float *queries = t->queries + place_in(s, words, row);
        for (long i = 0; i < words; i += LANES) {
            vec square[LANES];
            for (int r = 0; r < LANES; r++) square[r] = load_words(t->query_rows[row + r], i, words - i, s);
            vec_transpose(square);
            for (int r = 0; r < least(LANES, words - i); r++)
                vec_store(queries + (i + r) * slice_of(s), square[r], FLOAT32);
        }
    }
    t->merged = NULL;
    t->lines = 0;
    tile_fresh(t, &t->states[0]);
}

// The weight that a key's value is multiplied by.
INLINE vec value_weight(const tile *t, scoring s, vec weight, long key) {
    return s.kind == INT8 ? vec_mul(weight, vec_all(t->value_scales[key])) : weight;
}

// The largest score of each of a vector of rows; `keys` is a multiple of LANES.
INLINE vec largest_score(const float *column, long stride, long keys) {
    vec most[4];  // of every fourth key: a comparison need not wait for the one before it
    for (int i = 0; i < 4; i++) most[i] = vec_all(UNSEEN);
    for (long key = 0; key < keys; key += 4, column += 4 * stride)
        for (int i = 0; i < 4; i++) most[i] = vec_max(vec_load(column + i * stride, FLOAT32), most[i]);
    return vec_max(vec_max(most[0], most[1]), vec_max(most[2], most[3]));
}

// Turns the scores of a vector of rows, times `factor`, into weights, in place; `keys` is a multiple of LANES.
INLINE void weigh(tile *t, scoring s, long keys, long lane, float factor) {
    const long stride = slice_of(s);
    float *column = t->scores + lane % stride, *total = t->chunk->total + lane;
    vec before = vec_load(t->chunk->largest + lane, FLOAT32), sums[LANES];
    vec largest = vec_max(vec_mul(largest_score(column, stride, keys), vec_all(factor)), before);
    vec less = vec_sub(vec_zero(), largest);
    for (int i = 0; i < LANES; i++) sums[i] = vec_zero();
    for (long key = 0; key < keys; key += LANES) {
        if (by_amx(s)) fetch_lines(t);
#pragma GCC unroll 8
        for (int i = 0; i < LANES; i += 2) {
            float *score = column + (key + i) * stride;
            vec weight = vec_exp2(vec_fma(vec_load(score, FLOAT32), vec_all(factor), less), s.kind);
            vec next = vec_exp2(vec_fma(vec_load(score + stride, FLOAT32), vec_all(factor), less), s.kind);
            sums[i] = vec_add(sums[i], weight);
            sums[i + 1] = vec_add(sums[i + 1], next);
            if (in_pairs(s.kind)) vec_store(column + (key + i) / 2 * stride, pairs_narrow(weight, next), FLOAT32);
            else {
                vec_store(score, value_weight(t, s, weight, key + i), FLOAT32);
                vec_store(score + stride, value_weight(t, s, next, key + i + 1), FLOAT32);
            }
        }
    }
    vec decay = vec_exp2(vec_sub(before, largest), FLOAT32);
    vec_store(t->chunk->largest + lane, largest, FLOAT32);
    vec_store(total, vec_add(vec_mul(vec_load(total, FLOAT32), decay), vec_sum_lanewise(sums)), FLOAT32);
    vec_store(t->decay + lane, decay, FLOAT32);
}

INLINE void scale_scores(float *column, long stride, long keys, float scale) {
    for (long key = 0; key < keys; key++, column += stride)
        vec_store(column, vec_mul(vec_load(column, FLOAT32), vec_all(scale)), FLOAT32);
}

INLINE void cap_scores(float *column, long stride, long keys, float softcap) {
    for (long key = 0; key < keys; key++, column += stride)
        vec_store(column, vec_cap(vec_load(column, FLOAT32), softcap), FLOAT32);
}

// The biases of a head of [heads, 2 * reach + 1], and the one that is added to the score of a key that stands
// `distance` after its query.
INLINE const float *bias_of(const float *bias, long reach, long head) { return bias + head * (2 * reach + 1) + reach; }
INLINE float bias_at(const float *bias, long reach, long distance) {
    return bias[distance > reach ? reach : distance < -reach ? -reach : distance] * LOG2_E;
}

// Fills in the biases of a tile whose first key stands `distance` after its first row.
INLINE void lay_bias(tile *t, const float *bias, long reach, long distance) {
    for (long i = 1; i < CHUNK + TILE; i++) t->bias[i] = bias_at(bias, reach, distance + CHUNK - i);
}

INLINE void add_bias(const tile *t, float *column, long stride, long keys, long lane) {
    for (long key = 0; key < keys; key++, column += stride)
        vec_store(column, vec_add(vec_load(column, FLOAT32), vec_load(t->bias + CHUNK + lane - key, FLOAT32)), FLOAT32);
}

// The score of a key that is `distance`, at most 0, from its query.
INLINE vec vec_slope(vec score, vec slope, vec distance) { return vec_fma(slope, distance, score); }

// In causal attention, where the last position that a row sees is its own.
INLINE void slope_scores(const tile *t, float *column, long stride, long start, long keys, long lane) {
    vec slope = vec_load(t->slopes + lane, FLOAT32), own = vec_load(t->last + lane, FLOAT32);
    for (long key = 0; key < keys; key++, column += stride) {
        vec distance = vec_sub(vec_all((float)(start + key)), own);
        vec_store(column, vec_slope(vec_load(column, FLOAT32), slope, distance), FLOAT32);
    }
}

INLINE void hide_scores(const tile *t, float *column, long stride, long start, long keys, long lane) {
    vec first = vec_load(t->first + lane, FLOAT32), last = vec_load(t->last + lane, FLOAT32), unseen = vec_all(UNSEEN);
    for (long key = 0; key < keys; key++, column += stride) {
        vec position = vec_all((float)(start + key));
        vec seen = vec_where_greater(first, position, unseen, vec_load(column, FLOAT32));
        vec_store(column, vec_where_greater(position, last, unseen, seen), FLOAT32);
    }
}

// Computes a block of keys at positions [start, start + keys), whose rows the caller has filled in, for `rows` queries.
INLINE void tile_block(tile *t, scoring s, long start, long keys, long rows, int fresh) {
    const long lanes = laid_rows(rows), stride = slice_of(s);
    const float late = late_scale(s);
    prepare_rows(t, s, keys);
    for (long first = 0, end; first < lanes; first = end) {
        end = least(first + stride, lanes);
        const long last = least(end, rows) - 1, seen = least(keys, (long)t->last[last] - start + 1), all = weighed(s, seen);
        if (seen <= 0) {  // only later rows see these keys
            if (fresh) memset(t->chunk->out + place_in(s, s.dim, first), 0, s.dim * stride * sizeof(float));
            continue;
        }
        const int partly = (float)start < t->first[last] || (float)(start + all - 1) > t->last[first];
        score_slice(t, s, seen, first, end);
        for (long lane = first; lane < end; lane += LANES) {
            float *column = t->scores + lane % stride;
            if (by_amx(s) && late == 1) scale_scores(column, stride, seen, s.scale);
            if (s.softcap != 0) cap_scores(column, stride, seen, s.softcap);
            if (s.biased) add_bias(t, column, stride, seen, lane);
            if (s.sloping) slope_scores(t, column, stride, start, seen, lane);
            if (partly) hide_scores(t, column, stride, start, all, lane);
            weigh(t, s, all, lane, late);
        }
        value_slice(t, s, in_pairs(s.kind) ? ceil_div(seen, 2) : seen, fresh, first, end);
    }
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
        const long stride = slice_of(s), first = place_in(s, s.dim, lane);
        for (long i = first; i < first + s.dim * stride; i += stride) {
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
        const float *out = t->merged->out + place_in(s, s.dim, row);
        for (long dim = 0; dim < s.dim; dim += LANES) {
            vec square[LANES];
            for (int d = 0; d < LANES; d++) {  // past the last dimension are garbage values, which are not stored
                square[d] = vec_fma(vec_load(out + (dim + d) * slice_of(s), FLOAT32), share, vec_zero());
            }
            vec_transpose(square);
            for (int r = 0; r < least(LANES, rows - row); r++)
                vec_store_upto(at_out(t->out_rows[row + r], dim, s.outer), square[r], s.dim - dim, s.outer);
        }
    }
}
