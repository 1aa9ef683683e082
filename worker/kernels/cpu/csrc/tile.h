// A tile: as many rows times one panel as there are registers for their sums. This is the innermost loop of all linear
// layers, for each number type.
#pragma once

#include "rows.h"
#include "sections.h"

// The most rows of a tile, whose sums fill the registers: where each number of a matrix is widened first, and where it
// is not. Beyond WHOLE_ROWS one half of the columns comes after the other; the sums of six rows would leave AVX2 too few
// registers for what they are multiplied with.
#if LANES == 16
enum { TILE_ROWS = 12, VEC_ROWS = 14, WHOLE_ROWS = 14 };
#else
enum { TILE_ROWS = 3, VEC_ROWS = 5, WHOLE_ROWS = 3 };
#endif

// The memory to prefetch while a tile is computed: `step` bytes for each dword of the panel.
typedef struct {
    const char *from;
    long step;
    const char *end, *next;  // what lies at `next` comes after `end`; NULL: there is no end
} fetch;

INLINE void pass_end(fetch *ahead) {
    if (ahead->next == NULL || ahead->from < ahead->end) return;
    ahead->from += ahead->next - ahead->end;
    ahead->next = NULL;
}

// Tiles of rows that are multiplied with the same panel, one after the other or together.
enum { TILES_AT_ONCE = 8 };
typedef struct {
    long count;
    // The number of the first one among all that this thread multiplies with the panel, and how many those are; none
    // if the panel is in the cache already, and nothing is to be prefetched.
    long first, all;
    const void *next;  // the panel that this thread reads after this one; NULL: the one that lies behind it
    int apart;         // whether sums of sections are not added up, but left one behind the other
    const uint32_t *x[TILES_AT_ONCE];
    long rows[TILES_AT_ONCE];
    float *sums[TILES_AT_ONCE];  // [rows, 32] each, and room for those that wait
    // Of `multiply_in_place`: the rows [sections, 32] to which one tile is added; NULL: its sums are stored.
    float *const *totals;
} tiles;

INLINE vec broadcast(const uint32_t *x) {
    float value;
    memcpy(&value, x, 4);
    return vec_all(value);
}

INLINE void add_products(vec sums[][COLUMNS], const uint32_t *x, int rows, int columns, const vec *w) {
    for (int r = 0; r < rows; r++) {
        vec row = broadcast(x + r);
        for (int c = 0; c < columns; c++) sums[r][c] = vec_fma(row, w[c], sums[r][c]);
    }
}

INLINE void step_float32(vec sums[][COLUMNS], const uint32_t *x, int rows, int columns, const uint32_t *panel) {
    vec w[COLUMNS];
    for (int c = 0; c < columns; c++) w[c] = vec_load(panel + c * LANES, FLOAT32);
    add_products(sums, x, rows, columns, w);
}

#if DOTS
INLINE void step_bfloat16(vec sums[][COLUMNS], const uint32_t *x, int rows, int columns, const uint32_t *panel) {
    (void)columns;  // both
    __m512bh w0 = (__m512bh)_mm512_loadu_si512(panel), w1 = (__m512bh)_mm512_loadu_si512(panel + LANES);
    for (int r = 0; r < rows; r++) {
        __m512bh row = (__m512bh)_mm512_set1_epi32((int)x[r]);
        sums[r][0] = _mm512_dpbf16_ps(sums[r][0], row, w0);
        sums[r][1] = _mm512_dpbf16_ps(sums[r][1], row, w1);
    }
}
#elif LANES == 16
INLINE void step_bfloat16(vec sums[][COLUMNS], const uint32_t *x, int rows, int columns, const uint32_t *panel) {
    vec first[COLUMNS], second[COLUMNS];
    for (int c = 0; c < columns; c++) {
        vec pairs = vec_load(panel + c * LANES, FLOAT32);
        first[c] = widen_even(pairs);
        second[c] = widen_odd(pairs);
    }
    add_products(sums, x, rows, columns, first);
    add_products(sums, x + rows, rows, columns, second);
}
#else
// Few columns are widened at a time, and rows loaded again for the next ones, because sums take nearly all registers.
INLINE void step_bfloat16(vec sums[][COLUMNS], const uint32_t *x, int rows, int columns, const uint32_t *panel) {
    enum { TOGETHER = 2 };
    for (int first = 0; first < columns; first += TOGETHER)
        for (int odd = 0; odd < 2; odd++) {
            vec w[TOGETHER];
            for (int c = 0; c < TOGETHER; c++) {
                vec pairs = vec_load(panel + (first + c) * LANES, FLOAT32);
                w[c] = odd ? widen_odd(pairs) : widen_even(pairs);
            }
            for (int r = 0; r < rows; r++) {
                vec row = broadcast(x + odd * rows + r);
                for (int c = 0; c < TOGETHER; c++) sums[r][first + c] = vec_fma(row, w[c], sums[r][first + c]);
            }
            __asm__ volatile("" : : : "memory");  // a compiler must not keep what is loaded until it is needed again
        }
}
#endif

enum { AHEAD_BYTES = 8192 };

// The memory that a tile prefetches: its own panel, a little ahead; or if this panel is in the cache because it has
// several tiles, its share of the next panel.
INLINE fetch fetch_for(const weights *w, long panel, const tiles *t) {
    const char *from = (const char *)panel_of(w, panel), *end = from + panel_bytes(w);
    if (t->all <= 1) return (fetch){from + AHEAD_BYTES, t->all * PANEL * 4, end, t->next};
    long lines = panel_bytes(w) / (PANEL * 4), step = PANEL * 4 / t->all;
    const char *next = t->next ? t->next : end;
    return (fetch){next + t->first * step * lines, step, NULL, NULL};
}
