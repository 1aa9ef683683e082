// Rows of numbers as whole ones times a scale: those of a cache of 8 bits, and queries that are compared with them.
//
// A cached row is its codes [dim] of 8 bits, and behind them its scale in bfloat16. A code is the number divided by the
// scale, rounded to nearest even. Queries are words of 16 bits. Sums of products of words and codes are whole numbers,
// which are exact, so they have the same bits in any order: 32767 * 128 * MAX_DIM is below 2^31.
#pragma once

#include "pairs.h"
#include "int_vec.h"

enum { SCALE_BYTES = 2, MOST_CODE = 127, MOST_WORD = 32767 };

// The numbers of a cached row, its scale included.
INLINE long row_numbers(long dim, kind k) { return k == INT8 ? dim + SCALE_BYTES : dim; }

INLINE float scale_behind(const void *row, long dim) {
    bf16 scale;
    memcpy(&scale, (const char *)row + dim, SCALE_BYTES);
    return widen(scale);
}

// The scale with which the largest of some numbers is `most`: 0 if all are 0, NaN if one of them is not finite.
INLINE float scale_of(const void *row, long dim, float most, kind k) {
    vec largest = vec_zero(), strange = vec_zero();
    for (long i = 0; i < dim; i += LANES) {
        vec x = vec_load_upto(at(row, i, k), dim - i, k);
        largest = vec_max(vec_abs(x), largest);
        strange = vec_fma(x, vec_zero(), strange);
    }
    return vec_largest(largest) / most + vec_sum(strange);
}

INLINE vec divisor_of(float scale) { return vec_all(scale == 0 ? 1.0f : scale); }

// Writes numbers [dim] as codes with their scale behind them.
INLINE void write_codes(int8_t *to, const void *row, long dim, kind k) {
    bf16 scale = narrow(scale_of(row, dim, MOST_CODE, k));
    vec divisor = divisor_of(widen(scale));
    for (long i = 0; i < dim; i += LANES)
        vec_store_codes(to + i, vec_div(vec_load_upto(at(row, i, k), dim - i, k), divisor), dim - i);
    memcpy(to + dim, &scale, SCALE_BYTES);
}

// Writes a query [dim] as words, and zeros up to a whole vector; -> its scale.
INLINE float write_words(int16_t *to, const void *row, long dim, kind k) {
    float scale = scale_of(row, dim, MOST_WORD, k);
    vec divisor = divisor_of(scale);
    for (long i = 0; i < dim; i += LANES)
        vec_store_words(to + i, vec_div(vec_load_upto(at(row, i, k), dim - i, k), divisor));
    return scale;
}
