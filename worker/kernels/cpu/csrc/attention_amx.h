// Products of attention by AMX: of queries and keys, and of weights and values. The order of their sums:
// `attention_tile.h`.
//
// A register holds 16 rows of 64 bytes, and one instruction multiplies 16 rows of 32 numbers with 16 columns. Keys are
// read where they lie, 16 of them as rows, so that scores come out as [key][query]. Values have to be transposed for a
// tile of queries, as [dimension][key], so that sums come out as [dimension][query]; a row of its own multiplies its
// weights as rows with values as columns instead.
#pragma once

#include "amx_registers.h"
#include "pairs.h"

enum {
    SPAN = 16,   // rows and columns of a register
    DEPTH = 32,  // numbers of a row of bfloat16: dimensions of a product, or keys
    QUAD = 4,    // heads that a row of its own multiplies with keys at a time; SPAN, if it has more
};

INLINE long beside_of(long heads) { return heads > QUAD ? SPAN : QUAD; }

// SPAN rows that lie at one distance from each other.
typedef struct {
    const char *first;
    long stride;
} spaced;

// `count` of SPAN rows: as they lie, if that is at one distance, or copied; past the last one lies anything.
INLINE spaced spaced_rows(const void *const *rows, long count, long bytes, void *copy) {
    const char *first = rows[0];
    if (count >= SPAN) {
        long stride = (const char *)rows[1] - first, apart = 0;
        for (long r = 2; r < SPAN; r++) apart |= (const char *)rows[r] - first - r * stride;
        if (apart == 0) return (spaced){first, stride};
    }
    for (long r = 0; r < least(SPAN, count); r++) memcpy((char *)copy + r * bytes, rows[r], bytes);
    return (spaced){copy, bytes};
}

// Rows that are prefetched line by line, in the order of memory: processors recognize it, and read on by themselves.
typedef struct {
    const void *const *row, *const *last;
    const char *line;
    long left, bytes;  // of this row, and of each
} row_stream;

// Prefetches the next row into the second-level cache.
INLINE void fetch_row(row_stream *f) {
    if (f->row >= f->last) return;
    const char *row = *f->row++;
    for (long i = 0; i < f->bytes; i += 64) _mm_prefetch(row + i, _MM_HINT_T1);
}

// Prefetches the next 64 bytes into the second-level cache.
INLINE void fetch_line(row_stream *f) {
    _mm_prefetch(f->line, _MM_HINT_T1);
    f->line += 64, f->left -= 64;
    for (; f->left <= 0 && f->row < f->last; f->left += f->bytes) f->line = (const char *)*++f->row - f->left;
}

// What is multiplied for up to 2 * SPAN rows and as many columns: `steps` registers for each SPAN of them.
typedef struct {
    spaced rows[2];
    long row_step;  // bytes from one step to the next
    const float *columns;  // each row of them 2 * SPAN floats long
    long column_step;      // floats from one step to the next
    long steps;
    int below, beside;  // whether there are more than SPAN rows, and columns
} products;

#if defined(__AMX_BF16__)
INLINE int has_amx(void) { return 1; }

// Registers for tiles of queries: 0 to 3 hold sums, 4 and 5 rows, 6 and 7 columns.
INLINE void shape_for_tiles(void) {
    shapes s = {.palette = 1};
    for (int i = 0; i < 8; i++) s.rows[i] = SPAN, s.row_bytes[i] = 64;
    set_shapes(&s);
}

// Registers for rows of their own, with so many heads: 0 holds scores of SPAN keys, 1 keys, or values of SPAN dimensions,
// 2 words of queries, 3 weights, and 4 to 7 sums of values.
INLINE void shape_for_heads(long heads) {
    shapes s = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        s.rows[i] = i < 3 ? SPAN : (uint8_t)least(SPAN, heads);
        s.row_bytes[i] = i == 0 || i == 2 ? (uint16_t)(beside_of(heads) * 4) : 64;
    }
    set_shapes(&s);
}

INLINE void release_registers(void) { _tile_release(); }  // or each switch to another process would save them

// Computes sums [row][2 * SPAN].
INLINE void multiply(const products *p, float *sums) {
    const long bytes = 2 * SPAN * 4;
    float *lower = sums + SPAN * 2 * SPAN;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long i = 0; i < p->steps; i++) {
        const float *columns = p->columns + i * p->column_step;
        _tile_loadd(4, p->rows[0].first + i * p->row_step, p->rows[0].stride);
        _tile_loadd(6, columns, bytes);
        _tile_dpbf16ps(0, 4, 6);
        if (p->below) {
            _tile_loadd(5, p->rows[1].first + i * p->row_step, p->rows[1].stride);
            _tile_dpbf16ps(2, 5, 6);
        }
        if (!p->beside) continue;
        _tile_loadd(7, columns + SPAN, bytes);
        _tile_dpbf16ps(1, 4, 7);
        if (p->below) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, bytes);
    if (p->beside) _tile_stored(1, sums + SPAN, bytes);
    if (p->below) _tile_stored(2, lower, bytes);
    if (p->below && p->beside) _tile_stored(3, lower + SPAN, bytes);
}

// Computes the scores [key][beside] of SPAN keys for heads that lie side by side, and prefetches as many rows of `f`, if
// it is given, evenly: a burst would keep loads waiting.
INLINE void multiply_keys(spaced keys, const float *queries, long words, long beside, row_stream *f, float *scores) {
    _tile_zero(0);
    for (long i = 0; i < words; i += SPAN) {
        _tile_loadd(1, keys.first + i * 4, keys.stride);
        for (long row = 0; f && row < SPAN * SPAN; row += words) fetch_row(f);
        _tile_loadd(2, queries + i * beside, beside * 4);
        _tile_dpbf16ps(0, 1, 2);
    }
    _tile_stored(0, scores, beside * 4);
}

// Sums [head][SPAN] of up to four SPANs of dimensions: begins with those of earlier keys, if there are any; adds DEPTH keys,
// whose weights are [head], words `stride` bytes apart, and whose values are [SPAN of dimensions][word of keys][dimension];
// and stores them.
#define EACH_SPAN(what) what(4, 0) what(5, 1) if (spans > 2) { what(6, 2) what(7, 3) }
#define BEGIN(number, i) _tile_zero(number); if (sums) _tile_loadd(number, sums[i], SPAN * 4);
#define ADD(number, i) _tile_loadd(1, values + (i) * SPAN * SPAN, SPAN * 4); _tile_dpbf16ps(number, 3, 1);
#define END(number, i) _tile_stored(number, sums[i], SPAN * 4);
INLINE void begin_values(const int spans, float sums[][SPAN * SPAN]) { EACH_SPAN(BEGIN) }
INLINE void add_weighted(const float *weights, long stride, const float *values, const int spans) {
    _tile_loadd(3, weights, stride);
    EACH_SPAN(ADD)
}
INLINE void end_values(const int spans, float sums[][SPAN * SPAN]) { EACH_SPAN(END) }
#undef EACH_SPAN
#undef BEGIN
#undef ADD
#undef END
#else  // never called, but the code that calls them must compile
INLINE int has_amx(void) { return 0; }
INLINE void shape_for_tiles(void) {}
INLINE void shape_for_heads(long heads) { (void)heads; }
INLINE void release_registers(void) {}
INLINE void multiply(const products *p, float *sums) { (void)p, (void)sums; }
INLINE void multiply_keys(spaced keys, const float *queries, long words, long beside, row_stream *f, float *scores) {
    (void)keys, (void)queries, (void)words, (void)beside, (void)f, (void)scores;
}
INLINE void begin_values(const int spans, float sums[][SPAN * SPAN]) { (void)spans, (void)sums; }
INLINE void add_weighted(const float *weights, long stride, const float *values, const int spans) {
    (void)weights, (void)stride, (void)values, (void)spans;
}
INLINE void end_values(const int spans, float sums[][SPAN * SPAN]) { (void)spans, (void)sums; }
#endif
