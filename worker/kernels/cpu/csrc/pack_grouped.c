// Packs codes that are there already into panels of whole numbers, without any rounding.
#include "threads.h"
#include "weights.h"

// A part of the rows of a matrix. Parts lie anywhere.
typedef struct {
    const uint8_t *codes;
    long row_step, column_step;  // of codes, in bytes
    const char *scales;          // [rows, groups] of the type that `weights` names
    const uint8_t *offsets;      // [rows, groups], or NULL: all are in the middle
    const char *minimums;        // [rows, groups] of the type of scales, if there are any
    const char *factors[2];      // [rows, runs] of scales and of minimums, if there are any
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

// Copies a number of a row to its column, or a zero for a row that is none. numbers: [rows, each].
INLINE void pack_number(uint8_t *to, place from, const char *numbers, long column, long index, long each, long width) {
    if (from.part == NULL) memset(to + column * width, 0, width);
    else memcpy(to + column * width, numbers + (from.row * each + index) * width, width);
}

// Packs the numbers of a column of a group.
INLINE void pack_head(uint8_t *to, place from, long column, long index, const weights *w) {
    uint8_t middle = (uint8_t)(1 << (w->bits - 1));
    const grouped_part *part = from.part;
    long groups = groups_of(w), width = number_bytes(w->scale);
    pack_number(to, from, part ? part->scales : NULL, column, index, groups, width);
    to += scales_bytes(w);
    if (w->offsets)
        to[column] = part == NULL || part->offsets == NULL ? middle : part->offsets[from.row * groups + index];
    else if (w->minimums) pack_number(to, from, part ? part->minimums : NULL, column, index, groups, width);
}

// Packs the factors of all runs of a section.
INLINE void pack_factors(uint8_t *to, const place *rows, long section, const weights *w) {
    long runs = w->run ? ceil_div(section_groups(w), w->run) : 0, width = number_bytes(w->factor);
    for (long run = 0; run < runs; run++) {
        for (int which = 0; which <= w->minimums; which++, to += PANEL * width) {
            for (long column = 0; column < PANEL; column++) {
                const grouped_part *part = rows[column].part;
                const char *factors = part ? part->factors[which] : NULL;
                pack_number(to, rows[column], factors, column, section * runs + run, w->sections * runs, width);
            }
        }
    }
}

enum { SIDE = 16 };  // rows of a panel whose codes may lie side by side: also its gates, or their values

// A dword of a panel: four codes, or eight, of which the later ones are in the high nibbles.
INLINE uint32_t dword_of(const uint8_t *codes, int bits) {
    uint32_t low, high;
    memcpy(&low, codes, 4);
    if (bits == 8) return low;
    memcpy(&high, codes + 4, 4);
    return low | high << 4;
}

// Packs dwords of a column whose codes lie one behind the other.
INLINE void pack_behind(uint32_t *to, const uint8_t *codes, long dwords, int bits) {
    for (long d = 0; d < dwords; d++) to[d * PANEL] = dword_of(codes + d * (32 / bits), bits);
}

// Packs dwords of SIDE columns whose codes lie side by side.
INLINE void pack_beside(uint32_t *to, const uint8_t *codes, long step, long dwords, int bits) {
    for (long d = 0; d < dwords; d++) {
        uint32_t found[SIDE] = {0};
        for (long i = 0; i < 32 / bits; i++) {
            const uint8_t *from = codes + (d * (32 / bits) + i) * step;
            for (long c = 0; c < SIDE; c++) found[c] |= (uint32_t)from[c] << (i % 4 * 8 + i / 4 * 4);
        }
        memcpy(to + d * PANEL, found, sizeof found);
    }
}

// Packs dwords of a column, some codes of which may be missing: only the first `count` are there.
INLINE void pack_some(uint32_t *to, place from, long start, long count, long dwords, int bits) {
    const grouped_part *part = from.part;
    for (long d = 0; d < dwords; d++) {
        uint8_t codes[8];
        for (long i = 0; i < 32 / bits; i++) {
            int there = part != NULL && d * (32 / bits) + i < count;
            long input = start + d * (32 / bits) + i;
            codes[i] = (uint8_t)(1 << (bits - 1));
            if (there) codes[i] = part->codes[from.row * part->row_step + input * part->column_step];
        }
        to[d * PANEL] = dword_of(codes, bits);
    }
}

// Whether the codes of these rows of a panel lie side by side.
INLINE int are_beside(const place *rows) {
    const grouped_part *part = rows->part;
    if (part == NULL || part->row_step != 1) return 0;
    for (long c = 1; c < SIDE; c++)
        if (rows[c].part != part || rows[c].row != rows->row + c) return 0;
    return 1;
}

// Packs the codes of a group, whose first input of those of all sections is `start`.
INLINE void pack_codes(uint32_t *to, const place *rows, long start, long count, long dwords, int bits) {
    long whole = count / (32 / bits), rest = dwords - whole, next = whole * (32 / bits);
    for (long side = 0; side < PANEL; side += SIDE) {
        int beside = are_beside(rows + side);
        if (beside) {
            const grouped_part *part = rows[side].part;
            pack_beside(to + side, part->codes + rows[side].row + start * part->column_step, part->column_step, whole, bits);
        }
        for (long column = side; column < side + SIDE; column++) {
            place from = rows[column];
            const grouped_part *part = from.part;
            if (part != NULL && part->column_step == 1 && !beside)
                pack_behind(to + column, part->codes + from.row * part->row_step + start, whole, bits);
            else if (!beside) pack_some(to + column, from, start, count, whole, bits);
            pack_some(to + whole * PANEL + column, from, start + next, count - next, rest, bits);
        }
    }
}

// Packs a unit of a column whose codes of 5 or 6 bits lie one behind the other.
INLINE void pack_unit(uint8_t *to, const uint8_t *codes, int bits) {
    uint32_t quads[8], high = 0, fours = 0x0f0f0f0f;
    long units = unit_quads(bits);
    memcpy(quads, codes, (size_t)units * 4);
    for (long q = 0; q < units; q += 2) {
        uint32_t low = (quads[q] & fours) | (quads[q + 1] & fours) << 4;
        memcpy(to + q / 2 * PANEL * 4, &low, 4);
        high |= (quads[q] >> 4 & fours) << q * (bits - 4) | (quads[q + 1] >> 4 & fours) << (q + 1) * (bits - 4);
    }
    memcpy(to + units / 2 * PANEL * 4, &high, 4);
}

// Packs the codes of 5 or 6 bits of a group, in units.
INLINE void pack_units(uint8_t *to, const place *rows, long start, long count, int bits) {
    long units = unit_quads(bits), row_bytes = PANEL * 4, unit_bytes = units * PANEL * bits / 2;
    memset(to, 0, ceil_div(count, 4 * units) * unit_bytes);
    for (long column = 0; column < PANEL; column++, to += 4) {
        const grouped_part *part = rows[column].part;
        if (part == NULL) continue;
        const uint8_t *codes = part->codes + rows[column].row * part->row_step + start * part->column_step;
        long done = 0;
        for (; part->column_step == 1 && done + 4 * units <= count; done += 4 * units)
            pack_unit(to + done / 4 / units * unit_bytes, codes + done, bits);
        for (; done < count; done++) {
            long in_unit = done / 4 % units;
            uint8_t code = codes[done * part->column_step], *unit = to + done / 4 / units * unit_bytes + done % 4;
            unit[in_unit / 2 * row_bytes] |= (uint8_t)((code & 15) << in_unit % 2 * 4);
            unit[units / 2 * row_bytes] |= (uint8_t)(code >> 4 << in_unit * (bits - 4));
        }
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
            long start = section * section_inputs(w) + number * w->group, dwords = quads_in(w, number) * w->bits / 8;
            if (number == 0) {
                pack_factors(to, rows, section, w);
                to += section_head_bytes(w);
            }
            for (long column = 0; column < PANEL; column++) pack_head(to, rows[column], column, index, w);
            uint32_t *codes = (uint32_t *)(to + group_head_bytes(w));
            if (w->bits == 8) pack_codes(codes, rows, start, inputs_in(w, number), dwords, 8);
            else if (w->bits == 4) pack_codes(codes, rows, start, inputs_in(w, number), dwords, 4);
            else if (w->bits == 6) pack_units((uint8_t *)codes, rows, start, inputs_in(w, number), 6);
            else pack_units((uint8_t *)codes, rows, start, inputs_in(w, number), 5);
            to += bytes_in(w, number);
        }
    }
}

EXPORT void pack_grouped(const weights *to, const grouped_part *matrix) {
    packing task = {to, matrix};
    spread(panels_of(to), 1, pack_panels, &task);
}
