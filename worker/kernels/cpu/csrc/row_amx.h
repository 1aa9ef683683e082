// Scores and values of rows of their own by AMX.
#pragma once

#include "row_memory.h"

// Transposes [key][QUAD] of SPAN keys.
INLINE void transpose_quad(vec v[QUAD]) {
#if LANES == 16
    const __m512i first = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(2));
    vec a = _mm512_permutex2var_ps(v[0], first, v[1]), b = _mm512_permutex2var_ps(v[2], first, v[3]);
    vec c = _mm512_permutex2var_ps(v[0], second, v[1]), d = _mm512_permutex2var_ps(v[2], second, v[3]);
    v[0] = _mm512_shuffle_f32x4(a, b, 0x44), v[1] = _mm512_shuffle_f32x4(a, b, 0xee);
    v[2] = _mm512_shuffle_f32x4(c, d, 0x44), v[3] = _mm512_shuffle_f32x4(c, d, 0xee);
#else
    (void)v;
#endif
}

// Computes the scores of a span, as `score_keys` does.
INLINE void score_keys_by_amx(row_memory *m, scoring s, long head, long last, span k) {
    char copy[SPAN * MAX_DIM * 2] __attribute__((aligned(64)));
    const long words = words_of(s), beside = m->beside, first = head / beside * beside;
    const int wide = words > 2 * SPAN;
    row_stream f = m->stream;
    for (long key = 0; key < k.count; key += SPAN) {
        spaced keys = spaced_rows(m->rows + key, k.count - key, s.dim * 2, copy);
        for (long h = first; h < last; h += beside)
            multiply_keys(keys, m->queries + h * words, words, beside, wide && h == first ? &f : NULL,
                          m->raw + h * CHUNK + key * beside);
        for (int i = 0; !wide && i < SPAN; i++) fetch_row(&f);
    }
    m->stream = f;
    // Not before: what is stored row by row cannot be loaded at once.
    for (long h = first; h < last; h += beside)
        for (long key = 0; key < k.count; key += SPAN) {
            vec of[SPAN];
            for (int i = 0; i < beside; i++) of[i] = vec_load(m->raw + h * CHUNK + key * beside + i * SPAN, FLOAT32);
            if (beside == QUAD) transpose_quad(of);
            else vec_transpose(of);
            for (int i = 0; i < least(beside, last - h); i++)
                vec_store(m->scores + (h + i) * CHUNK + k.first + key, of[i], FLOAT32);
        }
}

// Lays SPANs of dimensions of DEPTH keys as [SPAN of dimensions][word of keys][dimension], in the order of
// `pairs_load2`; those of keys from `count` on are zeros.
INLINE void lay_values(const void *const *rows, long count, long dim, const int spans, row_stream *f, float *to) {
    static const bf16 zeros[DEPTH];
    for (long key = 0; key < DEPTH; key += 2, to += SPAN) {
        for (int j = 0; j < spans; j += 2) {
            const void *even = key < count ? at(rows[key], dim + j * SPAN, BFLOAT16) : zeros;
            const void *odd = key + 1 < count ? at(rows[key + 1], dim + j * SPAN, BFLOAT16) : zeros;
            vec pair[2];
            pairs_load2(pair, even, odd);
            vec_store(to + j * SPAN * SPAN, pair[0], FLOAT32), vec_store(to + (j + 1) * SPAN * SPAN, pair[1], FLOAT32);
        }
        if (f) fetch_row(f);
        if (f && f->bytes <= 8 * SPAN) fetch_row(f);  // rows that are laid at once; others are laid twice
    }
}

// Some values of a span, and the heads that they are weighted for.
typedef struct {
    const void *const *rows;
    const float *weights;  // of the first head
    long keys, heads;
    int fresh;             // whether these are the first of their span
    row_stream *stream;    // NULL: nothing is prefetched
} weighted;

// Goes on with the sums of `spans` SPANs of dimensions.
INLINE void value_spans(const weighted *w, long dim, const int spans, float *part, long stride) {
    float values[2][4 * SPAN * SPAN] __attribute__((aligned(64)));
    float sums[4][SPAN * SPAN] __attribute__((aligned(64)));
    for (long h = 0; h < w->heads && !w->fresh; h++)
        for (int j = 0; j < spans; j++) vec_store(sums[j] + h * SPAN, vec_load(part + h * stride + j * SPAN, FLOAT32), FLOAT32);
    begin_values(spans, w->fresh ? NULL : sums);
    for (long key = 0; key < w->keys; key += DEPTH) {
        float *laid = values[key / DEPTH % 2];
        lay_values(w->rows + key, w->keys - key, dim, spans, dim <= 4 * SPAN ? w->stream : NULL, laid);
        add_weighted(w->weights + key / 2, CHUNK * 4, laid, spans);
    }
    end_values(spans, sums);
    for (long h = 0; h < w->heads; h++, part += stride)
        for (int j = 0; j < spans; j++) vec_store(part + j * SPAN, vec_load(sums[j] + h * SPAN, FLOAT32), FLOAT32);
}

// Puts the sums of a head into the order of dimensions.
INLINE void order_part(float *part, scoring s) {
    for (long dim = 0; dim < s.dim; dim += 2 * SPAN) {
        vec both[2] = {vec_load(part + dim, FLOAT32), vec_load(part + dim + SPAN, FLOAT32)};
        pairs_order2(both);
        vec_store(part + dim, both[0], FLOAT32), vec_store(part + dim + SPAN, both[1], FLOAT32);
    }
}

// Adds values as `value_keys` does.
INLINE void value_keys_by_amx(row_memory *m, scoring s, span k, long from, long stop, long head, long last, int fetch,
                              float *parts) {
    const long size = part_size(s), before = from - k.first;
    for (long h = head; h < last; h += SPAN) {
        weighted w = {m->values + before, m->scores + h * CHUNK + k.first + before / 2, stop - from, least(SPAN, last - h),
                      before == 0, fetch && h == head ? &m->stream : NULL};
        float *part = parts + h * size + 2;
        long dim = 0;
        for (; dim + 4 * SPAN <= s.dim; dim += 4 * SPAN) value_spans(&w, dim, 4, part + dim, size);
        for (; dim < s.dim; dim += 2 * SPAN) value_spans(&w, dim, 2, part + dim, size);
    }
    for (long h = head; h < last && stop == k.first + k.count; h++) order_part(parts + h * size + 2, s);
}
