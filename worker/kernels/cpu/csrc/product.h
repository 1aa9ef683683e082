// A product, and what follows the sums of a tile: a bias, an activation, a gate, and rounding.
#pragma once

#include "adapted.h"
#include "functions.h"
#include "weights.h"

typedef struct {
    const weights *w;
    const char *x;
    long x_stride;  // in bytes
    const void *bias;
    char *out;
    long out_stride;  // in bytes
    kind out_kind;
    function function;
    long rows;
    const added *added;  // what adapters add to the sums; NULL: there are none
    long first;          // the row of the step that is the first one here
} product;

// Finishes the sums [rows, 32] of a tile, from row `start` on.
void finish_tile(const product *p, float *sums, long start, long rows, long panel);
