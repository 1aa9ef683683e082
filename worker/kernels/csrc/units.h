// What a thread takes at a time in attention: a part of a row of the batch, for one head of keys.
#pragma once

#include <string.h>

#include "vec.h"

typedef struct {
    int row;
    int first;  // query; or key, of a row with one query
    int count;
    int split;  // number of the row among those whose chunks are units of their own; -1: it is not
    long cost;  // of any scale
} unit;

enum { CLASSES = 128 };

// Two for every power of 2; the most costly first.
INLINE int class_of(long cost) {
    int power = 63 - __builtin_clzl((unsigned long)cost | 2);
    return CLASSES - 1 - (2 * power + (int)(cost >> (power - 1) & 1));
}

// So that at the end, when one thread has nothing left to do, the others soon have done too.
static void longest_first(unit *sorted, const unit *units, long n) {
    long starts[CLASSES + 1] = {0};
    for (long i = 0; i < n; i++) starts[class_of(units[i].cost) + 1]++;
    for (int c = 0; c < CLASSES; c++) starts[c + 1] += starts[c];
    for (long i = 0; i < n; i++) sorted[starts[class_of(units[i].cost)]++] = units[i];
}
