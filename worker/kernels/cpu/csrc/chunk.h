// What the numbers in a panel mean, and chunks of a panel whose codes are brought into bytes before they are multiplied.
//
// Whatever the form of a matrix, its elements are `scale * (byte - excess) + minimum`.
#pragma once

#include "weights.h"
#include "int_vec.h"

enum { CHUNK = 256 };  // inputs: whole groups

// Groups of a section, which lie one after the other; or of several sections, if they are whole.
typedef struct {
    long group, end;      // the first one, and the one after the last
    long sections;        // that follow each other, this one included
    const char *panel;    // where the first one is
    const char *factors;  // of the section
} groups;

// What bytes are too high by.
INLINE int excess_of(const weights *w) {
    if (w->codes == E2M1) return 12;
    if (w->codes == IQ4) return 127;
    return w->minimums ? 0 : 1 << (w->bits - 1);
}

// The bytes of the 16 codes; those of E2M1 are twice their numbers, and its scales are halved.
INLINE whole levels_of(const weights *w) {
    static const int8_t wholes[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    static const int8_t e2m1[] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
    static const uint8_t iq4[] = {0, 23, 44, 62, 78, 92, 105, 117, 128, 140, 152, 165, 180, 196, 216, 240};
    return table_of(w->codes == E2M1 ? e2m1 : w->codes == IQ4 ? (const int8_t *)iq4 : wholes);
}

#if defined(__AVX512BF16__)
// Looks up the numbers in bfloat16 of quads of codes by their two bytes: pairs of the first two inputs, and of the others.
// First, the pairs that belong into a vector are brought into the same half of each lane.
INLINE __m512i in_halves(whole quads) {
    return _mm512_shuffle_epi8((__m512i)quads, _mm512_set4_epi32(0x0f0e0b0a, 0x07060302, 0x0d0c0908, 0x05040100));
}
INLINE void look_up_pairs(vec *first, vec *second, whole quads, whole below, whole above) {
    whole codes = (whole)in_halves(quads), low = looked_up(below, codes), high = looked_up(above, codes);
    *first = _mm512_castsi512_ps(_mm512_unpacklo_epi8((__m512i)low, (__m512i)high));
    *second = _mm512_castsi512_ps(_mm512_unpackhi_epi8((__m512i)low, (__m512i)high));
}
#endif

// Numbers of neighbouring columns, of one of the types of scales. A power of 2 is its exponent, and the least one has
// no leading 1 in float32.
INLINE vec load_numbers(const char *from, long column, int type) {
    const char *p = from + column * number_bytes(type);
    switch (type) {
        case FLOAT32: return vec_load(p, FLOAT32);
        case BFLOAT16: return vec_load(p, BFLOAT16);
        case FLOAT16: return vec_of_half(p);
        case POWER: return vec_of_bits(whole_max(whole_up(whole_of_bytes(p), 23), whole_all(0x400000)));
        case UNSIGNED: return vec_of_whole(whole_of_bytes(p));
        default: return vec_of_whole(whole_of_signed(p));
    }
}

INLINE const char *factors_for(const groups *g, long group, const weights *w) {
    return w->run ? g->factors + shifted(group, w->run) * factors_bytes(w) : NULL;
}

// Numbers of neighbouring columns that are whole, of one of two types.
INLINE whole load_whole(const char *p, int type) { return type == UNSIGNED ? whole_of_bytes(p) : whole_of_signed(p); }

// Whether products of whole numbers are multiplied with the scales of groups, which are whole too, and added up for a run
// before they become floats. Then the inputs of a run are rounded on one scale.
INLINE int has_whole_scales(const weights *w) {
    int small = w->bits < 8 && w->input_bits == 8 && w->codes == WHOLE;
    return small && w->run && w->scale >= UNSIGNED && !w->offsets && w->run * w->group <= CHUNK;
}

// Whether the numbers of groups are scales of 16 or 32 bits alone, as those of most matrices are.
INLINE int has_scales_alone(const weights *w) {
    return w->scale <= FLOAT16 && !w->offsets && !w->minimums && !w->run && w->codes != E2M1;
}

// `load_head` of a matrix that has scales alone, of this type.
INLINE void load_scales(vec *scales, const char *head, int type, int first, int columns) {
    for (int c = 0; c < columns; c++) {
        long column = (first + c) * LANES;
        if (type == FLOAT32) scales[c] = vec_load(head + column * 4, FLOAT32);
        else if (type == FLOAT16) scales[c] = vec_of_half(head + column * 2);
        else scales[c] = vec_load(head + column * 2, BFLOAT16);
    }
}

// Loads the scales of a group, and its minimums if there are any, of some vectors of columns; offsets become minimums
// too. factors: of its run.
INLINE void load_head(vec *scales, vec *minimums, const char *head, const char *factors, const weights *w, int first,
                      int columns) {
    const char *behind = head + scales_bytes(w);
#if LANES == 16
#pragma GCC unroll 2  // a loop around the branches for types is mispredicted in every group
#endif
    for (int c = 0; c < columns; c++) {
        long column = (first + c) * LANES;
        scales[c] = load_numbers(head, column, w->scale);
        if (w->run) scales[c] = vec_mul(scales[c], load_numbers(factors, column, w->factor));
        if (w->codes == E2M1) scales[c] = vec_mul(scales[c], vec_all(0.5f));
        minimums[c] = vec_zero();
        if (w->offsets) {
            vec low = vec_sub(vec_all((float)excess_of(w)), vec_of_bytes(behind + column));
            minimums[c] = vec_mul(low, scales[c]);
        } else if (w->minimums) {
            minimums[c] = load_numbers(behind, column, w->scale);
            if (w->run)
                minimums[c] = vec_mul(minimums[c], load_numbers(factors + factors_bytes(w) / 2, column, w->factor));
        }
    }
}

// more: the bits beyond 4.
INLINE void unpack_more(whole *to, const whole *from, long quads, int more) {
    whole kept = whole_all(more == 2 ? 0x30303030 : 0x10101010);
    long unit = 8 / more;
    for (; quads > 0; quads -= unit, from += COLUMNS) {
        const whole *others = from + unit / 2 * COLUMNS;
        for (int i = 0; i < unit; i++, to += COLUMNS) {
            for (int c = 0; c < COLUMNS; c++) {
                whole nibbles = whole_load(from + c), other = whole_load(others + c);
                int up = 4 - i * more;
                other = (up > 0 ? whole_up(other, up) : whole_down(other, -up)) & kept;
                whole_store(to + c, (i % 2 ? high_nibbles(nibbles) : low_nibbles(nibbles)) | other);
            }
            if (i % 2) from += COLUMNS;
        }
    }
}

// Brings codes of 4 bits into the bytes that they stand for.
INLINE void unpack_levels(whole *to, const whole *from, long quads, whole levels) {
    for (; quads > 0; quads -= 2, from += COLUMNS, to += 2 * COLUMNS)
        for (int c = 0; c < COLUMNS; c++) {
            whole codes = whole_load(from + c);
            whole_store(to + c, looked_up(levels, low_nibbles(codes)));
            whole_store(to + COLUMNS + c, looked_up(levels, high_nibbles(codes)));
        }
}

// Whether codes are looked up: in registers for one tile, and before for several.
INLINE int is_looked_up(const weights *w) { return w->codes == E2M1 || w->codes == IQ4; }

// Whether products read codes where they lie: those of 4 bits are taken apart in registers.
INLINE int is_read_in_place(const weights *w) { return w->bits == 4 || w->bits == 8; }

// The form of the same matrix in bytes, with scales and minimums in float32 unless they are to stay whole.
INLINE weights in_bytes(const weights *w) {
    weights to = *w;
    to.bits = 8;
    to.codes = WHOLE;
    if (has_whole_scales(w)) return to;
    to.scale = FLOAT32;
    to.minimums = w->offsets || w->minimums;
    to.offsets = to.run = 0;
    return to;
}

// The most bytes that a chunk has in that form.
enum { UNPACKED_BYTES = CHUNK * PANEL + CHUNK / 8 * 2 * PANEL * 4 };

// Brings the head of a group into the form `in_bytes`; -> where its codes begin.
INLINE char *unpack_head(char *to, const char *head, const char *factors, const weights *w) {
    if (has_whole_scales(w)) return (char *)memcpy(to, head, group_head_bytes(w)) + group_head_bytes(w);
    vec scales[COLUMNS], minimums[COLUMNS];
    load_head(scales, minimums, head, factors, w, 0, COLUMNS);
    for (int c = 0; c < COLUMNS; c++, to += LANES * 4) vec_store(to, scales[c], FLOAT32);
    if (w->offsets || w->minimums)
        for (int c = 0; c < COLUMNS; c++, to += LANES * 4) vec_store(to, minimums[c], FLOAT32);
    return to;
}

// Brings groups into bytes; -> the beginning of the next one.
INLINE const char *unpack(char *to, const groups *from, const weights *w) {
    const char *panel = from->panel;
    for (long group = from->group; group < from->end; group++) {
        to = unpack_head(to, panel, factors_for(from, group, w), w);
        const whole *codes = (const whole *)(panel + group_head_bytes(w));
        long quads = quads_in(w, group);
        if (w->bits == 4) unpack_levels((whole *)to, codes, quads, levels_of(w));
        else unpack_more((whole *)to, codes, quads, w->bits - 4);
        to += quads * PANEL * 4;
        panel += bytes_in(w, group);
    }
    return panel;
}
