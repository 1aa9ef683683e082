// Multiplying and adding in registers alone: what no kernel can exceed. Both functions return their operations.
#include <immintrin.h>

#if defined(__AVX512F__)
#define LANES 16
typedef __m512 vec;
static inline vec all(float x) { return _mm512_set1_ps(x); }
static inline vec fma32(vec a, vec b, vec sum) { return _mm512_fmadd_ps(a, b, sum); }
#else
#define LANES 8
typedef __m256 vec;
static inline vec all(float x) { return _mm256_set1_ps(x); }
static inline vec fma32(vec a, vec b, vec sum) { return _mm256_fmadd_ps(a, b, sum); }
#endif

enum { SUMS = 12 };  // beyond the latency of one times the units that take them, within the registers
volatile float sink;

static void keep(const vec *sums) {
    for (int i = 0; i < SUMS; i++) sink = ((const float *)&sums[i])[0];
}

long fp32(long times) {
    vec sums[SUMS], a = all(0.5f), b = all(0.5f);
    for (int i = 0; i < SUMS; i++) sums[i] = all(0);
    for (long t = 0; t < times; t++)
#pragma GCC unroll 12
        for (int i = 0; i < SUMS; i++) sums[i] = fma32(a, b, sums[i]);
    keep(sums);
    return times * SUMS * LANES * 2;
}

long bf16(long times) {
#if defined(__AVX512BF16__)
    vec sums[SUMS];
    __m512bh a = (__m512bh)_mm512_set1_epi32(0x3f003f00), b = a;
    for (int i = 0; i < SUMS; i++) sums[i] = all(0);
    for (long t = 0; t < times; t++)
#pragma GCC unroll 12
        for (int i = 0; i < SUMS; i++) sums[i] = _mm512_dpbf16_ps(sums[i], a, b);
    keep(sums);
    return times * SUMS * LANES * 4;
#else
    return fp32(times);  // numbers are widened, which costs more still
#endif
}
