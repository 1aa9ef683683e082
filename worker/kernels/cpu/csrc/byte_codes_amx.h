// Codes as bytes by AMX: those of 8 bits are read where they lie.
//
// Inputs of 16 bits are divided into two bytes, of which only the upper ones have a sign; codes are multiplied by both. The sum
// of a group is the whole number that `tile_quantized.c` has, and groups are scaled and added up in the same order.
#pragma once

#include "code_tile_amx.h"

enum { MOST_GROUPS = CHUNK / STEP };  // of a run

INLINE int has_byte_codes(const weights *w) {
    int fits = w->bits && !are_floats(w) && !has_shifts(w) && !has_whole_scales(w);
    return fits && w->group >= STEP && section_inputs(w) % least(w->group, DEPTH) == 0;
}

// A run: where the codes of its groups lie, and what groups are scaled by.
typedef struct {
    const char *codes[MOST_GROUPS];
    long steps[MOST_GROUPS];
    float scales[MOST_GROUPS][PANEL], minimums[MOST_GROUPS][PANEL];
    long groups;
    whole unpacked[CHUNK / 4 * COLUMNS];
} byte_run;

// Lays a step of words, which are parts of quads, as their upper bytes and so many bytes behind as their lower ones.
INLINE void lay_words(char *to, const uint32_t *parts, long inputs, long behind) {
    const __m512i bytes = _mm512_set1_epi32(0xff00ff);
    for (long i = 0; i < inputs; i += 2 * LANES, to += 2 * LANES) {
        __m512i quads = _mm512_loadu_si512(parts + i / 2), upper = _mm512_and_si512(_mm512_srli_epi16(quads, 8), bytes);
        __m512i lower = _mm512_and_si512(quads, bytes);
        upper = _mm512_or_si512(upper, _mm512_srli_epi64(upper, 24));
        lower = _mm512_or_si512(lower, _mm512_srli_epi64(lower, 24));
        _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi64_epi32(upper));
        _mm256_storeu_si256((__m256i *)(to + behind), _mm512_cvtepi64_epi32(lower));
    }
}

// Finds the groups of a run, and unpacks codes of fewer bits; -> the beginning of the next one.
INLINE const char *unpack_bytes(byte_run *to, const groups *from, const weights *w) {
    const char *panel = from->panel;
    whole *bytes = to->unpacked;
    to->groups = from->end - from->group;
    for (long group = 0; group < to->groups; group++) {
        vec scales[COLUMNS], minimums[COLUMNS];
        load_head(scales, minimums, panel, factors_for(from, from->group + group, w), w, 0, COLUMNS);
        for (int c = 0; c < COLUMNS; c++) {
            vec_store(to->scales[group] + c * LANES, scales[c], FLOAT32);
            vec_store(to->minimums[group] + c * LANES, minimums[c], FLOAT32);
        }
        const long quads = quads_in(w, from->group + group);
        const whole *codes = (const whole *)(panel + group_head_bytes(w));
        to->codes[group] = (const char *)(w->bits == 8 ? codes : bytes);
        if (w->bits == 4) unpack_levels(bytes, codes, quads, levels_of(w));
        else if (w->bits < 8) unpack_more(bytes, codes, quads, w->bits - 4);
        bytes += quads * COLUMNS;
        to->steps[group] = inputs_in(w, from->group + group) / least(w->group, DEPTH);
        panel += bytes_in(w, from->group + group);
    }
    return panel;
}

typedef int32_t sums_of_group[COLUMNS][2][HALF] __attribute__((aligned(64)));  // of both bytes

// Multiplies a tile with a group; -> the inputs of the next one. depth: the inputs of a step.
INLINE const char *multiply_group(sums_of_group sums, const char *codes, const char *x, long steps, long depth,
                                  const int words) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long step = 0; step < steps; step++, codes += depth * PANEL) {
        _tile_loadd(4, x, depth);
        x += HALF_ROWS * depth;
        _tile_loadd(6, codes, PANEL * 4);
        _tile_dpbsud(0, 4, 6);
        _tile_loadd(7, codes + LANES * 4, PANEL * 4);
        _tile_dpbsud(2, 4, 7);
        if (words) {
            _tile_loadd(5, x, depth);
            x += HALF_ROWS * depth;
            _tile_dpbuud(1, 5, 6);
            _tile_dpbuud(3, 5, 7);
        }
    }
    _tile_stored(0, sums[0][0], STEP_BYTES);
    _tile_stored(2, sums[1][0], STEP_BYTES);
    if (words) {
        _tile_stored(1, sums[0][1], STEP_BYTES);
        _tile_stored(3, sums[1][1], STEP_BYTES);
    }
    return x;
}

// Adds the sums of groups with half of the columns to those of a tile. each: the numbers of a group in a row.
INLINE void add_half_of_groups(const sums_of_group *of, const byte_run *run, const code_tile *t, int half, long each,
                               const int words, const int low) {
    vec totals[HALF_ROWS];
    float *sums = t->sums + half * LANES;
#pragma GCC unroll 16
    for (int r = 0; r < HALF_ROWS; r++) totals[r] = vec_load(sums + r * PANEL, FLOAT32);
    for (long group = 0; group < run->groups; group++) {
        const float *numbers = t->numbers + group * each;
        vec scale = vec_load(run->scales[group] + half * LANES, FLOAT32);
        vec minimum = low ? vec_load(run->minimums[group] + half * LANES, FLOAT32) : vec_zero();
#pragma GCC unroll 16
        for (int r = 0; r < HALF_ROWS; r++, numbers += t->stride) {
            whole sum = whole_load(of[group][half][0] + r * LANES), start = bits_of_vec(vec_all(numbers[1]));
            if (words) sum = whole_up(sum, 8) + whole_load(of[group][half][1] + r * LANES);
            if (low) totals[r] = vec_fma(minimum, vec_all(numbers[2]), totals[r]);
            totals[r] = vec_fma(vec_mul(vec_of_whole(sum + start), scale), vec_all(numbers[0]), totals[r]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < HALF_ROWS; r++) vec_store(sums + r * PANEL, totals[r], FLOAT32);
}

// Adds the products of a tile with a run.
INLINE void add_bytes(const byte_run *run, const code_tile *t, const weights *w, const int words, const int low) {
    const long depth = least(w->group, DEPTH);
    sums_of_group sums[MOST_GROUPS];
    const char *x = t->x;
    for (long group = 0; group < run->groups; group++)
        x = multiply_group(sums[group], run->codes[group], x, run->steps[group], depth, words);
    for (int half = 0; half < COLUMNS; half++) add_half_of_groups(sums, run, t, half, head_of(w), words, low);
}
