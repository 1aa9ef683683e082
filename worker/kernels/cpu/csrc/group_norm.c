// RMS norms of groups of features, each of which is first multiplied by silu of its gate. Other ranks may hold the rest
// of a group, so its sum of squares is an operation of its own.
#include "functions.h"
#include "sections.h"
#include "threads.h"
#include "call_arguments.h"

typedef struct {
    const void *x, *gate;  // gate: NULL in sums of squares of x alone
    long x_stride, gate_stride;
    const float *weight;  // [groups * width]
    float *squares;       // [tokens, groups]
    void *out;            // [tokens, groups * width]; NULL: squares are added up
    long groups, width, sections, count;  // count: the numbers in each sum of squares, wherever they are
    float eps;
    kind k;
} group_norm;

INLINE vec gated_at(const group_norm *g, const char *x, const char *gate, long i, long left, kind k) {
    vec value = vec_load_upto(at(x, i, k), left, k);
    if (g->gate == NULL) return value;
    return vec_mul(value, vec_function(vec_load_upto(at(gate, i, k), left, k), SILU, FLOAT32));
}

// Adds up each section of a group, then neighbouring sections, then their sums.
INLINE void add_squares(const group_norm *g, const char *x, const char *gate, float *squares, kind k) {
    long width = g->width / g->sections;
    float sums[MOST_SECTIONS];
    for (int section = 0; section < g->sections; section++) {
        vec sum = vec_zero();
        for (long i = 0; i < width; i += LANES) {
            vec value = gated_at(g, x, gate, section * width + i, width - i, k);
            sum = vec_fma(value, value, sum);
        }
        sums[section] = vec_sum(sum);
    }
    for (int left = g->sections; left > 1; left /= 2)
        for (int i = 0; i < left / 2; i++) sums[i] = sums[2 * i] + sums[2 * i + 1];
    *squares = sums[0];
}

INLINE void normalise_groups(const group_norm *g, long token, kind k) {
    for (long group = 0; group < g->groups; group++) {
        long first = group * g->width;
        const char *x = at(g->x, token * g->x_stride + first, k);
        const char *gate = g->gate == NULL ? NULL : at(g->gate, token * g->gate_stride + first, k);
        float *squares = g->squares + token * g->groups + group;
        if (g->out == NULL) {
            add_squares(g, x, gate, squares, k);
            continue;
        }
        char *out = at_out(g->out, token * g->groups * g->width + first, k);
        vec scale = vec_all(1.0f / sqrtf(*squares / (float)g->count + g->eps));
        for (long i = 0; i < g->width; i += LANES) {
            long left = g->width - i;
            vec value = vec_mul(gated_at(g, x, gate, i, left, k), scale);
            value = vec_mul(value, vec_load_upto(g->weight + first + i, left, FLOAT32));
            vec_store_upto(at_out(out, i, k), value, left, k);
        }
    }
}

static void normalise_tokens(const void *task, long first, long last) {
    const group_norm *g = task;
    for (long token = first; token < last; token++) {
        if (g->k == FLOAT32) normalise_groups(g, token, FLOAT32);
        else normalise_groups(g, token, BFLOAT16);
    }
}

enum { GRAIN = 4096 };  // elements that are worth handing to another thread

// Squares and out are contiguous. A group's width divides into `sections`, which are 1, 2, 4 or 8.
EXPORT void group_norm_rows(const void *x, long x_stride, const void *gate, long gate_stride, const float *weight,
                            float *squares, void *out, long tokens, long groups, long width, long sections, long count,
                            float eps, int kind) {
    group_norm g = {x,   gate,   x_stride, gate_stride, weight, squares,
                    out, groups, width,    sections,    count,  eps, kind};
    spread(tokens, grain_of(GRAIN, groups * width), normalise_tokens, &g);
}

EXPORT void group_norm_rows_words(const word *a) {
    group_norm_rows(a[0].pointer, a[1].whole, a[2].pointer, a[3].whole, a[4].pointer, a[5].pointer, a[6].pointer,
                    a[7].whole, a[8].whole, a[9].whole, a[10].whole, a[11].whole, a[12].real, (int)a[13].whole);
}
