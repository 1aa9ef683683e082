// Packs codes that are there already into panels of whole numbers, without any rounding.
#include "threads.h"
#include "weights.h"

// A part of the rows of a matrix. Parts lie anywhere.
typedef struct {
    const uint8_t *codes;
    long row_step, column_step;  // of codes, in bytes
    const char *scales;          // [rows, groups] of the type that `weights` names
    const uint8_t *offsets;      // [rows, groups], or NULL: all are in the middle
    long rows;
} grouped_part;

typedef struct {
    const weights *to;
    const grouped_part *from;
} packing;

// A row of one of the parts; `part` is NULL for a row beyond the last, which is filled with zeros.
typedef struct {
    const grouped_part *part;
    long row;
} place;

INLINE place place_of(const packing *p, long row) {
    if (row >= p->to->outputs) return (place){NULL, 0};
    const grouped_part *part = p->from;
    while (row >= part->rows) row -= part++->rows;
    return (place){part, row};
}

// Packs the column of a group: the first of its inputs, of those of all sections, is `start`.
INLINE void pack_column(uint8_t *to, place from, long column, long start, long number, long index, const weights *w) {
    uint8_t middle = (uint8_t)(1 << (w->bits - 1));
    long width = scales_bytes(w) / PANEL, count = inputs_in(w, number), step = 8 / w->bits;
    uint8_t *codes = to + group_head_bytes(w), *offset = to + scales_bytes(w) + column;
    const grouped_part *part = from.part;
    long at_group = from.row * groups_of(w) + index;
    if (part == NULL) memset(to + column * width, 0, width);
    else memcpy(to + column * width, part->scales + at_group * width, width);
    if (w->offsets) *offset = part == NULL || part->offsets == NULL ? middle : part->offsets[at_group];
    for (long i = 0; i < quads_in(w, number) * 4; i++) {
        long quad = i / 4;
        uint8_t *byte = codes + (quad / step * PANEL + column) * 4 + i % 4, code = middle;
        if (part != NULL && i < count) code = part->codes[from.row * part->row_step + (start + i) * part->column_step];
        *byte = quad % step ? (uint8_t)(*byte | code << 4) : code;
    }
}

static void pack_panels(const void *task, long first, long last) {
    const packing *p = task;
    const weights *w = p->to;
    for (long panel = first; panel < last; panel++) {
        uint8_t *to = (uint8_t *)panel_of(w, panel);
        place rows[PANEL];
        for (long column = 0; column < PANEL; column++) rows[column] = place_of(p, row_at(w, panel, column));
        for (long index = 0; index < groups_of(w); index++) {
            long number = index % section_groups(w), section = index / section_groups(w);
            long start = section * section_inputs(w) + number * w->group;
            for (long column = 0; column < PANEL; column++)
                pack_column(to, rows[column], column, start, number, index, w);
            to += group_head_bytes(w) + quads_in(w, number) * PANEL * w->bits / 2;
        }
    }
}

EXPORT void pack_grouped(const weights *to, const grouped_part *matrix) {
    packing task = {to, matrix};
    spread(panels_of(to), 1, pack_panels, &task);
}
