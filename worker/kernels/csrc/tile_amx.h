// A tile of bfloat16 by AMX: up to 32 rows times one panel, in four tiles of sums.
#pragma once

#include "tile.h"

enum { AMX_ROWS = 32, HALF = 16 };

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} __attribute__((packed, aligned(64))) shapes;

// Tiles 0 to 3 hold sums, two for the upper rows and two for the lower; 4 and 5 rows of x; 6 and 7 parts of the panel.
INLINE void shape_tiles(int upper, int lower) {
    shapes s = {.palette = 1, .rows = {upper, upper, lower, lower, upper, lower, HALF, HALF}};
    for (int tile = 0; tile < 8; tile++) s.row_bytes[tile] = s.rows[tile] ? 64 : 0;
    _tile_loadconfig(&s);
}

// Lays rows out in blocks of 16 dwords: the first block of each row, then the second of each. The last block of a
// section is filled up with zeros.
static void lay_blocks(uint32_t *to, const char *x, long stride, long rows, const weights *w) {
    long bytes = section_inputs(w) * 2;
    for (long section = 0; section < w->sections; section++, x += bytes) {
        for (long start = 0; start < bytes; start += 64) {
            for (long r = 0; r < rows; r++, to += PAIRS) {
                if (start + 64 <= bytes) {
                    _mm512_storeu_si512(to, _mm512_loadu_si512(x + r * stride + start));
                } else {
                    memset(to, 0, 64);
                    memcpy(to, x + r * stride + start, bytes - start);
                }
            }
        }
    }
}

INLINE void multiply_blocks(const uint32_t *x, long upper, long lower, const uint32_t *panel, long dwords,
                            fetch ahead) {
    for (long i = 0; i < dwords; i += PAIRS, panel += PAIRS * PANEL, x += PAIRS * (upper + lower)) {
        for (long p = 0; p < PAIRS; p++, ahead.from += ahead.step) {
            _mm_prefetch(ahead.from, _MM_HINT_T0);
            _mm_prefetch(ahead.from + 64, _MM_HINT_T0);
        }
        _tile_loadd(4, x, 64);
        _tile_loadd(6, panel, PANEL * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, panel + PANEL / 2, PANEL * 4);
        _tile_dpbf16ps(1, 4, 7);
        if (lower) {
            _tile_loadd(5, x + upper * PAIRS, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
}

INLINE void multiply_section(const uint32_t *x, long upper, long lower, const uint32_t *panel, long dwords,
                             fetch ahead, float *sums) {
    _tile_zero(0);
    _tile_zero(1);
    if (lower) {
        _tile_zero(2);
        _tile_zero(3);
        multiply_blocks(x, upper, lower, panel, dwords, ahead);
        _tile_stored(2, sums + HALF * PANEL, PANEL * 4);
        _tile_stored(3, sums + HALF * PANEL + PANEL / 2, PANEL * 4);
    } else {
        multiply_blocks(x, upper, 0, panel, dwords, ahead);
    }
    _tile_stored(0, sums, PANEL * 4);
    _tile_stored(1, sums + PANEL / 2, PANEL * 4);
}

// sums [rows, 32] and room for those that wait; x as `lay_blocks` wrote it.
static void multiply_amx(const uint32_t *x, long rows, const weights *w, long number, fetch ahead, float *sums) {
    long upper = least(rows, HALF), lower = rows - upper, dwords = section_dwords(w);
    const uint32_t *panel = panel_of(w, number);
    shape_tiles((int)upper, (int)lower);
    for (long section = 0; section < w->sections; section++) {
        multiply_section(x, upper, lower, panel, dwords, ahead, place_of_section(sums, rows, w, section));
        join_section(sums, rows, w, section);
        x += dwords * rows;
        panel += dwords * PANEL;
        ahead.from += dwords * ahead.step;
    }
    _tile_release();  // or each switch to another process would save them
}
