// Attention of rows with a single new token: the query heads that share a key head, over a chunk of keys. Rows of one
// sequence, as guesses are, take a chunk together, as if the later ones were more heads of the first.
//
// It adds in the order that `attention_tile.h` specifies. The lanes of a vector are keys for scores, so that a lane
// adds the words of a key one after the other, and dimensions for values. Memory bounds a row alone, so all products
// are interleaved with prefetches of what is used some time later: towards the end of a chunk, of the next one or the
// next unit. Whole numbers may be added in any order: of a cache of 8 bits the lanes are dimensions for scores, too.
#pragma once

#include "row_amx.h"
#include "row_scores.h"

// The position in a chunk where the block of a key ends, or all keys do.
INLINE long block_end(scoring s, long key, long stop) { return least(stop, (key / block_of(s) + 1) * block_of(s)); }

// Turns the scores of some blocks, times `factor`, into weights, in place. The largest ones of all blocks are found first, so that the
// processor need not wait for them block by block.
INLINE void weigh_blocks(float *scores, long first, long stop, scoring s, float factor, float *decays, float *part) {
    float before[LANES] = {0}, largest[LANES] = {0}, decay[LANES];
    part[0] = LOWEST, part[1] = 0;
    for (long key = first, next, b = 0; key < stop; key = next, b++) {
        next = block_end(s, key, stop);
        vec most = vec_all(LOWEST);
        for (long i = key; i < next; i += LANES) most = vec_max(vec_load(scores + i, FLOAT32), most);
        before[b] = part[0], largest[b] = vec_largest(most) * factor;
        part[0] = largest[b] = before[b] > largest[b] ? before[b] : largest[b];
    }
    vec_store(decay, vec_exp2(vec_sub(vec_load(before, FLOAT32), vec_load(largest, FLOAT32)), FLOAT32), FLOAT32);
    for (long key = first, next, b = 0; key < stop; key = next, b++) {
        next = block_end(s, key, stop);
        vec total = vec_zero();
        for (long i = key; i < next; i += LANES) {
            vec weight = vec_exp2(vec_fma(vec_load(scores + i, FLOAT32), vec_all(factor), vec_all(-largest[b])), s.kind);
            total = vec_add(total, weight);
            if (in_pairs(s.kind)) pairs_store(scores + key + (i - key) / 2, weight);
            else vec_store(scores + i, weight, FLOAT32);
        }
        decays[key / KEYS] = decay[b];
        part[1] = part[1] * decay[b] + vec_sum(total);
    }
}

INLINE void slope_head(const row_memory *m, span k, long head, float *scores) {
    static const float lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vec slope = vec_all(m->slopes[head] * LOG2_E), lane = vec_load(lanes, FLOAT32);
    for (long key = k.first; key < k.first + k.count; key += LANES) {
        vec distance = vec_add(vec_all(m->distance + (float)key), lane);
        vec_store(scores + key, vec_slope(vec_load(scores + key, FLOAT32), slope, distance), FLOAT32);
    }
}

INLINE void bias_head(const row_memory *m, span k, long head, float *scores) {
    const float *bias = bias_of(m->bias, m->reach, head);
    long distance = (long)m->distance;
    for (long key = k.first; key < k.first + k.count; key++) scores[key] += bias_at(bias, m->reach, distance + key);
}

INLINE void weigh_head(const row_memory *m, scoring s, span k, long head, float *part) {
    float *scores = m->scores + head * CHUNK, *decays = m->decays + head * (CHUNK / KEYS);
    long stop = k.first + k.count;
    const float late = late_scale(s);
    for (long key = k.first; key < stop && late == 1; key += LANES) {
        vec score = vec_mul(vec_load(scores + key, FLOAT32), vec_all(s.kind == INT8 ? m->factors[head] : s.scale));
        vec_store(scores + key, s.softcap != 0 ? vec_cap(score, s.softcap) : score, FLOAT32);
    }
    if (s.biased) bias_head(m, k, head, scores);
    if (s.sloping) slope_head(m, k, head, scores);
    for (long key = k.first; key < k.first + k.hidden; key++) scores[key] = UNSEEN;
    for (long all = k.first + weighed(s, k.count); stop < all; stop++) scores[stop] = UNSEEN;
    weigh_blocks(scores, k.first, stop, s, late, decays, part);
}

// Loads 2 * LANES dimensions of a value in bfloat16, or words of those of two values, in an order of their own.
INLINE void values_load2(vec to[2], const void *row, const void *other) {
    if (in_pairs(BFLOAT16)) {
        pairs_load2(to, row, other);
        return;
    }
    vec both = vec_load(row, FLOAT32);
    to[0] = widen_even(both), to[1] = widen_odd(both);
}

// Puts sums of such dimensions in order.
INLINE void order_values(vec *sums, const int vecs, scoring s) {
    for (int c = 0; c + 1 < vecs && s.kind == BFLOAT16; c += 2)
        if (in_pairs(s.kind)) pairs_order2(sums + c);
        else vec_interleave(sums + c);
}

// Adds the values of keys, weighted: `rows` of [0, keys).
INLINE void add_values(vec sums[HEADS][HEAD_VECS], scoring s, const void *const *rows, long keys, const float *weights,
                       const int heads, long dim, const int vecs, int fetch, row_stream *stream) {
    const int pairs = in_pairs(s.kind), step = 1 + pairs;
    const long bytes = step * vecs * LANES * width_of(s.kind);
    row_stream f = *stream;
    for (long key = 0; key < keys; key += step, weights++) {
        vec value[HEAD_VECS], weight[HEADS];
        const void *other = rows[key + pairs < keys ? key + pairs : key];  // a last row alone has itself beside it
        if (fetch && (bytes >= 64 || key % (64 / bytes) == 0))
            for (long i = 0; i < bytes; i += 64) fetch_line(&f);
        for (int h = 0; h < heads; h++) weight[h] = vec_all(weights[h * CHUNK]);
        for (int c = 0; c < vecs; c++) {
            const void *row = at(rows[key], dim + c * LANES, s.kind);
            if (s.kind != BFLOAT16 || vecs == 1)
                value[c] = pairs ? pairs_load(row, at(other, dim, s.kind)) : vec_load(row, s.kind);
            else if (c % 2 == 0) values_load2(value + c, row, at(other, dim + c * LANES, s.kind));
            for (int h = 0; h < heads; h++) sums[h][c] = words_fma(weight[h], value[c], sums[h][c], s);
        }
    }
    if (fetch) *stream = f;
}

// Multiplies weights by the scales of values.
INLINE void scale_weights(scoring s, const void *const *rows, long keys, float *weights, const int heads) {
    for (long key = 0; key < keys; key++, weights++) {
        float scale = scale_behind(rows[key], s.dim);
        for (int h = 0; h < heads; h++) weights[h * CHUNK] *= scale;
    }
}

// Goes on with the sums of a span's values: those `of` some of its keys. Between two calls the sums lie in `parts`.
INLINE void value_heads(row_memory *m, scoring s, span k, span of, long head, const int heads, long dim,
                        const int vecs, int fetch, float *parts) {
    vec sums[HEADS][HEAD_VECS];
    float *part = parts + head * part_size(s) + 2 + dim;
    for (int h = 0; h < heads; h++)
        for (int c = 0; c < vecs; c++) {
            sums[h][c] = of.first == k.first ? vec_zero() : vec_load(part + h * part_size(s) + c * LANES, FLOAT32);
            if (of.first % KEYS == 0) {
                vec decay = vec_all(m->decays[(head + h) * (CHUNK / KEYS) + of.first / KEYS]);
                sums[h][c] = vec_mul(sums[h][c], decay);
            }
        }
    long block = of.first / KEYS * KEYS > k.first ? of.first / KEYS * KEYS : k.first, before = of.first - block;
    const float *weights = m->scores + head * CHUNK + block + (in_pairs(s.kind) ? before / 2 : before);
    add_values(sums, s, m->values + of.first - k.first, of.count, weights, heads, dim, vecs, fetch, &m->stream);
    for (int h = 0; h < heads; h++) {
        if (of.first + of.count == k.first + k.count) order_values(sums[h], vecs, s);
        for (int c = 0; c < vecs; c++) vec_store(part + h * part_size(s) + c * LANES, sums[h][c], FLOAT32);
    }
}

INLINE void value_dims(row_memory *m, scoring s, span k, span of, long head, const int heads, int fetch,
                       float *parts) {
    const int most = vecs_beside(heads);
    long dim = 0, all = s.dim;
    if (s.kind == INT8)
        scale_weights(s, m->values + of.first - k.first, of.count, m->scores + head * CHUNK + of.first, heads);
    for (; dim + most * LANES <= all; dim += most * LANES)
        value_heads(m, s, k, of, head, heads, dim, most, fetch, parts);
    for (; dim + 2 * LANES <= all; dim += 2 * LANES) value_heads(m, s, k, of, head, heads, dim, 2, fetch, parts);
    for (; dim < all; dim += LANES) value_heads(m, s, k, of, head, heads, dim, 1, fetch, parts);
}

#define VALUES(k, h)                                                                                               \
    static __attribute__((noinline)) void value_##k##_##h(row_memory *m, scoring s, span keys, span of, long head, \
                                                          int fetch, float *parts) {                               \
        s.kind = k;                                                                                                \
        value_dims(m, s, keys, of, head, h, fetch, parts);                                                         \
    }
VALUES(FLOAT32, 1) VALUES(FLOAT32, 2) VALUES(FLOAT32, 3) VALUES(FLOAT32, 4)
VALUES(BFLOAT16, 1) VALUES(BFLOAT16, 2) VALUES(BFLOAT16, 3) VALUES(BFLOAT16, 4)
VALUES(INT8, 1) VALUES(INT8, 2) VALUES(INT8, 3) VALUES(INT8, 4)

static void (*const value_loops[][HEADS])(row_memory *, scoring, span, span, long, int, float *) = {
    [FLOAT32] = {value_FLOAT32_1, value_FLOAT32_2, value_FLOAT32_3, value_FLOAT32_4},
    [BFLOAT16] = {value_BFLOAT16_1, value_BFLOAT16_2, value_BFLOAT16_3, value_BFLOAT16_4},
    [INT8] = {value_INT8_1, value_INT8_2, value_INT8_3, value_INT8_4},
};

// Goes on with the sums of a span's values by those of its keys in [from, stop). Takes values at a time that stay in the
// first-level cache, for all heads and dimensions. If all keys came at once for some dimensions, then memory would be waited
// for with the first ones, and idle with the others.
INLINE void value_keys(row_memory *m, scoring s, span k, long from, long stop, long head, long last, int fetch,
                       float *parts) {
    if (by_amx(s)) {
        value_keys_by_amx(m, s, k, from, stop, head, last, fetch, parts);
        return;
    }
    for (span of = {from, 0, 0}; of.first < stop; of.first += of.count) {
        of.count = least(stop, (of.first / m->held + 1) * m->held) - of.first;
        for (long h = head, heads; h < last; h += heads) {
            heads = heads_of(h, last);
            value_loops[s.kind][heads - 1](m, s, k, of, h, fetch && h == head, parts);
        }
    }
}

// The keys of a span that a row sees. The first row lacks `over` of them, and each row one less than the one before it.
INLINE span seen_by(span k, long row, long over) {
    if (over > row) k.count -= over - row;
    return k;
}

// Computes the parts [head][part_size] of keys whose rows the caller has filled in, for rows [row, rows) with `group`
// heads each, of which the last sees all keys. Scores of keys that a row does not see are computed for nothing. Values
// are left out, for they may not be finite: so all rows take the blocks together that all of them see, and each the others.
INLINE void row_chunk(row_memory *m, scoring s, long group, long row, long rows, span k, long over, float *parts) {
    stream_begin(&m->stream, m->rows, 2 * k.count);
    if (s.kind == INT8) score_coded_keys(m, s, row * group, rows * group, k);
    else if (by_amx(s)) score_keys_by_amx(m, s, row * group, rows * group, k);
    else score_keys(m, s, row * group, rows * group, k);
    m->values = m->rows + k.count;
    for (long head = row * group; head < rows * group; head++)
        weigh_head(m, s, seen_by(k, head / group, over), head, parts + head * part_size(s));
    long from = k.first, stop = (k.first + seen_by(k, row, over).count - 1) / KEYS * KEYS;
    if (row < over && from < stop) {
        value_keys(m, s, k, from, stop, row * group, rows * group, 1, parts);
        from = stop;
    }
    for (long fetch = 1, next; row < rows; row = next, fetch = 0) {
        next = row < over ? row + 1 : rows;
        span seen = seen_by(k, row, over);
        value_keys(m, s, seen, from, seen.first + seen.count, row * group, next * group, fetch, parts);
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
