// The instructions of AVX2 that kernels use, in vectors of GCC: for processors that have others, such as those of ARM.
//
// A vector of 8 floats is a struct of two, which compilers keep in registers where those have 16 bytes. All is added in
// the order of AVX2, so results have the bits of that level.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#define VECTOR(name, type, bytes) typedef type name __attribute__((vector_size(bytes), may_alias))
VECTOR(__m128, float, 16);
typedef struct {
    __m128 low, high;
} __m256;
VECTOR(__m128i, long long, 16);
VECTOR(__m256i, long long, 32);
VECTOR(int_4, int32_t, 16);
VECTOR(int_8, int32_t, 32);
VECTOR(bits_8, uint32_t, 32);
VECTOR(short_4, int16_t, 8);
VECTOR(short_8, int16_t, 16);
VECTOR(short_16, int16_t, 32);
VECTOR(word_8, uint16_t, 16);
VECTOR(word_16, uint16_t, 32);
VECTOR(code_8, int8_t, 8);
VECTOR(code_16, int8_t, 16);
VECTOR(code_32, int8_t, 32);
VECTOR(byte_8, uint8_t, 8);
VECTOR(byte_16, uint8_t, 16);
VECTOR(byte_32, uint8_t, 32);

#define FUNCTION static inline __attribute__((always_inline))
// A function of vectors: its type, name and arguments, and what it returns.
#define SAYS(type, name, arguments, ...) \
    FUNCTION type name arguments { return (type)(__VA_ARGS__); }
// One that makes every lane of the result by itself, as lane `i` of `to`.
#define EACH(type, name, arguments, lanes, of, ...)                     \
    FUNCTION type name arguments {                                      \
        of to;                                                          \
        _Pragma("GCC unroll 32") for (int i = 0; i < lanes; i++) to[i] = __VA_ARGS__; \
        return (type)to;                                                \
    }

// Lanes of `a` where `where` has all bits set, and of `b` where it has none.
FUNCTION __m256i chosen(__m256i where, __m256i a, __m256i b) { return (where & a) | (~where & b); }

enum { _MM_HINT_T0 = 3, _MM_HINT_T1 = 2, _CMP_GT_OQ, _CMP_UNORD_Q, _MM_FROUND_TO_NEAREST_INT, _MM_FROUND_NO_EXC = 0 };
#define _mm_prefetch(from, hint) __builtin_prefetch(from, 0, hint)
#if defined(__aarch64__)
#include <arm_neon.h>
#define _mm_pause() __asm__ volatile("yield")
FUNCTION uint64_t __rdtsc(void) {  // at about the rate that x86 counts at
    uint64_t now, rate;
    __asm__ volatile("mrs %0, cntvct_el0\n\tmrs %1, cntfrq_el0" : "=r"(now), "=r"(rate));
    return now * (2500000000u / rate);
}
#else
#define _mm_pause() __builtin_ia32_pause()
#define __rdtsc() __builtin_ia32_rdtsc()
#endif

// Memory.
#define LOADED(type, name, bytes)         \
    FUNCTION type name(const void *from) { \
        type to = {0};                    \
        memcpy(&to, from, bytes);         \
        return to;                        \
    }
#define STORED(type, name, bytes) \
    FUNCTION void name(void *to, type a) { memcpy(to, &a, bytes); }
LOADED(__m128, _mm_loadu_ps, 16)
LOADED(__m256i, _mm256_loadu_si256, 32)
LOADED(__m128i, _mm_loadu_si128, 16)
LOADED(__m128i, _mm_loadl_epi64, 8)
STORED(__m128, _mm_storeu_ps, 16)
STORED(__m256i, _mm256_storeu_si256, 32)
STORED(__m128i, _mm_storeu_si128, 16)
STORED(__m128i, _mm_storel_epi64, 8)
FUNCTION __m256 _mm256_loadu_ps(const void *from) {
    return (__m256){_mm_loadu_ps(from), _mm_loadu_ps((const char *)from + 16)};
}
FUNCTION void _mm256_storeu_ps(void *to, __m256 a) {
    _mm_storeu_ps(to, a.low);
    _mm_storeu_ps((char *)to + 16, a.high);
}
FUNCTION __m256 _mm256_maskload_ps(const float *from, __m256i mask) {
    float to[8] = {0};
    for (int i = 0; i < 8; i++)
        if (((int_8)mask)[i]) to[i] = from[i];
    return _mm256_loadu_ps(to);
}
FUNCTION void _mm256_maskstore_ps(float *to, __m256i mask, __m256 a) {
    float lanes[8];
    _mm256_storeu_ps(lanes, a);
    for (int i = 0; i < 8; i++)
        if (((int_8)mask)[i]) to[i] = lanes[i];
}

// Halves, lanes and other types.
SAYS(__m128, _mm256_castps256_ps128, (__m256 a), a.low)
#define _mm256_extractf128_ps(a, half) ((a).high)
SAYS(__m128i, _mm256_castsi256_si128, (__m256i a), __builtin_shufflevector(a, a, 0, 1))
SAYS(__m128i, upper_half_i, (__m256i a), __builtin_shufflevector(a, a, 2, 3))
#define _mm256_extracti128_si256(a, half) upper_half_i(a)
SAYS(__m256i, _mm256_broadcastsi128_si256, (__m128i a), __builtin_shufflevector(a, a, 0, 1, 0, 1))
FUNCTION __m256 _mm256_castsi256_ps(__m256i a) {
    __m256 to;
    memcpy(&to, &a, 32);
    return to;
}
FUNCTION __m256i _mm256_castps_si256(__m256 a) {
    __m256i to;
    memcpy(&to, &a, 32);
    return to;
}
SAYS(float, _mm256_cvtss_f32, (__m256 a), a.low[0])
SAYS(float, _mm_cvtss_f32, (__m128 a), a[0])
SAYS(int, _mm_cvtsi128_si32, (__m128i a), ((int_4)a)[0])
#define _mm256_extract_epi32(a, lane) (((int_8)(a))[lane])
FUNCTION __m256 _mm256_set1_ps(float x) { return (__m256){{x, x, x, x}, {x, x, x, x}}; }
FUNCTION __m256 _mm256_setzero_ps(void) { return _mm256_set1_ps(0); }
SAYS(__m256i, _mm256_setr_epi32, (int a, int b, int c, int d, int e, int f, int g, int h), (int_8){a, b, c, d, e, f, g, h})
SAYS(__m256i, _mm256_set1_epi32, (int x), (int_8){x, x, x, x, x, x, x, x})
SAYS(__m256i, _mm256_set1_epi16, (short x), _mm256_set1_epi32((uint16_t)x * 0x10001))
SAYS(__m256i, _mm256_set1_epi8, (char x), _mm256_set1_epi32((int)((uint8_t)x * 0x1010101u)))
#define _mm_set_epi8(p, o, n, m, l, k, j, i, h, g, f, e, d, c, b, a) \
    ((__m128i)(code_16){a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p})

// Floats, half by half.
#define BOTH(name, ...)                                                                                    \
    FUNCTION __m128 name##_half(__m128 a, __m128 b) { return (__m128)(__VA_ARGS__); }                      \
    FUNCTION __m256 name(__m256 a, __m256 b) {                                                             \
        return (__m256){name##_half(a.low, b.low), name##_half(a.high, b.high)};                           \
    }
FUNCTION __m128 chosen_half(int_4 where, __m128 a, __m128 b) { return (__m128)((where & (int_4)a) | (~where & (int_4)b)); }
BOTH(_mm256_add_ps, a + b)
BOTH(_mm256_sub_ps, a - b)
BOTH(_mm256_mul_ps, a * b)
BOTH(_mm256_div_ps, a / b)
BOTH(_mm256_max_ps, chosen_half(a > b, a, b))
BOTH(_mm256_min_ps, chosen_half(a < b, a, b))
BOTH(_mm256_and_ps, (int_4)a & (int_4)b)
BOTH(_mm256_andnot_ps, ~(int_4)a & (int_4)b)
BOTH(greater, a > b)
BOTH(unordered, (a != a) | (b != b))
#define _mm256_cmp_ps(a, b, how) ((how) == _CMP_GT_OQ ? greater(a, b) : unordered(a, b))
FUNCTION __m256 _mm256_blendv_ps(__m256 a, __m256 b, __m256 where) {
    return (__m256){chosen_half((int_4)where.low < 0, b.low, a.low), chosen_half((int_4)where.high < 0, b.high, a.high)};
}
EACH(__m128, root_half, (__m128 a), 4, __m128, __builtin_sqrtf(a[i]))
EACH(__m128, nearest_half, (__m128 a), 4, __m128, __builtin_rintf(a[i]))
FUNCTION __m256 _mm256_sqrt_ps(__m256 a) { return (__m256){root_half(a.low), root_half(a.high)}; }
FUNCTION __m256 nearest(__m256 a) { return (__m256){nearest_half(a.low), nearest_half(a.high)}; }
#define _mm256_round_ps(a, how) nearest(a)
#if defined(__aarch64__)
SAYS(__m128, fma_half, (__m128 a, __m128 b, __m128 c), vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b))
#else
EACH(__m128, fma_half, (__m128 a, __m128 b, __m128 c), 4, __m128, __builtin_fmaf(a[i], b[i], c[i]))
#endif
FUNCTION __m256 _mm256_fmadd_ps(__m256 a, __m256 b, __m256 c) {
    return (__m256){fma_half(a.low, b.low, c.low), fma_half(a.high, b.high, c.high)};
}
FUNCTION __m256 _mm256_fnmadd_ps(__m256 a, __m256 b, __m256 c) {
    return (__m256){fma_half(-a.low, b.low, c.low), fma_half(-a.high, b.high, c.high)};
}
SAYS(__m128, _mm_add_ps, (__m128 a, __m128 b), a + b)
SAYS(__m128, _mm_add_ss, (__m128 a, __m128 b), a + b)  // only the first lane is read
EACH(__m128, _mm_max_ps, (__m128 a, __m128 b), 4, __m128, a[i] > b[i] ? a[i] : b[i])
SAYS(__m128, _mm_max_ss, (__m128 a, __m128 b), _mm_max_ps(a, b))
SAYS(__m128, _mm_movehl_ps, (__m128 a, __m128 b), __builtin_shufflevector(a, b, 6, 7, 2, 3))
SAYS(__m128, _mm_movehdup_ps, (__m128 a), __builtin_shufflevector(a, a, 1, 1, 3, 3))
#define SHUFFLED(a, b, ...) \
    ((__m256){__builtin_shufflevector(a.low, b.low, __VA_ARGS__), __builtin_shufflevector(a.high, b.high, __VA_ARGS__)})
#define _mm256_unpacklo_ps(a, b) SHUFFLED(a, b, 0, 4, 1, 5)
#define _mm256_unpackhi_ps(a, b) SHUFFLED(a, b, 2, 6, 3, 7)
#define _mm256_shuffle_ps(a, b, how) SHUFFLED(a, b, (how) & 3, (how) >> 2 & 3, 4 + ((how) >> 4 & 3), 4 + ((how) >> 6 & 3))
FUNCTION __m128 half_of(__m256 a, __m256 b, int which) {
    return which == 0 ? a.low : which == 1 ? a.high : which == 2 ? b.low : b.high;
}
#define _mm256_permute2f128_ps(a, b, how) ((__m256){half_of(a, b, (how) & 3), half_of(a, b, (how) >> 4)})
FUNCTION __m256 _mm256_permutevar8x32_ps(__m256 a, __m256i places) {
    float from[8], to[8];
    _mm256_storeu_ps(from, a);
    for (int i = 0; i < 8; i++) to[i] = from[((int_8)places)[i] & 7];
    return _mm256_loadu_ps(to);
}

// Whole numbers.
SAYS(__m256i, _mm256_and_si256, (__m256i a, __m256i b), a & b)
SAYS(__m256i, _mm256_or_si256, (__m256i a, __m256i b), a | b)
SAYS(__m256i, _mm256_add_epi32, (__m256i a, __m256i b), (bits_8)a + (bits_8)b)
SAYS(__m256i, _mm256_sub_epi32, (__m256i a, __m256i b), (bits_8)a - (bits_8)b)
SAYS(__m128i, _mm_add_epi32, (__m128i a, __m128i b), (int_4)a + (int_4)b)
SAYS(__m256i, _mm256_add_epi16, (__m256i a, __m256i b), (word_16)a + (word_16)b)
SAYS(__m256i, _mm256_max_epi32, (__m256i a, __m256i b), chosen((__m256i)((int_8)a > (int_8)b), a, b))
SAYS(__m256i, _mm256_cmpgt_epi32, (__m256i a, __m256i b), (int_8)a > (int_8)b)
SAYS(__m256i, _mm256_slli_epi32, (__m256i a, int n), n > 31 ? (bits_8){0} : (bits_8)a << n)
SAYS(__m256i, _mm256_srli_epi32, (__m256i a, int n), n > 31 ? (bits_8){0} : (bits_8)a >> n)
SAYS(__m256i, _mm256_srai_epi32, (__m256i a, int n), (int_8)a >> (n > 31 ? 31 : n))
SAYS(__m256i, _mm256_srli_epi16, (__m256i a, int n), n > 15 ? (word_16){0} : (word_16)a >> n)
SAYS(__m256i, _mm256_blendv_epi8, (__m256i a, __m256i b, __m256i where), chosen((__m256i)((code_32)where < 0), b, a))
#define _mm_shuffle_epi32(a, how) \
    ((__m128i)__builtin_shufflevector((int_4)(a), (int_4)(a), (how) & 3, (how) >> 2 & 3, (how) >> 4 & 3, (how) >> 6))
#define _mm256_permute4x64_epi64(a, how) \
    __builtin_shufflevector(a, a, (how) & 3, (how) >> 2 & 3, (how) >> 4 & 3, (how) >> 6 & 3)
// Of each half for itself, as AVX2 does; a place below 0 means 0.
EACH(__m256i, _mm256_shuffle_epi8, (__m256i a, __m256i places), 32, code_32,
     ((code_32)places)[i] < 0 ? 0 : ((code_32)a)[(i & 16) + (((code_32)places)[i] & 15)])

// Numbers that become wider.
FUNCTION __m256 _mm256_cvtepi32_ps(__m256i a) {
    __m256 bits = _mm256_castsi256_ps(a);
    return (__m256){__builtin_convertvector((int_4)bits.low, __m128), __builtin_convertvector((int_4)bits.high, __m128)};
}
SAYS(__m256i, _mm256_cvtepu16_epi32, (__m128i a), __builtin_convertvector((word_8)a, int_8))
SAYS(__m256i, _mm256_cvtepi8_epi16, (__m128i a), __builtin_convertvector((code_16)a, short_16))
EACH(__m256i, _mm256_cvtepi8_epi32, (__m128i a), 8, int_8, ((code_16)a)[i])
EACH(__m256i, _mm256_cvtepu8_epi32, (__m128i a), 8, int_8, ((byte_16)a)[i])
// Rounded to nearest even; numbers that are too large become the lowest one.
EACH(__m128, whole_half, (__m128 a), 4, int_4,
     __builtin_fabsf(a[i]) < 0x1p31f ? (int32_t)__builtin_rintf(a[i]) : INT32_MIN)
FUNCTION __m256i _mm256_cvtps_epi32(__m256 a) {
    return _mm256_castps_si256((__m256){whole_half(a.low), whole_half(a.high)});
}
FUNCTION float _cvtsh_ss(uint16_t half) {  // float16
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = (uint32_t)(half & 0x7fff) << 13;
    float wide;
    memcpy(&wide, &rest, 4);
    wide *= 0x1p112f;  // which brings the exponent into its place, of numbers without a leading 1 too
    if (rest < 0x7c00 << 13) memcpy(&rest, &wide, 4);
    else rest |= 0x7f800000;
    rest |= sign;
    memcpy(&wide, &rest, 4);
    return wide;
}
FUNCTION __m256 _mm256_cvtph_ps(__m128i a) {
    float to[8];
    for (int i = 0; i < 8; i++) to[i] = _cvtsh_ss(((word_8)a)[i]);
    return _mm256_loadu_ps(to);
}

// Numbers that become narrower, and keep within what those hold.
FUNCTION int within(int x, int least, int most) { return x < least ? least : x > most ? most : x; }
EACH(__m128i, _mm_packs_epi32, (__m128i a, __m128i b), 8, short_8,
     (int16_t)within((i < 4 ? (int_4)a : (int_4)b)[i & 3], INT16_MIN, INT16_MAX))
EACH(__m128i, _mm_packs_epi16, (__m128i a, __m128i b), 16, code_16,
     (int8_t)within((i < 8 ? (short_8)a : (short_8)b)[i & 7], INT8_MIN, INT8_MAX))
EACH(__m256i, _mm256_packs_epi32, (__m256i a, __m256i b), 16, short_16,
     (int16_t)within((i & 4 ? (int_8)b : (int_8)a)[(i >> 3) * 4 + (i & 3)], INT16_MIN, INT16_MAX))
EACH(__m256i, _mm256_packus_epi32, (__m256i a, __m256i b), 16, word_16,
     (uint16_t)within((i & 4 ? (int_8)b : (int_8)a)[(i >> 3) * 4 + (i & 3)], 0, UINT16_MAX))
EACH(__m256i, _mm256_packs_epi16, (__m256i a, __m256i b), 32, code_32,
     (int8_t)within((i & 8 ? (short_16)b : (short_16)a)[(i >> 4) * 8 + (i & 7)], INT8_MIN, INT8_MAX))

// Products of neighbours, added up.
EACH(__m256i, _mm256_madd_epi16, (__m256i a, __m256i b), 8, bits_8,
     (uint32_t)(((short_16)a)[2 * i] * ((short_16)b)[2 * i]) + (uint32_t)(((short_16)a)[2 * i + 1] * ((short_16)b)[2 * i + 1]))
EACH(__m256i, _mm256_maddubs_epi16, (__m256i a, __m256i b), 16, short_16,
     (int16_t)within(((byte_32)a)[2 * i] * ((code_32)b)[2 * i] + ((byte_32)a)[2 * i + 1] * ((code_32)b)[2 * i + 1], INT16_MIN,
                     INT16_MAX))
