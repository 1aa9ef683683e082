// A product of many rows with a matrix of whole codes by AMX.
#pragma once

#include "code_products_amx.h"
#include "product.h"
#include "quantized_rows.h"
#include "threads.h"

enum { CODE_BYTES = 512 << 10 };  // of a chunk's inputs, which stay in the second-level cache

typedef struct {
    product product;
    code_form form;
    char *laid;       // tiles, one behind the other
    long tile_bytes;  // of which each has so many
    long tiles, chunks, blocks;
} codes_job;

INLINE code_rows laid_tile(const codes_job *j, long tile) {
    return code_rows_at(j->laid + tile * j->tile_bytes, j->product.w, j->form);
}

static void lay_codes_rows(const void *task, long first, long last) {
    const codes_job *j = task;
    const weights *w = j->product.w;
    uint32_t *alone = scratch_beside((size_t)quantized_dwords(w) * 4 + 64);
    for (long r = first; r < last; r++) {
        lay_quantized(alone, j->product.x + r * j->product.x_stride, 0, 1, w);
        lay_code_row(laid_tile(j, r / HALF_ROWS), r % HALF_ROWS, alone, w, j->form);
    }
}

// Multiplies the tiles [first, end) with a panel. sums: for the sections of so many tiles.
INLINE void multiply_code_panel(const codes_job *j, long panel, long first, long end, float *sums) {
    const weights *w = j->product.w;
    const long size = w->sections * PART;
    code_product of[CODE_TILES];
    memset(sums, 0, (end - first) * size * sizeof *sums);
    for (long tile = first; tile < end; tile++)
        of[tile - first] = (code_product){laid_tile(j, tile), sums + (tile - first) * size};
    add_panel(of, end - first, w, panel, panel_of(w, panel + 1), j->form);
    for (long tile = first, start; tile < end; tile++, sums += size) {
        join_apart(sums, PART, w->sections);
        start = tile * HALF_ROWS;
        finish_tile(&j->product, sums, start, least(HALF_ROWS, j->product.rows - start), panel);
    }
}

static void multiply_code_units(const void *task, long first, long last) {
    const codes_job *j = task;
    const weights *w = j->product.w;
    long panels = panels_of(w);
    float *sums = scratch_beside((size_t)(CODE_TILES * w->sections * PART) * sizeof *sums);
    shape_steps(AMX_ROWS, step_bytes(w, j->form));
    for (long unit = first; unit < last; unit++) {
        long chunk = unit / j->blocks, block = unit % j->blocks, end = panels * (block + 1) / j->blocks;
        long from = j->tiles * chunk / j->chunks, to = j->tiles * (chunk + 1) / j->chunks;
        for (long panel = panels * block / j->blocks; panel < end; panel++) multiply_code_panel(j, panel, from, to, sums);
    }
    _tile_release();
}

static void linear_codes_amx(const product *p) {
    const weights *w = p->w;
    codes_job j = {.product = *p, .form = form_of(w), .tiles = ceil_div(p->rows, HALF_ROWS)};
    j.tile_bytes = code_rows_bytes(w, j.form);
    j.laid = scratch(j.tiles * j.tile_bytes);
    spread(p->rows, 8, lay_codes_rows, &j);
    if (p->rows % HALF_ROWS) clear_rows(laid_tile(&j, j.tiles - 1), p->rows % HALF_ROWS, w, j.form);
    long panels = panels_of(w), most = CODE_BYTES / bytes_before(w, j.form, w->inputs);
    j.chunks = ceil_div(j.tiles, most < 1 ? 1 : least(most, CODE_TILES));
    j.blocks = least(ceil_div(8 * threads, j.chunks), panels);
    spread(j.blocks * j.chunks, 1, multiply_code_units, &j);
}
