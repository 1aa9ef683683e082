// B of an adapter, laid out as `adapted.h` reads it.
#include "adapted.h"

// Rows of B as they are stored: those of neighbouring outputs, made of neighbouring numbers A x.
typedef struct {
    const char *b;  // [rows, numbers]
    long stride;    // from row to row, in numbers
    long start, rows;
    long first, numbers;
    int kind;
    float scale;
} block;

static const block *block_of(const block *blocks, long count, int row) {
    for (const block *each = blocks; each < blocks + count; each++)
        if (row >= each->start && row < each->start + each->rows) return each;
    return NULL;
}

// rows [halves, 16]: the output that each column of half a panel holds; -1: none. Writes `ranges`, and returns for how
// many numbers there are values in all.
EXPORT long adapter_ranges(const void *blocks, long count, const int *rows, long halves, int *ranges) {
    int before = 0;
    for (long half = 0; half < halves; half++, ranges += 3) {
        long first = 0, end = 0;
        for (long c = 0; c < HALF_PANEL; c++) {
            const block *own = block_of(blocks, count, rows[half * HALF_PANEL + c]);
            if (own == NULL) continue;
            first = end ? least(first, own->first) : own->first;
            end = -least(-end, -(own->first + own->numbers));
        }
        ranges[0] = (int)first, ranges[1] = (int)(end - first), ranges[2] = before;
        before += ranges[1];
    }
    return before;
}

INLINE void lay_row(const block *own, long row, char *values, kind from, kind to) {
    const void *b = at(own->b, (row - own->start) * own->stride, from);
    for (long i = 0; i < own->numbers; i++) {
        float x = own->scale * (from == BFLOAT16 ? widen(((const bf16 *)b)[i]) : ((const float *)b)[i]);
        if (to == BFLOAT16) ((bf16 *)values)[i * HALF_PANEL] = narrow(x);
        else ((float *)values)[i * HALF_PANEL] = x;
    }
}

EXPORT void lay_adapter(const void *blocks, long count, const int *rows, long halves, const int *ranges, void *out,
                        int out_kind) {
    for (long half = 0; half < halves; half++, ranges += 3, rows += HALF_PANEL) {
        char *values = at_out(out, (long)ranges[2] * HALF_PANEL, out_kind);
        memset(values, 0, ranges[1] * HALF_PANEL * width_of(out_kind));
        for (long c = 0; c < HALF_PANEL; c++) {
            const block *own = block_of(blocks, count, rows[c]);
            if (own == NULL) continue;
            char *column = at_out(values, (own->first - ranges[0]) * HALF_PANEL + c, out_kind);
            if (own->kind == BFLOAT16 && out_kind == BFLOAT16) lay_row(own, rows[c], column, BFLOAT16, BFLOAT16);
            else if (own->kind == BFLOAT16) lay_row(own, rows[c], column, BFLOAT16, FLOAT32);
            else if (out_kind == BFLOAT16) lay_row(own, rows[c], column, FLOAT32, BFLOAT16);
            else lay_row(own, rows[c], column, FLOAT32, FLOAT32);
        }
    }
}
