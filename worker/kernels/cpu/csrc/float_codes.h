// Codes that become floats, and their pairs in bfloat16 where the processor multiplies those.
#pragma once

#include "chunk.h"
#include "rows.h"

// The 16 numbers of a table in the type of the model: as floats, all of them or the lower and the upper ones, and as the
// bytes of bfloat16.
typedef struct {
    vec floats[16 / LANES];
    whole below, above;
} levels;

INLINE levels levels_for(const weights *w) {
    static const float nf4[] = {-1.0f,          -0.6961928f,  -0.52507305f, -0.3949175f, -0.28444138f, -0.18477343f,
                                -0.091050036f,  0.0f,         0.0795803f,   0.1609302f,  0.2461123f,   0.33791524f,
                                0.44070983f,    0.562617f,    0.72295684f,  1.0f};
    static const float fp4[] = {0.0f, 0.0625f / 12, 8.0f / 12, 1.0f, 4.0f / 12, 6.0f / 12, 2.0f / 12, 3.0f / 12,
                                0.0f, -0.0625f / 12, -8.0f / 12, -1.0f, -4.0f / 12, -6.0f / 12, -2.0f / 12, -3.0f / 12};
    const float *numbers = w->codes == NF4 ? nf4 : fp4;
    uint16_t words[16];
    int8_t below[16], above[16];
    levels to;
    for (int i = 0; i < 16 / LANES; i++) {
        vec_store(words + i * LANES, vec_load(numbers + i * LANES, FLOAT32), BFLOAT16);
        to.floats[i] = w->kind == BFLOAT16 ? vec_load(words + i * LANES, BFLOAT16) : vec_load(numbers + i * LANES, FLOAT32);
    }
    for (int i = 0; i < 16; i++) below[i] = (int8_t)words[i], above[i] = (int8_t)(words[i] >> 8);
    to.below = table_of(below), to.above = table_of(above);
    return to;
}

// The codes of a quad as bytes: a line of a panel holds one, or two of 4 bits.
INLINE whole quad_in(const whole *line, int second, int bits) {
    whole codes = whole_load(line);
    return bits == 8 ? codes : second ? high_nibbles(codes) : low_nibbles(codes);
}

#if DOTS
// The two bytes of bfloat16 are looked up by the upper and the lower half of a code; those of numbers without a leading
// 1 by their mantissa.
INLINE void widen_quads(vec *first, vec *second, whole quads, int bits, const levels *table) {
    const __m512i upper = _mm512_set4_epi32((int)0xc3c2c1c0, (int)0xbfbebdbc, 0x43424140, 0x3f3e3d3c);
    const __m512i lower = _mm512_set4_epi32((int)0xf0e0d0c0, (int)0xb0a09080, 0x70605040, 0x30201000);
    const __m512i small_upper = _mm512_set4_epi32(0, 0, 0x3c3c3c3c, 0x3b3b3b00);
    const __m512i small_lower = _mm512_set4_epi32(0, 0, 0x60402000, (int)0xc0800000);
    const __m512i nibble = _mm512_set1_epi8(15), sign = _mm512_set1_epi8(-128), exponent = _mm512_set1_epi8(0x78);
    if (bits == 4) {
        look_up_pairs(first, second, quads, table->below, table->above);
        return;
    }
    __m512i codes = in_halves(quads);
    __m512i low = _mm512_and_si512(codes, nibble);
    __m512i high = _mm512_and_si512(_mm512_srli_epi16(codes, 4), nibble);
    __mmask64 small = _mm512_testn_epi8_mask(codes, exponent);
    __m512i below = _mm512_mask_shuffle_epi8(_mm512_shuffle_epi8(lower, low), small, small_lower, low);
    __m512i above = _mm512_mask_shuffle_epi8(_mm512_shuffle_epi8(upper, high), small, small_upper, low);
    above = _mm512_or_si512(above, _mm512_and_si512(codes, sign));
    *first = _mm512_castsi512_ps(_mm512_unpacklo_epi8(below, above));
    *second = _mm512_castsi512_ps(_mm512_unpackhi_epi8(below, above));
}
#endif
