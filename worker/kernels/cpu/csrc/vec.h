// Vectors of floats, 16 wide with AVX-512 and 8 wide with AVX2, or what stands for it (`portable.h`).
//
// Kernels are written once, with `vec`, for float32 and for bfloat16: `kind` is always a constant where they are
// called, so the compiler removes the other half. Arithmetic is float32; bfloat16 is rounded to nearest even. Whole
// numbers of 8 bits are only loaded.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#else
#include "portable.h"
#endif
#include <math.h>
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

typedef uint16_t bf16;
typedef enum { FLOAT32, BFLOAT16, INT8 } kind;

INLINE long width_of(kind k) { return k == INT8 ? 1 : k == BFLOAT16 ? 2 : 4; }
INLINE const void *at(const void *base, long i, kind k) { return (const char *)base + i * width_of(k); }
INLINE void *at_out(void *base, long i, kind k) { return (char *)base + i * width_of(k); }
INLINE long least(long a, long b) { return a < b ? a : b; }
INLINE long ceil_div(long a, long b) { return (a + b - 1) / b; }

INLINE float widen(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}

INLINE bf16 narrow(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return (bf16)(bits >> 16 | 0x40);  // NaN stays NaN
    return (bf16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Sums lanes: the upper half is added to the lower, again and again.
INLINE float sum_halves(__m256 a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}

#if defined(__AVX512F__)

#define LANES 16
typedef __m512 vec;

INLINE vec vec_zero(void) { return _mm512_setzero_ps(); }
INLINE vec vec_all(float x) { return _mm512_set1_ps(x); }
INLINE vec vec_add(vec a, vec b) { return _mm512_add_ps(a, b); }
INLINE vec vec_sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
INLINE vec vec_mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
INLINE vec vec_div(vec a, vec b) { return _mm512_div_ps(a, b); }
INLINE vec vec_sqrt(vec a) { return _mm512_sqrt_ps(a); }
INLINE float vec_lane(vec a) { return _mm512_cvtss_f32(a); }  // the first one
INLINE vec vec_fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }         // a * b + c
INLINE vec vec_fma_minus(vec a, vec b, vec c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a * b
INLINE vec vec_max(vec a, vec b) { return _mm512_max_ps(a, b); }                     // b where either is NaN
INLINE vec vec_min(vec a, vec b) { return _mm512_min_ps(a, b); }                     // b where either is NaN
INLINE vec vec_abs(vec a) { return _mm512_abs_ps(a); }
INLINE vec vec_where_greater(vec a, vec b, vec then, vec other) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), other, then);
}
INLINE vec vec_round(vec a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE vec vec_scale2(vec a, vec n) { return _mm512_scalef_ps(a, n); }  // a * 2^n
INLINE float vec_sum(vec a) {
    return sum_halves(_mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1)));
}
INLINE float vec_largest(vec a) { return _mm512_reduce_max_ps(a); }

INLINE __mmask16 lanes_mask(long n) { return (__mmask16)((1u << n) - 1); }

INLINE vec vec_first(vec a, long n) { return _mm512_maskz_mov_ps(lanes_mask(n), a); }  // 0 beyond n < LANES

INLINE vec widen_lanes(__m256i half) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

// The lower or the upper bfloat16 of each lane.
INLINE vec widen_even(vec a) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(a), 16)); }
INLINE vec widen_odd(vec a) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32((int)0xffff0000)));
}

INLINE __m256i narrow_lanes(vec a) {
#if defined(__AVX512BF16__)
    return (__m256i)_mm512_cvtneps_pbh(a);  // flushes denormals, which bfloat16 products do anyway
#else
    __m512i bits = _mm512_castps_si512(a);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i even = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    __m512i nan = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
    return _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(_mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), even, nan));
#endif
}

// n < LANES: the other lanes are 0, and memory past n is neither read nor written.
INLINE vec vec_load(const void *p, kind k) {
    if (k == INT8) return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p)));
    return k == BFLOAT16 ? widen_lanes(_mm256_loadu_si256(p)) : _mm512_loadu_ps(p);
}
INLINE vec vec_load_part(const void *p, long n, kind k) {
    if (k == INT8) return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(lanes_mask(n), p)));
    return k == BFLOAT16 ? widen_lanes(_mm256_maskz_loadu_epi16(lanes_mask(n), p))
                         : _mm512_maskz_loadu_ps(lanes_mask(n), p);
}
INLINE void vec_store(void *p, vec a, kind k) {
    if (k == BFLOAT16) _mm256_storeu_si256(p, narrow_lanes(a));
    else _mm512_storeu_ps(p, a);
}
INLINE void vec_store_part(void *p, vec a, long n, kind k) {
    if (k == BFLOAT16) _mm256_mask_storeu_epi16(p, lanes_mask(n), narrow_lanes(a));
    else _mm512_mask_storeu_ps(p, lanes_mask(n), a);
}
INLINE vec vec_of_half(const void *p) { return _mm512_cvtph_ps(_mm256_loadu_si256(p)); }  // float16
INLINE vec vec_of_bytes(const void *p) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(p))); }
INLINE void vec_store_words(int16_t *p, vec a) {  // whole numbers, rounded to nearest even
    _mm256_storeu_si256((void *)p, _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(a)));
}
INLINE void vec_store_codes(int8_t *p, vec a, long n) {  // the same in 8 bits, n of them
    __mmask16 kept = n >= LANES ? (__mmask16)0xffff : lanes_mask(n);
    _mm_mask_storeu_epi8(p, kept, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a)));
}

#else

#define LANES 8
typedef __m256 vec;

INLINE vec vec_zero(void) { return _mm256_setzero_ps(); }
INLINE vec vec_all(float x) { return _mm256_set1_ps(x); }
INLINE vec vec_add(vec a, vec b) { return _mm256_add_ps(a, b); }
INLINE vec vec_sub(vec a, vec b) { return _mm256_sub_ps(a, b); }
INLINE vec vec_mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
INLINE vec vec_div(vec a, vec b) { return _mm256_div_ps(a, b); }
INLINE vec vec_sqrt(vec a) { return _mm256_sqrt_ps(a); }
INLINE float vec_lane(vec a) { return _mm256_cvtss_f32(a); }
INLINE vec vec_fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vec vec_fma_minus(vec a, vec b, vec c) { return _mm256_fnmadd_ps(a, b, c); }
INLINE vec vec_max(vec a, vec b) { return _mm256_max_ps(a, b); }
INLINE vec vec_min(vec a, vec b) { return _mm256_min_ps(a, b); }
INLINE vec vec_abs(vec a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
INLINE vec vec_where_greater(vec a, vec b, vec then, vec other) {
    return _mm256_blendv_ps(other, then, _mm256_cmp_ps(a, b, _CMP_GT_OQ));
}
INLINE vec vec_round(vec a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE vec vec_scale2(vec a, vec n) {  // in two halves, so that 2^n may be a denormal number or infinite
    __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1), bias = _mm256_set1_epi32(127);
    __m256i rest = _mm256_sub_epi32(whole, half);
    a = _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23)));
    return _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23)));
}
INLINE float vec_sum(vec a) { return sum_halves(a); }
INLINE float vec_largest(vec a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

INLINE __m256i lanes_mask(long n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

INLINE vec vec_first(vec a, long n) { return _mm256_and_ps(a, _mm256_castsi256_ps(lanes_mask(n))); }

INLINE vec widen_lanes(__m128i half) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

INLINE vec widen_even(vec a) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(a), 16)); }
INLINE vec widen_odd(vec a) {
    return _mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(a), _mm256_set1_epi32((int)0xffff0000)));
}

INLINE __m128i narrow_lanes(vec a) {
    __m256i bits = _mm256_castps_si256(a), high = _mm256_srli_epi32(bits, 16);
    __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    __m256i even = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    __m256i nan = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
    __m256i words = _mm256_blendv_epi8(even, nan, _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)));
    words = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08);
    return _mm256_castsi256_si128(words);
}

INLINE vec vec_load(const void *p, kind k) {
    if (k == INT8) return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p)));
    return k == BFLOAT16 ? widen_lanes(_mm_loadu_si128(p)) : _mm256_loadu_ps(p);
}
INLINE vec vec_load_part(const void *p, long n, kind k) {
    if (k == FLOAT32) return _mm256_maskload_ps(p, lanes_mask(n));
    bf16 part[LANES] = {0};
    for (long i = 0; i < n; i++) part[i] = ((const bf16 *)p)[i];
    return widen_lanes(_mm_loadu_si128((const void *)part));
}
INLINE void vec_store(void *p, vec a, kind k) {
    if (k == BFLOAT16) _mm_storeu_si128(p, narrow_lanes(a));
    else _mm256_storeu_ps(p, a);
}
INLINE void vec_store_part(void *p, vec a, long n, kind k) {
    if (k == FLOAT32) {
        _mm256_maskstore_ps(p, lanes_mask(n), a);
        return;
    }
    bf16 part[LANES];
    _mm_storeu_si128((void *)part, narrow_lanes(a));
    for (long i = 0; i < n; i++) ((bf16 *)p)[i] = part[i];
}
INLINE vec vec_of_half(const void *p) { return _mm256_cvtph_ps(_mm_loadu_si128(p)); }
INLINE vec vec_of_bytes(const void *p) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(p))); }
INLINE void vec_store_words(int16_t *p, vec a) {
    __m256i all = _mm256_cvtps_epi32(a);
    _mm_storeu_si128((void *)p, _mm_packs_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1)));
}
INLINE void vec_store_codes(int8_t *p, vec a, long n) {
    int16_t words[LANES];
    vec_store_words(words, a);
    __m128i both = _mm_loadu_si128((const void *)words);
    _mm_storel_epi64((void *)p, _mm_packs_epi16(both, both));
    (void)n;  // a multiple of LANES
}

#endif

// A whole vector or a part of one: n elements are left, which may be more than a vector holds.
INLINE vec vec_load_upto(const void *p, long n, kind k) {
    return n >= LANES ? vec_load(p, k) : vec_load_part(p, n, k);
}
INLINE void vec_store_upto(void *p, vec a, long n, kind k) {
    if (n >= LANES) vec_store(p, a, k);
    else vec_store_part(p, a, n, k);
}

INLINE vec vec_in_register(vec a) {  // a compiler might keep it in memory meanwhile
#if defined(__AVX2__)  // else it has several registers
    __asm__ volatile("" : "+v"(a));
#endif
    return a;
}

// Rounds to the digits that a tensor of this type can hold.
INLINE vec vec_rounded(vec a, kind k) { return k == BFLOAT16 ? widen_lanes(narrow_lanes(a)) : a; }

// e^x within 2 units of the last digit: 0 from -104 down, infinite from 89 up, NaN stays NaN.
INLINE vec vec_exp(vec x) {
    x = vec_min(vec_all(89.0f), vec_max(vec_all(-104.0f), x));
    vec n = vec_round(vec_mul(x, vec_all(1.44269504f)));
    vec r = vec_fma_minus(n, vec_all(-2.12194440e-4f), vec_fma_minus(n, vec_all(0.693359375f), x));
    vec p = vec_all(1.9875691500e-4f);
    p = vec_fma(p, r, vec_all(1.3981999507e-3f));
    p = vec_fma(p, r, vec_all(8.3334519073e-3f));
    p = vec_fma(p, r, vec_all(4.1665795894e-2f));
    p = vec_fma(p, r, vec_all(1.6666665459e-1f));
    p = vec_fma(p, r, vec_all(5.0000001201e-1f));
    p = vec_fma(p, vec_mul(r, r), vec_add(r, vec_all(1.0f)));
    return vec_scale2(p, n);
}

// 2^x: exactly 1 at 0, and 0 from -150 down. Of bfloat16's 3 digits, 4 are right. AVX-512 scales by any power, and by one that
// is far too small at once; a product that is just too small, as 2^-152, takes a hundred times as long. x may be -infinity.
INLINE vec vec_exp2(vec x, kind k) {
    x = vec_max(vec_all(LANES < 16 ? -152.0f : -1.0e6f), x);
    vec n = vec_round(x), f = vec_sub(x, n), p;
    if (k == BFLOAT16) {
        p = vec_fma(vec_all(0.0550089292f), f, vec_all(0.242210954f));
        p = vec_fma(p, f, vec_all(0.693282902f));
    } else {
        p = vec_fma(vec_all(0.00132647273f), f, vec_all(0.00967151299f));
        p = vec_fma(p, f, vec_all(0.0555073358f));
        p = vec_fma(p, f, vec_all(0.240222424f));
        p = vec_fma(p, f, vec_all(0.693147004f));
    }
    return vec_scale2(vec_fma(p, f, vec_all(1.0f)), n);
}
