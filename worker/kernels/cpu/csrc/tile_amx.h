// A tile of bfloat16 by AMX: up to 32 rows times one panel, in four registers of sums.
//
// A register holds 16 rows of 64 bytes: 16 sums for each of 16 rows, 32 inputs of 16 rows of x, or 16 columns of 16
// dwords of a panel. It is loaded from rows of x where they lie.
#pragma once

#include "amx_registers.h"
#include "sections.h"

enum {
    AMX_ROWS = 32,
    HALF_ROWS = 16,
    STEP_BYTES = 64,                 // of each row of x that a step multiplies,
    STEP_PANEL = PAIRS * PANEL * 4,  // and of the panel
};

// Registers 0 to 3 hold sums, two for the upper rows and two for the lower; 4 and 5 rows of x, with so many bytes for a step;
// 6 and 7 parts of the panel.
INLINE void shape_steps(long rows, long bytes) {
    uint8_t upper = (uint8_t)least(rows, HALF_ROWS), lower = (uint8_t)(rows - upper), dwords = (uint8_t)(bytes / 4);
    shapes s = {.palette = 1, .rows = {upper, upper, lower, lower, upper, lower, dwords, dwords}};
    for (int tile = 0; tile < 8; tile++)
        s.row_bytes[tile] = s.rows[tile] == 0 ? 0 : tile == 4 || tile == 5 ? (uint16_t)bytes : STEP_BYTES;
    set_shapes(&s);
}
INLINE void shape_tiles(long rows) { shape_steps(rows, STEP_BYTES); }

// A part of a tile: some steps of its rows and of its panel. If `rows_once`, the panel is used again by the next tile
// and stays in the first-level cache, through which the rows pass; else it is the other way round.
typedef struct {
    const char *x;
    long stride;  // from one row to the next, in bytes
    long rows;
    const char *panel;
    long steps;
    int rows_once;
    const char *ahead;  // memory to prefetch, `lines` of it in each step
    long lines;
} stretch;

#define LOAD(number, from, stride, once)              \
    if (once) _tile_stream_loadd(number, from, stride); \
    else _tile_loadd(number, from, stride)

INLINE void multiply_steps(const stretch *s, const int lower, const int rows_once) {
    const char *x = s->x, *below = x + HALF_ROWS * s->stride, *panel = s->panel, *ahead = s->ahead;
    for (long i = 0; i < s->steps; i++, x += STEP_BYTES, below += STEP_BYTES, panel += STEP_PANEL) {
        for (long line = 0; line < s->lines; line++, ahead += 64) {
            if (rows_once) _mm_prefetch(ahead, _MM_HINT_T1);
            else _mm_prefetch(ahead, _MM_HINT_T0);
        }
        LOAD(4, x, s->stride, rows_once);
        LOAD(6, panel, PANEL * 4, !rows_once);
        _tile_dpbf16ps(0, 4, 6);
        LOAD(7, panel + PANEL * 2, PANEL * 4, !rows_once);
        _tile_dpbf16ps(1, 4, 7);
        if (lower) {
            LOAD(5, below, s->stride, rows_once);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
}

INLINE void load_sums(const float *sums, long rows, int fresh) {
    if (fresh) {
        _tile_zero(0);
        _tile_zero(1);
        if (rows <= HALF_ROWS) return;
        _tile_zero(2);
        _tile_zero(3);
        return;
    }
    _tile_loadd(0, sums, PANEL * 4);
    _tile_loadd(1, sums + PANEL / 2, PANEL * 4);
    if (rows <= HALF_ROWS) return;
    _tile_loadd(2, sums + HALF_ROWS * PANEL, PANEL * 4);
    _tile_loadd(3, sums + HALF_ROWS * PANEL + PANEL / 2, PANEL * 4);
}

INLINE void store_sums(float *sums, long rows) {
    _tile_stored(0, sums, PANEL * 4);
    _tile_stored(1, sums + PANEL / 2, PANEL * 4);
    if (rows <= HALF_ROWS) return;
    _tile_stored(2, sums + HALF_ROWS * PANEL, PANEL * 4);
    _tile_stored(3, sums + HALF_ROWS * PANEL + PANEL / 2, PANEL * 4);
}

// Adds the products of a stretch to sums [rows, 32], or to zeros. A sum that is stored and loaded between two stretches
// has the same bits as one that stays in its register.
static void multiply_stretch(const stretch *s, float *sums, int fresh) {
    load_sums(sums, s->rows, fresh);
    if (s->rows > HALF_ROWS) {
        if (s->rows_once) multiply_steps(s, 1, 1);
        else multiply_steps(s, 1, 0);
    } else {
        if (s->rows_once) multiply_steps(s, 0, 1);
        else multiply_steps(s, 0, 0);
    }
    store_sums(sums, s->rows);
}

// sums [rows, 32] and room for those that wait, or for each section if they stay apart; `s` is the first section.
static void multiply_sections(stretch s, const weights *w, int apart, float *sums) {
    for (long section = 0; section < w->sections; section++) {
        multiply_stretch(&s, place_of_section(sums, s.rows, w, section, apart), 1);
        if (!apart) join_section(sums, s.rows, w, section);
        s.x += s.steps * STEP_BYTES;
        s.panel += s.steps * STEP_PANEL;
        s.ahead += s.steps * s.lines * 64;
    }
}
