// The steps between projections and attention: heads are normalised and rotated, keys and values cached.
#include "rotation.h"
#include "threads.h"
#include "call_arguments.h"

typedef struct {
    const void *q, *k, *v;  // [tokens, heads, dim]; the heads of a token are contiguous, tokens have these strides:
    long q_stride, k_stride, v_stride;
    void *out;              // q, rotated
    void *keys, *values;    // of the cache, [blocks, kv_heads, block_size, row_numbers]
    const int64_t *slots;   // [tokens]: places in the cache
    long heads, kv_heads, block_size;
    rotation q_rotation, k_rotation, v_rotation;
    kind kind, cached;
} rotary;

// Writes a key or a value of one head to its place in the cache.
INLINE void cache_head(const rotary *r, const rotation *rotation, const void *head, void *row, long token, kind k,
                       kind norm_kind) {
    char turned[(MAX_DIM + LANES) * sizeof(float)];
    int as_it_is = rotation->norm == NULL && rotation->rotated == 0;
    if (!as_it_is) rotate_head(rotation, head, r->cached == INT8 ? turned : row, token, k, norm_kind);
    if (r->cached == INT8) write_codes(row, as_it_is ? head : turned, rotation->dim, k);
    else if (as_it_is) memcpy(row, head, rotation->dim * width_of(k));
}

INLINE void rotate_token(const rotary *r, long token, kind k, kind norm_kind) {
    long dim = r->q_rotation.dim;
    for (long head = 0; head < r->heads; head++)
        rotate_head(&r->q_rotation, at(r->q, token * r->q_stride + head * dim, k),
                  at_out(r->out, (token * r->heads + head) * dim, k), token, k, norm_kind);
    for (long head = 0; head < r->kv_heads; head++) {
        long block = r->slots[token] / r->block_size, offset = r->slots[token] % r->block_size;
        long place = ((block * r->kv_heads + head) * r->block_size + offset) * row_numbers(dim, r->cached);
        const void *key = at(r->k, token * r->k_stride + head * dim, k);
        const void *value = at(r->v, token * r->v_stride + head * dim, k);
        cache_head(r, &r->k_rotation, key, at_out(r->keys, place, r->cached), token, k, norm_kind);
        cache_head(r, &r->v_rotation, value, at_out(r->values, place, r->cached), token, k, norm_kind);
    }
}

static void rotate_tokens(const void *task, long first, long last) {
    const rotary *r = task;
    for (long token = first; token < last; token++) {
        if (r->kind == FLOAT32) rotate_token(r, token, FLOAT32, FLOAT32);
        else if (r->q_rotation.norm_kind == FLOAT32) rotate_token(r, token, BFLOAT16, FLOAT32);
        else rotate_token(r, token, BFLOAT16, BFLOAT16);
    }
}

enum { GRAIN = 16384 };  // elements that are worth handing to another thread

// kv [2, blocks, kv_heads, block_size, row_numbers], contiguous, of the kind of q or INT8. There are both norms of q and k,
// or no norm; if q is float32, so are they. Values may have a norm too, of the same type.
EXPORT void rotary_and_cache(const void *q, long q_stride, const void *k, long k_stride, const void *v, long v_stride,
                             void *out, void *kv, long blocks, long kv_heads, long block_size, long dim,
                             const int64_t *slots, const float *cos_sin, long rotated, const void *q_norm,
                             const void *k_norm, const void *v_norm, float eps, long tokens, long heads, int kind,
                             int norm_kind, int cached) {
    rotation rotation = {q_norm, norm_kind, eps, cos_sin, rotated, dim};
    long half = blocks * kv_heads * block_size * row_numbers(dim, cached);
    rotary r = {q, k, v, q_stride, k_stride, v_stride, out, kv, at_out(kv, half, cached),
                slots, heads, kv_heads, block_size, rotation, rotation, rotation, kind, cached};
    r.k_rotation.norm = k_norm;
    r.v_rotation.norm = v_norm;
    r.v_rotation.rotated = 0;
    spread(tokens, grain_of(GRAIN, (heads + kv_heads) * dim), rotate_tokens, &r);
}

EXPORT void rotary_and_cache_words(const word *a) {
    rotary_and_cache(a[0].pointer, a[1].whole, a[2].pointer, a[3].whole, a[4].pointer, a[5].whole, a[6].pointer,
                     a[7].pointer, a[8].whole, a[9].whole, a[10].whole, a[11].whole, a[12].pointer, a[13].pointer,
                     a[14].whole, a[15].pointer, a[16].pointer, a[17].pointer, a[18].real, a[19].whole, a[20].whole,
                     (int)a[21].whole, (int)a[22].whole, (int)a[23].whole);
}

// x [tokens, heads, dim], of which the heads of a token are contiguous. out is contiguous. If x is float32, so is the
// norm.
EXPORT void rotate(const void *x, long stride, void *out, const float *cos_sin, long rotated, const void *norm,
                   float eps, long tokens, long heads, long dim, int kind, int norm_kind) {
    rotation rotation = {norm, norm_kind, eps, cos_sin, rotated, dim};
    rotary r = {.q = x, .q_stride = stride, .out = out, .heads = heads, .q_rotation = rotation, .kind = kind};
    spread(tokens, grain_of(GRAIN, heads * dim), rotate_tokens, &r);
}

EXPORT void rotate_words(const word *a) {
    rotate(a[0].pointer, a[1].whole, a[2].pointer, a[3].pointer, a[4].whole, a[5].pointer, a[6].real, a[7].whole,
           a[8].whole, a[9].whole, (int)a[10].whole, (int)a[11].whole);
}
