// One tile of gathered rows times a panel, by whatever computes a matrix of that form: AMX, or a way of `tile_methods.h`.
#pragma once

#if defined(__AMX_BF16__)
#include "float_codes_amx.h"
#endif
#include "tile_methods.h"
#include "threads.h"

#if defined(__AMX_BF16__)
enum { MOST_ROWS = AMX_ROWS };
#else
enum { MOST_ROWS = METHOD_ROWS };
#endif

INLINE long tile_rows(const weights *w) { return is_for_amx(w) ? MOST_ROWS : method_for(w).rows; }

// The size of a row as it is laid.
INLINE long row_dwords(const weights *w) { return is_for_amx(w) ? dwords_of(w) : method_for(w).dwords; }

// A row for AMX, whose sections are filled up with zeros.
INLINE void lay_padded_row(uint32_t *to, const char *row, long bytes, const weights *w) {
    long room = section_dwords(w) * 4;
    for (long section = 0; section < w->sections; section++) {
        char *place = (char *)to + section * room;
        memcpy(place, row + section * bytes, bytes);
        memset(place + bytes, 0, room - bytes);
    }
}

// Lays rows of so many bytes, which may be less than a matrix has inputs, if those have an order.
INLINE void lay_rows(uint32_t *to, const char *const *rows, long count, long bytes, const weights *w) {
    if (is_for_amx(w)) {
        for (long r = 0; r < count; r++) lay_padded_row(to + r * dwords_of(w), rows[r], shifted(bytes, w->sections), w);
        return;
    }
    if (count == 1) {
        method_for(w).lay(to, rows[0], bytes, 1, w);
        return;
    }
    char *gathered = scratch_beside((size_t)(count * bytes));
    for (long r = 0; r < count; r++) memcpy(gathered + r * bytes, rows[r], bytes);
    method_for(w).lay(to, gathered, bytes, count, w);
}

// Whether products are added to totals where they are made, and not stored first.
INLINE int adds_to_totals(const weights *w) { return w->bits && !are_floats(w) && is_read_in_place(w); }

// A tile of gathered rows and what it is multiplied with. The first tile of a panel reads it from memory.
typedef struct {
    const uint32_t *x;
    long rows;
    int leads;
    const void *next;      // the panel that is read after this one
    float *const *totals;  // of `tiles`
} gathered_tile;

// Multiplies a tile with a panel; the sums of sections are left apart. shaped: what AMX was set up for.
INLINE void multiply_tile(const gathered_tile *t, const weights *w, long panel, float *sums, long *shaped) {
#if defined(__AMX_BF16__)
    if (is_for_amx(w) && w->bits) {
        float_tile tile = {.x = (const char *)t->x, .stride = dwords_of(w) * 4, .rows = t->rows, .sums = sums};
        multiply_float_tiles(&tile, 1, w, panel, 1, shaped);
        return;
    }
    if (is_for_amx(w)) {
        const char *from = (const char *)panel_of(w, panel);
        long steps = section_dwords(w) / PAIRS, stride = dwords_of(w) * 4;
        stretch s = {.x = (const char *)t->x, .stride = stride, .rows = t->rows, .panel = from, .steps = steps};
        s.ahead = from + AHEAD_BYTES;
        s.lines = t->leads ? STEP_PANEL / 64 : 0;
        if (t->rows != *shaped) shape_tiles(*shaped = t->rows);
        multiply_sections(s, w, 1, sums);
        return;
    }
#endif
    (void)shaped;
    tiles one = {.count = 1, .all = t->leads, .next = t->next, .apart = 1, .x = {t->x}, .rows = {t->rows}};
    one.sums[0] = sums;
    one.totals = t->totals;
    method_for(w).multiply(&one, w, panel);
}

INLINE void release(long shaped) {
#if defined(__AMX_BF16__)
    if (shaped) _tile_release();  // or each switch to another process would save them
#else
    (void)shaped;
#endif
}
