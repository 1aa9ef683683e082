// The unit of work that a thread takes in attention: a part of a row of the batch, for one key head.
#pragma once

#include <string.h>

#include "vec.h"

typedef struct {
    int row;
    int first;  // the first query; or key, of a row with one query
    int count;
    int split;  // the index of a row whose chunks are units of their own; -1: this row's are not
    long cost;  // relative to other units
} unit;

enum { CLASSES = 128 };

// There are two classes for every power of 2; the most costly comes first.
INLINE int class_of(long cost) {
    int power = 63 - __builtin_clzl((unsigned long)cost | 2);
    return CLASSES - 1 - (2 * power + (int)(cost >> (power - 1) & 1));
}

// Sorts units by cost, so that all threads end at about the same time.
static void longest_first(unit *sorted, const unit *units, long n) {
    long starts[CLASSES + 1] = {0};
    for (long i = 0; i < n; i++) starts[class_of(units[i].cost) + 1]++;
    for (int c = 0; c < CLASSES; c++) starts[c + 1] += starts[c];
    for (long i = 0; i < n; i++) sorted[starts[class_of(units[i].cost)]++] = units[i];
}
