// The activation functions, in float32.
#pragma once

#include "vec.h"

typedef enum { NONE, SILU, GELU, GELU_TANH, RELU } function;

INLINE vec vec_sigmoid(vec x) {
    return vec_div(vec_all(1.0f), vec_add(vec_all(1.0f), vec_exp(vec_sub(vec_zero(), x))));
}

// Two polynomials that meet at 475/512, each within a unit of the last digit.
INLINE vec vec_erf(vec x) {
    vec t = vec_abs(x), s = vec_mul(x, x);
    vec far = vec_fma(vec_all(-1.72853470e-5f), t, vec_all(3.83197126e-4f));
    far = vec_fma(far, s, vec_fma(vec_all(-3.88396438e-3f), t, vec_all(2.42546219e-2f)));
    far = vec_fma(far, t, vec_all(-1.06777877e-1f));
    far = vec_fma(far, t, vec_all(-6.34846687e-1f));
    far = vec_fma(far, t, vec_all(-1.28717512e-1f));
    far = vec_fma(far, t, vec_sub(vec_zero(), t));
    far = vec_sign_of(vec_sub(vec_all(1.0f), vec_exp(far)), x);
    vec near = vec_all(-5.96761703e-4f);
    near = vec_fma(near, s, vec_all(4.99119423e-3f));
    near = vec_fma(near, s, vec_all(-2.67681349e-2f));
    near = vec_fma(near, s, vec_all(1.12819925e-1f));
    near = vec_fma(near, s, vec_all(-3.76125336e-1f));
    near = vec_fma(near, s, vec_all(1.28379166e-1f));
    near = vec_fma(near, x, x);
    return vec_where_greater(t, vec_all(0.927734375f), far, near);
}

INLINE vec vec_function(vec x, function f) {
    switch (f) {
        case SILU:
            return vec_mul(x, vec_sigmoid(x));
        case GELU:
            x = vec_mul(x, vec_all(0.5f));
            return vec_fma(x, vec_erf(vec_mul(x, vec_all(1.41421356f))), x);
        case GELU_TANH: {  // (1 + tanh(u)) / 2 is the sigmoid of 2u
            vec cubic = vec_fma(vec_mul(x, x), vec_all(0.044715f), vec_all(1.0f));
            return vec_mul(x, vec_sigmoid(vec_mul(vec_mul(x, vec_all(1.59576912f)), cubic)));
        }
        case RELU:
            return vec_max(vec_zero(), x);
        default:
            return x;
    }
}
