// What happens between the projections and attention: heads are normalised and turned, keys and values cached.
#include "attention_tile.h"
#include "threads.h"
#include "words.h"

typedef struct {
    const void *norm;  // [dim]; NULL: there is none
    kind norm_kind;
    float eps;
    const float *cos_sin;  // [tokens, turned]: cosines, then sines
    long turned;
    long dim;
} turn;

typedef struct {
    const void *q, *k, *v;                // [tokens, heads, dim]; heads are contiguous, tokens these strides apart:
    long q_stride, k_stride, v_stride;
    void *out;                            // q, turned
    void *keys, *values;                  // of the cache, [blocks, kv_heads, block_size, dim]
    const int64_t *slots;                 // [tokens]
    long heads, kv_heads, block_size;
    turn q_turn, k_turn;
    kind kind;
} rotary;

// Rounds where the reference does: after the norm, and each product and sum of float32.
INLINE void turn_head(const turn *t, const void *head, void *out, long token, kind k, kind norm_kind) {
    float row[MAX_DIM + LANES];
    vec squares = vec_zero();
    for (long i = 0; i < t->dim; i += LANES) {
        vec x = vec_load_upto(at(head, i, k), t->dim - i, k);
        squares = vec_fma(x, x, squares);
        vec_store(row + i, x, FLOAT32);
    }
    if (t->norm != NULL) {
        vec scale = vec_all(1.0f / sqrtf(vec_sum(squares) / (float)t->dim + t->eps));
        for (long i = 0; i < t->dim; i += LANES) {
            vec weight = vec_load_upto(at(t->norm, i, norm_kind), t->dim - i, norm_kind);
            vec x = vec_mul(vec_mul(vec_load(row + i, FLOAT32), scale), weight);
            vec_store(row + i, vec_rounded(x, k), FLOAT32);
        }
    }
    long half = t->turned / 2;
    const float *cosine = t->cos_sin + token * t->turned, *sine = cosine + half;
    for (long i = 0; i < half; i += LANES) {
        long left = half - i;
        vec a = vec_load_upto(row + i, left, FLOAT32), b = vec_load_upto(row + half + i, left, FLOAT32);
        vec c = vec_load_upto(cosine + i, left, FLOAT32), s = vec_load_upto(sine + i, left, FLOAT32);
        vec_store_upto(at_out(out, i, k), vec_sub(vec_mul(a, c), vec_mul(b, s)), left, k);
        vec_store_upto(at_out(out, half + i, k), vec_add(vec_mul(b, c), vec_mul(a, s)), left, k);
    }
    for (long i = t->turned; i < t->dim; i += LANES) {
        long left = t->dim - i;
        vec_store_upto(at_out(out, i, k), vec_load_upto(row + i, left, FLOAT32), left, k);
    }
}

INLINE void turn_token(const rotary *r, long token, kind k, kind norm_kind) {
    long dim = r->q_turn.dim;
    for (long head = 0; head < r->heads; head++)
        turn_head(&r->q_turn, at(r->q, token * r->q_stride + head * dim, k),
                  at_out(r->out, (token * r->heads + head) * dim, k), token, k, norm_kind);
    for (long head = 0; head < r->kv_heads; head++) {
        long block = r->slots[token] / r->block_size, offset = r->slots[token] % r->block_size;
        long place = ((block * r->kv_heads + head) * r->block_size + offset) * dim;
        const void *key = at(r->k, token * r->k_stride + head * dim, k);
        const void *value = at(r->v, token * r->v_stride + head * dim, k);
        turn_head(&r->k_turn, key, at_out(r->keys, place, k), token, k, norm_kind);
        memcpy(at_out(r->values, place, k), value, dim * width_of(k));
    }
}

static void turn_tokens(const void *task, long first, long last) {
    const rotary *r = task;
    for (long token = first; token < last; token++) {
        if (r->kind == FLOAT32) turn_token(r, token, FLOAT32, FLOAT32);
        else if (r->q_turn.norm_kind == FLOAT32) turn_token(r, token, BFLOAT16, FLOAT32);
        else turn_token(r, token, BFLOAT16, BFLOAT16);
    }
}

enum { GRAIN = 16384 };  // elements that are worth handing to another thread

// kv [2, blocks, kv_heads, block_size, dim], contiguous. Norms are both there or not; in float32 they are too.
EXPORT void rotary_and_cache(const void *q, long q_stride, const void *k, long k_stride, const void *v, long v_stride,
                             void *out, void *kv, long blocks, long kv_heads, long block_size, long dim,
                             const int64_t *slots, const float *cos_sin, long turned, const void *q_norm,
                             const void *k_norm, float eps, long tokens, long heads, int kind, int norm_kind) {
    turn turn = {q_norm, norm_kind, eps, cos_sin, turned, dim};
    rotary r = {q, k, v, q_stride, k_stride, v_stride, out, kv, at_out(kv, blocks * kv_heads * block_size * dim, kind),
                slots, heads, kv_heads, block_size, turn, turn, kind};
    r.k_turn.norm = k_norm;
    spread(tokens, grain_of(GRAIN, (heads + kv_heads) * dim), turn_tokens, &r);
}

EXPORT void rotary_and_cache_words(const word *a) {
    rotary_and_cache(a[0].pointer, a[1].whole, a[2].pointer, a[3].whole, a[4].pointer, a[5].whole, a[6].pointer,
                     a[7].pointer, a[8].whole, a[9].whole, a[10].whole, a[11].whole, a[12].pointer, a[13].pointer,
                     a[14].whole, a[15].pointer, a[16].pointer, a[17].real, a[18].whole, a[19].whole,
                     (int)a[20].whole, (int)a[21].whole);
}

// x [tokens, heads, dim], whose heads are contiguous; out is so too.
EXPORT void rotate(const void *x, long stride, void *out, const float *cos_sin, long turned, long tokens, long heads,
                   long dim, int kind) {
    turn turn = {.cos_sin = cos_sin, .turned = turned, .dim = dim};
    rotary r = {.q = x, .q_stride = stride, .out = out, .heads = heads, .q_turn = turn, .kind = kind};
    spread(tokens, grain_of(GRAIN, heads * dim), turn_tokens, &r);
}

EXPORT void rotate_words(const word *a) {
    rotate(a[0].pointer, a[1].whole, a[2].pointer, a[3].pointer, a[4].whole, a[5].whole, a[6].whole, a[7].whole,
           (int)a[8].whole);
}
