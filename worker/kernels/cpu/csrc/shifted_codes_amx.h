// Codes of 4 and 5 bits by AMX, beside inputs that have shifts (`quantized_rows.h`).
//
// Codes and inputs are whole numbers of 8 bits, which bfloat16 holds exactly, and so it does inputs that are shifted to
// the scale of their run; float32 holds a group's sum of their products exactly. So a sum has the bits that products of
// bytes give it, and needs neither to be shifted nor to be made a float. The products of groups are stored, scaled and
// added up for a tile of rows at a time.
#pragma once

#include "code_tile_amx.h"

INLINE int has_shifted_codes(const weights *w) {
    return has_shifts(w) && w->bits <= 5 && w->group >= STEP && section_inputs(w) % STEP == 0;
}

// A run of a panel: its codes as registers of bfloat16, one for each half of the columns, and what its groups are scaled by.
typedef struct {
    uint32_t codes[STEPS][COLUMNS][PAIRS * LANES];
    float scales[STEPS][PANEL], minimums[STEPS][PANEL];
    long groups, steps;  // of this run, and of a group
} shifted_run;

// Lays the bytes of a step as bfloat16, on the scale of their run.
INLINE void lay_shifted(char *to, const char *bytes, int32_t up) {
    for (long i = 0; i < STEP; i += LANES)
        vec_store(to + i * 2, vec_of_whole(whole_up_by(whole_of_signed(bytes + i), whole_all(up))), BFLOAT16);
}

INLINE whole whole_of_bits(vec a) { return (whole)_mm512_castps_si512(a); }

// Where the pairs of the next quads of a run come, of which so many are done.
INLINE uint32_t *row_behind(uint32_t *row, long quads) {
    return row + 2 * quads % PAIRS * LANES + 2 * quads / PAIRS * COLUMNS * PAIRS * LANES;
}

// Unpacks the codes of a group, which have 4 bits; -> where those of the next one come.
INLINE uint32_t *unpack_halves(uint32_t *row, const char *from, long quads, whole below, whole above) {
    const whole *line = (const whole *)from;
    for (long quad = 0; quad < quads; quad += 2, line += COLUMNS) {
        for (int c = 0; c < COLUMNS; c++) {
            whole codes = whole_load(line + c);
            vec pairs[4];
            look_up_pairs(pairs, pairs + 1, low_nibbles(codes), below, above);
            look_up_pairs(pairs + 2, pairs + 3, high_nibbles(codes), below, above);
            for (int i = 0; i < 4; i++) vec_store(row_behind(row, quad) + (c * PAIRS + i) * LANES, pairs[i], FLOAT32);
        }
    }
    return row_behind(row, quads);
}

// The same of codes of 5 bits.
INLINE uint32_t *unpack_fives(uint32_t *row, const char *from, long quads, const weights *w) {
    whole bytes[CHUNK / 4 * COLUMNS], excess = whole_all(excess_of(w)), byte = whole_all(255);
    unpack_more(bytes, (const whole *)from, quads, 1);
    for (long quad = 0; quad < quads; quad++) {
        for (int c = 0; c < COLUMNS; c++) {
            whole numbers[4];
            for (int i = 0; i < 4; i++) {
                whole code = whole_down(bytes[quad * COLUMNS + c], 8 * i) & byte;
                numbers[i] = whole_of_bits(vec_of_whole(code - excess));
            }
            for (int i = 0; i < 4; i += 2) {  // bfloat16 is the upper half of float32
                whole pair = whole_down(numbers[i], 16) | (numbers[i + 1] & whole_all((int)0xffff0000));
                whole_store(row_behind(row, quad) + (c * PAIRS + i / 2) * LANES, pair);
            }
        }
    }
    return row_behind(row, quads);
}

// The two bytes of the 16 codes' numbers in bfloat16.
INLINE void bytes_of_levels(const weights *w, whole *below, whole *above) {
    whole levels = levels_of(w);
    int8_t low[16], high[16];
    for (int i = 0; i < 16; i++) {
        bf16 number = narrow((float)(((const uint8_t *)&levels)[i] - excess_of(w)));
        low[i] = (int8_t)number, high[i] = (int8_t)(number >> 8);
    }
    *below = table_of(low), *above = table_of(high);
}

// Unpacks a run; -> the beginning of the next one.
INLINE const char *unpack_shifted(shifted_run *to, const groups *from, const weights *w) {
    const char *panel = from->panel;
    uint32_t *row = to->codes[0][0];
    whole below, above;
    bytes_of_levels(w, &below, &above);
    to->groups = from->end - from->group, to->steps = shifted(w->group, STEP);
    for (long group = from->group; group < from->end; group++) {
        vec scales[COLUMNS], minimums[COLUMNS];
        load_head(scales, minimums, panel, factors_for(from, group, w), w, 0, COLUMNS);
        for (int c = 0; c < COLUMNS; c++) {
            vec_store(to->scales[group - from->group] + c * LANES, scales[c], FLOAT32);
            vec_store(to->minimums[group - from->group] + c * LANES, minimums[c], FLOAT32);
        }
        row = w->bits == 4 ? unpack_halves(row, panel + group_head_bytes(w), quads_in(w, group), below, above)
                           : unpack_fives(row, panel + group_head_bytes(w), quads_in(w, group), w);
        panel += bytes_in(w, group);
    }
    return panel;
}

typedef float products_of_groups[STEPS][HALF] __attribute__((aligned(64)));

// Multiplies a tile with half of the columns of a run. The products lie in memory that stays in the first-level cache.
INLINE void multiply_shifted_half(products_of_groups products, const shifted_run *run, const char *x, int half) {
    for (long group = 0, step = 0; group < run->groups; group++) {
        _tile_zero(0);
        for (long end = step + run->steps; step < end; step++, x += HALF_ROWS * STEP_BYTES) {
            _tile_loadd(4, x, STEP_BYTES);
            _tile_loadd(6, run->codes[step][half], STEP_BYTES);
            _tile_dpbf16ps(0, 4, 6);
        }
        _tile_stored(0, products[group], STEP_BYTES);
    }
}

// Adds the products with half of the columns, scaled, to the sums of a tile in the order of `tile_shifts.c`.
INLINE void add_shifted_half(const products_of_groups products, const shifted_run *run, const code_tile *t, int half,
                             const int low) {
    vec totals[HALF_ROWS];
    float *sums = t->sums + half * LANES;
#pragma GCC unroll 16
    for (int r = 0; r < HALF_ROWS; r++) totals[r] = vec_zero();
    for (long group = 0; group < run->groups; group++) {
        vec scale = vec_load(run->scales[group] + half * LANES, FLOAT32);
        vec minimum = low ? vec_load(run->minimums[group] + half * LANES, FLOAT32) : vec_zero();
#pragma GCC unroll 16
        for (int r = 0; r < HALF_ROWS; r++) {
            if (half == 0) _mm_prefetch(t->next + (group * HALF_ROWS + r) * STEP_BYTES, _MM_HINT_T0);
            if (low) totals[r] = vec_fma(minimum, vec_all(t->numbers[r * t->stride + 1 + group]), totals[r]);
            totals[r] = vec_fma(vec_load(products[group] + r * LANES, FLOAT32), scale, totals[r]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < HALF_ROWS; r++, sums += PANEL)
        vec_store(sums, vec_fma(totals[r], vec_all(t->numbers[r * t->stride]), vec_load(sums, FLOAT32)), FLOAT32);
}

// Adds the products of a tile with a run.
INLINE void add_shifted(const shifted_run *run, const code_tile *t, const int low) {
    products_of_groups products;
    for (int half = 0; half < COLUMNS; half++) {
        multiply_shifted_half(products, run, t->x, half);
        add_shifted_half(products, run, t, half, low);
    }
}
