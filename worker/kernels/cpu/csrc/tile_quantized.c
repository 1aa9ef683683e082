// Tiles of rows times a panel of a quantized matrix: whole numbers multiplied and added up without rounding.
//
// The inputs are rounded to whole numbers too, each group of a row with its own scale: to 16 bits, which beside
// elements of 8 bits loses nothing that could be measured, or to 8, which takes half the time. A group's sum is exact,
// so it is the same with any instructions; groups are added up in their order, in float32. So a row has the same bits
// alone, in any batch, and on every kind of processor.
#include "tile_quantized.h"

// Columns whose elements are widened together, so that a number of a row is loaded once for all. Where registers are few,
// both parts of one column come one after the other instead.
#if defined(__AVX512VNNI__)
// An instruction waits for the last one with the same sum: so a few rows have two for each product, one for each part.
enum { TOGETHER = COLUMNS, CHAINS_MOST = 2 };
INLINE int chains_of(int rows, int parts) { return rows > 5 ? 1 : parts; }
INLINE whole add_bytes(whole sum, whole w, whole x) {
    return (whole)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
}
#else
enum { TOGETHER = LANES == 16 ? COLUMNS : 1, CHAINS_MOST = 1 };
INLINE int chains_of(int rows, int parts) { return (void)rows, (void)parts, 1; }
INLINE whole add_bytes(whole sum, whole w, whole x) { return (void)w, (void)x, sum; }  // `add_quads` does it
#endif

// Adds the products of a part of each row with those of some columns.
INLINE void add_part(whole sums[][COLUMNS], const uint32_t *x, int rows, int parts, int first, const whole *w) {
    for (int r = 0; r < rows; r++) {
        whole row = whole_all(x[r]);
        for (int c = 0; c < TOGETHER; c++) {
            whole *sum = &sums[r][first + c];
            *sum = parts == 1 ? add_bytes(*sum, w[c], row) : add_words(*sum, w[c], row);
        }
    }
}

// The elements of a part, which are bytes if it is the only one, and else words; of 4 bits, those of the first or of the
// second quad that bytes hold.
INLINE whole elements(whole bytes, int bits, int table, whole levels, int quad, int part, int parts) {
    int down = 8 * part;
    if (bits == 4 && (table || parts == 1)) {
        bytes = quad ? high_nibbles(bytes) : low_nibbles(bytes);
        if (table) bytes = looked_up(levels, bytes);
        bits = 8;
    } else {
        down += 4 * quad;
    }
    if (parts == 1) return bytes;
    if (down) bytes = words_down(bytes, down);
    return down + bits < 16 ? words_below(bytes, (1 << bits) - 1) : bytes;
}

// Adds the products of the quads that four bytes of each column hold: one of 8 bits, or two of 4 bits. One part is
// widened after the other, because the sums of a large tile leave few registers.
INLINE void step(whole sums[][QUANTIZED_ROWS][COLUMNS], const uint32_t *x, int rows, int parts, int bits, int table,
                 whole levels, const whole *codes) {
    for (int quad = 0; quad < 8 / bits; quad++, x += parts * rows) {
        for (int first = 0; first < COLUMNS; first += TOGETHER) {
            for (int part = 0; part < parts; part++) {
                whole w[TOGETHER];
                for (int c = 0; c < TOGETHER; c++)
                    w[c] = elements(whole_load(codes + first + c), bits, table, levels, quad, part, parts);
                add_part(sums[part % chains_of(rows, parts)], x + part * rows, rows, parts, first, w);
            }
        }
    }
}

#if !defined(__AVX512VNNI__)
// Bytes whose codes are below 64, beside those of 8 bits, as the bits of a way to multiply.
enum { SMALL = 7 };
INLINE int stored_bits(int bits) { return bits == SMALL ? 8 : bits; }

// Quads that are multiplied together: a unit of codes of 5 and 6 bits, and of 4 bits four units.
INLINE int quads_at_once(int bits) { return bits == 8 ? 1 : bits == SMALL ? 2 : bits == 6 ? 4 : 8; }

// Quads whose products of bytes have room in sums of 16 bits.
INLINE int quads_in_words(int bits) { return bits == 4 ? 8 : bits == 5 ? 4 : bits == 8 ? 1 : 2; }

// The elements of a quad of those that are multiplied together, in a column.
INLINE whole bytes_of(const whole *column, int quad, int bits) {
    if (bits == 8) return whole_load(column + quad * COLUMNS) ^ whole_all(0x80808080);
    if (bits == SMALL) return whole_load(column + quad * COLUMNS);
    whole nibbles = whole_load(column + quad / 2 * COLUMNS);
    nibbles = quad % 2 ? high_nibbles(nibbles) : low_nibbles(nibbles);
    if (bits == 4) return nibbles;
    whole others = whole_load(column + quads_at_once(bits) / 2 * COLUMNS);
    int up = 4 - quad * (bits - 4);
    others = up > 0 ? whole_up(others, up) : whole_down(others, -up);
    return nibbles | (others & whole_all(bits == 6 ? 0x30303030 : 0x10101010));
}

// `step` for bytes without an instruction that adds up four products. Columns come one after the other, because their sums
// of 16 bits take all registers.
INLINE void add_quads(whole sums[QUANTIZED_ROWS][COLUMNS], const uint32_t *x, int rows, int bits, int quads,
                      const whole *codes) {
    for (int c = 0; c < COLUMNS; c++) {
        whole near[QUANTIZED_ROWS];
        // A compiler must not keep many inputs from column to column, for which there are no registers.
        if (quads > 1) __asm__ volatile("" : : : "memory");
#pragma GCC unroll 8
        for (int quad = 0; quad < quads; quad++) {
            whole w = bytes_of(codes + c, quad, bits);
            for (int r = 0; r < rows; r++) {
                whole row = whole_all(x[quad * rows + r]), from = quad % quads_in_words(bits) ? near[r] : whole_all(0);
                near[r] = bits == 8 ? add_to_words(from, whole_size(w), with_sign(row, w)) : add_to_words(from, w, row);
            }
            if ((quad + 1) % quads_in_words(bits) && quad + 1 < quads) continue;
            for (int r = 0; r < rows; r++) sums[r][c] = add_words(sums[r][c], near[r], whole_all(0x10001));
        }
    }
}

// -> the quads that were multiplied: at most as many as are left.
INLINE int add_some(whole sums[QUANTIZED_ROWS][COLUMNS], const uint32_t *x, int rows, int bits, long left,
                    const whole *codes) {
    int most = quads_at_once(bits);
    if (left >= most) {
        add_quads(sums, x, rows, bits, most, codes);
        return most;
    }
    int least_quads = bits == 4 ? 2 : 1;  // parts of the last group of a section, and small groups
    add_quads(sums, x, rows, bits, least_quads, codes);
    return least_quads;
}
#endif

// Where a tile is: in the numbers of its rows, and in what it prefetches for a row of codes; and the bytes that it
// prefetches for the head of a group.
typedef struct {
    const uint32_t *head, *x;
    fetch ahead;
    long head_step;
} tile_place;

// Where the rows of a tile are added up, and how far the places of sections are from each other.
typedef struct {
    float *rows[QUANTIZED_ROWS];
    long section;
} outputs;

// Sums that lie row by row, and in it section by section; they begin with zeros.
INLINE outputs fresh_sums(float *sums, long rows, long sections) {
    outputs to = {.section = rows * PANEL};
    memset(sums, 0, sizeof *sums * PANEL * rows * sections);
    for (long r = 0; r < rows; r++) to.rows[r] = sums + r * PANEL;
    return to;
}

// Adds the sums of a group, scaled, to the outputs, and before them the minimums times what the inputs add up to.
INLINE void add_group(float *const *outs, long place, whole sums[][QUANTIZED_ROWS][COLUMNS], int chains, int rows,
                      const vec *scales, const vec *minimums, const uint32_t *head) {
    for (int r = 0; r < rows; r++) {
        float *out = outs[r] + place;
        for (int c = 0; c < COLUMNS; c++) {
            vec before = vec_load(out + c * LANES, FLOAT32);
            if (minimums) before = vec_fma(minimums[c], broadcast(head + 2 * rows + r), before);
            whole all = sums[0][r][c];
            for (int i = 1; i < chains; i++) all += sums[i][r][c];
            vec sum = vec_mul(vec_of_whole(all), scales[c]);
            vec_store(out + c * LANES, vec_fma(sum, broadcast(head + r), before), FLOAT32);
        }
    }
}

// Multiplies a tile with groups. table: whether codes are looked up. alone: whether groups have scales alone; those of
// small groups take a good part of the time.
INLINE tile_place add_groups(int rows, int parts, int bits, int table, int alone, tile_place at, const groups *from,
                             const weights *w, const outputs *to) {
    const int chains = chains_of(rows, parts);
    const uint32_t *head = at.head, *x = at.x;
    const char *panel = from->panel;
    groups here = *from;
    // Stores to outputs might change what pointers lead to, as far as a compiler knows: so it is read beforehand.
    const long head_dwords = (alone ? 2 : head_of(w)) * rows;
    const long head_bytes = group_head_bytes(w);
    const long end = from->end, quads = w->group / 4, sections = from->sections, step_out = to->section;
    const int type = w->scale, low = w->offsets || w->minimums;
    const long section_head = section_head_bytes(w), all_quads = section_quads(w);
    whole levels = levels_of(w);
    fetch ahead = at.ahead;
    float *const *outs = to->rows;
    for (long section = 0, place = 0; section < sections; section++, place += step_out) {
        long rest = all_quads - here.group * quads;
        if (section) here.factors = panel, panel += section_head;
        for (long group = here.group; group < end; group++, head += head_dwords, rest -= quads) {
            const char *start = panel;
            whole sums[CHAINS_MOST][QUANTIZED_ROWS][COLUMNS];
            // A compiler must not keep outputs from group to group, for which there are no registers.
            __asm__ volatile("" : : : "memory");
            for (int r = 0; r < rows; r++)
                for (int i = 0; i < chains; i++)
                    for (int c = 0; c < COLUMNS; c++) sums[i][r][c] = whole_all(i ? 0 : head[rows + r]);
            pass_end(&ahead);
            _mm_prefetch(ahead.from, _MM_HINT_T0);
            ahead.from += at.head_step;
            panel += head_bytes;
            for (long left = least(quads, rest); left > 0;) {
#if defined(__AVX512VNNI__)
                const long taken = 8 / bits, lines = 1;
                step(sums, x, rows, parts, bits, table, levels, (const whole *)panel);
#else
                long taken = 8 / bits;
                if (parts == 1) taken = add_some(sums[0], x, rows, bits, left, (const whole *)panel);
                else step(sums, x, rows, parts, bits, table, levels, (const whole *)panel);
                long lines = taken * stored_bits(bits) / 8;
#endif
                for (long i = 0; i < lines; i++) {
                    _mm_prefetch(ahead.from, _MM_HINT_T0);
                    _mm_prefetch(ahead.from + 64, _MM_HINT_T0);
                    ahead.from += ahead.step;
                }
                left -= taken;
                panel += lines * PANEL * 4;
                x += taken * parts * rows;
            }
            vec scales[COLUMNS], minimums[COLUMNS];
            if (alone) {
                load_scales(scales, start, type);
                add_group(outs, place, sums, chains, rows, scales, NULL, head);
                continue;
            }
            load_head(scales, minimums, start, factors_for(&here, group, w), w);
            if (low) add_group(outs, place, sums, chains, rows, scales, minimums, head);
            else add_group(outs, place, sums, chains, rows, scales, NULL, head);
        }
    }
    return (tile_place){head, x, ahead, at.head_step};
}

// Each number of rows and form is a function of its own, for which registers are shared out well; in one large function
// counters of loops would lie in memory.
#define WAY(name, n, parts, bits, table, alone)                                                          \
    static __attribute__((noinline)) tile_place name(tile_place at, const groups *from, const weights *w, \
                                                     const outputs *to) {                                \
        return add_groups(n, parts, bits, table, alone, at, from, w, to);                                \
    }
#define WAYS_OF_BYTES(n, parts)                        \
    WAY(bytes_alone_##n##_##parts, n, parts, 8, 0, 1)  \
    WAY(bytes_##n##_##parts, n, parts, 8, 0, 0)
#define WAYS_OF_HALVES(n, parts)                       \
    WAY(halves_alone_##n##_##parts, n, parts, 4, 0, 1) \
    WAY(halves_##n##_##parts, n, parts, 4, 0, 0)
#define WAYS(n, parts)                                 \
    WAYS_OF_BYTES(n, parts)                            \
    WAY(codes_##n##_##parts, n, parts, 4, 1, 0)        \
    WAYS_OF_HALVES(n, parts)

#define TAKE(name, n, parts) return (alone ? name##_alone_##n##_##parts : name##_##n##_##parts)(at, from, w, to)
#define QUANTIZED(n, parts)                                                 \
    case n:                                                                 \
        if (w->bits == 8) TAKE(bytes, n, parts);                            \
        if (w->codes != WHOLE) return codes_##n##_##parts(at, from, w, to); \
        TAKE(halves, n, parts);

#define TO_6(of, parts) of(1, parts) of(2, parts) of(3, parts) of(4, parts) of(5, parts) of(6, parts)
#define TO_12(of, parts) \
    TO_6(of, parts) of(7, parts) of(8, parts) of(9, parts) of(10, parts) of(11, parts) of(12, parts)

// laid: the matrix as it lies in memory, whose form rows are laid for.
#if defined(__AVX512VNNI__)
TO_12(WAYS, 1)
TO_12(WAYS, 2)

static tile_place add_groups_of(long rows, tile_place at, const groups *from, const weights *w, const weights *laid,
                                const outputs *to) {
    int alone = has_scales_alone(w);
    if (are_bytes(laid)) {
        switch (rows) { TO_12(QUANTIZED, 1) }
    }
    switch (rows) { TO_12(QUANTIZED, 2) }
    return at;
}
#else
#define WAYS_OF_SMALL(n, parts)                           \
    WAY(small_alone_##n##_##parts, n, parts, SMALL, 0, 1) \
    WAY(small_##n##_##parts, n, parts, SMALL, 0, 0)       \
    WAY(fives_##n##_##parts, n, parts, 5, 0, 0)           \
    WAY(sixes_##n##_##parts, n, parts, 6, 0, 0)           \
    WAYS_OF_HALVES(n, parts)
#define OF_SMALL(n, parts)                                         \
    case n:                                                        \
        if (w->bits == 8) TAKE(small, n, parts);                   \
        if (w->bits == 5) return fives_##n##_##parts(at, from, w, to); \
        if (w->bits == 6) return sixes_##n##_##parts(at, from, w, to); \
        TAKE(halves, n, parts);
#define SIGNED(n, parts) \
    case n: TAKE(bytes, n, parts);

TO_6(WAYS_OF_BYTES, 1)
TO_6(WAYS_OF_SMALL, 1)
#if LANES == 16
TO_6(WAYS, 2)
#else
WAYS(1, 2) WAYS(2, 2)
#endif

static tile_place add_groups_of(long rows, tile_place at, const groups *from, const weights *w, const weights *laid,
                                const outputs *to) {
    int alone = has_scales_alone(w);
    if (are_signed(laid)) {
        switch (rows) { TO_6(SIGNED, 1) }
    }
    if (are_bytes(laid)) {
        switch (rows) { TO_6(OF_SMALL, 1) }
    }
#if LANES == 16
    switch (rows) { TO_6(QUANTIZED, 2) }
#else
    switch (rows) { QUANTIZED(1, 2) QUANTIZED(2, 2) }
#endif
    return at;
}
#endif

// The rows of a tile, as `lay_quantized` wrote them, where a section begins.
INLINE tile_place place_in_section(const tiles *t, long tile, const weights *w, long section) {
    long rows = t->rows[tile];
    const uint32_t *x = t->x[tile] + (head_dwords(w) + section * section_quads(w) * parts_of(w)) * rows;
    const uint32_t *head = t->x[tile] + section * section_groups(w) * head_of(w) * rows;
    return (tile_place){.head = head, .x = x};
}

// All sections are computed in one go, each in its own place, and then added up: a call for each would take as long as
// the products of a short one.
void multiply_in_place(const tiles *t, const weights *w, long panel) {
    const char *from = (const char *)panel_of(w, panel);
    long rows = t->rows[0];
    groups whole = {0, section_groups(w), w->sections, from + section_head_bytes(w), from};
    tile_place at = place_in_section(t, 0, w, 0);
    at.ahead = fetch_for(w, panel, t);
    at.head_step = t->all ? group_head_bytes(w) / t->all : 0;
    if (t->totals) {
        outputs to = {.section = PANEL};
        memcpy(to.rows, t->totals, rows * sizeof *to.rows);
        add_groups_of(rows, at, &whole, w, w, &to);
        return;
    }
    outputs to = fresh_sums(t->sums[0], rows, w->sections);
    add_groups_of(rows, at, &whole, w, w, &to);
    if (!t->apart) join_apart(t->sums[0], rows * PANEL, w->sections);
}

void multiply_unpacked(const tiles *t, const weights *w, long panel) {
#if !defined(__AVX512VNNI__)
    if (t->all <= 1 && t->count == 1 && are_bytes(w)) {  // bytes for one tile are made in registers
        multiply_in_place(t, w, panel);
        return;
    }
#endif
    enum { AHEAD = 2048 };  // bytes from the end of a chunk to what is prefetched first meanwhile
    char room[UNPACKED_BYTES] __attribute__((aligned(64)));
    const weights bytes = in_bytes(w);
    const char *next = (const char *)panel_of(w, panel);
    long head_step = group_head_bytes(w) / t->count, step = PANEL * w->bits / 2 / t->count;
    long count = shifted(CHUNK, w->group), share = count * head_step + CHUNK / 4 * step;
    tile_place at[TILES_AT_ONCE];
    outputs to[TILES_AT_ONCE];
    for (long section = 0; section < w->sections; section++) {
        groups from = {.sections = 1, .panel = next + section_head_bytes(w), .factors = next};
        for (long i = 0; i < t->count; i++) {
            at[i] = place_in_section(t, i, w, section);
            at[i].head_step = head_step;
            to[i] = fresh_sums(place_of_section(t->sums[i], t->rows[i], w, section, t->apart), t->rows[i], 1);
        }
        for (; from.group < section_groups(w); from.group = from.end, from.panel = next) {
            from.end = least(from.group + count, section_groups(w));
            next = unpack(room, &from, w);
            groups unpacked = {from.group, from.end, 1, room, NULL};
            for (long i = 0; i < t->count; i++) {
                at[i].ahead = (fetch){.from = next + AHEAD + i * share, .step = step};
                at[i] = add_groups_of(t->rows[i], at[i], &unpacked, &bytes, w, &to[i]);
            }
        }
        if (t->apart) continue;
        for (long i = 0; i < t->count; i++) join_section(t->sums[i], t->rows[i], w, section);
    }
}
