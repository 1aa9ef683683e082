// Activation functions, and gated ones, of rows that do not come directly from a linear layer.
#include "functions.h"
#include "threads.h"
#include "call_arguments.h"

typedef struct {
    const void *x;
    long x_stride;
    void *out;
    long width;  // columns of `out`
    int gated;
    function f;
    kind k;
} activation_task;

INLINE void activate(const activation_task *t, long row, function f, kind k) {
    const char *x = at(t->x, row * t->x_stride, k);
    const char *values = at(x, t->width, k);
    char *out = at_out(t->out, row * t->width, k);
    for (long i = 0; i < t->width; i += LANES) {
        long left = t->width - i;
        vec y = vec_load_upto(at(x, i, k), left, k);
        y = t->gated ? vec_gate(y, vec_load_upto(at(values, i, k), left, k), f, k) : vec_function(y, f, k);
        vec_store_upto(at_out(out, i, k), y, left, k);
    }
}

INLINE void activate_with(const activation_task *t, long row, function f) {
    if (t->k == FLOAT32) activate(t, row, f, FLOAT32);
    else activate(t, row, f, BFLOAT16);
}

static void activate_rows(const void *task, long first, long last) {
    const activation_task *t = task;
    for (long row = first; row < last; row++) {
        switch (t->f) {
            case SILU:
                activate_with(t, row, SILU);
                break;
            case GELU:
                activate_with(t, row, GELU);
                break;
            case GELU_TANH:
                activate_with(t, row, GELU_TANH);
                break;
            case RELU_SQUARED:
                activate_with(t, row, RELU_SQUARED);
                break;
            case QUICK_GELU:
                activate_with(t, row, QUICK_GELU);
                break;
            case CLAMPED:
                activate_with(t, row, CLAMPED);
                break;
            default:
                activate_with(t, row, RELU);
        }
    }
}

enum { GRAIN = 4096 };  // elements that are worth handing to another thread

// gated: x has 2 * width columns, gates and then the values they are multiplied with. out is contiguous.
EXPORT void activation(const void *x, long x_stride, void *out, long rows, long width, int gated, int f, int k) {
    activation_task t = {x, x_stride, out, width, gated, f, k};
    spread(rows, grain_of(GRAIN, width), activate_rows, &t);
}

EXPORT void activation_words(const word *a) {
    activation(a[0].pointer, a[1].whole, a[2].pointer, a[3].whole, a[4].whole, (int)a[5].whole, (int)a[6].whole,
               (int)a[7].whole);
}

typedef struct {
    const void *x;
    long x_stride;
    void *out;
    long width;
    const float *curves;
    kind k;
} xielu_task;

// Half of x, a square above 0 and an exponential without its first two terms below.
INLINE void curve(const xielu_task *t, long row, kind k) {
    const char *x = at(t->x, row * t->x_stride, k);
    char *out = at_out(t->out, row * t->width, k);
    vec square = vec_all(t->curves[0]), exponential = vec_all(t->curves[1]);
    for (long i = 0; i < t->width; i += LANES) {
        long left = t->width - i;
        vec value = vec_load_upto(at(x, i, k), left, k);
        vec above = vec_max(vec_zero(), value), below = vec_min(vec_zero(), value);
        vec rest = vec_sub(vec_sub(vec_exp(below), vec_all(1.0f)), below);
        vec y = vec_fma(vec_mul(above, above), square, vec_mul(value, vec_all(0.5f)));
        vec_store_upto(at_out(out, i, k), vec_fma(rest, exponential, y), left, k);
    }
}

static void curve_rows(const void *task, long first, long last) {
    const xielu_task *t = task;
    for (long row = first; row < last; row++) {
        if (t->k == FLOAT32) curve(t, row, FLOAT32);
        else curve(t, row, BFLOAT16);
    }
}

// curves: two numbers. out is contiguous.
EXPORT void xielu(const void *x, long x_stride, void *out, long rows, long width, const float *curves, int k) {
    xielu_task t = {x, x_stride, out, width, curves, k};
    spread(rows, grain_of(GRAIN, width), curve_rows, &t);
}

EXPORT void xielu_words(const word *a) {
    xielu(a[0].pointer, a[1].whole, a[2].pointer, a[3].whole, a[4].whole, a[5].pointer, (int)a[6].whole);
}
