// What follows the sums of a tile, for all that multiply.
#include "product.h"

INLINE vec add_bias(const product *p, vec sum, long column, long left) {
    kind k = p->w->kind;
    return p->bias == NULL ? sum : vec_add(sum, vec_load_upto(at(p->bias, column, k), left, k));
}

INLINE void finish_rows(const product *p, const float *sums, long start, long rows, long panel, function f, kind k) {
    long columns = columns_of(p->w), first = panel * PANEL, width = least(PANEL, columns - first);
    for (long r = 0; r < rows; r++, sums += PANEL) {
        char *row = at_out(p->out + (start + r) * p->out_stride, first, k);
        for (long i = 0; i < width; i += LANES) {
            vec sum = add_bias(p, vec_load(sums + i, FLOAT32), first + i, width - i);
            vec_store_upto(at_out(row, i, k), vec_function(sum, f, k), width - i, k);
        }
    }
}

INLINE void finish_gated_rows(const product *p, const float *sums, long start, long rows, long panel, function f,
                              kind k) {
    long columns = columns_of(p->w), half = PANEL / 2, first = panel * half, width = least(half, columns - first);
    for (long r = 0; r < rows; r++, sums += PANEL) {
        char *row = at_out(p->out + (start + r) * p->out_stride, first, k);
        for (long i = 0; i < width; i += LANES) {
            vec gate = add_bias(p, vec_load(sums + i, FLOAT32), first + i, width - i);
            vec value = add_bias(p, vec_load(sums + half + i, FLOAT32), columns + first + i, width - i);
            vec_store_upto(at_out(row, i, k), vec_gate(gate, value, f, k), width - i, k);
        }
    }
}

#define FINISH(f)                                                                                \
    case f:                                                                                      \
        if (p->w->gated && p->out_kind == BFLOAT16)                                              \
            finish_gated_rows(p, sums, start, rows, panel, f, BFLOAT16);                         \
        else if (p->w->gated) finish_gated_rows(p, sums, start, rows, panel, f, FLOAT32);        \
        else if (p->out_kind == BFLOAT16) finish_rows(p, sums, start, rows, panel, f, BFLOAT16); \
        else finish_rows(p, sums, start, rows, panel, f, FLOAT32);                               \
        break;

void finish_tile(const product *p, float *sums, long start, long rows, long panel) {
    if (p->added != NULL) add_adapters(p->added, sums, p->first + start, rows, panel);
    switch (p->function) {
        FINISH(NONE) FINISH(SILU) FINISH(GELU) FINISH(GELU_TANH) FINISH(RELU) FINISH(CLAMPED) FINISH(RELU_SQUARED)
        FINISH(QUICK_GELU)
    }
}
