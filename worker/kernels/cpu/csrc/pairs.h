// Vector functions that only attention needs: products of pairs of bfloat16, if the processor has them, sums across
// lanes, and transposition.
#pragma once

#include "vec.h"

#if defined(__AVX512BF16__)
INLINE int in_pairs(kind k) { return k == BFLOAT16; }
INLINE vec pairs_fma(vec a, vec b, vec sum) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
// Word i of the result is a[i], b[i].
INLINE vec pairs_narrow(vec a, vec b) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_castsi512_ps(_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(b, a)));
}
INLINE vec pairs_join(vec a, vec b) {  // both widened
    return _mm512_castsi512_ps(_mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(a), 16), _mm512_castps_si512(b)));
}
// Joins dimensions of two rows of bfloat16 to words: LANES of them, or twice as many in an order of their own.
INLINE vec pairs_load(const void *even, const void *odd) {
    return pairs_join(vec_load(even, BFLOAT16), vec_load(odd, BFLOAT16));
}
INLINE void pairs_load2(vec to[2], const void *even, const void *odd) {
    __m512i a = _mm512_loadu_si512(even), b = _mm512_loadu_si512(odd);
    to[0] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(a, b));
    to[1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(a, b));
}
// Puts lanes that `pairs_load2` laid into the order of dimensions.
INLINE void pairs_order2(vec v[2]) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    vec low = _mm512_permutex2var_ps(v[0], first, v[1]);
    v[1] = _mm512_permutex2var_ps(v[0], _mm512_add_epi32(first, _mm512_set1_epi32(8)), v[1]);
    v[0] = low;
}
// Narrows a vector to half as many words.
INLINE void pairs_store(void *to, vec a) { _mm256_storeu_si256(to, narrow_lanes(a)); }
#else  // never called, but the code that calls them must compile
INLINE int in_pairs(kind k) { return (void)k, 0; }
INLINE vec pairs_fma(vec a, vec b, vec sum) { return (void)a, (void)b, sum; }
INLINE vec pairs_narrow(vec a, vec b) { return (void)b, a; }
INLINE vec pairs_join(vec a, vec b) { return (void)b, a; }
INLINE vec pairs_load(const void *even, const void *odd) { return (void)even, (void)odd, vec_zero(); }
INLINE void pairs_load2(vec to[2], const void *even, const void *odd) { (void)to, (void)even, (void)odd; }
INLINE void pairs_order2(vec v[2]) { (void)v; }
INLINE void pairs_store(void *to, vec a) { (void)to, (void)a; }
#endif

// Sums vectors in the order in which `vec_sum` sums lanes. They are lost.
INLINE vec vec_sum_lanewise(vec v[LANES]) {
#pragma GCC unroll 4
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) v[i] = vec_add(v[i], v[i + half]);
    return v[0];
}

// Puts a vector of lanes and one of those that follow each into order.
INLINE void vec_interleave(vec v[2]) {
#if LANES == 16
    const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    vec low = _mm512_permutex2var_ps(v[0], first, v[1]);
    v[1] = _mm512_permutex2var_ps(v[0], _mm512_add_epi32(first, _mm512_set1_epi32(8)), v[1]);
    v[0] = low;
#else
    vec low = _mm256_unpacklo_ps(v[0], v[1]), high = _mm256_unpackhi_ps(v[0], v[1]);
    v[0] = _mm256_permute2f128_ps(low, high, 0x20);
    v[1] = _mm256_permute2f128_ps(low, high, 0x31);
#endif
}

// Transposes a square: rows become columns.
#if defined(__AVX512F__)
INLINE void vec_transpose(vec r[16]) {
    __m512 t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 4; j++) {
            t[i + j] = _mm512_shuffle_f32x4(r[i + j], r[i + j + 4], 0x88);
            t[i + j + 4] = _mm512_shuffle_f32x4(r[i + j], r[i + j + 4], 0xdd);
        }
    for (int j = 0; j < 8; j++) {
        r[j] = _mm512_shuffle_f32x4(t[j], t[j + 8], 0x88);
        r[j + 8] = _mm512_shuffle_f32x4(t[j], t[j + 8], 0xdd);
    }
}
#else
INLINE void vec_transpose(vec r[8]) {
    __m256 t[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int j = 0; j < 4; j++) {
        t[j] = _mm256_permute2f128_ps(r[j], r[j + 4], 0x20);
        t[j + 4] = _mm256_permute2f128_ps(r[j], r[j + 4], 0x31);
    }
    for (int j = 0; j < 8; j++) r[j] = t[j];
}
#endif
