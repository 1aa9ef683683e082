// The layout in memory of a matrix [outputs, inputs] for `linear`.
//
// A panel has 32 outputs. It holds 32 dwords for each dword of inputs: one float32 input each, or two neighbouring
// bfloat16 ones, which is what both vdpbf16ps and the tiles of AMX read. So a panel is read from beginning to end, and
// all panels one after the other. Panels, dwords and tiles are filled up with zeros. In a gated matrix, whose upper
// half of rows are gates, a panel has 16 gates and then their 16 values.
//
// Inputs that can be cut over ranks are divided into sections of equal length, which are added up apart (`sections.h`).
// A section begins with a dword, a tile and a group of its own, so a rank that holds some of them computes the same.
//
// In a quantized matrix a dword is a quad, four elements of 8 bits. Those of fewer bits lie in units: of 4 bits, two
// quads, the first in the low nibbles; of 5 and 6 bits, the low nibbles of eight or four quads in this way, and then a
// dword with the other bits, those of the first quad lowest. Panels are divided into groups of inputs. Each begins with
// 32 scales and, if the matrix has them, 32 bytes with the codes that stand for 0, and 32 minimums. Where these numbers
// are small whole ones, a section begins with the factors of its runs of groups: 32 for scales, and 32 for minimums.
//
// A matrix that was quantized before may have its inputs in another order, which `order` names: then they are gathered
// while rows are laid out. Such a matrix has one section.
#pragma once

#include "vec.h"

#define PANEL 32
#define COLUMNS (PANEL / LANES)  // vectors in a row of a panel

typedef struct {
    void *panels;
    long outputs;  // rows of the matrix
    long inputs;
    int kind;  // the type of the matrix as it was loaded, and so of the inputs
    int gated;
    int sections;  // 1, 2, 4 or 8; if several, each has an even number of inputs
    // The next ones are 0 if the matrix is not quantized.
    int bits;         // bits of an element: 8, 6, 5 or 4
    int group;        // inputs that share a scale: a power of 2 from 8 to 128, and a multiple of a unit
    int input_bits;   // bits to which inputs are rounded: 16 or 8
    int codes;        // what elements mean: one of those below
    int scale;        // the type of scales and minimums
    int offsets;      // whether groups have them
    int minimums;     // whether groups have them, which are added to each element; then codes count from 0
    int run;          // groups that share factors: a power of 2; 0 if there are none
    int factor;       // the type of factors
    const int *order;  // [inputs] the place of each input in a row of x, or -1 for a zero; NULL: as they come
} weights;

enum { WHOLE, E4M3, E2M1, IQ4, NF4, FP4 };                  // `weight_coding.py` says what they mean
enum { FLOAT16 = BFLOAT16 + 1, POWER, UNSIGNED, SIGNED };  // types of scales only: of 8 bits are all but the first

// Whether codes become floats, with which inputs are multiplied as they are: else both are whole numbers.
INLINE int are_floats(const weights *w) { return w->codes == E4M3 || w->codes >= NF4; }

// Whether a matrix is multiplied by AMX as bfloat16, with any number of rows.
INLINE int is_for_amx(const weights *w) {
#if defined(__AMX_BF16__)
    return w->kind == BFLOAT16 && (!w->bits || are_floats(w));
#else
    return (void)w, 0;
#endif
}

// A part of the rows of a matrix as it was loaded. Parts lie anywhere; each is contiguous.
typedef struct {
    const char *first;
    long rows;
} part;

INLINE const char *row_of(const part *parts, long row, long row_bytes) {
    while (row >= parts->rows) row -= parts++->rows;
    return parts->first + row * row_bytes;
}

#if defined(__AMX_BF16__)
enum { PAIRS = 16 };  // pairs of inputs in a tile
#else
enum { PAIRS = 1 };
#endif

// The size of a section, and then of all of them. Shifted, because a division takes as long as ten products.
INLINE long shifted(long a, long power) { return a >> __builtin_ctzl((unsigned long)power); }  // a / power of 2
INLINE long section_inputs(const weights *w) { return shifted(w->inputs, w->sections); }
INLINE long section_dwords(const weights *w) {
    return w->kind == BFLOAT16 ? ceil_div(section_inputs(w), 2 * PAIRS) * PAIRS : section_inputs(w);
}
INLINE long dwords_of(const weights *w) { return w->sections * section_dwords(w); }

enum { GROUP_LEAST = 8, GROUP_MOST = 128 };
INLINE long number_bytes(int type) { return type == FLOAT32 ? 4 : type <= FLOAT16 ? 2 : 1; }
INLINE long scales_bytes(const weights *w) { return PANEL * number_bytes(w->scale); }
INLINE long group_head_bytes(const weights *w) {
    return scales_bytes(w) + (w->offsets ? PANEL : 0) + (w->minimums ? scales_bytes(w) : 0);
}
INLINE long unit_quads(int bits) { return bits == 8 ? 1 : bits == 4 ? 2 : bits == 6 ? 4 : 8; }
INLINE long section_groups(const weights *w) { return shifted(section_inputs(w) + w->group - 1, w->group); }
INLINE long section_quads(const weights *w) {  // whole units
    long least = 4 * unit_quads(w->bits) - 1;
    return ((section_inputs(w) + least) & ~least) / 4;
}
INLINE long groups_of(const weights *w) { return w->sections * section_groups(w); }
INLINE long quads_of(const weights *w) { return w->sections * section_quads(w); }
INLINE long factors_bytes(const weights *w) { return PANEL * number_bytes(w->factor) * (1 + w->minimums); }  // of a run
INLINE long section_head_bytes(const weights *w) {
    return w->run ? shifted(section_groups(w) + w->run - 1, w->run) * factors_bytes(w) : 0;
}

// The inputs, quads and bytes of a group of a section.
INLINE long inputs_in(const weights *w, long group) {
    return least(w->group, section_inputs(w) - group * w->group);
}
INLINE long quads_in(const weights *w, long group) {
    return least(w->group / 4, section_quads(w) - group * w->group / 4);
}
INLINE long bytes_in(const weights *w, long group) {
    return group_head_bytes(w) + quads_in(w, group) * PANEL * w->bits / 2;
}

INLINE long panel_bytes(const weights *w) {
    if (!w->bits) return dwords_of(w) * PANEL * 4;
    long heads = w->sections * section_head_bytes(w) + groups_of(w) * group_head_bytes(w);
    return heads + quads_of(w) * PANEL * w->bits / 2;
}
INLINE long columns_of(const weights *w) { return w->gated ? w->outputs / 2 : w->outputs; }  // columns of the result
INLINE long panel_columns(const weights *w) { return w->gated ? PANEL / 2 : PANEL; }
INLINE long panels_of(const weights *w) { return ceil_div(columns_of(w), panel_columns(w)); }
INLINE const uint32_t *panel_of(const weights *w, long panel) {
    return (const uint32_t *)((const char *)w->panels + panel * panel_bytes(w));
}

// The row of the matrix that a column of a panel holds; past the last row if it holds none.
INLINE long row_at(const weights *w, long panel, long column) {
    long half = PANEL / 2;
    if (!w->gated) return panel * PANEL + column;
    long index = panel * half + column % half;
    if (index >= columns_of(w)) return w->outputs;
    return column < half ? index : columns_of(w) + index;
}
