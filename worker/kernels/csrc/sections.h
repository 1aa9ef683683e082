// Adds up the sums of sections: neighbours first, then their sums, as a binary tree.
//
// So the sum of half of the sections, or of a quarter or an eighth, is a number on the way to the sum of all, and ranks
// that compute one each give the same bits as one that computes all. The tree is walked like a binary counter: a sum
// waits at the level that says how many sections it has, until its neighbour is there.
#pragma once

#include "weights.h"

enum { MOST_SECTIONS = 8, MOST_SUMS = 5 };  // places for sums in a tile: the result, three levels, one to add up in

// The sums of a tile [rows, 32] that wait, by level; the last level is `sums` itself.
INLINE float *waiting(float *sums, long rows, const weights *w, int level) {
    return sums + (__builtin_ctz((unsigned)w->sections) - level) * rows * PANEL;
}

// Where the sums of a section are to be stored, before `join_section`.
INLINE float *place_of_section(float *sums, long rows, const weights *w, long section) {
    return section % 2 ? sums + (MOST_SUMS - 1) * rows * PANEL : waiting(sums, rows, w, 0);
}

// Adds the sums of a section to those of its neighbours that wait.
INLINE void join_section(float *sums, long rows, const weights *w, long section) {
    const float *from = place_of_section(sums, rows, w, section);
    int levels = __builtin_ctzl(~section);
    if (levels == 0) return;
    for (long i = 0; i < rows * PANEL; i += LANES) {
        vec sum = vec_load(from + i, FLOAT32);
        for (int level = 0; level < levels; level++)
            sum = vec_add(vec_load(waiting(sums, rows, w, level) + i, FLOAT32), sum);
        vec_store(waiting(sums, rows, w, levels) + i, sum, FLOAT32);
    }
}
