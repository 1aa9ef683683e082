// A tile of rows times a panel of bytes in e4m3 (one sign, four bits of exponent, three of mantissa).
//
// A byte is widened to float32, which holds all its values, those without a leading 1 among them. Inputs are float32
// too, so only sums are rounded: each group is added up in the order of its inputs, multiplied by its scale and added to
// the output. That order is the same for any number of rows and on every kind of processor.
#include "tile_e4m3.h"

// Lays rows side by side in float32: the first input of each row, then the second of each. Sections end with zeros.
void lay_e4m3(uint32_t *to, const char *x, long stride, long rows, const weights *w) {
    long inputs = section_inputs(w), laid = section_quads(w) * 4;
    for (long section = 0; section < w->sections; section++, to += laid * rows, x += inputs * width_of(w->kind)) {
        for (long r = 0; r < rows; r++) {
            float vector[LANES];
            for (long i = 0; i < laid; i += LANES) {
                vec v = i < inputs ? vec_load_upto(at(x + r * stride, i, w->kind), inputs - i, w->kind) : vec_zero();
                vec_store(vector, v, FLOAT32);
                for (long lane = 0; lane < least(LANES, laid - i); lane++)
                    memcpy(&to[(i + lane) * rows + r], vector + lane, 4);
            }
        }
    }
}

#if LANES == 16
INLINE vec exponents_apart(__m512i bits) {  // the byte on top of each lane, spread to the fields of a float32
    __m512i fields = _mm512_and_si512(_mm512_srai_epi32(bits, 4), _mm512_set1_epi32((int)0x87f00000u));
    return _mm512_castsi512_ps(fields);
}
INLINE vec byte_on_top(whole quad, int byte) {
    return exponents_apart(_mm512_slli_epi32((__m512i)quad, (unsigned)(24 - 8 * byte)));
}
#else
INLINE vec exponents_apart(__m256i bits) {
    __m256i fields = _mm256_and_si256(_mm256_srai_epi32(bits, 4), _mm256_set1_epi32((int)0x87f00000u));
    return _mm256_castsi256_ps(fields);
}
INLINE vec byte_on_top(whole quad, int byte) {
    return exponents_apart(_mm256_slli_epi32((__m256i)quad, 24 - 8 * byte));
}
#endif

// The exponents of float32 begin at -127 and those of e4m3 at -7: so what is spread is too small by 2^120.
INLINE vec e4m3_widened(whole quad, int byte) { return vec_mul(byte_on_top(quad, byte), vec_all(0x1p120f)); }

INLINE void e4m3_tile(int rows, const uint32_t *x, const weights *w, const char *panel, fetch ahead, float *out) {
    long scale_bytes = scales_bytes(w);
    for (long section = 0; section < w->sections; section++) {
        float *total = place_of_section(out, rows, w, section);
        memset(total, 0, sizeof *total * PANEL * rows);
        for (long group = 0; group < section_groups(w); group++) {
            const char *scales = panel;
            vec sums[TILE_ROWS][COLUMNS];
            for (int r = 0; r < rows; r++)
                for (int c = 0; c < COLUMNS; c++) sums[r][c] = vec_zero();
            panel += scale_bytes;
            ahead.from += ahead.step * scale_bytes / (PANEL * 4);
            for (long left = quads_in(w, group); left > 0; left--, panel += PANEL * 4) {
                _mm_prefetch(ahead.from, _MM_HINT_T0);
                _mm_prefetch(ahead.from + 64, _MM_HINT_T0);
                ahead.from += ahead.step;
                for (int byte = 0; byte < 4; byte++, x += rows) {
                    vec codes[COLUMNS];
                    for (int c = 0; c < COLUMNS; c++) codes[c] = e4m3_widened(whole_load((const whole *)panel + c), byte);
                    add_products(sums, x, rows, codes);
                }
            }
            for (int c = 0; c < COLUMNS; c++) {
                vec scale = load_scale(scales, c * LANES, w);
                for (int r = 0; r < rows; r++) {
                    float *to = total + r * PANEL + c * LANES;
                    vec_store(to, vec_fma(sums[r][c], scale, vec_load(to, FLOAT32)), FLOAT32);
                }
            }
        }
        join_section(out, rows, w, section);
    }
}

#define E4M3(n)                                  \
    case n:                                      \
        e4m3_tile(n, x, w, panel, ahead, sums); \
        break;

// sums [rows, 32] and room for those that wait; x as `lay_e4m3` wrote it.
void multiply_e4m3(const uint32_t *x, long rows, const weights *w, long number, fetch ahead, float *sums) {
    const char *panel = (const char *)panel_of(w, number);
    switch (rows) {
        E4M3(1) E4M3(2) E4M3(3)
#if TILE_ROWS > 3
        E4M3(4) E4M3(5) E4M3(6) E4M3(7) E4M3(8) E4M3(9) E4M3(10) E4M3(11) E4M3(12)
#endif
    }
}
