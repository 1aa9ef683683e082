// Tiles of rows times small groups, of which a run is added up on one scale of the inputs: so a group's sum is multiplied
// with the scales of the matrix alone, and with that of the inputs once for 256 of them.
#include "quantized_products.h"

// A run of groups, of which each takes the same number of dwords of a row's head.
typedef struct {
    const char *panel;
    const groups *of;
    long group, end, quads, group_quads;  // of these groups of a section, and of one
    long head_dwords, head_bytes;         // of a group
    long head_step;                       // of `tile_place`
} run;

enum { AT_ONCE = 6 };  // rows whose sums of a group and of a run are in registers together

// Adds the sums of a group to those of its run, and before them the minimums times what the inputs add up to.
INLINE void add_group(vec totals[][COLUMNS], row_sums sums[][QUANTIZED_ROWS], way f, const vec *scales,
                      const vec *minimums, const uint32_t *numbers) {
    for (int r = 0; r < f.rows; r++) {
        whole shift = whole_all(numbers[r]);
        vec low = minimums ? broadcast(numbers + 2 * f.side + r) : vec_zero();
        for (int c = 0; c < columns_at_once(f); c++) {
            vec before = minimums ? vec_fma(minimums[c], low, totals[r][c]) : totals[r][c];
            totals[r][c] = vec_fma(vec_of_whole(whole_up_by(joined(sums, f, r, c), shift)), scales[c], before);
            if (f.near) totals[r][c] = vec_in_register(totals[r][c]);
        }
    }
}

// Multiplies some rows of a tile with a run, from the first of them on. alone: whether groups have scales alone.
INLINE void multiply_some(float *const *outs, long place, const uint32_t *x, const uint32_t *head, way f, int alone,
                          const run *of, const weights *w, int first, fetch *ahead) {
    const uint32_t *numbers = head + f.side;
    const char *panel = of->panel;
    const int columns = columns_at_once(f), type = f.near ? FLOAT32 : w->scale, low = w->offsets || w->minimums;
    const long end = of->end, group_quads = of->group_quads, head_dwords = of->head_dwords * f.side;
    const long head_bytes = of->head_bytes;
    whole levels = levels_of(w), ones[COLUMNS];
    for (int c = 0; c < columns; c++) ones[c] = whole_all(0x10001);
    vec totals[QUANTIZED_ROWS][COLUMNS];
    for (int r = 0; r < f.rows; r++)
        for (int c = 0; c < columns; c++) totals[r][c] = vec_zero();
    long rest = of->quads;
    for (long group = of->group; group < end; group++, numbers += head_dwords, rest -= group_quads) {
        const long count = least(group_quads, rest);
        const whole *codes = (const whole *)(panel + head_bytes) + first;
        if (f.near)
            for (long i = 0; i < of->head_step; i++, ahead->from += 64) _mm_prefetch(ahead->from, _MM_HINT_T0);
        else prefetch_head(ahead, of->head_step);
        row_sums sums[CHAINS_MOST][QUANTIZED_ROWS];
        // A compiler must not keep totals and inputs from one to the next, for which there are no registers.
        if (!f.near) __asm__ volatile("" : : "r"(totals) : "memory");
        for (int r = 0; r < f.rows; r++)
            for (int i = 0; i < chains_of(f); i++)
                for (int c = 0; c < columns; c++) sums[i][r][c] = whole_all(i ? 0 : numbers[f.side + r]);
        add_products_of(sums, x, f, levels, count, codes, first, ones, ahead);
        vec scales[COLUMNS], minimums[COLUMNS];
        if (alone) load_scales(scales, panel, type, first, columns);
        else load_head(scales, minimums, panel, factors_for(of->of, group, w), w, first, columns);
        add_group(totals, sums, f, scales, !alone && low ? minimums : NULL, numbers);
        x += count * f.parts * f.side;
        panel += head_bytes + count * PANEL * w->bits / 2;
    }
    for (int r = 0; r < f.rows; r++) {
        float *out = outs[r] + place + first * LANES;
        vec scale = broadcast(head + r);
        for (int c = 0; c < columns; c++)
            vec_store(out + c * LANES, vec_fma(totals[r][c], scale, vec_load(out + c * LANES, FLOAT32)), FLOAT32);
    }
}

// Multiplies a tile with a run: if it has many rows, one half after the other.
INLINE void multiply_run(float *const *outs, long place, const uint32_t *x, const uint32_t *head, way f, int alone,
                         const run *of, const weights *w, int first, fetch *ahead) {
    way half = f;
    half.rows = f.near && f.rows > AT_ONCE ? f.rows / 2 : f.rows;
    multiply_some(outs, place, x, head, half, alone, of, w, first, ahead);
    if (half.rows == f.rows) return;
    const int done = half.rows;
    run again = *of;
    again.head_step = 0;
    half.rows = f.rows - done;
    multiply_some(outs + done, place, x + done, head + done, half, alone, &again, w, first, ahead);
}

// `add_groups` of rows that have shifts. laid: the matrix as it lies in memory, whose form rows are laid for.
INLINE tile_place add_shifted(way f, int alone, tile_place at, const groups *from, const weights *w, const weights *laid,
                             const outputs *to) {
    const uint32_t *head = at.head, *x = at.x;
    groups here = *from;
    const long end = from->end, sections = from->sections, step_out = to->section, together = groups_rounded(laid);
    const long head_dwords = head_of(laid) * f.rows, section_head = section_head_bytes(w), all_quads = section_quads(w);
    const int columns = columns_at_once(f);
    run of = {.panel = from->panel, .of = &here, .group_quads = w->group / 4, .head_step = at.head_step};
    of.head_dwords = head_of_group(laid), of.head_bytes = group_head_bytes(w);
    fetch ahead = at.ahead;
    float *const *outs = to->rows;
    for (long section = 0, place = 0; section < sections; section++, place += step_out) {
        if (section) here.factors = of.panel, of.panel += section_head;
        for (long group = here.group; group < end; group += together, head += head_dwords) {
            of.group = group, of.end = least(group + together, end);
            of.quads = least((of.end - group) * of.group_quads, all_quads - group * of.group_quads);
            fetch pass = ahead;
            for (int first = 0; first < COLUMNS; first += columns) {
                pass = ahead;
                multiply_run(outs, place, x, head, f, alone, &of, w, first, &pass);
            }
            ahead = pass;
            x += of.quads * f.parts * f.rows;
            of.panel += (of.end - group) * of.head_bytes + of.quads * PANEL * w->bits / 2;
        }
    }
    return (tile_place){head, x, ahead, at.head_step};
}

// As in `tile_quantized.c`, each number of rows and form is a function of its own.
#define WAY(name, n, parts, bits, table, alone, near)                                                    \
    static __attribute__((noinline)) tile_place name(tile_place at, const groups *from, const weights *w, \
                                                     const weights *laid, const outputs *to) {           \
        return add_shifted((way){n, parts, bits, table, 0, n, near}, alone, at, from, w, laid, to);      \
    }
#define WAYS(n, parts)                                \
    WAY(halves_alone_##n, n, parts, 4, 0, 1, 0)       \
    WAY(halves_##n, n, parts, 4, 0, 0, 0)             \
    WAY(codes_##n, n, BYTES, 4, 1, 0, 0)              \
    WAY(fives_##n, n, parts, 5, 0, 0, 0)
#define TAKE(name, n) return (alone ? name##_alone_##n : name##_##n)(at, from, w, laid, to)
#define OF(n, parts)                                                       \
    case n:                                                                \
        if (w->bits == 5) return fives_##n(at, from, w, laid, to);         \
        if (w->codes != WHOLE) return codes_##n(at, from, w, laid, to);    \
        UNPACKED(n)                                                        \
        TAKE(halves, n);

#if defined(__AVX512VNNI__)
enum { BYTES = 1 };  // the parts of a quad of codes that need 8 bits
#define TO_MOST TO_12
#define UNPACKED(n)
#define NEAR(n, parts)                        \
    WAY(near_alone_##n, n, parts, 8, 0, 1, 1) \
    WAY(near_##n, n, parts, 8, 0, 0, 1)
#define OF_NEAR(n, parts) \
    case n: return (w->minimums ? near_##n : near_alone_##n)(at, from, w, laid, to);

TO_12(NEAR, 1)

tile_place add_chunk_of(long rows, tile_place at, const groups *from, const weights *w, const weights *laid,
                        const outputs *to) {
    switch (rows) { TO_12(OF_NEAR, 1) }
    return at;
}
#else
tile_place add_chunk_of(long rows, tile_place at, const groups *from, const weights *w, const weights *laid,
                        const outputs *to) {
    return add_shifted_of(rows, at, from, w, laid, to);
}

enum { BYTES = 2 };
#define TO_MOST TO_6
#define WAYS_OF_UNPACKED(n, parts)                \
    WAY(bytes_alone_##n, n, BYTES, 8, 0, 1, 0)     \
    WAY(bytes_##n, n, BYTES, 8, 0, 0, 0)           \
    WAY(small_alone_##n, n, parts, SMALL, 0, 1, 0) \
    WAY(small_##n, n, parts, SMALL, 0, 0, 0)
#define UNPACKED(n)                     \
    if (w->bits == 8) {                 \
        if (are_bytes(laid)) TAKE(small, n); \
        TAKE(bytes, n);                 \
    }

TO_6(WAYS_OF_UNPACKED, 1)
#endif

TO_MOST(WAYS, 1)

tile_place add_shifted_of(long rows, tile_place at, const groups *from, const weights *w, const weights *laid,
                          const outputs *to) {
    const int alone = has_scales_alone(w);
    switch (rows) { TO_MOST(OF, 1) }
    return at;
}
