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
    long rows;
    const char *x;
    const float *numbers;  // of the first row, `stride` before those of the next
    long stride;
    float *sums;
    const char *next;  // the inputs of the next tile
} code_tile;

INLINE int has_words(const weights *w) { return w->input_bits == 16; }  // as inputs

// Registers 0 to 3 hold the sums of so many rows, 4 and 5 so many bytes of each row of x, 6 and 7 as many of each column.
INLINE void shape_code_tiles(long rows, long bytes) {
    shapes s = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        s.rows[tile] = (uint8_t)(tile < 6 ? rows : bytes / 4);
        s.row_bytes[tile] = tile == 4 || tile == 5 ? (uint16_t)bytes : STEP_BYTES;
    }
    set_shapes(&s);
}
