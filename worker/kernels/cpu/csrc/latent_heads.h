// Products of tokens whose heads have a matrix each.
#pragma once

#include "weights.h"

typedef struct {
    const weights *w;   // the heads' matrices, each of which begins with a panel
    long heads, outputs;  // of each head
    const char *x;
    long x_stride, x_head;  // from one token to the next, and from one head to the next, in bytes
    char *out;
    long out_stride, out_head;
    long tokens, tiles;
    long groups, parts;  // units of a head: groups of tiles times parts of its panels
} by_head;

// Divides the work; -> the number of units.
long divide_heads(by_head *h);

void multiply_heads(const by_head *h, long first, long last);
