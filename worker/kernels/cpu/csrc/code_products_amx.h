// Tiles of rows times a panel of whole codes, by AMX. A run of the panel is unpacked once for all tiles.
#pragma once

#include "code_rows_amx.h"

enum { CODE_TILES = 16 };  // the most that are multiplied together, each of HALF_ROWS rows

// Laid rows, and the sums to which their products are added: [section][row][PANEL].
typedef struct {
    code_rows rows;
    float *sums;
} code_product;

// A run of a panel, of one of the forms.
typedef union {
    shifted_run shifted;
    scaled_run scaled;
    byte_run bytes;
} code_run;

// The groups of a run.
INLINE long groups_of_run(const weights *w, code_form form) {
    return form == BYTE_CODES ? shifted(CHUNK, w->group) : groups_rounded(w);
}

INLINE const char *unpack_run(code_run *to, const groups *from, const weights *w, code_form form) {
    switch (form) {
        case SHIFTED_CODES: return unpack_shifted(&to->shifted, from, w);
        case SCALED_CODES: return unpack_scaled(&to->scaled, from, w);
        default: return unpack_bytes(&to->bytes, from, w);
    }
}

// Adds the products of a tile with a run.
INLINE void add_run(const code_run *run, const code_tile *t, const weights *w, code_form form, const int low) {
    if (form == SHIFTED_CODES) add_shifted(&run->shifted, t, low);
    else if (form == SCALED_CODES) add_scaled(&run->scaled, t, low);
    else if (has_words(w)) add_bytes(&run->bytes, t, w, 1, low);
    else add_bytes(&run->bytes, t, w, 0, low);
}

// Prefetches the i-th of `count` parts of so many bytes.
INLINE void fetch_part(const char *from, long bytes, long i, long count) {
    for (long at = bytes * i / count / 64; at < bytes * (i + 1) / count / 64; at++) _mm_prefetch(from + at * 64, _MM_HINT_T0);
}

INLINE void add_panel_of(const code_product *of, long count, const weights *w, long panel, const char *then,
                         const code_form form) {
    const long all = section_groups(w), numbers = numbers_of_row(w, form), at_once = groups_of_run(w, form);
    const char *next = (const char *)panel_of(w, panel), *stop = next + panel_bytes(w);
    code_run run __attribute__((aligned(64)));
    for (long section = 0; section < w->sections; section++) {
        groups from = {.panel = next + section_head_bytes(w), .factors = next};
        for (; from.group < all; from.group = from.end, from.panel = next) {
            from.end = least(from.group + at_once, all);
            next = unpack_run(&run, &from, w, form);
            const long inputs = bytes_before(w, form, section * section_inputs(w) + from.group * w->group);
            const long number = section * numbers_of_section(w, form) +
                                from.group / groups_rounded(w) * numbers_together(w, form);
            const char *ahead = next < stop ? next : then;
            const long bytes = next - from.panel;
            for (const code_product *p = of; p < of + count; p++) {
                fetch_part(ahead, bytes, p - of, count);
                const char *next_inputs = (p + 1 < of + count ? p + 1 : of)->rows.inputs + inputs;
                code_tile t = {p->rows.inputs + inputs, p->rows.numbers + number, numbers, p->sums + section * PART,
                               next_inputs};
                if (has_lows(w)) add_run(&run, &t, w, form, 1);
                else add_run(&run, &t, w, form, 0);
            }
        }
    }
}

// Adds the products of tiles with a panel to their sums; `then` is the panel that is read after it. AMX is set up for AMX_ROWS
// rows and `step_bytes`.
static void add_panel(const code_product *of, long count, const weights *w, long panel, const void *then, code_form form) {
    switch (form) {  // each is compiled apart
        case SHIFTED_CODES: add_panel_of(of, count, w, panel, then, SHIFTED_CODES); break;
        case SCALED_CODES: add_panel_of(of, count, w, panel, then, SCALED_CODES); break;
        default: add_panel_of(of, count, w, panel, then, BYTE_CODES);
    }
}
