// Tiles of gathered rows times a panel of whole codes: by AMX, if an expert has enough rows for it. No other processor does so.
#pragma once

#if defined(__AMX_BF16__)
#include "code_products_amx.h"
#include "threads.h"
#else
#include "weights.h"
#endif

enum { CODED_ROWS = 16, CODED_TILES = 16 };  // the rows of a tile, and the most tiles that are multiplied together

// Numbers of the sums of a tile [section][row][PANEL].
INLINE long coded_sums(const weights *w) { return w->sections * CODED_ROWS * PANEL; }

#if defined(__AMX_BF16__)
_Static_assert((int)CODED_ROWS == HALF_ROWS && (int)CODED_TILES == CODE_TILES, "as AMX has them");

// Whether so many rows are multiplied so: more than a tile, of which the last one is filled by chance. So it is worth it for half
// as many again as elsewhere.
INLINE int takes_codes(const weights *w, long rows) { return rows > CODED_ROWS && has_codes_for_amx(w, rows * 2 / 3); }

// The size of a row in a tile.
INLINE long coded_dwords(const weights *w) {
    code_form form = form_of(w);
    return form == NO_CODES ? 0 : code_rows_bytes(w, form) / CODED_ROWS / 4;
}

// Lays the rows of a tile, which were laid alone.
INLINE void lay_laid_codes(uint32_t *to, const uint32_t *const *alone, long count, const weights *w) {
    code_form form = form_of(w);
    code_rows rows = code_rows_at((char *)to, w, form);
    for (long r = 0; r < count; r++) lay_code_row(rows, r, alone[r], w, form);
    clear_rows(rows, count, w, form);
}

// Lays rows of so many bytes as a tile. factors: what each is multiplied by; NULL: nothing.
INLINE void lay_codes(uint32_t *to, const char *const *rows, long count, long bytes, const float *factors, const weights *w) {
    code_form form = form_of(w);
    code_rows laid = code_rows_at((char *)to, w, form);
    uint32_t *alone = scratch_beside((size_t)quantized_dwords(w) * 4 + 64);
    for (long r = 0; r < count; r++) {
        lay_quantized(alone, rows[r], bytes, 1, w);
        if (factors) scale_laid(alone, factors + r, 1, w);
        lay_code_row(laid, r, alone, w, form);
    }
    clear_rows(laid, count, w, form);
}

// Adds the products of tiles with a panel to their sums, which lie one behind the other. then: the panel
// that is read after it; shaped: what AMX was set up for.
INLINE void add_codes(const uint32_t *const *x, long count, const weights *w, long panel, const void *then, float *sums,
                      long *shaped) {
    code_form form = form_of(w);
    code_product of[CODED_TILES];
    long shape = AMX_ROWS | step_bytes(w, form) << 8;
    for (long i = 0; i < count; i++)
        of[i] = (code_product){code_rows_at((char *)x[i], w, form), sums + i * coded_sums(w)};
    if (shape != *shaped) shape_steps(AMX_ROWS, step_bytes(w, form)), *shaped = shape;
    add_panel(of, count, w, panel, then, form);
}
#else
INLINE int takes_codes(const weights *w, long rows) { return (void)w, (void)rows, 0; }
INLINE long coded_dwords(const weights *w) { return (void)w, 0; }
INLINE void lay_laid_codes(uint32_t *to, const uint32_t *const *alone, long count, const weights *w) {
    (void)to, (void)alone, (void)count, (void)w;
}
INLINE void lay_codes(uint32_t *to, const char *const *rows, long count, long bytes, const float *factors, const weights *w) {
    (void)to, (void)rows, (void)count, (void)bytes, (void)factors, (void)w;
}
INLINE void add_codes(const uint32_t *const *x, long count, const weights *w, long panel, const void *then, float *sums,
                      long *shaped) {
    (void)x, (void)count, (void)w, (void)panel, (void)then, (void)sums, (void)shaped;
}
#endif
