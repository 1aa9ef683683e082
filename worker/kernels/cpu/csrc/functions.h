// The activation functions, in float32.
#pragma once

#include "vec.h"

typedef enum { NONE, SILU, GELU, GELU_TANH, RELU, CLAMPED, RELU_SQUARED, QUICK_GELU } function;  // CLAMPED: of gates only

INLINE vec vec_sigmoid(vec x) {
    return vec_div(vec_all(1.0f), vec_add(vec_all(1.0f), vec_exp(vec_sub(vec_zero(), x))));
}

// gelu(x) = max(x, 0) - t/2 * 2^(t * p(t)), with t = |x| and p a fitted polynomial. The error is at most 3e-7, and
// 3e-5 for bfloat16, whose own rounding errors are larger.
INLINE vec vec_gelu(vec x, kind k) {
    vec t = vec_min(vec_all(30.0f), vec_abs(x)), p;
    if (k == BFLOAT16) {
        p = vec_fma(vec_all(-0.00032873987f), t, vec_all(0.005927718f));
        p = vec_fma(p, t, vec_all(-0.04867354f));
        p = vec_fma(p, t, vec_all(-0.46330795f));
        p = vec_fma(p, t, vec_all(-1.1497806f));
    } else {
        p = vec_fma(vec_all(-1.2866313e-6f), t, vec_all(1.991753e-5f));
        p = vec_fma(p, t, vec_all(-8.873262e-5f));
        p = vec_fma(p, t, vec_all(-0.00038592238f));
        p = vec_fma(p, t, vec_all(0.007408095f));
        p = vec_fma(p, t, vec_all(-0.052748293f));
        p = vec_fma(p, t, vec_all(-0.45912147f));
        p = vec_fma(p, t, vec_all(-1.1511153f));
    }
    vec excess = vec_mul(vec_mul(t, vec_all(0.5f)), vec_exp2(vec_mul(p, t), k));
    return vec_sub(vec_max(vec_zero(), x), excess);
}

// log(1 + e^x) = max(x, 0) + log(1 + u) with u = e^-|x|. The logarithm is 2 (s + s^3/3 + s^5/5 + ...), s = u / (2 + u).
INLINE vec vec_softplus(vec x) {
    vec u = vec_exp(vec_sub(vec_zero(), vec_abs(x)));
    vec s = vec_div(u, vec_add(vec_all(2.0f), u)), z = vec_mul(s, s), p = vec_all(1.0f / 15);
    p = vec_fma(p, z, vec_all(1.0f / 13));
    p = vec_fma(p, z, vec_all(1.0f / 11));
    p = vec_fma(p, z, vec_all(1.0f / 9));
    p = vec_fma(p, z, vec_all(1.0f / 7));
    p = vec_fma(p, z, vec_all(1.0f / 5));
    p = vec_fma(p, z, vec_all(1.0f / 3));
    p = vec_fma(p, z, vec_all(1.0f));
    return vec_fma(vec_add(s, s), p, vec_max(vec_zero(), x));
}

// k: the type that the result is rounded to.
INLINE vec vec_function(vec x, function f, kind k) {
    switch (f) {
        case SILU:
            return vec_mul(x, vec_sigmoid(x));
        case GELU:
            return vec_gelu(x, k);
        case GELU_TANH: {  // (1 + tanh(u)) / 2 is the sigmoid of 2u
            vec cubic = vec_fma(vec_mul(x, x), vec_all(0.044715f), vec_all(1.0f));
            return vec_mul(x, vec_sigmoid(vec_mul(vec_mul(x, vec_all(1.59576912f)), cubic)));
        }
        case RELU:
            return vec_max(vec_zero(), x);
        case RELU_SQUARED: {
            vec positive = vec_max(vec_zero(), x);
            return vec_mul(positive, positive);
        }
        case QUICK_GELU:
            return vec_mul(x, vec_sigmoid(vec_mul(x, vec_all(1.702f))));
        default:
            return x;
    }
}

// A value and its gate, which CLAMPED keeps small.
INLINE vec vec_gate(vec gate, vec value, function f, kind k) {
    if (f != CLAMPED) return vec_mul(vec_function(gate, f, k), value);
    vec most = vec_all(7.0f), one = vec_all(1.0f);
    gate = vec_min(most, gate);
    value = vec_min(most, vec_max(vec_all(-7.0f), value));
    return vec_mul(vec_add(value, one), vec_mul(gate, vec_sigmoid(vec_mul(gate, vec_all(1.702f)))));
}
