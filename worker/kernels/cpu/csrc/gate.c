// Rows that are multiplied by functions of gates, and heads that are normalised before.
#include "functions.h"
#include "threads.h"
#include "call_arguments.h"

typedef enum { SILU_OPENING, SIGMOID_OPENING, IDENTITY, GELU_OPENING } opening;  // _OPENINGS of recurrent.py

typedef struct {
    const void *x, *gate;
    long x_stride, gate_stride;
    const void *weight;  // [width]: x consists of heads of this width, each of which is normalised; NULL: no norm
    void *out;
    long heads, width;
    float eps;
    opening f;
    kind k, weight_kind;
    int shared;  // whether each head has one gate for all of its numbers
} gating;

INLINE vec opened(vec gate, opening f) {
    if (f == IDENTITY) return gate;
    if (f == GELU_OPENING) return vec_function(gate, GELU_TANH, FLOAT32);
    return f == SIGMOID_OPENING ? vec_sigmoid(gate) : vec_function(gate, SILU, FLOAT32);
}

INLINE float scale_of(const gating *g, const char *x, kind k) {
    vec sum = vec_zero();
    for (long i = 0; i < g->width; i += LANES) {
        vec value = vec_load_upto(at(x, i, k), g->width - i, k);
        sum = vec_fma(value, value, sum);
    }
    return 1.0f / sqrtf(vec_sum(sum) / (float)g->width + g->eps);
}

INLINE void gate_head(const gating *g, long token, long head, kind k, kind weight_kind) {
    const char *x = at(g->x, token * g->x_stride + head * g->width, k);
    const char *gate = at(g->gate, token * g->gate_stride + (g->shared ? head : head * g->width), k);
    char *out = at_out(g->out, (token * g->heads + head) * g->width, k);
    vec scale = vec_all(g->weight == NULL ? 1.0f : scale_of(g, x, k));
    vec factor = opened(vec_all(vec_sum(vec_load_upto(gate, 1, k))), g->f);
    for (long i = 0; i < g->width; i += LANES) {
        long left = g->width - i;
        vec value = vec_load_upto(at(x, i, k), left, k);
        if (g->weight != NULL) {
            vec weight = vec_load_upto(at(g->weight, i, weight_kind), left, weight_kind);
            value = vec_mul(vec_mul(value, scale), weight);
        }
        if (!g->shared) factor = opened(vec_load_upto(at(gate, i, k), left, k), g->f);
        vec_store_upto(at_out(out, i, k), vec_mul(value, factor), left, k);
    }
}

static void gate_tokens(const void *task, long first, long last) {
    const gating *g = task;
    for (long token = first; token < last; token++) {
        for (long head = 0; head < g->heads; head++) {
            if (g->k == FLOAT32) gate_head(g, token, head, FLOAT32, FLOAT32);
            else if (g->weight_kind == FLOAT32) gate_head(g, token, head, BFLOAT16, FLOAT32);
            else gate_head(g, token, head, BFLOAT16, BFLOAT16);
        }
    }
}

enum { GRAIN = 4096 };  // elements that are worth handing to another thread

// out is contiguous. If x is float32, so is the weight.
EXPORT void gate(const void *x, long x_stride, const void *gate, long gate_stride, const void *weight, void *out,
                 long tokens, long heads, long width, float eps, int f, int kind, int weight_kind, int shared) {
    gating g = {x, gate, x_stride, gate_stride, weight, out, heads, width, eps, f, kind, weight_kind, shared};
    spread(tokens, grain_of(GRAIN, heads * width), gate_tokens, &g);
}

EXPORT void gate_words(const word *a) {
    gate(a[0].pointer, a[1].whole, a[2].pointer, a[3].whole, a[4].pointer, a[5].pointer, a[6].whole, a[7].whole,
         a[8].whole, a[9].real, (int)a[10].whole, (int)a[11].whole, (int)a[12].whole, (int)a[13].whole);
}
