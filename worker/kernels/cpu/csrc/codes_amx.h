// A product of many rows with codes of 4 bits by AMX, where inputs have shifts (`quantized_rows.h`).
//
// Codes and inputs are whole numbers of 8 bits, which bfloat16 holds exactly, and so it does inputs that are shifted to
// the scale of their run; float32 holds a group's sum of their products exactly. So a sum has the bits that products of
// bytes give it, and needs neither to be shifted nor to be made a float. A run of a panel is unpacked once for all rows
// of a chunk, and the products of its groups are stored, scaled and added up for a tile of rows at a time.
#pragma once

#include "product.h"
#include "quantized_rows.h"
#include "threads.h"
#include "tile.h"
#include "tile_amx.h"

enum {
    STEP = 2 * PAIRS,            // inputs that one instruction multiplies
    STEPS = CHUNK / STEP,        // of a run
    CODE_TILES = 16,             // the most tiles of a chunk, each of HALF_ROWS rows
    CODE_BYTES = 512 << 10,      // of a chunk's inputs, which stay in the second-level cache
    PART = HALF_ROWS * PANEL,    // numbers of a tile
};

// Whether rows of a matrix are multiplied so, from which number on it takes less time.
INLINE int has_codes_for_amx(const weights *w, long rows) {
    return rows >= HALF_ROWS && w->bits == 4 && has_shifts(w) && w->group >= STEP && section_inputs(w) % STEP == 0;
}

typedef struct {
    product product;
    bf16 *laid;       // [tile][section][step][row][input of a step]
    uint32_t *heads;  // [rows of whole tiles][head_dwords]
    long tiles, chunks, blocks;
} codes_job;

// A run of a panel: its codes as registers of bfloat16, one for each half of the columns, and what its groups are scaled by.
typedef struct {
    uint32_t codes[STEPS][COLUMNS][PAIRS * LANES];
    float scales[STEPS][PANEL], minimums[STEPS][PANEL];
    long groups, steps;  // of this run, and of a group
} code_run;

// Rounds rows; numbers are laid as bfloat16, on the scale of their run.
static void lay_codes_rows(const void *task, long first, long last) {
    const codes_job *j = task;
    const weights *w = j->product.w;
    const long inputs = section_inputs(w), each = head_of_group(w);
    uint32_t *head = j->heads + first * head_dwords(w), bytes[CHUNK / 4 + LANES];
    for (long r = first; r < last; r++) {
        const char *from = j->product.x + r * j->product.x_stride;
        bf16 *to = j->laid + r / HALF_ROWS * HALF_ROWS * w->inputs + r % HALF_ROWS * STEP;
        for (long section = 0; section < w->sections; section++, from += inputs * width_of(w->kind)) {
            for (long input = 0; input < inputs; input += CHUNK, head += head_of(w)) {
                round_row(bytes, head - input / CHUNK * head_of(w), from, 1, shifted(input, w->group), w);
                for (long i = 0; i < least(CHUNK, inputs - input); i += STEP, to += HALF_ROWS * STEP) {
                    whole up = whole_all(head[1 + shifted(i, w->group) * each]);
                    for (long half = 0; half < STEP; half += LANES) {
                        whole numbers = whole_of_signed((char *)bytes + i + half);
                        vec_store(to + half, vec_of_whole(whole_up_by(numbers, up)), BFLOAT16);
                    }
                }
            }
        }
    }
}

// Unpacks a run; -> the beginning of the next one.
INLINE const char *unpack_run(code_run *to, const groups *from, const weights *w, whole below, whole above) {
    const char *panel = from->panel;
    uint32_t *row = to->codes[0][0];
    to->groups = from->end - from->group, to->steps = shifted(w->group, STEP);
    for (long group = from->group; group < from->end; group++) {
        vec scales[COLUMNS], minimums[COLUMNS];
        load_head(scales, minimums, panel, factors_for(from, group, w), w, 0, COLUMNS);
        for (int c = 0; c < COLUMNS; c++) {
            vec_store(to->scales[group - from->group] + c * LANES, scales[c], FLOAT32);
            vec_store(to->minimums[group - from->group] + c * LANES, minimums[c], FLOAT32);
        }
        const whole *line = (const whole *)(panel + group_head_bytes(w));
        for (long quads = quads_in(w, group), quad = 0; quad < quads; quad += 2, line += COLUMNS) {
            for (int c = 0; c < COLUMNS; c++) {
                whole codes = whole_load(line + c);
                vec pairs[4];
                look_up_pairs(pairs, pairs + 1, low_nibbles(codes), below, above);
                look_up_pairs(pairs + 2, pairs + 3, high_nibbles(codes), below, above);
                for (int i = 0; i < 4; i++) vec_store(row + (c * PAIRS + i) * LANES, pairs[i], FLOAT32);
            }
            row += 4 * LANES;
            if ((quad + 2) % (PAIRS / 2) == 0) row += (COLUMNS - 1) * PAIRS * LANES;
        }
        panel += bytes_in(w, group);
    }
    return panel;
}

// Adds the products of a tile with half of the columns of a run to its sums, in the order of `tile_shifts.c`. head: of the
// run in the first row, `stride` before that in the next. products: memory that stays in the first-level cache.
INLINE void add_half(const code_run *run, const bf16 *x, const uint32_t *head, long stride, int half, int low,
                     float products[][HALF_ROWS * LANES], float *sums, const bf16 *next) {
    for (long group = 0, step = 0; group < run->groups; group++) {
        _tile_zero(0);
        for (long end = step + run->steps; step < end; step++) {
            _tile_loadd(4, x + step * HALF_ROWS * STEP, STEP * 2);
            _tile_loadd(6, run->codes[step][half], LANES * 4);
            _tile_dpbf16ps(0, 4, 6);
        }
        _tile_stored(0, products[group], LANES * 4);
    }
    vec totals[HALF_ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < HALF_ROWS; r++) totals[r] = vec_zero();
    for (long group = 0; group < run->groups; group++) {
        vec scale = vec_load(run->scales[group] + half * LANES, FLOAT32);
        vec minimum = low ? vec_load(run->minimums[group] + half * LANES, FLOAT32) : vec_zero();
        const float *of = products[group];
#pragma GCC unroll 16
        for (int r = 0; r < HALF_ROWS; r++) {
            if (half == 0) _mm_prefetch((const char *)(next + (group * HALF_ROWS + r) * STEP), _MM_HINT_T0);
            if (low) totals[r] = vec_fma(minimum, broadcast(head + r * stride + 3 + 3 * group), totals[r]);
            totals[r] = vec_fma(vec_load(of + r * LANES, FLOAT32), scale, totals[r]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < HALF_ROWS; r++) {
        float *to = sums + r * PANEL + half * LANES;
        vec_store(to, vec_fma(totals[r], broadcast(head + r * stride), vec_load(to, FLOAT32)), FLOAT32);
    }
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

// Multiplies the tiles [first, end) with a run of a panel that begins so many inputs and so many dwords of a head after
// the first one.
INLINE void add_run(const codes_job *j, const code_run *run, long first, long end, long inputs, long head,
                    float sums[][MOST_SUMS * PART], long section, int low) {
    const weights *w = j->product.w;
    const long stride = head_dwords(w);
    float products[STEPS][HALF_ROWS * LANES] __attribute__((aligned(64)));
    for (long tile = first; tile < end; tile++) {
        const bf16 *x = j->laid + HALF_ROWS * (tile * w->inputs + inputs);
        const uint32_t *heads = j->heads + tile * HALF_ROWS * stride + head;
        float *to = place_of_section(sums[tile - first], HALF_ROWS, w, section, 0);
        for (int half = 0; half < COLUMNS; half++) add_half(run, x, heads, stride, half, low, products, to, x + HALF_ROWS * w->inputs);
    }
}

// Multiplies the tiles [first, end) with a panel.
static void multiply_code_panel(const codes_job *j, long panel, long first, long end, float sums[][MOST_SUMS * PART]) {
    const product *p = &j->product;
    const weights *w = p->w;
    const long all = section_groups(w);
    const char *next = (const char *)panel_of(w, panel);
    code_run run __attribute__((aligned(64)));
    whole below, above;
    bytes_of_levels(w, &below, &above);
    for (long section = 0; section < w->sections; section++) {
        groups from = {.panel = next + section_head_bytes(w), .factors = next};
        for (long tile = first; tile < end; tile++)
            memset(place_of_section(sums[tile - first], HALF_ROWS, w, section, 0), 0, PART * sizeof(float));
        for (; from.group < all; from.group = from.end, from.panel = next) {
            from.end = least(from.group + groups_rounded(w), all);
            next = unpack_run(&run, &from, w, below, above);
            long inputs = section * section_inputs(w) + from.group * w->group;
            long head = section * section_head_dwords(w) + from.group / groups_rounded(w) * head_of(w);
            if (w->offsets || w->minimums) add_run(j, &run, first, end, inputs, head, sums, section, 1);
            else add_run(j, &run, first, end, inputs, head, sums, section, 0);
        }
        for (long tile = first; tile < end; tile++) join_section(sums[tile - first], HALF_ROWS, w, section);
    }
    for (long tile = first, start; tile < end; tile++) {
        start = tile * HALF_ROWS;
        finish_tile(p, sums[tile - first], start, least(HALF_ROWS, p->rows - start), panel);
    }
}

static void multiply_code_units(const void *task, long first, long last) {
    const codes_job *j = task;
    long panels = panels_of(j->product.w);
    float(*sums)[MOST_SUMS * PART] = scratch_beside(CODE_TILES * sizeof *sums);
    shape_tiles(HALF_ROWS);
    for (long unit = first; unit < last; unit++) {
        long chunk = unit / j->blocks, block = unit % j->blocks, end = panels * (block + 1) / j->blocks;
        for (long panel = panels * block / j->blocks; panel < end; panel++)
            multiply_code_panel(j, panel, j->tiles * chunk / j->chunks, j->tiles * (chunk + 1) / j->chunks, sums);
    }
    _tile_release();
}

static void linear_codes_amx(const product *p) {
    const weights *w = p->w;
    codes_job j = {.product = *p, .tiles = ceil_div(p->rows, HALF_ROWS)};
    long rows = j.tiles * HALF_ROWS, most = CODE_BYTES / (HALF_ROWS * w->inputs * 2), panels = panels_of(w);
    j.laid = scratch(rows * (w->inputs * sizeof *j.laid + head_dwords(w) * sizeof *j.heads));
    j.heads = (uint32_t *)(j.laid + rows * w->inputs);
    spread(p->rows, 8, lay_codes_rows, &j);
    j.chunks = ceil_div(j.tiles, most < 1 ? 1 : least(most, CODE_TILES));
    j.blocks = least(ceil_div(8 * threads, j.chunks), panels);
    spread(j.blocks * j.chunks, 1, multiply_code_units, &j);
}
