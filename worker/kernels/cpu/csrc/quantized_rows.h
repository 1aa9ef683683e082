// The rows of a tile as they are multiplied with a quantized matrix: rounded to whole numbers, side by side. First
// come, for each group of inputs, the scales of the rows, the values that their sums start with, and if the matrix has
// offsets or minimums the totals of the inputs; then the parts of each quad of inputs, which have a dword of each row.
// Where scales are whole, a scale comes for each run of groups, and then the totals of its groups, two in a dword.
#pragma once

#include "chunk.h"
#include "rows.h"

// Inputs of 8 bits are bytes where the processor multiplies bytes: a quad is one part. Other inputs are words: the two
// even ones of a quad are a part, and the two odd ones, for so the bytes of a matrix are widened by one instruction.
#if defined(__AVX512VNNI__)
enum { QUANTIZED_ROWS = 12 };
INLINE int are_bytes(const weights *w) { return w->input_bits == 8; }
INLINE void store_bytes(void *p, whole a) { _mm_storeu_si128(p, _mm512_cvtepi32_epi8((__m512i)a)); }
#else
// Without VNNI two products of bytes are added up in 16 bits, which is exact for codes of 6 bits and less. Those of 8 bits
// are multiplied as words, like 16-bit inputs: to give the signs of codes to inputs first takes longer than that.
enum { QUANTIZED_ROWS = 6 };
INLINE int are_bytes(const weights *w) { return w->input_bits == 8 && w->codes == WHOLE && w->bits < 8; }
#if LANES == 16
INLINE void store_bytes(void *p, whole a) { _mm_storeu_si128(p, _mm512_cvtepi32_epi8((__m512i)a)); }
#else
INLINE void store_bytes(void *p, whole a) {
    __m256i words = _mm256_packs_epi32((__m256i)a, (__m256i)a), bytes = _mm256_packs_epi16(words, words);
    uint32_t halves[2] = {(uint32_t)_mm256_extract_epi32(bytes, 0), (uint32_t)_mm256_extract_epi32(bytes, 4)};
    memcpy(p, halves, sizeof halves);
}
#endif
#endif
INLINE void store_numbers(void *p, whole a, int bytes) {
    if (bytes) store_bytes(p, a);
    else whole_store_parts(p, a);
}
INLINE int parts_of(const weights *w) { return are_bytes(w) ? 1 : 2; }

// Groups whose inputs are rounded on one scale, and the dwords of a row that come for them.
INLINE long groups_rounded(const weights *w) { return has_whole_scales(w) ? w->run : 1; }
INLINE long head_of(const weights *w) {
    return has_whole_scales(w) ? 1 + (w->run + 1) / 2 : 2 + (w->offsets || w->minimums);
}
INLINE long section_head_dwords(const weights *w) {
    return shifted(section_groups(w) + groups_rounded(w) - 1, groups_rounded(w)) * head_of(w);
}
INLINE long head_dwords(const weights *w) { return w->sections * section_head_dwords(w); }

// The size of a row as `lay_quantized` writes it.
INLINE long quantized_dwords(const weights *w) { return head_dwords(w) + quads_of(w) * parts_of(w); }

// The inputs of a chunk are rounded before they are laid. A row may be written past its end by less than a vector.
typedef struct {
    uint32_t rows[16][CHUNK / 2];  // which is what `transpose_rows` takes
    uint32_t beyond[LANES];
} rounded;

// The largest of `count` inputs, without its sign. Inputs that are not finite make `finite` NaN.
INLINE float largest_input(const char *x, long count, kind k, vec *finite) {
    vec largest = vec_zero();
    for (long i = 0; i < count; i += LANES) {
        vec v = vec_load_upto(at(x, i, k), count - i, k);
        largest = vec_max(vec_abs(v), largest);
        *finite = vec_fma(v, vec_zero(), *finite);
    }
    return vec_largest(largest);
}

// Rounds the inputs of a group to whole numbers, with zeros up to whole vectors and where quads have none; -> their total.
INLINE int32_t round_inputs(uint32_t *to, const char *x, long group, vec inverse, const weights *w) {
    long count = inputs_in(w, group), quads = quads_in(w, group);
    kind k = w->kind;
    whole sum = whole_all(0);
    if (count < quads * 4) memset(to, 0, quads * parts_of(w) * 4);
    for (long i = 0; i < count; i += LANES, to += LANES / 4 * parts_of(w)) {
        whole numbers = whole_of_vec(vec_mul(vec_load_upto(at(x, i, k), count - i, k), inverse));
        sum += numbers;
        store_numbers(to, numbers, are_bytes(w));
    }
    return whole_sum(sum);
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

// Rounds the inputs of a group and writes the start of its sums, and their total if it is wanted. Bytes of the matrix are
// too high by `excess_of`, so sums start with the negative of that times the inputs.
INLINE uint32_t *round_group(uint32_t *to, uint32_t *head, const char *x, long rows, long group, vec inverse,
                             const weights *w) {
    int32_t sum = round_inputs(to, x, group, inverse, w);
    head[rows] = (uint32_t)-(sum * excess_of(w));
    if (w->offsets || w->minimums) {
        float scale, total;
        memcpy(&scale, head, 4);
        total = scale * (float)sum;
        memcpy(head + 2 * rows, &total, 4);
    }
    return to + quads_in(w, group) * parts_of(w);
}

// Rounds the inputs of a run, and writes the totals of its groups behind its scale.
INLINE uint32_t *round_run(uint32_t *to, uint32_t *head, const char *x, long rows, long group, vec inverse,
                           const weights *w) {
    for (long i = 0; i < w->run; i++) {
        uint32_t *pair = head + (1 + i / 2) * rows, sum = 0;
        if (group + i < section_groups(w)) {
            sum = (uint32_t)round_inputs(to, at(x, i * w->group, w->kind), group + i, inverse, w);
            to += quads_in(w, group + i) * parts_of(w);
        }
        *pair = i % 2 ? *pair | sum << 16 : sum & 0xffff;
    }
    return to;
}

// Rounds up to CHUNK inputs of a row of a section, from `group` on.
INLINE void round_row(uint32_t *to, uint32_t *head, const char *x, long rows, long group, const weights *w) {
    char inputs[GROUP_MOST * 4];
    float scale = 0.0f, most = w->input_bits == 16 ? 32639.0f : 127.0f;
    vec finite = vec_zero();
    long together = groups_rounded(w), end = least(group + shifted(CHUNK, w->group), section_groups(w));
    head += shifted(group, together) * head_of(w) * rows;
    for (; group < end; group += together, head += head_of(w) * rows) {
        const char *from = inputs_of(inputs, x, group, w);
        long count = least(together * w->group, section_inputs(w) - group * w->group);
        float top = largest_input(from, count, w->kind, &finite);
        vec inverse = vec_all(top > 1e-30f ? most / top : 0.0f);
        scale = top * (1.0f / most);
        memcpy(head, &scale, 4);
        if (has_whole_scales(w)) to = round_run(to, head, from, rows, group, inverse, w);
        else to = round_group(to, head, from, rows, group, inverse, w);
    }
    scale += vec_sum(finite);  // NaN in any lane makes it NaN
    memcpy(head - head_of(w) * rows, &scale, 4);
}

INLINE void lay_section(uint32_t *head, uint32_t *parts, const char *x, long stride, long rows, const weights *w) {
    rounded chunk;
    for (long start = 0; start < section_quads(w); start += CHUNK / 4) {
        long dwords = least(CHUNK / 4, section_quads(w) - start) * parts_of(w), done = 0;
        for (long r = 0; r < rows; r++) round_row(chunk.rows[r], head + r, x + r * stride, rows, start * 4 / w->group, w);
        if (rows == 1) memcpy(parts, chunk.rows[0], (done = dwords) * 4);
        for (; done + 16 <= dwords; done += 16)
            transpose_rows(parts + done * rows, (const char *)(chunk.rows[0] + done), sizeof chunk.rows[0], rows);
        for (long r = 0; r < rows; r++)
            for (long i = done; i < dwords; i++) parts[i * rows + r] = chunk.rows[r][i];
        parts += dwords * rows;
    }
}

// Multiplies laid rows by a factor each, and so what they are multiplied with.
static void scale_laid(uint32_t *head, const float *factors, long rows, const weights *w) {
    long each = head_of(w), whole = has_whole_scales(w);
    for (long i = 0; i < head_dwords(w); i++, head += rows) {
        long which = i % each;
        if (whole ? which > 0 : which == 1) continue;  // whole numbers
        for (long r = 0; r < rows; r++) {
            float value;
            memcpy(&value, head + r, 4);
            value *= factors[r];
            memcpy(head + r, &value, 4);
        }
    }
}

static void lay_quantized(uint32_t *to, const char *x, long stride, long rows, const weights *w) {
    uint32_t *head = to, *parts = to + head_dwords(w) * rows;
    for (long section = 0; section < w->sections; section++) {
        lay_section(head, parts, x, stride, rows, w);
        head += section_head_dwords(w) * rows;
        parts += section_quads(w) * parts_of(w) * rows;
        x += section_inputs(w) * width_of(w->kind);
    }
}
