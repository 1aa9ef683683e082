// Vectors of whole numbers, beside those of floats in `vec.h`.
#pragma once

#include "vec.h"

// A vector of int32. The type of the intrinsics is one of longs, and gcc would copy sums from one to the other.
typedef int32_t whole __attribute__((vector_size(LANES * 4)));

// Sums follow each other as they are written: a compiler would make many products first, for which there are no registers.
INLINE whole in_register(whole a) {
#if defined(__AVX2__)
    __asm__ volatile("" : "+v"(a));
#endif
    return a;
}

#if LANES == 16
INLINE whole whole_all(uint32_t x) { return (whole)_mm512_set1_epi32((int)x); }
INLINE whole whole_load(const void *p) { return (whole)_mm512_loadu_si512(p); }
INLINE vec vec_of_whole(whole a) { return _mm512_cvtepi32_ps((__m512i)a); }
INLINE whole whole_of_vec(vec a) { return (whole)_mm512_cvtps_epi32(a); }  // rounded to nearest even
INLINE int32_t whole_sum(whole a) { return _mm512_reduce_add_epi32((__m512i)a); }
INLINE whole words_down(whole a, int n) { return (whole)_mm512_srli_epi16((__m512i)a, (unsigned)n); }
INLINE whole words_below(whole a, int n) { return (whole)_mm512_and_si512((__m512i)a, _mm512_set1_epi16((short)n)); }
INLINE whole low_nibbles(whole a) { return (whole)_mm512_and_si512((__m512i)a, _mm512_set1_epi8(15)); }
INLINE whole high_nibbles(whole a) { return low_nibbles((whole)_mm512_srli_epi16((__m512i)a, 4)); }
INLINE void whole_store(void *p, whole a) { _mm512_storeu_si512(p, (__m512i)a); }
INLINE whole whole_of_bytes(const void *p) { return (whole)_mm512_cvtepu8_epi32(_mm_loadu_si128(p)); }
INLINE whole whole_of_signed(const void *p) { return (whole)_mm512_cvtepi8_epi32(_mm_loadu_si128(p)); }
INLINE whole whole_up(whole a, int n) { return (whole)_mm512_slli_epi32((__m512i)a, (unsigned)n); }
INLINE whole whole_up_by(whole a, whole n) { return (whole)_mm512_sllv_epi32((__m512i)a, (__m512i)n); }
INLINE whole whole_down(whole a, int n) { return (whole)_mm512_srli_epi32((__m512i)a, (unsigned)n); }
INLINE whole whole_max(whole a, whole b) { return (whole)_mm512_max_epi32((__m512i)a, (__m512i)b); }
INLINE vec vec_of_bits(whole a) { return _mm512_castsi512_ps((__m512i)a); }
INLINE whole bits_of_vec(vec a) { return (whole)_mm512_castps_si512(a); }
INLINE whole table_of(const int8_t *levels) {  // of 16 bytes
    return (whole)_mm512_broadcast_i32x4(_mm_loadu_si128((const void *)levels));
}
INLINE whole looked_up(whole table, whole nibbles) {
    return (whole)_mm512_shuffle_epi8((__m512i)table, (__m512i)nibbles);
}

// Stores numbers as words: of each quad first the even ones, then the odd ones.
INLINE void whole_store_parts(void *p, whole a) {
    const __m512i places = _mm512_set_epi16(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 30, 26, 28, 24, 22, 18, 20, 16,
                                            14, 10, 12, 8, 6, 2, 4, 0);
    _mm256_storeu_si256(p, _mm512_castsi512_si256(_mm512_permutexvar_epi16(places, (__m512i)a)));
}

// Adds the products of bytes without a sign with bytes that have one to sums of 16 bits, two to each.
INLINE whole add_to_words(whole sums, whole w, whole x) {
    whole products = in_register((whole)_mm512_maddubs_epi16((__m512i)w, (__m512i)x));
    return in_register((whole)_mm512_add_epi16((__m512i)sums, (__m512i)products));
}

// Adds the products of pairs of words.
INLINE whole add_words(whole sum, whole w, whole x) {
#if defined(__AVX512VNNI__)
    return (whole)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
#else
    return in_register(sum + in_register((whole)_mm512_madd_epi16((__m512i)w, (__m512i)x)));
#endif
}

// Bytes as words, twice as many as there are lanes, of which `left` exist; others are 0.
INLINE whole words_of_bytes(const int8_t *p, long left) {
    __mmask32 there = left >= 2 * LANES ? 0xffffffffu : (1u << left) - 1;
    return (whole)_mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(there, p));
}
#else
INLINE whole whole_all(uint32_t x) { return (whole)_mm256_set1_epi32((int)x); }
INLINE whole whole_load(const void *p) { return (whole)_mm256_loadu_si256(p); }
INLINE vec vec_of_whole(whole a) { return _mm256_cvtepi32_ps((__m256i)a); }
INLINE whole whole_of_vec(vec a) { return (whole)_mm256_cvtps_epi32(a); }
INLINE int32_t whole_sum(whole a) {
    __m128i x = _mm_add_epi32(_mm256_castsi256_si128((__m256i)a), _mm256_extracti128_si256((__m256i)a, 1));
    x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32(x, 0xb1)));
}
INLINE whole words_down(whole a, int n) { return (whole)_mm256_srli_epi16((__m256i)a, n); }
INLINE whole words_below(whole a, int n) { return (whole)_mm256_and_si256((__m256i)a, _mm256_set1_epi16((short)n)); }
INLINE whole low_nibbles(whole a) { return (whole)_mm256_and_si256((__m256i)a, _mm256_set1_epi8(15)); }
INLINE whole high_nibbles(whole a) { return low_nibbles((whole)_mm256_srli_epi16((__m256i)a, 4)); }
INLINE void whole_store(void *p, whole a) { _mm256_storeu_si256(p, (__m256i)a); }
INLINE whole whole_of_bytes(const void *p) { return (whole)_mm256_cvtepu8_epi32(_mm_loadl_epi64(p)); }
INLINE whole whole_of_signed(const void *p) { return (whole)_mm256_cvtepi8_epi32(_mm_loadl_epi64(p)); }
INLINE whole whole_up(whole a, int n) { return (whole)_mm256_slli_epi32((__m256i)a, n); }
INLINE whole whole_up_by(whole a, whole n) { return a << n; }
INLINE whole whole_down(whole a, int n) { return (whole)_mm256_srli_epi32((__m256i)a, n); }
INLINE whole whole_max(whole a, whole b) { return (whole)_mm256_max_epi32((__m256i)a, (__m256i)b); }
INLINE vec vec_of_bits(whole a) { return _mm256_castsi256_ps((__m256i)a); }
INLINE whole bits_of_vec(vec a) { return (whole)_mm256_castps_si256(a); }
INLINE whole table_of(const int8_t *levels) {
    return (whole)_mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)levels));
}
INLINE whole looked_up(whole table, whole nibbles) {
    return (whole)_mm256_shuffle_epi8((__m256i)table, (__m256i)nibbles);
}
INLINE void whole_store_parts(void *p, whole a) {
    const __m128i places = _mm_set_epi8(-1, -1, -1, -1, -1, -1, -1, -1, 13, 12, 5, 4, 9, 8, 1, 0);  // of a quad
    __m256i parts = _mm256_shuffle_epi8((__m256i)a, _mm256_broadcastsi128_si256(places));
    _mm_storeu_si128(p, _mm256_castsi256_si128(_mm256_permute4x64_epi64(parts, 0x08)));
}
INLINE whole add_to_words(whole sums, whole w, whole x) {
    whole products = in_register((whole)_mm256_maddubs_epi16((__m256i)w, (__m256i)x));
    return in_register((whole)_mm256_add_epi16((__m256i)sums, (__m256i)products));
}
INLINE whole add_words(whole sum, whole w, whole x) {
    return in_register(sum + in_register((whole)_mm256_madd_epi16((__m256i)w, (__m256i)x)));
}
INLINE whole words_of_bytes(const int8_t *p, long left) {  // `left` is a multiple of 8
    return (whole)_mm256_cvtepi8_epi16(left >= 2 * LANES ? _mm_loadu_si128((const void *)p)
                                                         : _mm_loadl_epi64((const void *)p));
}
#endif

// Words of whole numbers, as `add_words` multiplies them: `a` in the lower ones, `b` in the upper.
INLINE whole in_words(whole a, whole b) { return (a & whole_all(0xffff)) | whole_up(b, 16); }
