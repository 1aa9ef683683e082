// Packs a matrix into panels, when it is loaded.
#include "pairs.h"
#include "threads.h"
#include "weights.h"

typedef struct {
    const weights *to;
    const part *from;
} packing;

// Moves dwords of rows, as many of each as a vector has, to where each row is a column. A row that is NULL is zeros.
INLINE void pack_square(uint32_t *to, const char *const *rows, long offset) {
    vec square[LANES];
    for (long row = 0; row < LANES; row++)
        square[row] = rows[row] == NULL ? vec_zero() : vec_load(rows[row] + offset, FLOAT32);
    vec_transpose(square);
    for (long i = 0; i < LANES; i++) vec_store(to + i * PANEL, square[i], FLOAT32);
}

INLINE void pack_section(uint32_t *to, const char *const *rows, long section, const weights *w) {
    long dwords = section_dwords(w), bytes = section_inputs(w) * width_of(w->kind), whole = bytes / 4;
    long start = 0;
    for (; start + LANES <= whole; start += LANES)
        for (long column = 0; column < PANEL; column += LANES)
            pack_square(to + start * PANEL + column, rows + column, section * bytes + start * 4);
    for (; start < dwords; start += 16) {
        long stop = least(start + 16, dwords), stop_whole = least(stop, whole);
        for (long column = 0; column < PANEL; column++) {
            for (long i = start; i < stop; i++) to[i * PANEL + column] = 0;
            if (rows[column] == NULL) continue;
            const char *from = rows[column] + section * bytes;
            for (long i = start; i < stop_whole; i++) memcpy(&to[i * PANEL + column], from + i * 4, 4);
            if (start <= whole && whole < stop && bytes % 4)  // an odd input
                memcpy(&to[whole * PANEL + column], from + whole * 4, 2);
        }
    }
}

static void pack_panels(const void *task, long first, long last) {
    const packing *p = task;
    const weights *w = p->to;
    long row_bytes = w->inputs * width_of(w->kind);
    for (long panel = first; panel < last; panel++) {
        uint32_t *to = (uint32_t *)panel_of(w, panel);
        const char *rows[PANEL];
        for (long column = 0; column < PANEL; column++) {
            long row = row_at(w, panel, column);
            rows[column] = row < w->outputs ? row_of(p->from, row, row_bytes) : NULL;
        }
        for (long section = 0; section < w->sections; section++)
            pack_section(to + section * section_dwords(w) * PANEL, rows, section, w);
    }
}

EXPORT long packed_bytes(const weights *w) { return panels_of(w) * panel_bytes(w); }

EXPORT void pack(const weights *to, const part *matrix) {
    packing task = {to, matrix};
    spread(panels_of(to), 1, pack_panels, &task);
}
