// The rows of a tile as they are multiplied with a quantized matrix: rounded to whole numbers, side by side. First
// come, for each group of inputs, the scales of the rows, the values that their sums start with, and if the matrix has
// offsets the totals of the inputs; then one part or two, which have a dword of each row for each quad of inputs.
#pragma once

#include "rows.h"
#include "weights.h"

#if defined(__AVX512VNNI__)
// Parts are bytes. Inputs of 16 bits have two parts, each with its sums: 256 times the first plus the second.
enum { BYTES = 1, QUANTIZED_ROWS = 12 };
INLINE int parts_of(const weights *w) { return w->input_bits / 8; }
INLINE int sums_of(const weights *w) { return parts_of(w); }
#else
// Parts are words of 16 bits. The even inputs are one part and the odd ones the other, and all have one sum.
enum { BYTES = 0, QUANTIZED_ROWS = LANES == 16 ? 6 : 2 };
INLINE int parts_of(const weights *w) { return (void)w, 2; }
INLINE int sums_of(const weights *w) { return (void)w, 1; }
#endif

INLINE long quantized_rows(const weights *w) { return QUANTIZED_ROWS / sums_of(w); }

// The dwords of a row that come for each group.
INLINE long head_of(const weights *w) { return 1 + sums_of(w) + w->offsets; }
INLINE long head_dwords(const weights *w) { return groups_of(w) * head_of(w); }

// The size of a row as `lay_quantized` writes it.
INLINE long quantized_dwords(const weights *w) { return head_dwords(w) + quads_of(w) * parts_of(w); }

// Rounds `count` inputs to whole numbers up to `most`, with zeros up to whole vectors; -> the scale. Inputs that are
// not finite make `finite` NaN.
INLINE float round_inputs(int16_t *to, const char *x, long count, kind k, float most, vec *finite) {
    vec largest = vec_zero();
    for (long i = 0; i < count; i += LANES) {
        vec v = vec_load_upto(at(x, i, k), count - i, k);
        largest = vec_max(vec_abs(v), largest);
        *finite = vec_fma(v, vec_zero(), *finite);
    }
    float top = vec_largest(largest);
    vec inverse = vec_all(top > 1e-30f ? most / top : 0.0f);
    for (long i = 0; i < count; i += LANES)
        vec_store_words(to + i, vec_mul(vec_load_upto(at(x, i, k), count - i, k), inverse));
    return top * (1.0f / most);
}

enum { CHUNK = 256 };  // inputs that are rounded before they are laid; whole groups

typedef struct {
    uint32_t parts[2][16][CHUNK / 4];  // of up to 16 rows, which is what `transpose_rows` takes
} rounded;

// Splits a group of one row into parts, and computes what each sum would be with a matrix of ones.
INLINE void split(rounded *to, long row, long quad, const int16_t *words, long quads, int32_t *sums, const weights *w) {
    uint32_t *first = &to->parts[0][row][quad], *second = &to->parts[1][row][quad];
    int8_t upper[GROUP_MOST], lower[GROUP_MOST];
    int16_t even[GROUP_MOST / 2], odd[GROUP_MOST / 2];
    sums[0] = sums[1] = 0;
    if (BYTES && parts_of(w) == 2) {
        for (long i = 0; i < quads * 4; i++) {
            sums[0] += upper[i] = (int8_t)((words[i] + 128) >> 8);
            sums[1] += lower[i] = (int8_t)words[i];
        }
        memcpy(first, upper, quads * 4);
        memcpy(second, lower, quads * 4);
    } else if (BYTES) {
        for (long i = 0; i < quads * 4; i++) sums[0] += lower[i] = (int8_t)words[i];
        memcpy(first, lower, quads * 4);
    } else {
        for (long i = 0; i < quads * 2; i++) {
            sums[0] += even[i] = words[2 * i];
            sums[0] += odd[i] = words[2 * i + 1];
        }
        memcpy(first, even, quads * 4);
        memcpy(second, odd, quads * 4);
    }
}

// The inputs of a group; gathered in `to` if they have an order.
INLINE const char *inputs_of(char *to, const char *x, long group, const weights *w) {
    if (w->order == NULL) return at(x, group * w->group, w->kind);
    const int *order = w->order + group * w->group;
    long width = width_of(w->kind), count = inputs_in(w, group);
    memset(to, 0, count * width);
    for (long i = 0; i < count; i++) {
        if (order[i] < 0) continue;
        if (w->kind == BFLOAT16) memcpy(to + i * 2, x + order[i] * 2L, 2);
        else memcpy(to + i * 4, x + order[i] * 4L, 4);
    }
    return to;
}

// Rounds up to CHUNK inputs of a row of a section, from `group` on. Elements of the matrix are stored without a sign,
// too high by 2^(bits - 1), so sums start with the negative of that times the inputs.
INLINE void round_row(rounded *to, uint32_t *head, const char *x, long row, long rows, long group, const weights *w) {
    int16_t words[GROUP_MOST + LANES];
    char inputs[GROUP_MOST * 4];
    float most = w->input_bits == 16 ? 32639.0f : 127.0f, scale = 0.0f;  // of 32639 the upper byte is 127
    vec finite = vec_zero();
    head += group * head_of(w) * rows + row;
    for (long quad = 0; quad < CHUNK / 4 && group < section_groups(w); quad += w->group / 4, group++) {
        int32_t sums[2];
        const char *from = inputs_of(inputs, x, group, w);
        scale = round_inputs(words, from, inputs_in(w, group), w->kind, most, &finite);
        split(to, row, quad, words, quads_in(w, group), sums, w);
        memcpy(head, &scale, 4);
        for (int s = 0; s < sums_of(w); s++) head[(1 + s) * rows] = (uint32_t)-(sums[s] << (w->bits - 1));
        if (w->offsets) {
            float total = scale * (float)(sums_of(w) == 2 ? sums[0] * 256 + sums[1] : sums[0]);
            memcpy(head + (1 + sums_of(w)) * rows, &total, 4);
        }
        head += head_of(w) * rows;
    }
    scale += vec_sum(finite);  // NaN in any lane makes it NaN
    memcpy(head - head_of(w) * rows, &scale, 4);
}

INLINE void lay_section(uint32_t *head, uint32_t *parts, const char *x, long stride, long rows, const weights *w) {
    rounded chunk;
    for (long start = 0; start < section_quads(w); start += CHUNK / 4) {
        long quads = least(CHUNK / 4, section_quads(w) - start), done;
        for (long r = 0; r < rows; r++) round_row(&chunk, head, x + r * stride, r, rows, start * 4 / w->group, w);
        for (int p = 0; p < parts_of(w); p++) {
            const uint32_t *from = chunk.parts[p][0];
            uint32_t *part = parts + (p * quads_of(w) + start) * rows;
            for (done = 0; done + 16 <= quads; done += 16)
                transpose_rows(part + done * rows, (const char *)(from + done), CHUNK, rows);
            for (long r = 0; r < rows; r++)
                for (long i = done; i < quads; i++) part[i * rows + r] = from[r * CHUNK / 4 + i];
        }
    }
}

static void lay_quantized(uint32_t *to, const char *x, long stride, long rows, const weights *w) {
    uint32_t *head = to, *parts = to + head_dwords(w) * rows;
    for (long section = 0; section < w->sections; section++) {
        lay_section(head, parts, x, stride, rows, w);
        head += section_groups(w) * head_of(w) * rows;
        parts += section_quads(w) * rows;
        x += section_inputs(w) * width_of(w->kind);
    }
}
