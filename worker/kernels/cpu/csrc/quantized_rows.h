// The rows of a tile as they are multiplied with a quantized matrix: rounded to whole numbers, side by side. First
// come, for each group of inputs, the scales of the rows, the values that their sums start with, and if the matrix has
// offsets or minimums the totals of the inputs; then the parts of each quad of inputs, which have a dword of each row.
// Small groups of 8-bit inputs lie in runs, each of which begins with the scales of the rows, and groups have powers of 2
// in place of theirs. Where scales are whole, only the totals of its groups follow a run's scale, two in a dword.
#pragma once

#include "chunk.h"
#include "rows.h"

// Inputs of 8 bits are bytes where the processor multiplies bytes: a quad is one part. Other inputs are words: the two
// even ones of a quad are a part, and the two odd ones, for so the bytes of a matrix are widened by one instruction.
#if defined(__AVX512VNNI__)
enum { VNNI = 1, QUANTIZED_ROWS = 12 };
INLINE int are_bytes(const weights *w) { return w->input_bits == 8; }
INLINE void store_bytes(void *p, whole a) { _mm_storeu_si128(p, _mm512_cvtepi32_epi8((__m512i)a)); }
#else
// Without VNNI two products of bytes are added up in 16 bits, which is exact for codes of 6 bits and less. Those of 8 bits
// are multiplied as words, like 16-bit inputs: to give the signs of codes to inputs first takes longer than that.
enum { VNNI = 0, QUANTIZED_ROWS = 6 };
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

// Beside codes of fewer than 8 bits, the scales of small groups of 8-bit inputs are 2^0 to 2^-7 of the largest one of their
// run, which has CHUNK inputs: so the sums of groups, which are whole, are shifted to be on one scale, and multiplied with
// those of the matrix alone. With codes of 8 bits that would be most of what is lost.
enum { SHIFT_MOST = 7 };
INLINE int has_shifts(const weights *w) {
    return w->input_bits == 8 && !has_whole_scales(w) && w->bits < 8 &&
           (w->group < GROUP_MOST || w->codes != WHOLE || w->bits % 4);
}

// Whether codes are brought into bytes for several tiles though products could read them where they lie.
INLINE int is_widened_once(const weights *w) { return VNNI && has_shifts(w); }

// Groups whose inputs are rounded together, and the dwords of a row that come for them.
INLINE long groups_rounded(const weights *w) {
    return has_whole_scales(w) ? w->run : has_shifts(w) ? shifted(CHUNK, w->group) : 1;
}
INLINE long head_of_group(const weights *w) { return 2 + (w->offsets || w->minimums); }
INLINE long head_of(const weights *w) {
    if (has_whole_scales(w)) return 1 + (w->run + 1) / 2;
    return has_shifts(w) ? 1 + groups_rounded(w) * head_of_group(w) : head_of_group(w);
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

// So many inputs from the beginning of a group on; gathered in `to` if they have an order.
INLINE const char *inputs_of(char *to, const char *x, long group, long count, const weights *w) {
    if (w->order == NULL) return at(x, group * w->group, w->kind);
    const int *order = w->order + group * w->group;
    long width = width_of(w->kind);
    memset(to, 0, count * width);
    for (long i = 0; i < count; i++) {
        if (order[i] < 0) continue;
        if (w->kind == BFLOAT16) memcpy(to + i * 2, x + order[i] * 2L, 2);
        else memcpy(to + i * 4, x + order[i] * 4L, 4);
    }
    return to;
}

// How often a number can be doubled without becoming larger than another, but at most `most` times. Both are positive.
INLINE int doublings(float number, float up_to, int most) {
    int32_t a, b;
    memcpy(&a, &number, 4);
    memcpy(&b, &up_to, 4);
    return (int)least((b - a) >> 23, most);
}

// Rounds the inputs of a group and writes the start of its sums, and their total times `scale` if it is wanted. Bytes of
// the matrix are too high by `excess_of`, so sums start with the negative of that times the inputs.
INLINE uint32_t *round_group(uint32_t *to, uint32_t *head, const char *x, long rows, long group, float inverse, float scale,
                             const weights *w) {
    int32_t sum = round_inputs(to, x, group, vec_all(inverse), w);
    head[rows] = 0u - (uint32_t)sum * (uint32_t)excess_of(w);
    if (w->offsets || w->minimums) {
        float total = scale * (float)sum;
        memcpy(head + 2 * rows, &total, 4);
    }
    return to + quads_in(w, group) * parts_of(w);
}

// Rounds the inputs of groups whose largest ones are known, and of a run whose largest one is `top`.
INLINE uint32_t *round_shifted(uint32_t *to, uint32_t *head, const char *x, long rows, long group, long count,
                               const float *tops, float top, float inverse, const weights *w) {
    for (long i = 0; i < count; i++, head += head_of_group(w) * rows) {
        int up = doublings(tops[i], top, SHIFT_MOST), shift = SHIFT_MOST - up;
        *head = (uint32_t)shift;
        const char *from = at(x, i * w->group, w->kind);
        to = round_group(to, head, from, rows, group + i, inverse * (float)(1 << up), (float)(1 << shift), w);
    }
    return to;
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
    char inputs[CHUNK * 4];
    float scale = 0.0f, most = w->input_bits == 16 ? 32639.0f : 127.0f;
    vec finite = vec_zero();
    const int whole = has_whole_scales(w), shifts = has_shifts(w);
    const long together = groups_rounded(w), end = least(group + shifted(CHUNK, w->group), section_groups(w));
    head += shifted(group, together) * head_of(w) * rows;
    for (; group < end; group += together, head += head_of(w) * rows) {
        float tops[CHUNK / GROUP_LEAST], top = 0.0f;
        long groups = least(together, section_groups(w) - group);
        long count = least(together * w->group, section_inputs(w) - group * w->group);
        const char *from = inputs_of(inputs, x, group, count, w);
        for (long i = 0; i < groups; i++) {
            tops[i] = largest_input(at(from, i * w->group, w->kind), inputs_in(w, group + i), w->kind, &finite);
            if (tops[i] > top) top = tops[i];
        }
        float inverse = top > 1e-30f ? most / top : 0.0f;
        scale = top * (1.0f / most) * (shifts ? 1.0f / (1 << SHIFT_MOST) : 1.0f);
        memcpy(head, &scale, 4);
        if (whole) to = round_run(to, head, from, rows, group, vec_all(inverse), w);
        else if (shifts) to = round_shifted(to, head + rows, from, rows, group, groups, tops, top, inverse, w);
        else to = round_group(to, head, from, rows, group, inverse, scale, w);
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
    long each = head_of(w), runs = has_whole_scales(w) || has_shifts(w);
    for (long i = 0; i < head_dwords(w); i++, head += rows) {
        long which = i % each;
        if (runs ? which > 0 : which == 1) continue;  // numbers of groups, and whole ones
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
