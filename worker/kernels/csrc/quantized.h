// A tile of rows times a panel of a quantized matrix: whole numbers multiplied and added up without rounding.
//
// The inputs are rounded to whole numbers too, each group of a row with its own scale: to 16 bits, which beside
// elements of 8 bits loses nothing that could be measured, or to 8, which takes half the time. A group's sum is exact,
// so it is the same with any instructions; groups are added up in their order, in float32. So a row has the same bits
// alone, in any batch, and on every kind of processor.
#pragma once

#include "quantized_rows.h"
#include "sections.h"
#include "tile.h"

// A vector of int32. The type of the intrinsics is one of longs, and gcc would copy sums from one to the other.
typedef int32_t whole __attribute__((vector_size(LANES * 4)));

#if LANES == 16
INLINE whole whole_all(uint32_t x) { return (whole)_mm512_set1_epi32((int)x); }
INLINE whole whole_load(const void *p) { return (whole)_mm512_loadu_si512(p); }
INLINE vec vec_of_whole(whole a) { return _mm512_cvtepi32_ps((__m512i)a); }
INLINE whole even_bytes(whole a) { return (whole)_mm512_and_si512((__m512i)a, _mm512_set1_epi16(255)); }
INLINE whole odd_bytes(whole a) { return (whole)_mm512_srli_epi16((__m512i)a, 8); }
INLINE whole low_nibbles(whole a) { return (whole)_mm512_and_si512((__m512i)a, _mm512_set1_epi8(15)); }
INLINE whole high_nibbles(whole a) { return low_nibbles((whole)_mm512_srli_epi16((__m512i)a, 4)); }
INLINE whole add_words(whole sum, whole w, whole x) {
    return sum + (whole)_mm512_madd_epi16((__m512i)w, (__m512i)x);
}
#else
INLINE whole whole_all(uint32_t x) { return (whole)_mm256_set1_epi32((int)x); }
INLINE whole whole_load(const void *p) { return (whole)_mm256_loadu_si256(p); }
INLINE vec vec_of_whole(whole a) { return _mm256_cvtepi32_ps((__m256i)a); }
INLINE whole even_bytes(whole a) { return (whole)_mm256_and_si256((__m256i)a, _mm256_set1_epi16(255)); }
INLINE whole odd_bytes(whole a) { return (whole)_mm256_srli_epi16((__m256i)a, 8); }
INLINE whole low_nibbles(whole a) { return (whole)_mm256_and_si256((__m256i)a, _mm256_set1_epi8(15)); }
INLINE whole high_nibbles(whole a) { return low_nibbles((whole)_mm256_srli_epi16((__m256i)a, 4)); }
INLINE whole add_words(whole sum, whole w, whole x) {
    return sum + (whole)_mm256_madd_epi16((__m256i)w, (__m256i)x);
}
#endif

#if defined(__AVX512VNNI__)
// Adds the products of a quad of each row with those of the columns; the parts of x are `apart` dwords apart.
INLINE void step_quad(whole sums[][2][COLUMNS], const uint32_t *x, long apart, int rows, int parts, const whole *w) {
    for (int r = 0; r < rows; r++) {
        for (int p = 0; p < parts; p++) {
            __m512i row = (__m512i)whole_all(x[p * apart + r]);
            for (int c = 0; c < COLUMNS; c++)
                sums[r][p][c] = (whole)_mm512_dpbusd_epi32((__m512i)sums[r][p][c], (__m512i)w[c], row);
        }
    }
}

// Adds the products of the quads that four bytes of each column hold: one of 8 bits, or two of 4 bits.
INLINE void step(whole sums[][2][COLUMNS], const uint32_t *x, long apart, int rows, int parts, int bits,
                 const whole *w) {
    whole low[COLUMNS], high[COLUMNS];
    for (int c = 0; c < COLUMNS; c++) {
        low[c] = bits == 8 ? whole_load(w + c) : low_nibbles(whole_load(w + c));
        high[c] = high_nibbles(whole_load(w + c));
    }
    step_quad(sums, x, apart, rows, parts, low);
    if (bits == 4) step_quad(sums, x + rows, apart, rows, parts, high);
}
#else
INLINE void step_quad(whole sums[][2][COLUMNS], const uint32_t *x, long apart, int rows, int column, whole w) {
    whole even = even_bytes(w), odd = odd_bytes(w);
    for (int r = 0; r < rows; r++) {
        sums[r][0][column] = add_words(sums[r][0][column], even, whole_all(x[r]));
        sums[r][0][column] = add_words(sums[r][0][column], odd, whole_all(x[apart + r]));
    }
}

INLINE void step(whole sums[][2][COLUMNS], const uint32_t *x, long apart, int rows, int parts, int bits,
                 const whole *w) {
    (void)parts;
    for (int c = 0; c < COLUMNS; c++) {
        whole bytes = whole_load(w + c);
        step_quad(sums, x, apart, rows, c, bits == 8 ? bytes : low_nibbles(bytes));
        if (bits == 4) step_quad(sums, x + rows, apart, rows, c, high_nibbles(bytes));
    }
}
#endif

INLINE vec load_scale(const char *scales, int column, const weights *w) {
    if (w->scale == FLOAT16) return vec_of_half(scales + column * 2);
    return w->scale == BFLOAT16 ? vec_load(scales + column * 2, BFLOAT16) : vec_load(scales + column * 4, FLOAT32);
}

// Adds what codes are too high or too low by, because they stand for 0 at another place than the middle.
INLINE void add_offsets(float *out, int rows, const char *offsets, const vec *scale, const uint32_t *totals,
                        const weights *w) {
    vec off[COLUMNS], middle = vec_all((float)(1 << (w->bits - 1)));
    for (int c = 0; c < COLUMNS; c++)
        off[c] = vec_mul(vec_sub(middle, vec_of_bytes(offsets + c * LANES)), scale[c]);
    for (int r = 0; r < rows; r++, out += PANEL)
        for (int c = 0; c < COLUMNS; c++)
            vec_store(out + c * LANES, vec_fma(off[c], broadcast(totals + r), vec_load(out + c * LANES, FLOAT32)),
                      FLOAT32);
}

// Adds the sums of a group, scaled, to the outputs. scales: the beginning of the group in the panel. x: its head.
INLINE void add_group(float *out, whole sums[][2][COLUMNS], int rows, int each, const char *scales, const uint32_t *x,
                      const weights *w) {
    vec scale[COLUMNS];
    for (int c = 0; c < COLUMNS; c++) scale[c] = load_scale(scales, c * LANES, w);
    if (w->offsets) add_offsets(out, rows, scales + scales_bytes(w), scale, x + (1 + each) * rows, w);
    for (int r = 0; r < rows; r++, out += PANEL) {
        for (int c = 0; c < COLUMNS; c++) {
            vec sum = vec_of_whole(each == 2 ? (sums[r][0][c] << 8) + sums[r][1][c] : sums[r][0][c]);
            sum = vec_fma(vec_mul(sum, scale[c]), broadcast(x + r), vec_load(out + c * LANES, FLOAT32));
            vec_store(out + c * LANES, sum, FLOAT32);
        }
    }
}

// Where a tile is: in the scales of its rows, in its rows, in the panel, and what it prefetches.
typedef struct {
    const uint32_t *head, *x;
    const char *panel;
    fetch ahead;
} place;

// each: the number of sums that a product has.
INLINE place add_section(int rows, int bits, int each, place at, const weights *w, float *out) {
    const uint32_t *head = at.head, *x = at.x;
    const char *panel = at.panel;
    fetch ahead = at.ahead;
    long apart = quads_of(w) * rows, head_bytes = group_head_bytes(w);
    memset(out, 0, sizeof *out * PANEL * rows);
    for (long group = 0; group < section_groups(w); group++, head += head_of(w) * rows) {
        const char *scales = panel;
        whole sums[QUANTIZED_ROWS][2][COLUMNS];
        for (int r = 0; r < rows; r++)
            for (int s = 0; s < each; s++)
                for (int c = 0; c < COLUMNS; c++) sums[r][s][c] = whole_all(head[(1 + s) * rows + r]);
        panel += head_bytes;
        _mm_prefetch(ahead.from, _MM_HINT_T0);
        ahead.from += ahead.step * head_bytes / (PANEL * 4);
        for (long left = quads_in(w, group); left > 0; left -= 8 / bits, panel += PANEL * 4, x += 8 / bits * rows) {
            _mm_prefetch(ahead.from, _MM_HINT_T0);
            _mm_prefetch(ahead.from + 64, _MM_HINT_T0);
            ahead.from += ahead.step;
            step(sums, x, apart, rows, each, bits, (const whole *)panel);
        }
        add_group(out, sums, rows, each, scales, head, w);
    }
    return (place){head, x, panel, ahead};
}

INLINE void quantized_tile(int rows, int bits, int each, const uint32_t *x, const weights *w, const char *panel,
                           fetch ahead, float *sums) {
    place at = {x, x + head_dwords(w) * rows, panel, ahead};
    for (long section = 0; section < w->sections; section++) {
        at = add_section(rows, bits, each, at, w, place_of_section(sums, rows, w, section));
        join_section(sums, rows, w, section);
    }
}

#define QUANTIZED(n, each)                                                                    \
    case n:                                                                                   \
        if (w->bits == 8) quantized_tile(n, 8, each, x, w, panel, ahead, sums); \
        else quantized_tile(n, 4, each, x, w, panel, ahead, sums);              \
        break;

// sums [rows, 32] and room for those that wait; x as `lay_quantized` wrote it.
static void multiply_quantized(const uint32_t *x, long rows, const weights *w, long number, fetch ahead, float *sums) {
    const char *panel = (const char *)panel_of(w, number);
#if defined(__AVX512VNNI__)
    if (sums_of(w) == 2) {
        switch (rows) {
            QUANTIZED(1, 2) QUANTIZED(2, 2) QUANTIZED(3, 2) QUANTIZED(4, 2) QUANTIZED(5, 2) QUANTIZED(6, 2)
        }
        return;
    }
#endif
    switch (rows) {
        QUANTIZED(1, 1) QUANTIZED(2, 1)
#if LANES == 16
        QUANTIZED(3, 1) QUANTIZED(4, 1) QUANTIZED(5, 1) QUANTIZED(6, 1)
#endif
#if defined(__AVX512VNNI__)
        QUANTIZED(7, 1) QUANTIZED(8, 1) QUANTIZED(9, 1) QUANTIZED(10, 1) QUANTIZED(11, 1) QUANTIZED(12, 1)
#endif
    }
}
