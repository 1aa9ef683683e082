// Adds up the sums of sections: neighbours first, then their sums, as a binary tree.
//
// So the sum of half of the sections, or of a quarter or an eighth, is a number on the way to the sum of all, and ranks
// that compute one each give the same bits as one that computes all. The tree is walked like a binary counter: a sum
// waits at the level that says how many sections it has, until its neighbour is there. Or all sums lie apart, and are added
// up in the same order at the end.
#pragma once

#include "weights.h"

enum { MOST_SECTIONS = 8, MOST_SUMS = MOST_SECTIONS };  // places for sums in a tile

// The sums of a tile [rows, 32] that wait, by level; the last level is `sums` itself.
INLINE float *waiting(float *sums, long rows, const weights *w, int level) {
    return sums + (__builtin_ctz((unsigned)w->sections) - level) * rows * PANEL;
}

// Where the sums of a section are to be stored, before `join_section`. apart: they stay there, one section behind the
// other.
INLINE float *place_of_section(float *sums, long rows, const weights *w, long section, int apart) {
    if (apart) return sums + section * rows * PANEL;
    return section % 2 ? sums + (MOST_SUMS - 1) * rows * PANEL : waiting(sums, rows, w, 0);
}

// Adds the sums of a section to those of its neighbours that wait.
INLINE void join_section(float *sums, long rows, const weights *w, long section) {
    const float *from = place_of_section(sums, rows, w, section, 0);
    int levels = __builtin_ctzl(~section);
    if (levels == 0) return;
    for (long i = 0; i < rows * PANEL; i += LANES) {
        vec sum = vec_load(from + i, FLOAT32);
        for (int level = 0; level < levels; level++)
            sum = vec_add(vec_load(waiting(sums, rows, w, level) + i, FLOAT32), sum);
        vec_store(waiting(sums, rows, w, levels) + i, sum, FLOAT32);
    }
}

// Adds up sums of sections that lie one behind the other, of so many numbers each. The first becomes the result, and all
// others are lost.
INLINE void join_apart(float *sums, long size, long sections) {
    for (long step = 1; step < sections; step *= 2)
        for (long section = 0; section + step < sections; section += 2 * step)
            for (long i = 0; i < size; i += LANES) {
                float *to = sums + section * size + i;
                vec sum = vec_add(vec_load(to, FLOAT32), vec_load(to + step * size, FLOAT32));
                vec_store(to, sum, FLOAT32);
            }
}
