// Codes that become floats by AMX, beside inputs in bfloat16.
//
// A group is multiplied as any matrix of bfloat16 is, each in registers that begin with zeros, and then scaled. Any number of rows
// is multiplied so, because an instruction adds up its 32 inputs in an order of its own. What a step lacks at the end of a
// section is zeros.
#pragma once

#include "code_tile_amx.h"
#include "float_codes.h"

enum { WIDENED_AHEAD = 3072 };  // bytes from what is widened to what is prefetched

INLINE int has_float_codes(const weights *w) { return w->bits && are_floats(w) && w->kind == BFLOAT16; }

// A run: its codes in registers, one for each half of the columns, and what its groups are scaled by.
typedef struct {
    uint32_t codes[CHUNK / GROUP_LEAST][COLUMNS][PAIRS * LANES];
    float scales[CHUNK / GROUP_LEAST][PANEL];
    long groups, steps[CHUNK / GROUP_LEAST];
} float_run;

// Widens the codes of a group; depth: the inputs of a step; -> its steps.
INLINE long widen_group(uint32_t codes[][COLUMNS][PAIRS * LANES], const char *from, long quads, long depth, const int bits,
                        const levels *table) {
    const long steps = ceil_div(quads * 4, depth), each = depth / 4;
    for (long quad = 0; quad < steps * each; quad++) {
        const whole *line = (const whole *)(from + quad * bits / 8 * PANEL * 4);
        for (int c = 0; c < COLUMNS; c++) {
            vec first = vec_zero(), second = vec_zero();
            if (bits == 8 || quad % 2) _mm_prefetch((const char *)(line + c) + WIDENED_AHEAD, _MM_HINT_T0);
            if (quad < quads) widen_quads(&first, &second, quad_in(line + c, quad % 2, bits), bits, table);
            uint32_t *to = codes[quad / each][c] + quad % each * 2 * LANES;
            vec_store(to, first, FLOAT32);
            vec_store(to + LANES, second, FLOAT32);
        }
    }
    return steps;
}

// Unpacks a run; -> the beginning of the next one.
INLINE const char *unpack_floats(float_run *to, const groups *from, const weights *w) {
    const char *panel = from->panel;
    const levels table = levels_for(w);
    to->groups = from->end - from->group;
    for (long group = 0, step = 0; group < to->groups; group++) {
        const char *codes = panel + group_head_bytes(w);
        const long quads = quads_in(w, from->group + group), depth = least(w->group, STEP);
        vec scales[COLUMNS], minimums[COLUMNS];
        load_head(scales, minimums, panel, NULL, w, 0, COLUMNS);
        for (int c = 0; c < COLUMNS; c++) vec_store(to->scales[group] + c * LANES, scales[c], FLOAT32);
        if (w->bits == 4) to->steps[group] = widen_group(to->codes + step, codes, quads, depth, 4, &table);
        else to->steps[group] = widen_group(to->codes + step, codes, quads, depth, 8, &table);
        step += to->steps[group];
        panel += bytes_in(w, from->group + group);
    }
    return panel;
}

typedef float products_of_group[COLUMNS][HALF] __attribute__((aligned(64)));

INLINE void multiply_floats_by_amx(products_of_group *products, const float_run *run, const char *x, long bytes) {
    const uint32_t(*codes)[COLUMNS][PAIRS * LANES] = run->codes;
    for (long group = 0; group < run->groups; group++) {
        _tile_zero(0);
        _tile_zero(1);
        for (long end = run->steps[group], step = 0; step < end; step++, codes++, x += HALF_ROWS * bytes) {
            _tile_loadd(4, x, bytes);
            _tile_loadd(6, (*codes)[0], STEP_BYTES);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, (*codes)[1], STEP_BYTES);
            _tile_dpbf16ps(1, 4, 7);
        }
        _tile_stored(0, products[group][0], STEP_BYTES);
        _tile_stored(1, products[group][1], STEP_BYTES);
    }
}

// Adds the products of a tile with a run.
INLINE void add_floats(const float_run *run, const code_tile *t, const weights *w) {
    products_of_group products[CHUNK / GROUP_LEAST];
    multiply_floats_by_amx(products, run, t->x, 2 * least(w->group, STEP));
    for (int half = 0; half < COLUMNS; half++) {
        float *sums = t->sums + half * LANES;
        for (long r = 0; r < t->rows; r++, sums += PANEL) {
            vec total = vec_load(sums, FLOAT32);
            for (long group = 0; group < run->groups; group++) {
                vec scale = vec_load(run->scales[group] + half * LANES, FLOAT32);
                total = vec_fma(vec_load(products[group][half] + r * LANES, FLOAT32), scale, total);
            }
            vec_store(sums, total, FLOAT32);
        }
    }
}
