// A head of a query or a key, normalised and rotated.
#pragma once

#include "attention_tile.h"

typedef struct {
    const void *norm;  // [dim]; NULL: there is none
    kind norm_kind;
    float eps;
    const float *cos_sin;  // [tokens, rotated]: cosines, then sines
    long rotated;          // dimensions that are rotated
    long dim;
} rotation;

// Rounds where the reference does: after the norm, and each product and sum of float32.
INLINE void rotate_head(const rotation *r, const void *head, void *out, long token, kind k, kind norm_kind) {
    float row[MAX_DIM + LANES];
    vec squares = vec_zero();
    for (long i = 0; i < r->dim; i += LANES) {
        vec x = vec_load_upto(at(head, i, k), r->dim - i, k);
        squares = vec_fma(x, x, squares);
        vec_store(row + i, x, FLOAT32);
    }
    if (r->norm != NULL) {
        vec scale = vec_all(1.0f / sqrtf(vec_sum(squares) / (float)r->dim + r->eps));
        for (long i = 0; i < r->dim; i += LANES) {
            vec weight = vec_load_upto(at(r->norm, i, norm_kind), r->dim - i, norm_kind);
            vec x = vec_mul(vec_mul(vec_load(row + i, FLOAT32), scale), weight);
            vec_store(row + i, vec_rounded(x, k), FLOAT32);
        }
    }
    long half = r->rotated / 2;
    const float *cosine = r->cos_sin + token * r->rotated, *sine = cosine + half;
    for (long i = 0; i < half; i += LANES) {
        long left = half - i;
        vec a = vec_load_upto(row + i, left, FLOAT32), b = vec_load_upto(row + half + i, left, FLOAT32);
        vec c = vec_load_upto(cosine + i, left, FLOAT32), s = vec_load_upto(sine + i, left, FLOAT32);
        vec_store_upto(at_out(out, i, k), vec_sub(vec_mul(a, c), vec_mul(b, s)), left, k);
        vec_store_upto(at_out(out, half + i, k), vec_add(vec_mul(b, c), vec_mul(a, s)), left, k);
    }
    for (long i = r->rotated; i < r->dim; i += LANES) {
        long left = r->dim - i;
        vec_store_upto(at_out(out, i, k), vec_load_upto(row + i, left, FLOAT32), left, k);
    }
}
