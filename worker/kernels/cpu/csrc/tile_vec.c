// Tiles of rows times a panel that is not quantized.
#include "tile_vec.h"

void lay_dwords(uint32_t *to, const char *x, long stride, long rows, const weights *w) {
    lay_first_dwords(to, x, stride, rows, dwords_of(w), w);
}

// `join_section` for sums that are in registers.
INLINE void store_section(vec sums[][COLUMNS], int rows, int columns, const weights *w, long section, int apart,
                          float *out) {
    int levels = apart ? 0 : __builtin_ctzl(~section);
    for (int level = 0; level < levels; level++) {
        const float *others = waiting(out, rows, w, level);
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < columns; c++)
                sums[r][c] = vec_add(vec_load(others + r * PANEL + c * LANES, FLOAT32), sums[r][c]);
    }
    out = apart ? place_of_section(out, rows, w, section, 1) : waiting(out, rows, w, levels);
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) vec_store(out + r * PANEL + c * LANES, sums[r][c], FLOAT32);
}

INLINE void tile_of(int rows, int columns, kind k, const uint32_t *x, const uint32_t *panel, const weights *w,
                    fetch ahead, int apart, float *out) {
    long stride = k == BFLOAT16 && !DOTS ? 2 * rows : rows, dwords = section_dwords(w);
    for (long section = 0; section < w->sections; section++) {
        vec sums[VEC_ROWS][COLUMNS];
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < columns; c++) sums[r][c] = vec_zero();
        pass_end(&ahead);
        for (long i = 0; i < dwords; i++, panel += PANEL, x += stride) {
            _mm_prefetch(ahead.from, _MM_HINT_T0);
            _mm_prefetch(ahead.from + 64, _MM_HINT_T0);
            ahead.from += ahead.step;
            if (k == BFLOAT16) step_bfloat16(sums, x, rows, columns, panel);
            else step_float32(sums, x, rows, columns, panel);
        }
        store_section(sums, rows, columns, w, section, apart, out);
    }
}

// Half of the columns of a panel are a tile of its own, as far as prefetches go.
INLINE void multiply_rows(int rows, kind k, const tiles *t, const weights *w, long number) {
    const char *panel = (const char *)panel_of(w, number);
    const int passes = rows > WHOLE_ROWS ? 2 : 1, columns = COLUMNS / passes;
    tiles each = *t;
    each.all *= passes;
    for (int pass = 0; pass < passes; pass++, panel += columns * LANES * 4) {
        each.first = t->first * passes + pass;
        tile_of(rows, columns, k, t->x[0], (const uint32_t *)panel, w, fetch_for(w, number, &each), t->apart,
                t->sums[0] + pass * columns * LANES);
    }
}

#define TILE(n)                                                            \
    case n:                                                                \
        if (w->kind == BFLOAT16) multiply_rows(n, BFLOAT16, t, w, number); \
        else multiply_rows(n, FLOAT32, t, w, number);                      \
        break;

void multiply_vec(const tiles *t, const weights *w, long number) {
    switch (t->rows[0]) {
        TILE(1) TILE(2) TILE(3) TILE(4) TILE(5)
#if LANES == 16
        TILE(6) TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12) TILE(13) TILE(14)
#endif
    }
}
