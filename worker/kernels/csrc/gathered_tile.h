// One tile of gathered rows times a panel, by whatever computes a matrix of that form: AMX, or a way of `method.h`.
#pragma once

#if defined(__AMX_BF16__)
#include "tile_amx.h"
#endif
#include "method.h"

#if defined(__AMX_BF16__)
enum { MOST_ROWS = AMX_ROWS };
#else
enum { MOST_ROWS = TILE_ROWS > QUANTIZED_ROWS ? TILE_ROWS : QUANTIZED_ROWS };
#endif

INLINE int by_amx(const weights *w) {
#if defined(__AMX_BF16__)
    return w->kind == BFLOAT16 && !w->bits;
#else
    return (void)w, 0;
#endif
}

INLINE long tile_rows(const weights *w) { return by_amx(w) ? MOST_ROWS : method_for(w).rows; }

// The size of a row of a section as it is laid.
INLINE long row_dwords(const weights *w) { return by_amx(w) ? dwords_of(w) : method_for(w).dwords; }

// bytes: the size of a row, which may be less than a matrix has inputs, if those have an order.
INLINE void lay_rows(uint32_t *to, const char *const *rows, long count, long bytes, const weights *w) {
    long room = row_dwords(w) * 4;
    if (by_amx(w)) {
        for (long r = 0; r < count; r++) {
            memcpy((char *)to + r * room, rows[r], bytes);
            memset((char *)to + r * room + bytes, 0, room - bytes);
        }
        return;
    }
    if (count == 1) {
        method_for(w).lay(to, rows[0], bytes, 1, w);
        return;
    }
    char gathered[MOST_ROWS][bytes];
    for (long r = 0; r < count; r++) memcpy(gathered[r], rows[r], bytes);
    method_for(w).lay(to, gathered[0], bytes, count, w);
}

// Multiplies a tile with a panel of a matrix of one section. The first tile of a panel reads it from memory. shaped:
// what AMX was set up for.
INLINE void multiply_tile(const uint32_t *x, long rows, const weights *w, long panel, int leads, float *sums,
                          long *shaped) {
#if defined(__AMX_BF16__)
    if (by_amx(w)) {
        const char *from = (const char *)panel_of(w, panel);
        long steps = dwords_of(w) / PAIRS, stride = dwords_of(w) * 4;
        stretch s = {.x = (const char *)x, .stride = stride, .rows = rows, .panel = from, .steps = steps};
        s.ahead = from + AHEAD_BYTES;
        s.lines = leads ? STEP_PANEL / 64 : 0;
        if (rows != *shaped) shape_tiles(*shaped = rows);
        multiply_stretch(&s, sums, 1);
        return;
    }
#endif
    (void)shaped;
    tiles one = {.count = 1, .all = leads, .x = {x}, .rows = {rows}, .sums = {sums}};
    method_for(w).multiply(&one, w, panel);
}

INLINE void release(long shaped) {
#if defined(__AMX_BF16__)
    if (shaped) _tile_release();  // or each switch to another process would save them
#else
    (void)shaped;
#endif
}
