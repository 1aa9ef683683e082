// The ways to compute tiles of rows times a panel, one for each form of a matrix.
#pragma once

#include "tile_floats.h"
#include "tile_quantized.h"
#include "tile_vec.h"

// The functions that compute tiles: by vectors, or from a quantized matrix.
typedef struct {
    long rows;    // the most rows of a tile
    long dwords;  // the size of a row as `lay` writes it
    long tiles;   // the most that are multiplied together
    void (*lay)(uint32_t *to, const char *x, long stride, long rows, const weights *w);
    void (*multiply)(const tiles *t, const weights *w, long panel);
} method;

enum { METHOD_ROWS = VEC_ROWS > QUANTIZED_ROWS ? VEC_ROWS : QUANTIZED_ROWS };  // of any method

static method method_for(const weights *w) {
    long plain = LANES == 16 && widened(w) ? TILE_ROWS : VEC_ROWS;
    if (!w->bits) return (method){plain, laid_dwords(w), 1, lay_dwords, multiply_vec};
    if (are_floats(w)) return (method){TILE_ROWS, floats_dwords(w), TILES_AT_ONCE, lay_floats, multiply_floats};
    method whole = {QUANTIZED_ROWS, quantized_dwords(w), 1, lay_quantized, multiply_in_place};
    if (!is_read_in_place(w) || is_looked_up(w) || is_widened_once(w))
        whole.tiles = TILES_AT_ONCE, whole.multiply = multiply_unpacked;
    return whole;
}
