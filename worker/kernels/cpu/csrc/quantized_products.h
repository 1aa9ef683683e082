// Products of the rows of a tile with the codes of a group, in some neighbouring vectors of columns: whole numbers,
// multiplied and added up without rounding.
#pragma once

#include "quantized_rows.h"
#include "tile.h"

// How a tile is multiplied: all of it is constant in each function, for which registers are then shared out well.
typedef struct {
    int rows, parts;
    int bits;   // of codes, or SMALL
    int table;  // whether codes are looked up
    int runs;   // whether sums are those of runs, each product times its scale
    int side;   // rows that lie side by side: those of the tile, of which `rows` are multiplied at once
    int near;   // whether bytes of the matrix are in the first-level cache, as those of a chunk are
} way;

typedef whole row_sums[COLUMNS];

#if defined(__AVX512VNNI__)
// An instruction waits for the last one with the same sum: so a few rows have two for each product, one for each part.
enum { CHAINS_MOST = 2 };
INLINE int chains_of(way f) { return f.rows > 5 ? 1 : f.parts; }
INLINE int columns_at_once(way f) { return (void)f, COLUMNS; }
INLINE whole add_bytes(whole sum, whole w, whole x) {
    return in_register((whole)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x));
}
#else
// Sums stay in registers for all of a group, so where registers are few, there are few columns.
enum { CHAINS_MOST = 1 };
INLINE int chains_of(way f) { return (void)f, 1; }
INLINE int columns_at_once(way f) {
    enum { SUMS = 12 };
    return f.rows * COLUMNS <= SUMS ? COLUMNS : 2;
}
INLINE whole add_bytes(whole sum, whole w, whole x) { return (void)w, (void)x, sum; }  // `add_quads` does it
#endif

// The elements of a part, which are bytes if it is the only one, and else words; of 4 bits, those of the first or of the
// second quad that bytes hold.
INLINE whole elements(whole bytes, way f, whole levels, int quad, int part) {
    int down = 8 * part, bits = f.bits;
    if (bits == 4 && (f.table || f.parts == 1)) {
        bytes = quad ? high_nibbles(bytes) : low_nibbles(bytes);
        if (f.table) bytes = looked_up(levels, bytes);
        bits = 8;
    } else {
        down += 4 * quad;
    }
    if (f.parts == 1) return bytes;
    if (down) bytes = words_down(bytes, down);
    return down + bits < 16 ? words_below(bytes, (1 << bits) - 1) : bytes;
}

// Adds the products of the quads that four bytes of each column hold: one of 8 bits, or two of 4 bits. One part is
// widened after the other, because the sums of a large tile leave few registers.
INLINE void add_line(row_sums sums[][QUANTIZED_ROWS], const uint32_t *x, way f, whole levels, const whole *codes) {
    for (int quad = 0; quad < 8 / f.bits; quad++) {
        for (int part = 0; part < f.parts; part++, x += f.side) {
            whole w[COLUMNS];
            for (int c = 0; c < columns_at_once(f); c++)
                w[c] = elements(whole_load(codes + c), f, levels, quad, part);
            for (int r = 0; r < f.rows; r++) {
                whole row = whole_all(x[r]);
                for (int c = 0; c < columns_at_once(f); c++) {
                    whole *sum = &sums[part % chains_of(f)][r][c];
                    *sum = f.parts == 1 ? add_bytes(*sum, w[c], row) : add_words(*sum, w[c], row);
                }
            }
        }
    }
}

// Bytes whose codes are below 64, as the bits of a way to multiply where two products are added up in 16 bits.
enum { SMALL = 7 };

// Quads that are multiplied together: a unit of codes of 5 and 6 bits, and of 4 bits four units.
INLINE int quads_at_once(int bits) { return bits == SMALL ? 2 : bits == 6 ? 4 : 8; }

// The elements of a quad of those that are multiplied together, in a column.
INLINE whole bytes_of(const whole *column, int quad, int bits) {
    if (bits == SMALL) return whole_load(column + quad * COLUMNS);
    whole nibbles = whole_load(column + quad / 2 * COLUMNS);
    nibbles = quad % 2 ? high_nibbles(nibbles) : low_nibbles(nibbles);
    if (bits == 4) return nibbles;
    whole others = whole_load(column + quads_at_once(bits) / 2 * COLUMNS);
    int up = 4 - quad * (bits - 4);
    others = up > 0 ? whole_up(others, up) : whole_down(others, -up);
    return nibbles | (others & whole_all(bits == 6 ? 0x30303030 : 0x10101010));
}

#if defined(__AVX512VNNI__)
// Adds the products of a unit of codes of 5 or 6 bits.
INLINE void add_unit(row_sums *sums, const uint32_t *x, way f, const whole *codes) {
#pragma GCC unroll 8
    for (int quad = 0; quad < quads_at_once(f.bits); quad++, x += f.side) {
        whole w[COLUMNS];
        for (int c = 0; c < COLUMNS; c++) w[c] = bytes_of(codes + c, quad, f.bits);
        for (int r = 0; r < f.rows; r++)
            for (int c = 0; c < COLUMNS; c++) sums[r][c] = add_bytes(sums[r][c], w[c], whole_all(x[r]));
    }
}

// Quads that are multiplied without a loop, which would take a good part of the time of many rows in small groups.
INLINE int quads_together(way f) {
    if (f.bits == 5 || f.bits == 6) return quads_at_once(f.bits);
    if (f.near) return 8;
    return f.parts == 1 && (f.runs || f.rows > 8) ? 4 : 8 / f.bits;
}

INLINE void add_together(row_sums sums[][QUANTIZED_ROWS], const uint32_t *x, way f, whole levels, const whole *codes) {
    if (f.bits == 5 || f.bits == 6) {
        add_unit(sums[0], x, f, codes);
        return;
    }
    const int quads = quads_together(f), line = 8 / f.bits;
#pragma GCC unroll 8
    for (int done = 0; done < quads; done += line, codes += COLUMNS, x += line * f.parts * f.side)
        add_line(sums, x, f, levels, codes);
}
#else
INLINE int stored_bits(int bits) { return bits == SMALL ? 8 : bits; }

// Quads whose products of bytes have room in sums of 16 bits.
INLINE int quads_in_words(int bits) { return bits == 4 ? 8 : bits == 5 ? 4 : 2; }

// `add_line` for bytes without an instruction that adds up four products. Pairs of sums of 16 bits are multiplied with
// `factors` when they are added up: ones, or the scales of a group.
INLINE void add_quads(row_sums *sums, const uint32_t *x, way f, int quads, const whole *codes, const whole *factors) {
    row_sums near[QUANTIZED_ROWS];
    if (f.runs) __asm__ volatile("" : : "r"(sums) : "memory");  // where there is no room for them as well
#pragma GCC unroll 8
    for (int quad = 0; quad < quads; quad++) {
        int filled = quad % quads_in_words(f.bits), last = filled + 1 == quads_in_words(f.bits) || quad + 1 == quads;
        whole w[COLUMNS];
        for (int c = 0; c < columns_at_once(f); c++) w[c] = bytes_of(codes + c, quad, f.bits);
        for (int r = 0; r < f.rows; r++) {
            whole row = whole_all(x[quad * f.side + r]);
            for (int c = 0; c < columns_at_once(f); c++) {
                whole to = filled ? near[r][c] : whole_all(0);
                near[r][c] = add_to_words(to, w[c], row);
                if (last) sums[r][c] = add_words(sums[r][c], near[r][c], factors[c]);
            }
        }
    }
}

// `add_quads` where only two quads have room in sums of 16 bits: a row is finished before the next one, and only what it is
// multiplied with stays in registers.
INLINE void add_pairs(row_sums *sums, const uint32_t *x, way f, int quads, const whole *codes, const whole *factors) {
    const int columns = columns_at_once(f);
    for (int quad = 0; quad < quads; quad += 2) {
        whole w[2][COLUMNS];
        const int count = quad + 1 < quads ? 2 : 1;
        for (int i = 0; i < count; i++)
            for (int c = 0; c < columns; c++) w[i][c] = bytes_of(codes + c, quad + i, f.bits);
        __asm__ volatile("" : : "r"(sums) : "memory");
        for (int r = 0; r < f.rows; r++) {
            whole row[2];
            for (int i = 0; i < count; i++) row[i] = whole_all(x[(quad + i) * f.side + r]);
            for (int c = 0; c < columns; c++) {
                whole near = whole_all(0);
                for (int i = 0; i < count; i++) near = add_to_words(near, w[i][c], row[i]);
                sums[r][c] = add_words(sums[r][c], near, factors[c]);
            }
        }
    }
}

INLINE void add_bytes_of(row_sums *sums, const uint32_t *x, way f, int quads, const whole *codes, const whole *factors) {
    if (quads_in_words(f.bits) == 2) add_pairs(sums, x, f, quads, codes, factors);
    else add_quads(sums, x, f, quads, codes, factors);
}

// -> the quads that were multiplied: at most as many as are left.
INLINE int add_some(row_sums *sums, const uint32_t *x, way f, long left, const whole *codes, const whole *factors) {
    int most = quads_at_once(f.bits);
    if (left >= most) {
        add_bytes_of(sums, x, f, most, codes, factors);
        return most;
    }
    __asm__ volatile("" : "+r"(x));         // a compiler must not begin both ways at once
    int least_quads = f.bits == 4 ? 2 : 1;  // parts of the last group of a section, and small groups
    add_bytes_of(sums, x, f, least_quads, codes, factors);
    return least_quads;
}
#endif

// Prefetches the lines of a row of codes which lie in some vectors of columns.
INLINE void prefetch_codes(fetch *ahead, int first, int columns) {
    for (int byte = first * LANES * 4; byte < (first + columns) * LANES * 4; byte += 32)
        if (byte % 64 == 0) _mm_prefetch(ahead->from + byte, _MM_HINT_T0);
    ahead->from += ahead->step;
}

// Adds the products of rows with so many quads of a group to sums, in the columns from `first` on, where `codes` lie.
// factors: of `add_quads`.
INLINE void add_products_of(row_sums sums[][QUANTIZED_ROWS], const uint32_t *x, way f, whole levels, long quads,
                            const whole *codes, int first, const whole *factors, fetch *ahead) {
#if defined(__AVX512VNNI__)
    (void)factors;
    const int together = quads_together(f), line = 8 / f.bits, lines = together * f.bits / 8;
    for (; together > line && quads >= together; quads -= together) {
        __asm__ volatile("" : "+r"(codes), "+r"(x));  // there are no registers for more pointers
        add_together(sums, x, f, levels, codes);
        for (int i = 0; !f.near && i < lines; i++) prefetch_codes(ahead, first, columns_at_once(f));
        codes += lines * COLUMNS;
        x += together * f.side;
    }
    if (f.bits == 5 || f.bits == 6 || (f.runs && f.bits == 8)) return;  // groups are whole units
    if (together > line) __asm__ volatile("" : "+r"(codes), "+r"(x));
    for (; quads > 0; quads -= line) {
        add_line(sums, x, f, levels, codes);
        if (!f.near) prefetch_codes(ahead, first, columns_at_once(f));
        codes += COLUMNS;
        x += line * f.parts * f.side;
    }
#else
    for (long left = quads; left > 0;) {
        long taken = 8 / f.bits;
        if (f.parts == 1) taken = add_some(sums[0], x, f, left, codes, factors);
        else add_line(sums, x, f, levels, codes);
        long lines = taken * stored_bits(f.bits) / 8;
        for (long i = 0; i < lines; i++) prefetch_codes(ahead, first, columns_at_once(f));
        left -= taken;
        codes += lines * COLUMNS;
        x += taken * f.parts * f.side;
    }
#endif
}

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

INLINE void prefetch_head(fetch *ahead, long step) {
    pass_end(ahead);
    _mm_prefetch(ahead->from, _MM_HINT_T0);
    ahead->from += step;
}

// The sum of all chains of a column.
INLINE whole joined(row_sums sums[][QUANTIZED_ROWS], way f, int r, int c) {
    whole all = sums[0][r][c];
    for (int i = 1; i < chains_of(f); i++) all += sums[i][r][c];
    return all;
}

#define TO_6(of, parts) of(1, parts) of(2, parts) of(3, parts) of(4, parts) of(5, parts) of(6, parts)
#define TO_12(of, parts) \
    TO_6(of, parts) of(7, parts) of(8, parts) of(9, parts) of(10, parts) of(11, parts) of(12, parts)

// Multiplies a tile with groups that have whole scales, or with inputs that have shifts. laid: the matrix as it lies in
// memory, whose form rows are laid for.
tile_place add_runs_of(long rows, tile_place at, const groups *from, const weights *w, const weights *laid,
                       const outputs *to);
tile_place add_shifted_of(long rows, tile_place at, const groups *from, const weights *w, const weights *laid,
                          const outputs *to);

// The second for a chunk in bytes, of which `head_step` lines are prefetched for each group.
tile_place add_chunk_of(long rows, tile_place at, const groups *from, const weights *w, const weights *laid,
                        const outputs *to);
