// Tiles of rows times groups whose scales are whole numbers, by which products are multiplied before they become floats.
#include "quantized_products.h"

// A run of groups: where it is, what its groups take, and its factors.
typedef struct {
    const char *panel, *factors;
    long groups, quads;  // of all groups
    long group_quads, head_bytes, group_bytes;
} run;

enum { AT_ONCE = 6 };  // rows whose sums of a run and products of a group are in registers together

// Adds the products of a run to sums, each group's times its scale.
INLINE void add_run(row_sums *sums, const uint32_t *x, way f, const run *of, const weights *w, int first, fetch *ahead,
                    long head_step) {
    const char *panel = of->panel;
    const int columns = columns_at_once(f), type = w->scale;
    for (long left = of->quads; left > 0; left -= of->group_quads, panel += of->group_bytes) {
        const long count = least(of->group_quads, left);
        const whole *codes = (const whole *)(panel + of->head_bytes) + first;
        whole scales[COLUMNS];
        for (int c = 0; c < columns; c++) scales[c] = load_whole(panel + (first + c) * LANES, type);
        prefetch_head(ahead, head_step);
#if defined(__AVX512VNNI__)
        row_sums products[CHAINS_MOST][QUANTIZED_ROWS];
        for (int i = 0; i < chains_of(f); i++)
            for (int r = 0; r < f.rows; r++)
                for (int c = 0; c < columns; c++) products[i][r][c] = whole_all(0);
        if (f.rows > AT_ONCE) __asm__ volatile("" : : "r"(sums) : "memory");  // there are no registers for both
        add_products_of(products, x, f, whole_all(0), count, codes, first, NULL, ahead);
        for (int r = 0; r < f.rows; r++)
            for (int c = 0; c < columns; c++) sums[r][c] += joined(products, f, r, c) * scales[c];
#else
        for (int c = 0; c < columns; c++) scales[c] = in_words(scales[c], scales[c]);
        add_products_of((row_sums(*)[QUANTIZED_ROWS])sums, x, f, whole_all(0), count, codes, first, scales, ahead);
#endif
        x += count * f.side;
    }
}

// Sums up what the inputs of each group add up to, times its minimum; or where there are none, times its scale.
INLINE void sum_lows(row_sums *lows, const uint32_t *totals, way f, const run *of, const weights *w, int first) {
    const int columns = columns_at_once(f), type = w->scale;
    const char *numbers = of->panel + (w->minimums ? scales_bytes(w) : 0) + first * LANES;
    for (int r = 0; r < f.rows; r++)
        for (int c = 0; c < columns; c++) lows[r][c] = whole_all(0);
    for (long group = 0; group < of->groups; group += 2, numbers += 2 * of->group_bytes, totals += f.side) {
        whole pairs[COLUMNS];
        for (int c = 0; c < columns; c++) {
            const char *one = numbers + c * LANES;
            whole other = group + 1 < of->groups ? load_whole(one + of->group_bytes, type) : whole_all(0);
            pairs[c] = in_words(load_whole(one, type), other);
        }
        for (int r = 0; r < f.rows; r++) {
            whole row = whole_all(totals[r]);
            for (int c = 0; c < columns; c++) lows[r][c] = add_words(lows[r][c], pairs[c], row);
        }
    }
}

// Adds the sums of a run, scaled, to the outputs, and before them what belongs to its minimums. Without minimums bytes are
// too high by `excess`.
INLINE void finish_run(float *const *outs, long place, row_sums *sums, way f, const run *of, const weights *w, int first,
                       int excess, const uint32_t *head) {
    row_sums lows[QUANTIZED_ROWS];
    const int columns = columns_at_once(f), factor = w->factor, minimums = w->minimums;
    const char *behind = of->factors + PANEL * number_bytes(factor);
    sum_lows(lows, head + f.side, f, of, w, first);
    for (int r = 0; r < f.rows; r++) {
        float *out = outs[r] + place;
        vec scale = broadcast(head + r);
        for (int c = 0; c < columns; c++) {
            long column = (first + c) * LANES;
            vec before = vec_load(out + c * LANES, FLOAT32);
            whole sum = sums[r][c];
            if (minimums) {
                vec low = vec_mul(vec_of_whole(lows[r][c]), load_numbers(behind, column, factor));
                before = vec_fma(low, scale, before);
            } else {
                sum -= lows[r][c] * (int32_t)excess;
            }
            vec all = vec_mul(vec_of_whole(sum), load_numbers(of->factors, column, factor));
            vec_store(out + c * LANES, vec_fma(all, scale, before), FLOAT32);
        }
    }
}

// Multiplies some rows of a tile with a run, from the first of them on.
INLINE void multiply_some(float *const *outs, long place, const uint32_t *x, const uint32_t *head, way f, const run *of,
                          const weights *w, int first, int excess, fetch *ahead, long head_step) {
    row_sums sums[QUANTIZED_ROWS];
    for (int r = 0; r < f.rows; r++)
        for (int c = 0; c < columns_at_once(f); c++) sums[r][c] = whole_all(0);
    add_run(sums, x, f, of, w, first, ahead, head_step);
    finish_run(outs, place + first * LANES, sums, f, of, w, first, excess, head);
}

// Multiplies a tile with a run: if it has many rows, one half after the other.
INLINE void multiply_run(float *const *outs, long place, const uint32_t *x, const uint32_t *head, way f, const run *of,
                         const weights *w, int first, int excess, fetch *ahead, long head_step) {
    way half = f;
    half.rows = f.rows > AT_ONCE + 2 ? f.rows / 2 : f.rows;  // for few more, codes are taken apart once
    fetch none = {.from = ahead->from};
    multiply_some(outs, place, x, head, half, of, w, first, excess, ahead, head_step);
    if (half.rows == f.rows) return;
    const int done = half.rows;
    half.rows = f.rows - done;
    multiply_some(outs + done, place, x + done, head + done, half, of, w, first, excess, &none, 0);
}

// `add_groups` of a matrix with whole scales. laid: the matrix as it lies in memory, whose form rows are laid for.
INLINE tile_place add_runs(way f, tile_place at, const groups *from, const weights *w, const weights *laid,
                           const outputs *to) {
    const uint32_t *head = at.head, *x = at.x;
    groups here = *from;
    const long head_dwords = head_of(laid) * f.rows, together = w->run, group_quads = w->group / 4;
    const long end = from->end, sections = from->sections, step_out = to->section;
    const long section_head = section_head_bytes(w), all_quads = section_quads(w);
    const int columns = columns_at_once(f), excess = excess_of(laid);
    run of = {.panel = from->panel, .group_quads = group_quads, .head_bytes = group_head_bytes(w)};
    of.group_bytes = of.head_bytes + group_quads * PANEL * w->bits / 2;
    fetch ahead = at.ahead;
    float *const *outs = to->rows;
    for (long section = 0, place = 0; section < sections; section++, place += step_out) {
        long rest = all_quads - here.group * group_quads;
        if (section) here.factors = of.panel, of.panel += section_head;
        for (long group = here.group; group < end; group += together, head += head_dwords) {
            of.groups = least(together, end - group);
            of.quads = least(of.groups * group_quads, rest);
            of.factors = factors_for(&here, group, w);
            fetch pass = ahead;
            for (int first = 0; first < COLUMNS; first += columns) {
                pass = ahead;
                multiply_run(outs, place, x, head, f, &of, w, first, excess, &pass, at.head_step);
            }
            ahead = pass;
            x += of.quads * f.rows;
            rest -= of.quads;
            of.panel += of.groups * of.head_bytes + of.quads * PANEL * w->bits / 2;
        }
    }
    return (tile_place){head, x, ahead, at.head_step};
}

// As in `tile_quantized.c`, each number of rows and form is a function of its own.
#define RUNS(name, n, bits)                                                                              \
    static __attribute__((noinline)) tile_place name(tile_place at, const groups *from, const weights *w, \
                                                     const weights *laid, const outputs *to) {           \
        return add_runs((way){n, 1, bits, 0, 1, n, 0}, at, from, w, laid, to);                              \
    }
#if defined(__AVX512VNNI__)
#define TO_MOST TO_12
enum { WIDENED = 8 };  // the bits of a way for codes that were brought into bytes
#else
#define TO_MOST TO_6
enum { WIDENED = SMALL };
#endif
#define WAYS_OF_RUNS(n, parts)     \
    RUNS(runs_of_halves_##n, n, 4) \
    RUNS(runs_of_fives_##n, n, 5)  \
    RUNS(runs_of_sixes_##n, n, 6)  \
    RUNS(runs_of_bytes_##n, n, WIDENED)
#define OF_RUNS(n, parts)                                                     \
    case n:                                                                   \
        if (w->bits == 4) return runs_of_halves_##n(at, from, w, laid, to);   \
        if (w->bits == 5) return runs_of_fives_##n(at, from, w, laid, to);    \
        if (w->bits == 6) return runs_of_sixes_##n(at, from, w, laid, to);    \
        return runs_of_bytes_##n(at, from, w, laid, to);

TO_MOST(WAYS_OF_RUNS, 1)

tile_place add_runs_of(long rows, tile_place at, const groups *from, const weights *w, const weights *laid,
                       const outputs *to) {
    switch (rows) { TO_MOST(OF_RUNS, 1) }
    return at;
}
