// Tiles of rows times a panel of codes that become floats: bytes in e4m3 (one sign, four bits of exponent, three of
// mantissa), and codes of 4 bits with a table of any numbers.
//
// A chunk of a panel is widened once for all tiles, or if a few rows are all there is, in registers: to pairs of bfloat16,
// which hold every number, where inputs are bfloat16 and the processor multiplies those, else to float32. Inputs are not
// rounded. Each group is added up in the order of its inputs, multiplied by its scale and added to the output, for any
// number of rows in the same way. Where there is AMX, it multiplies what is in bfloat16
// (`float_codes_amx.h`).
#include "tile_floats.h"

#include "float_codes.h"

enum { FLOATS = 128 };  // inputs of a chunk: whole groups

typedef struct {
    vec codes[FLOATS * COLUMNS];
    vec scales[FLOATS / 8][COLUMNS];
} floats;

INLINE int in_pairs(const weights *w) { return DOTS && w->kind == BFLOAT16; }
INLINE long flat_dwords(const weights *w) { return ceil_div(w->inputs * width_of(w->kind), 4); }

long floats_dwords(const weights *w) { return flat_dwords(w) * (widened(w) ? 2 : 1); }

// Several sections of bfloat16 are even, so no pair belongs to two.
void lay_floats(uint32_t *to, const char *x, long stride, long rows, const weights *w) {
    lay_first_dwords(to, x, stride, rows, flat_dwords(w), w);
}

// The lowest four bits of each lane, as numbers of the table.
INLINE vec level_of(whole codes, const levels *table) {
#if LANES == 16
    return _mm512_permutexvar_ps((__m512i)codes, table->floats[0]);
#else
    __m256i places = (__m256i)codes, upper = _mm256_slli_epi32(places, 28);
    vec low = _mm256_permutevar8x32_ps(table->floats[0], places);
    return _mm256_blendv_ps(low, _mm256_permutevar8x32_ps(table->floats[1], places), _mm256_castsi256_ps(upper));
#endif
}

// The exponents of float32 begin at -127 and those of e4m3 at -7: so fields that are moved to their places mean 2^120
// times too little. A product makes numbers right that have no leading 1, too.
INLINE vec widened_byte(whole quad, int byte, int bits, const levels *table) {
    if (bits == 4) return level_of(whole_down(quad, 8 * byte), table);
    whole fields = (whole_up(quad, 24 - 8 * byte) >> 4) & whole_all(0x87f00000u);
    return vec_mul(vec_of_bits(fields), vec_all(0x1p120f));
}

INLINE void widen_to_floats(vec *to, const whole *from, long quads, int bits, const levels *table) {
    for (long quad = 0; quad < quads; quad++)
        for (int byte = 0; byte < 4; byte++, to += COLUMNS)
            for (int c = 0; c < COLUMNS; c++) {
                whole codes = quad_in(from + quad * bits / 8 * COLUMNS + c, quad % 2, bits);
                to[c] = widened_byte(codes, byte, bits, table);
            }
}

#if !DOTS
INLINE void widen_quads(vec *first, vec *second, whole quads, int bits, const levels *table) {
    *first = *second = widened_byte(quads, 0, bits, table);
}
#endif

INLINE void widen_to_pairs(vec *to, const whole *from, long quads, int bits, const levels *table) {
    for (long quad = 0; quad < quads; quad++, to += 2 * COLUMNS)
        for (int c = 0; c < COLUMNS; c++) {
            whole codes = quad_in(from + quad * bits / 8 * COLUMNS + c, quad % 2, bits);
            widen_quads(to + c, to + COLUMNS + c, codes, bits, table);
        }
}

INLINE void widen_codes(vec *to, const whole *from, long quads, int pairs, int bits, const levels *table) {
    if (pairs) widen_to_pairs(to, from, quads, bits, table);
    else widen_to_floats(to, from, quads, bits, table);
}

// Widens groups; -> the beginning of the next one.
INLINE const char *widen_groups(floats *to, const groups *from, const weights *w) {
    const char *panel = from->panel;
    vec *codes = to->codes, minimums[COLUMNS];
    levels table = levels_for(w);
    for (long group = from->group; group < from->end; group++) {
        const whole *bytes = (const whole *)(panel + group_head_bytes(w));
        long quads = quads_in(w, group);
        load_head(to->scales[group - from->group], minimums, panel, NULL, w, 0, COLUMNS);
        if (w->bits == 4) widen_codes(codes, bytes, quads, in_pairs(w), 4, &table);
        else widen_codes(codes, bytes, quads, in_pairs(w), 8, &table);
        codes += quads * (in_pairs(w) ? 2 : 4) * COLUMNS;
        panel += bytes_in(w, group);
    }
    return panel;
}

typedef struct {
    const uint32_t *x;
    fetch ahead;
} tile_place;

// Multiplies a tile with widened groups.
INLINE tile_place add_floats(int rows, int pairs, tile_place at, const floats *from, const groups *which,
                             const weights *w, float *out) {
    const vec *codes = from->codes;
    for (long group = which->group; group < which->end; group++) {
        vec sums[TILE_ROWS][COLUMNS];
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < COLUMNS; c++) sums[r][c] = vec_zero();
        long inputs = inputs_in(w, group), dwords = pairs ? ceil_div(inputs, 2) : inputs;
        for (long d = 0; d < dwords; d++, at.x += rows) {
            const uint32_t *row = (const uint32_t *)(codes + d * COLUMNS);
            _mm_prefetch(at.ahead.from, _MM_HINT_T0);
            at.ahead.from += at.ahead.step;
            if (pairs) step_bfloat16(sums, at.x, rows, COLUMNS, row);
            else step_float32(sums, at.x, rows, COLUMNS, row);
        }
        codes += quads_in(w, group) * (pairs ? 2 : 4) * COLUMNS;
        for (int r = 0; r < rows; r++) {
            for (int c = 0; c < COLUMNS; c++) {
                float *to = out + r * PANEL + c * LANES;
                vec scale = from->scales[group - which->group][c];
                vec_store(to, vec_fma(sums[r][c], scale, vec_load(to, FLOAT32)), FLOAT32);
            }
        }
    }
    return at;
}

#define FLOATS_OF(n)                                                                    \
    case n:                                                                             \
        if (in_pairs(w)) return add_floats(n, DOTS, at, from, which, w, out);      \
        return add_floats(n, 0, at, from, which, w, out);

static tile_place add_floats_of(long rows, tile_place at, const floats *from, const groups *which, const weights *w,
                                float *out) {
    switch (rows) {
        FLOATS_OF(1) FLOATS_OF(2) FLOATS_OF(3)
#if LANES == 16
        FLOATS_OF(4) FLOATS_OF(5) FLOATS_OF(6) FLOATS_OF(7) FLOATS_OF(8)
        FLOATS_OF(9) FLOATS_OF(10) FLOATS_OF(11) FLOATS_OF(12)
#endif
    }
    return at;
}

// The most rows of a tile for which panels are widened in registers.
enum { DIRECT_PAIRS = DOTS ? 12 : 1, DIRECT_FLOATS = LANES == 16 ? 4 : 2 };
INLINE long direct_rows(const weights *w) { return in_pairs(w) ? DIRECT_PAIRS : DIRECT_FLOATS; }

// Adds the products of a quad of each row with those of the columns, which are widened in registers.
INLINE void add_quad(vec sums[][COLUMNS], const uint32_t *x, int rows, int pairs, const whole *line, int second, int bits,
                     const levels *table) {
    vec wide[2][COLUMNS];
    whole codes[COLUMNS];
    for (int c = 0; c < COLUMNS; c++) codes[c] = quad_in(line + c, second, bits);
    for (int c = 0; pairs && c < COLUMNS; c++) widen_quads(&wide[0][c], &wide[1][c], codes[c], bits, table);
    for (int i = 0; i < (pairs ? 2 : 4); i++, x += rows) {
        for (int c = 0; !pairs && c < COLUMNS; c++) wide[0][c] = widened_byte(codes[c], i, bits, table);
        if (pairs) step_bfloat16(sums, x, rows, COLUMNS, (const uint32_t *)wide[i]);
        else add_products(sums, x, rows, COLUMNS, wide[0]);
    }
}

// Multiplies rows with a group; -> where the rows go on.
INLINE const uint32_t *add_directly(int rows, int pairs, int bits, const uint32_t *x, const groups *from, const weights *w,
                                    const levels *table, float *out) {
    vec sums[TILE_ROWS][COLUMNS], scales[COLUMNS], minimums[COLUMNS];
    const char *codes = from->panel + group_head_bytes(w);
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < COLUMNS; c++) sums[r][c] = vec_zero();
    for (long left = quads_in(w, from->group); left > 0; left -= 8 / bits, codes += PANEL * 4) {
        _mm_prefetch(codes + AHEAD_BYTES, _MM_HINT_T0);
        _mm_prefetch(codes + AHEAD_BYTES + 64, _MM_HINT_T0);
        for (int second = 0; second < 8 / bits; second++, x += (pairs ? 2 : 4) * rows)
            add_quad(sums, x, rows, pairs, (const whole *)codes, second, bits, table);
    }
    load_head(scales, minimums, from->panel, NULL, w, 0, COLUMNS);
    for (int r = 0; r < rows; r++) {
        for (int c = 0; c < COLUMNS; c++) {
            float *to = out + r * PANEL + c * LANES;
            vec_store(to, vec_fma(sums[r][c], scales[c], vec_load(to, FLOAT32)), FLOAT32);
        }
    }
    return x;
}

#define DIRECTLY(n, pairs)                                                               \
    case n:                                                                              \
        if (w->bits == 4) return add_directly(n, pairs, 4, x, from, w, table, out); \
        return add_directly(n, pairs, 8, x, from, w, table, out);

static const uint32_t *add_directly_of(long rows, const uint32_t *x, const groups *from, const weights *w,
                                       const levels *table, float *out) {
#if DOTS
    if (in_pairs(w)) {
        switch (rows) {
            DIRECTLY(1, 1) DIRECTLY(2, 1) DIRECTLY(3, 1) DIRECTLY(4, 1)
            DIRECTLY(5, 1) DIRECTLY(6, 1) DIRECTLY(7, 1) DIRECTLY(8, 1)
            DIRECTLY(9, 1) DIRECTLY(10, 1) DIRECTLY(11, 1) DIRECTLY(12, 1)
        }
    }
#endif
    switch (rows) {
        DIRECTLY(1, 0) DIRECTLY(2, 0)
#if LANES == 16
        DIRECTLY(3, 0) DIRECTLY(4, 0)
#endif
    }
    return x;
}

// Multiplies a tile with the groups of a section that are whole units, which are all but perhaps the last.
INLINE const uint32_t *add_whole_groups(long rows, const uint32_t *x, groups *from, const weights *w, float *out) {
    long end = section_groups(w) - (section_inputs(w) % (4 * unit_quads(w->bits)) != 0);
    levels table = levels_for(w);
    for (; from->group < end; from->group++) {
        x = add_directly_of(rows, x, from, w, &table, out);
        from->panel += bytes_in(w, from->group);
    }
    return x;
}

enum { FLOATS_AHEAD = 2048 };  // bytes from the end of a chunk to what is prefetched first meanwhile

INLINE float *out_of(const tiles *t, long tile, const weights *w, long section) {
    return place_of_section(t->sums[tile], t->rows[tile], w, section, t->apart);
}

// Multiplies tiles, whose rows are as `lay_floats` wrote them.
void multiply_floats(const tiles *t, const weights *w, long panel) {
    floats wide;
    tile_place places[TILES_AT_ONCE];
    long step = PANEL * (in_pairs(w) ? 2 : 1) * w->bits / 8 / t->count, share = FLOATS * PANEL * w->bits / 8 / t->count;
    groups from = {.panel = (const char *)panel_of(w, panel)};
    for (long i = 0; i < t->count; i++) places[i].x = t->x[i];
    for (long section = 0; section < w->sections; section++) {
        for (long i = 0; i < t->count; i++)
            memset(out_of(t, i, w, section), 0, sizeof(float) * PANEL * t->rows[i]);
        from.group = 0;
        if (t->count == 1 && t->rows[0] <= direct_rows(w))
            places[0].x = add_whole_groups(t->rows[0], places[0].x, &from, w, out_of(t, 0, w, section));
        for (; from.group < section_groups(w); from.group = from.end) {
            from.end = least(from.group + shifted(FLOATS, w->group), section_groups(w));
            from.panel = widen_groups(&wide, &from, w);
            for (long i = 0; i < t->count; i++) {
                places[i].ahead = (fetch){.from = from.panel + FLOATS_AHEAD + i * share, .step = step};
                places[i] = add_floats_of(t->rows[i], places[i], &wide, &from, w, out_of(t, i, w, section));
            }
        }
        if (t->apart) continue;
        for (long i = 0; i < t->count; i++) join_section(t->sums[i], t->rows[i], w, section);
    }
}
