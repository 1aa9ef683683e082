// Tiles of rows times a panel of a quantized matrix: whole numbers multiplied and added up without rounding.
//
// The inputs are rounded to whole numbers too, each group of a row with its own scale: to 16 bits, which beside
// elements of 8 bits loses nothing that could be measured, or to 8, which takes half the time. A group's sum is exact,
// so it is the same with any instructions; groups are added up in their order, in float32. Small groups of fewer than 8
// bits and 8-bit inputs are added up in runs (`tile_shifts.c`). Where the scales of groups are whole numbers themselves, and inputs have 8 bits,
// the sum of a run is exact (`tile_runs.c`), and runs are added up. So a row has the same bits alone, in any batch, and on
// every kind of processor.
#include "tile_quantized.h"

#include "quantized_products.h"

// Sums that lie row by row, and in it section by section; they begin with zeros.
INLINE outputs fresh_sums(float *sums, long rows, long sections) {
    outputs to = {.section = rows * PANEL};
    memset(sums, 0, sizeof *sums * PANEL * rows * sections);
    for (long r = 0; r < rows; r++) to.rows[r] = sums + r * PANEL;
    return to;
}

// Adds the sums of a group, scaled, to the outputs, and before them the minimums times what the inputs add up to.
INLINE void add_group(float *const *outs, long place, row_sums sums[][QUANTIZED_ROWS], way f, const vec *scales,
                      const vec *minimums, const uint32_t *head) {
    for (int r = 0; r < f.rows; r++) {
        float *out = outs[r] + place;
        vec scale = broadcast(head + r), total = minimums ? broadcast(head + 2 * f.rows + r) : vec_zero();
        for (int c = 0; c < columns_at_once(f); c++) {
            vec before = vec_load(out + c * LANES, FLOAT32);
            if (minimums) before = vec_fma(minimums[c], total, before);
            vec sum = vec_mul(vec_of_whole(joined(sums, f, r, c)), scales[c]);
            vec_store(out + c * LANES, vec_fma(sum, scale, before), FLOAT32);
        }
    }
}

// Multiplies a tile with groups. alone: whether groups have scales alone; those of small groups take a good part of the
// time.
INLINE tile_place add_groups(way f, int alone, tile_place at, const groups *from, const weights *w, const outputs *to) {
    const uint32_t *head = at.head, *x = at.x;
    const char *panel = from->panel;
    groups here = *from;
    // Stores to outputs might change what pointers lead to, as far as a compiler knows: so it is read beforehand.
    const long head_dwords = (alone ? 2 : head_of(w)) * f.rows;
    const long head_bytes = group_head_bytes(w);
    const long end = from->end, quads = w->group / 4, sections = from->sections, step_out = to->section;
    const int type = w->scale, low = w->offsets || w->minimums, columns = columns_at_once(f);
    const long section_head = section_head_bytes(w), all_quads = section_quads(w);
    whole levels = levels_of(w), ones[COLUMNS];
    for (int c = 0; c < columns; c++) ones[c] = whole_all(0x10001);
    fetch ahead = at.ahead;
    float *const *outs = to->rows;
    for (long section = 0, place = 0; section < sections; section++, place += step_out) {
        long rest = all_quads - here.group * quads;
        if (section) here.factors = panel, panel += section_head;
        for (long group = here.group; group < end; group++, head += head_dwords, rest -= quads) {
            const char *start = panel, *codes = panel + head_bytes;
            const long count = least(quads, rest);
            prefetch_head(&ahead, at.head_step);
            fetch pass = ahead;
            for (int first = 0; first < COLUMNS; first += columns) {
                row_sums sums[CHAINS_MOST][QUANTIZED_ROWS];
                // A compiler must not keep outputs and inputs from one to the next, for which there are no registers.
                __asm__ volatile("" : : : "memory");
                for (int r = 0; r < f.rows; r++)
                    for (int i = 0; i < chains_of(f); i++)
                        for (int c = 0; c < columns; c++) sums[i][r][c] = whole_all(i ? 0 : head[f.rows + r]);
                pass = ahead;
                add_products_of(sums, x, f, levels, count, (const whole *)codes + first, first, ones, &pass);
                vec scales[COLUMNS], minimums[COLUMNS];
                if (alone) load_scales(scales, start, type, first, columns);
                else load_head(scales, minimums, start, factors_for(&here, group, w), w, first, columns);
                add_group(outs, place + first * LANES, sums, f, scales, !alone && low ? minimums : NULL, head);
            }
            ahead = pass;
            x += count * f.parts * f.rows;
            panel = codes + count * PANEL * w->bits / 2;
        }
    }
    return (tile_place){head, x, ahead, at.head_step};
}

// Each number of rows and form is a function of its own, for which registers are shared out well; in one large function
// counters of loops would lie in memory.
#define WAY(name, n, parts, bits, table, alone)                                                          \
    static __attribute__((noinline)) tile_place name(tile_place at, const groups *from, const weights *w, \
                                                     const outputs *to) {                                \
        return add_groups((way){n, parts, bits, table, 0, n, 0}, alone, at, from, w, to);                \
    }
#define WAYS_OF_HALVES(n, parts)                       \
    WAY(halves_alone_##n##_##parts, n, parts, 4, 0, 1) \
    WAY(halves_##n##_##parts, n, parts, 4, 0, 0)
#define WAYS_OF_BYTES(n, parts)                       \
    WAY(bytes_alone_##n##_##parts, n, parts, 8, 0, 1) \
    WAY(bytes_##n##_##parts, n, parts, 8, 0, 0)
#define WAYS(n, parts)                          \
    WAY(codes_##n##_##parts, n, parts, 4, 1, 0) \
    WAYS_OF_BYTES(n, parts)                     \
    WAYS_OF_HALVES(n, parts)

#define TAKE(name, n, parts) return (alone ? name##_alone_##n##_##parts : name##_##n##_##parts)(at, from, w, to)
#define QUANTIZED(n, parts)                                                 \
    case n:                                                                 \
        if (w->bits == 8) TAKE(bytes, n, parts);                            \
        if (w->codes != WHOLE) return codes_##n##_##parts(at, from, w, to); \
        TAKE(halves, n, parts);

#if defined(__AVX512VNNI__)
#define TO_MOST TO_12
#define OF_LARGE(n, parts)                       \
    case n:                                      \
        if (w->bits == 8) TAKE(bytes, n, parts); \
        TAKE(halves, n, parts);

TO_12(WAYS_OF_BYTES, 1)
#else
#define TO_MOST TO_6
#define OF_LARGE(n, parts) \
    case n: TAKE(halves, n, parts);
#endif

TO_MOST(WAYS_OF_HALVES, 1)
TO_MOST(WAYS, 2)

// laid: the matrix as it lies in memory, whose form rows are laid for.
static tile_place add_groups_of(long rows, tile_place at, const groups *from, const weights *w, const weights *laid,
                                const outputs *to) {
    int alone = has_scales_alone(w);
    if (has_whole_scales(laid)) return add_runs_of(rows, at, from, w, laid, to);
    if (has_shifts(laid)) return add_shifted_of(rows, at, from, w, laid, to);
    if (are_bytes(laid)) {
        switch (rows) { TO_MOST(OF_LARGE, 1) }
    }
    switch (rows) { TO_MOST(QUANTIZED, 2) }
    return at;
}

// The rows of a tile, as `lay_quantized` wrote them, where a section begins.
INLINE tile_place place_in_section(const tiles *t, long tile, const weights *w, long section) {
    long rows = t->rows[tile];
    const uint32_t *x = t->x[tile] + (head_dwords(w) + section * section_quads(w) * parts_of(w)) * rows;
    const uint32_t *head = t->x[tile] + section * section_head_dwords(w) * rows;
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

// The most rows of a tile for which bytes are made in registers, if it is the only one: more leave no room for that.
INLINE long direct_rows(const weights *w) {
    if (is_looked_up(w)) return LANES == 16 && !are_bytes(w) ? 8 : 4;
    if (is_read_in_place(w)) return QUANTIZED_ROWS;
    if (!are_bytes(w)) return 0;
    return has_whole_scales(w) ? QUANTIZED_ROWS : w->bits == 5 ? 10 : 0;
}

void multiply_unpacked(const tiles *t, const weights *w, long panel) {
    if (t->all <= 1 && t->count == 1 && (t->totals || t->rows[0] <= direct_rows(w))) {
        multiply_in_place(t, w, panel);
        return;
    }
    enum { AHEAD = 2048 };  // bytes from the end of a chunk to what is prefetched first meanwhile
    char room[UNPACKED_BYTES] __attribute__((aligned(64)));
    const weights bytes = in_bytes(w);
    const char *next = (const char *)panel_of(w, panel);
    long head_step = group_head_bytes(w) / t->count, step = PANEL * w->bits / 2 / t->count;
    long count = shifted(CHUNK, w->group), share = count * head_step + CHUNK / 4 * step;
    tile_place (*add)(long, tile_place, const groups *, const weights *, const weights *, const outputs *) = add_groups_of;
    if (is_widened_once(w)) add = add_chunk_of, head_step = ceil_div(share, 64 * count);
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
            groups unpacked = {from.group, from.end, 1, room, from.factors};
            for (long i = 0; i < t->count; i++) {
                at[i].ahead = (fetch){.from = next + AHEAD + i * share, .step = step};
                at[i] = add(t->rows[i], at[i], &unpacked, &bytes, w, &to[i]);
            }
        }
        if (t->apart) continue;
        for (long i = 0; i < t->count; i++) join_section(t->sums[i], t->rows[i], w, section);
    }
}
