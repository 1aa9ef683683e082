// Packs a matrix into panels, when it is loaded.
#include "threads.h"
#include "weights.h"

typedef struct {
    const weights *to;
    const part *from;
} packing;

static void pack_panels(const void *task, long first, long last) {
    const packing *p = task;
    const weights *w = p->to;
    long dwords = dwords_of(w), row_bytes = w->inputs * width_of(w->kind), whole = row_bytes / 4;
    for (long panel = first; panel < last; panel++) {
        uint32_t *to = (uint32_t *)panel_of(w, panel);
        const char *rows[PANEL];
        for (long column = 0; column < PANEL; column++) {
            long row = row_at(w, panel, column);
            rows[column] = row < w->outputs ? row_of(p->from, row, row_bytes) : NULL;
        }
        for (long start = 0; start < dwords; start += 16) {  // one cache line of each row at a time
            long stop = least(start + 16, dwords), stop_whole = least(stop, whole);
            for (long column = 0; column < PANEL; column++) {
                const char *from = rows[column];
                for (long i = start; i < stop; i++) to[i * PANEL + column] = 0;
                if (from == NULL) continue;
                for (long i = start; i < stop_whole; i++) memcpy(&to[i * PANEL + column], from + i * 4, 4);
                if (start <= whole && whole < stop && row_bytes % 4)  // an odd input
                    memcpy(&to[whole * PANEL + column], from + whole * 4, 2);
            }
        }
    }
}

EXPORT long packed_bytes(const weights *w) { return panels_of(w) * panel_bytes(w); }

EXPORT void pack(const weights *to, const part *matrix) {
    packing task = {to, matrix};
    spread(panels_of(to), 1, pack_panels, &task);
}
