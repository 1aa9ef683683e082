// Codes of 4 to 6 bits by AMX whose scales are whole.
//
// Codes times whole scales are whole numbers of 16 bits, which are divided into two bytes. Inputs are multiplied by both,
// and a run is added up as whole numbers without a stop between its groups: the sum that `tile_runs.c` has.
#pragma once

#include "code_tile_amx.h"

INLINE int has_scaled_codes(const weights *w) {
    long inputs = w->run * w->group;
    return has_whole_scales(w) && inputs % DEPTH == 0 && section_inputs(w) % inputs == 0;
}

// A run with whole scales: codes times scales as two bytes, of which the first are 7 bits higher; and the factors of scales and
// of minimums.
typedef struct {
    uint32_t codes[CHUNK / DEPTH][COLUMNS][2][PAIRS * LANES];
    float factors[2][PANEL], minimums[CHUNK / GROUP_LEAST][PANEL];
    long groups, steps;  // of this run
} scaled_run;

// Multiplies the codes of a quad of 16 columns, of which each is a byte, by scales in both words of their dwords; -> the
// two bytes of the products.
INLINE void scale_quads(uint32_t *high, uint32_t *low, __m512i quads, __m512i scales, __m512i excess) {
    const __m512i bytes = _mm512_set1_epi16(255), sevens = _mm512_set1_epi16(127);
    __m512i even = _mm512_mullo_epi16(_mm512_sub_epi16(_mm512_and_si512(quads, bytes), excess), scales);
    __m512i odd = _mm512_mullo_epi16(_mm512_sub_epi16(_mm512_srli_epi16(quads, 8), excess), scales);
    __m512i above = _mm512_and_si512(_mm512_srai_epi16(even, 7), bytes);
    _mm512_storeu_si512(high, _mm512_or_si512(above, _mm512_slli_epi16(_mm512_srai_epi16(odd, 7), 8)));
    __m512i below = _mm512_and_si512(even, sevens);
    _mm512_storeu_si512(low, _mm512_or_si512(below, _mm512_slli_epi16(_mm512_and_si512(odd, sevens), 8)));
}

// Unpacks a run with whole scales; -> the beginning of the next one.
INLINE const char *unpack_scaled(scaled_run *to, const groups *from, const weights *w) {
    const char *panel = from->panel, *factors = factors_for(from, from->group, w);
    const __m512i excess = _mm512_set1_epi16((short)excess_of(w));
    to->groups = from->end - from->group, to->steps = to->groups * w->group / DEPTH;
    for (long i = 0; i < PANEL * (1 + w->minimums); i += LANES)
        vec_store(to->factors[0] + i, load_numbers(factors, i, w->factor), FLOAT32);
    for (long group = 0, quad = 0; group < to->groups; group++) {
        whole bytes[GROUP_MOST / 4 * COLUMNS];
        const whole *codes = (const whole *)(panel + group_head_bytes(w));
        const long quads = w->group / 4;
        if (w->bits == 4) unpack_levels(bytes, codes, quads, levels_of(w));
        else unpack_more(bytes, codes, quads, w->bits - 4);
        for (int c = 0; c < COLUMNS; c++) {
            whole scale = load_whole(panel + c * LANES, w->scale);
            __m512i scales = (__m512i)in_words(scale, scale);
            for (long q = 0; q < quads; q++) {
                uint32_t(*pair)[PAIRS * LANES] = to->codes[(quad + q) / PAIRS][c];
                long place = (quad + q) % PAIRS * LANES;
                scale_quads(pair[0] + place, pair[1] + place, (__m512i)bytes[q * COLUMNS + c], scales, excess);
            }
            if (w->minimums)
                vec_store(to->minimums[group] + c * LANES, load_numbers(panel + scales_bytes(w), c * LANES, w->scale), FLOAT32);
        }
        quad += quads;
        panel += bytes_in(w, from->group + group);
    }
    return panel;
}

// Adds the products with half of the columns to the sums of a tile as `tile_runs.c` does. high, low: those of both bytes.
INLINE void add_bytes_of_half(const int32_t *high, const int32_t *low, const scaled_run *run, const code_tile *t, int half,
                              const int minimums) {
    vec factor = vec_load(run->factors[0] + half * LANES, FLOAT32), lows[HALF_ROWS];
    vec behind = minimums ? vec_load(run->factors[1] + half * LANES, FLOAT32) : vec_zero();
    float *sums = t->sums + half * LANES;
#pragma GCC unroll 16
    for (int r = 0; r < HALF_ROWS; r++) lows[r] = vec_zero();
    for (long group = 0; minimums && group < run->groups; group++) {  // sums are exact in float32
        vec minimum = vec_load(run->minimums[group] + half * LANES, FLOAT32);
#pragma GCC unroll 16
        for (int r = 0; r < HALF_ROWS; r++)
            lows[r] = vec_fma(minimum, vec_all(t->numbers[r * t->stride + 1 + group]), lows[r]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < HALF_ROWS; r++, sums += PANEL) {
        vec scale = vec_all(t->numbers[r * t->stride]), before = vec_load(sums, FLOAT32);
        whole sum = whole_up(whole_load(high + r * LANES), 7) + whole_load(low + r * LANES);
        if (minimums) before = vec_fma(vec_mul(lows[r], behind), scale, before);
        vec_store(sums, vec_fma(vec_mul(vec_of_whole(sum), factor), scale, before), FLOAT32);
    }
}

// Adds the products of a tile with a run: inputs are signed, the lower bytes of codes are not.
INLINE void add_scaled(const scaled_run *run, const code_tile *t, const int minimums) {
    int32_t found[COLUMNS][2][HALF] __attribute__((aligned(64)));
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long step = 0; step < run->steps; step++) {
        _tile_loadd(4, t->x + step * HALF_ROWS * STEP_BYTES, STEP_BYTES);
        _tile_loadd(5, run->codes[step][0][0], STEP_BYTES);
        _tile_dpbssd(0, 4, 5);
        _tile_loadd(6, run->codes[step][0][1], STEP_BYTES);
        _tile_dpbsud(1, 4, 6);
        _tile_loadd(7, run->codes[step][1][0], STEP_BYTES);
        _tile_dpbssd(2, 4, 7);
        _tile_loadd(5, run->codes[step][1][1], STEP_BYTES);
        _tile_dpbsud(3, 4, 5);
    }
    _tile_stored(0, found[0][0], STEP_BYTES);
    _tile_stored(1, found[0][1], STEP_BYTES);
    _tile_stored(2, found[1][0], STEP_BYTES);
    _tile_stored(3, found[1][1], STEP_BYTES);
    for (int half = 0; half < COLUMNS; half++)
        add_bytes_of_half(found[half][0], found[half][1], run, t, half, minimums);
}
