// Tiles of rows in bfloat16 times a panel of codes that become floats, by AMX.
//
// A group is multiplied as any matrix of bfloat16 is, in registers that begin with zeros, and then scaled. Any number of rows
// is multiplied so, because an instruction adds up its 32 inputs in an order of its own. Rows lie as those of such a matrix do,
// with zeros behind each section.
#pragma once

#include "float_codes.h"
#include "tile_amx.h"

enum {
    WIDENED_AHEAD = 3072,  // bytes from what is widened to what is prefetched
    FLOAT_GROUPS = CHUNK / GROUP_LEAST,
};

// A run of a panel, which is a chunk: its codes as registers, one for each half of the columns, and what its groups are
// scaled by.
typedef struct {
    uint32_t codes[FLOAT_GROUPS][COLUMNS][PAIRS * LANES];
    float scales[FLOAT_GROUPS][PANEL];
    long groups, steps[FLOAT_GROUPS];
} float_run;

INLINE long step_inputs_of(const weights *w) { return least(w->group, 2 * PAIRS); }

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
        const long quads = quads_in(w, from->group + group), depth = step_inputs_of(w);
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

// Some rows, of which each begins so many bytes after the one before, and the sums to which their products are added.
typedef struct {
    const char *x;
    long stride, rows;
    float *sums;
} float_tile;

typedef float products_of_group[AMX_ROWS * PANEL] __attribute__((aligned(64)));

// Multiplies a tile with the groups of a run. x: its inputs.
INLINE void multiply_run(products_of_group *products, const float_run *run, const float_tile *t, const char *x, long bytes,
                         const int lower) {
    const uint32_t(*codes)[COLUMNS][PAIRS * LANES] = run->codes;
    for (long group = 0; group < run->groups; group++) {
        load_sums(NULL, t->rows, 1);
        for (long end = run->steps[group], step = 0; step < end; step++, codes++, x += bytes) {
            _tile_loadd(4, x, t->stride);
            _tile_loadd(6, (*codes)[0], STEP_BYTES);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, (*codes)[1], STEP_BYTES);
            _tile_dpbf16ps(1, 4, 7);
            if (lower) {
                _tile_loadd(5, x + HALF_ROWS * t->stride, t->stride);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        store_sums(products[group], t->rows);
    }
}

// Adds the products of a tile with a run to its sums.
INLINE void add_run_of_floats(const float_run *run, const float_tile *t, const char *x, float *sums, const weights *w) {
    products_of_group products[FLOAT_GROUPS];
    const long bytes = 2 * step_inputs_of(w);
    if (t->rows > HALF_ROWS) multiply_run(products, run, t, x, bytes, 1);
    else multiply_run(products, run, t, x, bytes, 0);
    for (long i = 0; i < t->rows * PANEL; i += LANES) {
        vec total = vec_load(sums + i, FLOAT32);
        for (long group = 0; group < run->groups; group++) {
            vec scale = vec_load(run->scales[group] + i % PANEL, FLOAT32);
            total = vec_fma(vec_load(products[group] + i, FLOAT32), scale, total);
        }
        vec_store(sums + i, total, FLOAT32);
    }
}

// Multiplies tiles with a panel. Each has room for the sums that wait, or for each section if they stay apart. shaped: what
// AMX was set up for.
static void multiply_float_tiles(const float_tile *tiles, long count, const weights *w, long panel, int apart, long *shaped) {
    const char *next = (const char *)panel_of(w, panel);
    const long all = section_groups(w), bytes = 2 * step_inputs_of(w);
    const long inputs = count > 1 ? CHUNK : CHUNK / 2;  // of a run: a lone tile reads memory, more evenly in short ones
    float_run run __attribute__((aligned(64)));
    for (long section = 0; section < w->sections; section++) {
        groups from = {.panel = next};
        for (const float_tile *t = tiles; t < tiles + count; t++)
            memset(place_of_section(t->sums, t->rows, w, section, apart), 0, t->rows * PANEL * sizeof(float));
        for (; from.group < all; from.group = from.end, from.panel = next) {
            from.end = least(from.group + shifted(inputs, w->group), all);
            next = unpack_floats(&run, &from, w);
            long before = section * section_dwords(w) * 4 + from.group * w->group * 2;
            for (const float_tile *t = tiles; t < tiles + count; t++) {
                long shape = t->rows | bytes << 8;
                if (shape != *shaped) shape_steps(t->rows, bytes), *shaped = shape;
                add_run_of_floats(&run, t, t->x + before, place_of_section(t->sums, t->rows, w, section, apart), w);
            }
        }
        for (const float_tile *t = tiles; !apart && t < tiles + count; t++) join_section(t->sums, t->rows, w, section);
    }
}
