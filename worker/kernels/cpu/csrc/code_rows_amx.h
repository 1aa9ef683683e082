// Rows as products with whole codes by AMX read them: the inputs of HALF_ROWS rows, and the numbers by which their sums
// are scaled.
#pragma once

#include "byte_codes_amx.h"
#include "scaled_codes_amx.h"
#include "shifted_codes_amx.h"

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
        case SCALED_CODES: return rows >= (w->bits == 6 ? 1 : 2) * HALF_ROWS;
        case BYTE_CODES: return rows >= (w->group < DEPTH ? 3 * HALF_ROWS : has_words(w) ? 12 : HALF_ROWS);
        default: return 0;
    }
}

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

// Laid rows: [section][step][byte of inputs][row][input of a step], and behind them [row][numbers_of_row].
typedef struct {
    char *inputs;
    float *numbers;
} code_rows;

INLINE long code_rows_bytes(const weights *w, code_form form) {
    return bytes_before(w, form, w->inputs) + HALF_ROWS * numbers_of_row(w, form) * (long)sizeof(float);
}
INLINE code_rows code_rows_at(char *memory, const weights *w, code_form form) {
    return (code_rows){memory, (float *)(memory + bytes_before(w, form, w->inputs))};
}

// Zeros the numbers of rows from the `row`-th one on, which are none: others might be too small for a processor to multiply
// quickly.
INLINE void clear_rows(code_rows rows, long row, const weights *w, code_form form) {
    const long each = numbers_of_row(w, form);
    memset(rows.numbers + row * each, 0, (HALF_ROWS - row) * each * sizeof *rows.numbers);
}

// Writes the numbers of groups whose head `lay_quantized` has written.
INLINE void lay_numbers(float *to, const uint32_t *head, const weights *w, code_form form) {
    memcpy(to, head, 4 * (form == BYTE_CODES ? head_of(w) : 1));
    if (form == BYTE_CODES || !has_lows(w)) return;
    for (long group = 0; group < groups_rounded(w); group++) {
        if (form == SCALED_CODES) to[1 + group] = (float)(int16_t)(head[1 + group / 2] >> group % 2 * 16);
        else memcpy(to + 1 + group, head + 1 + group * head_of_group(w) + 2, 4);
    }
}

// Lays a step of inputs, which lie as `lay_quantized` has written them; head: of the groups that are rounded together.
INLINE void lay_step(char *to, const char *inputs, const uint32_t *head, long group, const weights *w, code_form form) {
    const long bytes = step_bytes(w, form);
    if (form == SHIFTED_CODES)
        lay_shifted(to, inputs, (int32_t)head[1 + group % groups_rounded(w) * head_of_group(w)]);
    else if (has_words(w)) lay_words(to, (const uint32_t *)inputs, bytes, HALF_ROWS * bytes);
    else memcpy(to, inputs, bytes);
}

// Lays a row, which `lay_quantized` has written alone, as the `row`-th one.
static void lay_code_row(code_rows to, long row, const uint32_t *alone, const weights *w, code_form form) {
    const long each = section_groups(w), together = groups_rounded(w), step = step_inputs(w, form);
    const long bytes = bytes_before(w, form, step), step_dwords = step / 4 * parts_of(w);
    const uint32_t *head = alone;
    const char *inputs = (const char *)(alone + head_dwords(w));
    float *numbers = to.numbers + row * numbers_of_row(w, form);
    char *place = to.inputs + row * step_bytes(w, form);
    for (long section = 0; section < w->sections; section++)
        for (long group = 0; group < each; group += together, head += head_of(w)) {
            lay_numbers(numbers, head, w, form);
            numbers += numbers_together(w, form);
            const long first = group * w->group, end = least(first + together * w->group, section_inputs(w));
            for (long i = first; i < end; i += step, place += bytes, inputs += step_dwords * 4)
                lay_step(place, inputs, head, shifted(i, w->group), w, form);
        }
}
