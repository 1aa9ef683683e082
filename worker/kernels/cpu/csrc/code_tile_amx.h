// What all products with codes by AMX have in common: a tile of rows, a run of groups of a panel, and what rows lie as.
#pragma once

#include "quantized_rows.h"
#include "tile_amx.h"

enum {
    STEP = 2 * PAIRS,          // inputs that one instruction multiplies as bfloat16,
    STEPS = CHUNK / STEP,      // of a run,
    DEPTH = 4 * PAIRS,         // and as bytes
    PART = HALF_ROWS * PANEL,  // numbers of a tile, of which each half of the columns has so many:
    HALF = PART / COLUMNS,
};

// Some rows of a run, and the sums [HALF_ROWS, PANEL] to which their products are added.
typedef struct {
    const char *x;
    const float *numbers;  // of the first row, `stride` before those of the next
    long stride;
    float *sums;
    const char *next;  // the inputs of the next tile
} code_tile;

INLINE int has_words(const weights *w) { return w->input_bits == 16; }  // as inputs
