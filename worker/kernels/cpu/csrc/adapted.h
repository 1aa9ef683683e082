// What adapters add to the sums of a tile: y = factor * (W x + B (A x)) + shift.
//
// `low` holds A x, in float32. B lies in the panels of the matrix W: for each half of a panel, from which numbers
// A x it is made, and then 16 values for each of these. (The halves of a panel with gates are made of others.) A row's
// sum is added up in their order, whatever rows are beside it; rows without an adapter are passed over.
#pragma once

#include "weights.h"

// An adapter of a layer. All is 0 if it does not change the layer.
typedef struct {
    const weights *a;     // A; NULL: there are no products
    const char *b;        // NULL: likewise
    const int *ranges;    // [panels, 2, 3]: the first number, their count, and how many lie before a half's own in b
    const float *factor;  // [panels, 32]; NULL: 1
    const float *shift;   // [panels, 32]; NULL: 0
    long kind;            // the type of b
} adapted;

typedef struct {
    const adapted *table;  // by the number of the adapter
    const int *numbers;    // of each row's adapter; 0: none
    const float *low;
    long low_stride;
} added;

enum { ROWS_ADDED = 4 };  // that are computed together
enum { HALF_PANEL = PANEL / 2, OF_HALF = COLUMNS / 2 };

INLINE void add_rows(const added *a, const adapted *e, float *sums, long row, int rows, long panel, kind k) {
    vec sum[ROWS_ADDED][COLUMNS];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < COLUMNS; c++) sum[r][c] = vec_load(sums + r * PANEL + c * LANES, FLOAT32);
    if (e->b != NULL)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const int *range = e->ranges + 3 * (2 * panel + half);
            const char *b = at(e->b, (long)range[2] * HALF_PANEL, k);
            const float *low = a->low + row * a->low_stride + range[0];
            for (int i = 0; i < range[1]; i++, b += HALF_PANEL * width_of(k))
                for (int c = 0; c < OF_HALF; c++) {
                    vec column = vec_load(at(b, c * LANES, k), k), *own = &sum[0][half * OF_HALF + c];
                    for (int r = 0; r < rows; r++)
                        own[r * COLUMNS] = vec_fma(vec_all(low[r * a->low_stride + i]), column, own[r * COLUMNS]);
                }
        }
    for (int c = 0; c < COLUMNS; c++)
        for (int r = 0; r < rows; r++) {
            const long column = panel * PANEL + c * LANES;
            if (e->factor != NULL) sum[r][c] = vec_mul(sum[r][c], vec_load(e->factor + column, FLOAT32));
            if (e->shift != NULL) sum[r][c] = vec_add(sum[r][c], vec_load(e->shift + column, FLOAT32));
            vec_store(sums + r * PANEL + c * LANES, sum[r][c], FLOAT32);
        }
}

// Adds to the sums [rows, 32] of a tile that begins with row `start` of the step.
static void add_adapters(const added *a, float *sums, long start, long rows, long panel) {
    for (long r = 0; r < rows;) {
        int number = a->numbers[start + r];
        long end = r + 1;
        while (end < rows && end - r < ROWS_ADDED && a->numbers[start + end] == number) end++;
        const adapted *e = a->table + number;
        if (number && (e->b != NULL || e->factor != NULL || e->shift != NULL)) {
            int together = end - r == ROWS_ADDED ? ROWS_ADDED : 1;
            end = r + together;
            float *own = sums + r * PANEL;
            if (together == 1 && e->kind == BFLOAT16) add_rows(a, e, own, start + r, 1, panel, BFLOAT16);
            else if (together == 1) add_rows(a, e, own, start + r, 1, panel, FLOAT32);
            else if (e->kind == BFLOAT16) add_rows(a, e, own, start + r, ROWS_ADDED, panel, BFLOAT16);
            else add_rows(a, e, own, start + r, ROWS_ADDED, panel, FLOAT32);
        }
        r = end;
    }
}
