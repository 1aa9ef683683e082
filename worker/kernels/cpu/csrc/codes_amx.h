// A product of many rows with codes by AMX. A run of a panel is unpacked once for all rows of a chunk.
#pragma once

#include "byte_codes_amx.h"
#include "product.h"
#include "scaled_codes_amx.h"
#include "shifted_codes_amx.h"
#include "threads.h"

enum {
    CODE_TILES = 16,         // the most tiles of a chunk, each of HALF_ROWS rows
    CODE_BYTES = 512 << 10,  // of a chunk's inputs, which stay in the second-level cache
};

typedef enum { NO_CODES, SHIFTED_CODES, SCALED_CODES, BYTE_CODES } code_form;

INLINE code_form form_of(const weights *w) {
    if (has_scaled_codes(w)) return SCALED_CODES;
    if (has_shifted_codes(w)) return SHIFTED_CODES;
    return has_byte_codes(w) ? BYTE_CODES : NO_CODES;
}

// Whether rows of a matrix are multiplied so, from which number on it takes less time.
INLINE int has_codes_for_amx(const weights *w, long rows) {
    switch (form_of(w)) {
        case SHIFTED_CODES: return rows >= (w->bits == 4 ? 1 : 4) * HALF_ROWS;
        case SCALED_CODES: return rows >= 2 * HALF_ROWS;
        case BYTE_CODES: return rows >= (has_words(w) ? 12 : (w->group < DEPTH ? 3 : 1) * HALF_ROWS);
        default: return 0;
    }
}

typedef struct {
    product product;
    code_form form;
    char *laid;      // [tile][section][step][byte of inputs][row][input of a step]
    float *numbers;  // [rows of whole tiles][numbers_of_row]
    long tiles, chunks, blocks;
} codes_job;

// The inputs of a step, the bytes that a row has of them in a tile, and those of a tile for so many inputs.
INLINE long step_inputs(const weights *w, code_form form) {
    return form == SHIFTED_CODES ? STEP : form == SCALED_CODES ? DEPTH : least(w->group, DEPTH);
}
INLINE long step_bytes(const weights *w, code_form form) { return form == BYTE_CODES ? step_inputs(w, form) : STEP_BYTES; }
INLINE long bytes_before(const weights *w, code_form form, long inputs) {
    return inputs * HALF_ROWS * (form == SCALED_CODES || (form == BYTE_CODES && !has_words(w)) ? 1 : 2);
}

// The numbers of a row for groups that are rounded together: of bytes those that `round_row` writes, else a scale, and what
// the inputs of each group add up to, if it is wanted.
INLINE int has_lows(const weights *w) { return w->offsets || w->minimums; }
INLINE long numbers_together(const weights *w, code_form form) {
    return form == BYTE_CODES ? head_of(w) : 1 + (has_lows(w) ? groups_rounded(w) : 0);
}
INLINE long numbers_of_section(const weights *w, code_form form) {
    return section_head_dwords(w) / head_of(w) * numbers_together(w, form);
}
INLINE long numbers_of_row(const weights *w, code_form form) { return w->sections * numbers_of_section(w, form); }

// Writes these numbers of the head that `round_row` has written.
INLINE void lay_numbers(float *to, const uint32_t *head, const weights *w, code_form form) {
    memcpy(to, head, 4 * (form == BYTE_CODES ? head_of(w) : 1));
    if (form == BYTE_CODES || !has_lows(w)) return;
    for (long group = 0; group < groups_rounded(w); group++) {
        if (form == SCALED_CODES) to[1 + group] = (float)(int16_t)(head[1 + group / 2] >> group % 2 * 16);
        else memcpy(to + 1 + group, head + 1 + group * head_of_group(w) + 2, 4);
    }
}

enum { MOST_HEAD = CHUNK / GROUP_LEAST * 3 + 1 };  // dwords for a chunk of a row

// Lays a step of the inputs that `round_row` has written, from the i-th one on.
INLINE void lay_step(char *to, const uint32_t *inputs, const uint32_t *head, long i, const weights *w, code_form form) {
    const long bytes = step_bytes(w, form);
    if (form == SHIFTED_CODES)
        lay_shifted(to, (const char *)inputs + i, (int32_t)head[1 + shifted(i, w->group) * head_of_group(w)]);
    else if (has_words(w)) lay_words(to, inputs + i / 2, bytes, HALF_ROWS * bytes);
    else memcpy(to, (const char *)inputs + i, bytes);
}

// Rounds rows, and lays them as tiles read them.
static void lay_codes_rows(const void *task, long first, long last) {
    const codes_job *j = task;
    const weights *w = j->product.w;
    const code_form form = j->form;
    const long inputs = section_inputs(w), together = groups_rounded(w), step = step_inputs(w, form);
    float *numbers = j->numbers + first * numbers_of_row(w, form);
    uint32_t head[MOST_HEAD], rounded[CHUNK / 2 + LANES];
    for (long r = first; r < last; r++) {
        const char *from = j->product.x + r * j->product.x_stride;
        char *to = j->laid + bytes_before(w, form, w->inputs) * (r / HALF_ROWS) + r % HALF_ROWS * step_bytes(w, form);
        for (long section = 0; section < w->sections; section++, from += inputs * width_of(w->kind)) {
            for (long input = 0; input < inputs; input += CHUNK) {
                long group = shifted(input, w->group), count = least(CHUNK, inputs - input);
                round_row(rounded, head - shifted(group, together) * head_of(w), from, 1, group, w);
                for (long i = 0, run = 0; i < count; i += together * w->group, run++, numbers += numbers_together(w, form))
                    lay_numbers(numbers, head + run * head_of(w), w, form);
                for (long i = 0; i < count; i += step, to += bytes_before(w, form, step))
                    lay_step(to, rounded, head, i, w, form);
            }
        }
    }
}

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

// Multiplies the tiles [first, end) with a panel.
INLINE void multiply_code_panel(const codes_job *j, long panel, long first, long end, float sums[][MOST_SUMS * PART],
                                const code_form form) {
    const weights *w = j->product.w;
    const long all = section_groups(w), numbers = numbers_of_row(w, form), at_once = groups_of_run(w, form);
    const char *next = (const char *)panel_of(w, panel);
    code_run run __attribute__((aligned(64)));
    for (long section = 0; section < w->sections; section++) {
        groups from = {.panel = next + section_head_bytes(w), .factors = next};
        for (long tile = first; tile < end; tile++)
            memset(place_of_section(sums[tile - first], HALF_ROWS, w, section, 0), 0, PART * sizeof(float));
        for (; from.group < all; from.group = from.end, from.panel = next) {
            from.end = least(from.group + at_once, all);
            next = unpack_run(&run, &from, w, form);
            long inputs = bytes_before(w, form, section * section_inputs(w) + from.group * w->group);
            long number = section * numbers_of_section(w, form) +
                          from.group / groups_rounded(w) * numbers_together(w, form);
            for (long tile = first; tile < end; tile++) {
                code_tile t = {.stride = numbers};
                t.x = j->laid + tile * bytes_before(w, form, w->inputs) + inputs;
                t.next = t.x + bytes_before(w, form, w->inputs);
                t.numbers = j->numbers + tile * HALF_ROWS * numbers + number;
                t.sums = place_of_section(sums[tile - first], HALF_ROWS, w, section, 0);
                if (has_lows(w)) add_run(&run, &t, w, form, 1);
                else add_run(&run, &t, w, form, 0);
            }
        }
        for (long tile = first; tile < end; tile++) join_section(sums[tile - first], HALF_ROWS, w, section);
    }
    for (long tile = first, start; tile < end; tile++) {
        start = tile * HALF_ROWS;
        finish_tile(&j->product, sums[tile - first], start, least(HALF_ROWS, j->product.rows - start), panel);
    }
}

static void multiply_code_units(const void *task, long first, long last) {
    const codes_job *j = task;
    const weights *w = j->product.w;
    long panels = panels_of(w);
    float(*sums)[MOST_SUMS * PART] = scratch_beside(CODE_TILES * sizeof *sums);
    shape_steps(AMX_ROWS, step_bytes(w, j->form));
    for (long unit = first; unit < last; unit++) {
        long chunk = unit / j->blocks, block = unit % j->blocks, end = panels * (block + 1) / j->blocks;
        for (long panel = panels * block / j->blocks; panel < end; panel++) {
            long from = j->tiles * chunk / j->chunks, to = j->tiles * (chunk + 1) / j->chunks;
            switch (j->form) {  // each is compiled apart
                case SHIFTED_CODES: multiply_code_panel(j, panel, from, to, sums, SHIFTED_CODES); break;
                case SCALED_CODES: multiply_code_panel(j, panel, from, to, sums, SCALED_CODES); break;
                default: multiply_code_panel(j, panel, from, to, sums, BYTE_CODES);
            }
        }
    }
    _tile_release();
}

static void linear_codes_amx(const product *p) {
    const weights *w = p->w;
    codes_job j = {.product = *p, .form = form_of(w), .tiles = ceil_div(p->rows, HALF_ROWS)};
    long tile_bytes = bytes_before(w, j.form, w->inputs), most = CODE_BYTES / tile_bytes, panels = panels_of(w);
    j.laid = scratch(j.tiles * (tile_bytes + HALF_ROWS * numbers_of_row(w, j.form) * (long)sizeof *j.numbers));
    j.numbers = (float *)(j.laid + j.tiles * tile_bytes);
    spread(p->rows, 8, lay_codes_rows, &j);
    j.chunks = ceil_div(j.tiles, most < 1 ? 1 : least(most, CODE_TILES));
    j.blocks = least(ceil_div(8 * threads, j.chunks), panels);
    spread(j.blocks * j.chunks, 1, multiply_code_units, &j);
}
