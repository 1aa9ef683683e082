// A product of bfloat16 by AMX, with a matrix in bfloat16 or with codes that become floats.
//
// Two of the four loads of a step come from the second-level cache, which is as fast as the products of a step, and two
// from the first-level one: four from the second would take longer. So the rows of x are cut into chunks that stay in
// the second-level cache, and a panel into stretches that stay in the first-level one while they are multiplied with
// all rows of a chunk. The sums of the tiles wait in memory until the panel's next stretch. Sections are too short for
// that: those of a tile are computed one after the other.
//
// Rows with many inputs fill that cache when there are few of them, and panels would be read again for each few rows. Then a
// chunk has more rows, of which one stretch at a time stays there, beside the sums of all its tiles with several panels.
#pragma once

#include "float_codes_amx.h"
#include "product.h"
#include "threads.h"

enum {
    CHUNK_BYTES = 768 << 10,  // of x
    CHUNK_TILES = 16,         // the most tiles of a chunk
    STRETCH_STEPS = 18,       // the most steps of a stretch
    AMX_AHEAD = 4096,         // bytes from what a lone tile multiplies to what it prefetches
    LONG_STEPS = 144,         // steps from which on inputs are many
    LONG_TILES = 8,           // tiles of a chunk then,
    LONG_PANELS = 8,          // and panels for which its stretches stay in the cache
};

typedef struct {
    product product;
    char *laid;      // rows with zeros behind their sections; NULL if they are read where they lie
    long tiles;
    long chunks;     // of tiles
    long blocks;     // of panels; a unit of work is a block times a chunk
    long stretches;  // of a panel
} amx_job;

// Numbers of the sums of a tile that wait, those of its sections included.
INLINE long room_of(const weights *w) { return (w->sections > 1 ? MOST_SUMS : 1) * AMX_ROWS * PANEL; }

// Whether rows of a matrix have many inputs; `tiles`: of a job.
INLINE int is_long(const weights *w, long tiles) { return !w->bits && tiles > 1 && dwords_of(w) / PAIRS >= LONG_STEPS; }

// Some tiles of a job.
typedef struct {
    long first, end;
} tiles_of_chunk;

static void lay_padded(const void *task, long first, long last) {
    const amx_job *j = task;
    const weights *w = j->product.w;
    long bytes = section_inputs(w) * 2, room = section_dwords(w) * 4;
    char *to = j->laid + first * w->sections * room;
    for (long r = first; r < last; r++) {
        const char *from = j->product.x + r * j->product.x_stride;
        for (int section = 0; section < w->sections; section++, from += bytes, to += room) {
            memcpy(to, from, bytes);
            memset(to + bytes, 0, room - bytes);
        }
    }
}

// A stretch of the first row and a panel; of several sections, the first one. Each of several tiles prefetches its
// share of what follows in the panel, and a lone tile a little ahead.
INLINE stretch stretch_of(const amx_job *j, long panel, long number, long tiles) {
    const weights *w = j->product.w;
    long all = section_dwords(w) / PAIRS;
    long first = all * number / j->stretches, steps = all * (number + 1) / j->stretches - first;
    stretch s = {.stride = j->product.x_stride, .steps = steps, .rows_once = tiles > 1};
    s.x = j->product.x + first * STEP_BYTES;
    s.panel = (const char *)panel_of(w, panel) + first * STEP_PANEL;
    s.ahead = s.panel + (tiles > 1 ? w->sections * steps * STEP_PANEL : AMX_AHEAD);
    s.lines = ceil_div(STEP_PANEL / 64, tiles);
    return s;
}

// Multiplies the tiles of a chunk with a panel. sums: a place for each tile; or if there are several sections, room for
// those of one tile.
static void multiply_panel(const amx_job *j, long panel, tiles_of_chunk tiles, long *shaped,
                           float sums[][AMX_ROWS * PANEL]) {
    const product *p = &j->product;
    for (long number = 0; number < j->stretches; number++) {
        stretch s = stretch_of(j, panel, number, tiles.end - tiles.first);
        const char *x = s.x;
        for (long tile = tiles.first; tile < tiles.end; tile++) {
            long start = tile * AMX_ROWS;
            float *of_tile = j->stretches > 1 ? sums[tile - tiles.first] : sums[0];
            s.x = x + start * s.stride;
            s.rows = least(AMX_ROWS, p->rows - start);
            if (s.rows != *shaped) shape_tiles(*shaped = s.rows);
            if (p->w->sections > 1) multiply_sections(s, p->w, 0, of_tile);
            else multiply_stretch(&s, of_tile, number == 0);
            if (number == j->stretches - 1) finish_tile(p, of_tile, start, s.rows, panel);
            s.ahead += p->w->sections * s.steps * s.lines * 64;
        }
    }
}

// Multiplies the tiles of a chunk with a stretch of a panel, which is one of a section. sums: a place for each tile. ahead: what
// the tiles prefetch, each its share.
INLINE void multiply_stretch_of_tiles(const amx_job *j, tiles_of_chunk tiles, stretch s, const char *ahead, long section,
                                      int begins, int ends, long *shaped, float *sums) {
    const product *p = &j->product;
    const char *x = s.x;
    s.lines = ceil_div(STEP_PANEL / 64, tiles.end - tiles.first);
    for (long tile = tiles.first; tile < tiles.end; tile++, ahead += s.steps * s.lines * 64, sums += room_of(p->w)) {
        s.x = x + tile * AMX_ROWS * s.stride;
        s.rows = least(AMX_ROWS, p->rows - tile * AMX_ROWS);
        s.ahead = ahead;
        if (s.rows != *shaped) shape_tiles(*shaped = s.rows);
        multiply_stretch(&s, place_of_section(sums, s.rows, p->w, section, 0), begins);
        if (ends) join_section(sums, s.rows, p->w, section);
    }
}

// Multiplies the tiles of a chunk with so many panels from the first one on, whose rows have many inputs.
static void multiply_long_panels(const amx_job *j, long first, long count, tiles_of_chunk tiles, long *shaped, float *sums) {
    const product *p = &j->product;
    const weights *w = p->w;
    const long all = section_dwords(w) / PAIRS, stretches = ceil_div(all, STRETCH_STEPS);
    const long room = (tiles.end - tiles.first) * room_of(w);
    for (long i = 0; i < w->sections * stretches; i++) {
        long number = i % stretches, section = i / stretches, begin = all * number / stretches;
        stretch s = {.stride = p->x_stride, .steps = all * (number + 1) / stretches - begin, .rows_once = 1};
        begin += section * all;
        s.x = p->x + begin * STEP_BYTES;
        for (long panel = 0; panel < count; panel++) {
            s.panel = (const char *)panel_of(w, first + panel) + begin * STEP_PANEL;
            const char *ahead = s.panel + panel_bytes(w);  // the same of the next panel
            if (panel + 1 == count) ahead = (const char *)panel_of(w, first) + (begin + s.steps) * STEP_PANEL;
            multiply_stretch_of_tiles(j, tiles, s, ahead, section, number == 0, number + 1 == stretches, shaped,
                                      sums + panel * room);
        }
    }
    for (long panel = 0; panel < count; panel++)
        for (long tile = tiles.first; tile < tiles.end; tile++) {
            long start = tile * AMX_ROWS, rows = least(AMX_ROWS, p->rows - start);
            finish_tile(p, sums + panel * room + (tile - tiles.first) * room_of(w), start, rows, first + panel);
        }
}

// The same with a panel of codes, of which a run is widened for all tiles of a chunk. sums: a place for each tile.
static void multiply_panel_of_codes(const amx_job *j, long panel, tiles_of_chunk tiles, long *shaped, float *sums) {
    const product *p = &j->product;
    float_tile of[CHUNK_TILES];
    const long count = tiles.end - tiles.first;
    for (long i = 0; i < count; i++) {
        long start = (tiles.first + i) * AMX_ROWS;
        const char *x = p->x + start * p->x_stride;
        of[i] = (float_tile){.x = x, .stride = p->x_stride, .rows = least(AMX_ROWS, p->rows - start)};
        of[i].sums = sums + i * room_of(p->w);
    }
    multiply_float_tiles(of, count, p->w, panel, 0, shaped);
    for (long i = 0; i < count; i++) finish_tile(p, of[i].sums, (tiles.first + i) * AMX_ROWS, of[i].rows, panel);
}

static void multiply_units(const void *task, long first, long last) {
    const amx_job *j = task;
    const weights *w = j->product.w;
    const int many = is_long(w, j->tiles);
    const long panels = panels_of(w), most = many ? LONG_PANELS : 1;
    long shaped = 0;
    void *sums = scratch_beside((many ? LONG_TILES * LONG_PANELS : CHUNK_TILES) * room_of(w) * sizeof(float));
    for (long unit = first; unit < last; unit++) {
        long chunk = unit / j->blocks, block = unit % j->blocks, end = panels * (block + 1) / j->blocks;
        tiles_of_chunk tiles = {j->tiles * chunk / j->chunks, j->tiles * (chunk + 1) / j->chunks};
        for (long panel = panels * block / j->blocks, count; panel < end; panel += count) {
            count = least(most, end - panel);
            if (w->bits) multiply_panel_of_codes(j, panel, tiles, &shaped, sums);
            else if (many) multiply_long_panels(j, panel, count, tiles, &shaped, sums);
            else multiply_panel(j, panel, tiles, &shaped, sums);
        }
    }
    _tile_release();  // or each switch to another process would save them
}

static void linear_amx(const product *p) {
    const weights *w = p->w;
    if (p->rows == 0) return;
    amx_job j = {.product = *p, .tiles = ceil_div(p->rows, AMX_ROWS), .stretches = 1};
    long panels = panels_of(w), row_bytes = dwords_of(w) * 4, most = CHUNK_BYTES / (AMX_ROWS * row_bytes);
    if (section_inputs(w) % (2 * PAIRS)) {
        j.laid = scratch(p->rows * row_bytes);
        spread(p->rows, AMX_ROWS, lay_padded, &j);
        j.product.x = j.laid;
        j.product.x_stride = row_bytes;
    }
    if (w->sections == 1 && j.tiles > 1 && !w->bits) j.stretches = ceil_div(dwords_of(w) / PAIRS, STRETCH_STEPS);
    if (is_long(w, j.tiles)) most = LONG_TILES;
    j.chunks = ceil_div(j.tiles, most < 1 ? 1 : least(most, CHUNK_TILES));
    // Enough units for threads to end together. Those of a single tile are small, so that memory is read evenly.
    j.blocks = ceil_div(4 * threads, j.chunks);
    if (j.tiles == 1 && j.blocks < panels / 4) j.blocks = panels / 4;
    j.blocks = least(j.blocks, panels);
    // Rows of one tile wait for memory, which each thread then reads in a stream of its own.
    if (j.tiles == 1) spread_streams(j.blocks, 1, multiply_units, &j);
    else spread(j.blocks * j.chunks, 1, multiply_units, &j);
}
