// Norms of rows, and of sums of two rows. Everything is added up in float32, in the same order for every row.
#include "threads.h"
#include "words.h"

typedef struct {
    const void *x;
    long x_stride;
    const void *residual;  // NULL: there is none, and no sum is written
    long residual_stride;
    void *sum;
    const void *weight;
    const void *bias;  // NULL: there is none
    void *out;
    long width;
    float eps;
    kind k;
    kind weight_kind;
    int centred;
} norm;

// Writes x + residual, rounded, if there is a residual; -> the row to be normalised.
INLINE const void *add_row(const norm *n, long row, kind k) {
    const char *x = at(n->x, row * n->x_stride, k);
    if (n->residual == NULL) return x;
    const char *residual = at(n->residual, row * n->residual_stride, k);
    char *sum = at_out(n->sum, row * n->width, k);
    for (long i = 0; i < n->width; i += LANES) {
        long left = n->width - i;
        vec total = vec_add(vec_load_upto(at(residual, i, k), left, k), vec_load_upto(at(x, i, k), left, k));
        vec_store_upto(at_out(sum, i, k), total, left, k);
    }
    return sum;
}

INLINE float mean_of(const void *row, long width, kind k) {
    vec sum = vec_zero();
    for (long i = 0; i < width; i += LANES) sum = vec_add(sum, vec_load_upto(at(row, i, k), width - i, k));
    return vec_sum(sum) / (float)width;
}

INLINE float mean_square(const void *row, long width, float mean, kind k) {
    vec sum = vec_zero(), centre = vec_all(mean);
    long i = 0;
    for (; i + LANES <= width; i += LANES) {
        vec x = vec_sub(vec_load(at(row, i, k), k), centre);
        sum = vec_fma(x, x, sum);
    }
    if (i < width) {
        vec x = vec_first(vec_sub(vec_load_part(at(row, i, k), width - i, k), centre), width - i);
        sum = vec_fma(x, x, sum);
    }
    return vec_sum(sum) / (float)width;
}

INLINE void normalise(const norm *n, long row, kind k, kind weight_kind) {
    const char *x = add_row(n, row, k);
    float mean = n->centred ? mean_of(x, n->width, k) : 0.0f;
    vec centre = vec_all(mean), scale = vec_all(1.0f / sqrtf(mean_square(x, n->width, mean, k) + n->eps));
    char *out = at_out(n->out, row * n->width, k);
    for (long i = 0; i < n->width; i += LANES) {
        long left = n->width - i;
        vec value = vec_mul(vec_sub(vec_load_upto(at(x, i, k), left, k), centre), scale);
        value = vec_mul(value, vec_load_upto(at(n->weight, i, weight_kind), left, weight_kind));
        if (n->bias != NULL) value = vec_add(value, vec_load_upto(at(n->bias, i, weight_kind), left, weight_kind));
        vec_store_upto(at_out(out, i, k), value, left, k);
    }
}

static void normalise_rows(const void *task, long first, long last) {
    const norm *n = task;
    for (long row = first; row < last; row++) {
        if (n->k == FLOAT32) normalise(n, row, FLOAT32, FLOAT32);
        else if (n->weight_kind == FLOAT32) normalise(n, row, BFLOAT16, FLOAT32);
        else normalise(n, row, BFLOAT16, BFLOAT16);
    }
}

enum { GRAIN = 16384 };  // elements that are worth handing to another thread

// out and sum are contiguous. If x is float32, so is the weight.
EXPORT void rms_norm(const void *x, long x_stride, const void *residual, long residual_stride, const void *weight,
                     void *out, void *sum, long rows, long width, float eps, int kind, int weight_kind) {
    norm n = {x, x_stride, residual, residual_stride, sum, weight, NULL, out, width, eps, kind, weight_kind, 0};
    spread(rows, grain_of(GRAIN, width), normalise_rows, &n);
}

EXPORT void rms_norm_words(const word *a) {
    rms_norm(a[0].pointer, a[1].whole, a[2].pointer, a[3].whole, a[4].pointer, a[5].pointer, a[6].pointer,
             a[7].whole, a[8].whole, a[9].real, (int)a[10].whole, (int)a[11].whole);
}

// The bias has the weight's type.
EXPORT void layer_norm(const void *x, long x_stride, const void *residual, long residual_stride, const void *weight,
                       const void *bias, void *out, void *sum, long rows, long width, float eps, int kind,
                       int weight_kind) {
    norm n = {x, x_stride, residual, residual_stride, sum, weight, bias, out, width, eps, kind, weight_kind, 1};
    spread(rows, grain_of(GRAIN, width), normalise_rows, &n);
}

EXPORT void layer_norm_words(const word *a) {
    layer_norm(a[0].pointer, a[1].whole, a[2].pointer, a[3].whole, a[4].pointer, a[5].pointer, a[6].pointer,
               a[7].pointer, a[8].whole, a[9].whole, a[10].real, (int)a[11].whole, (int)a[12].whole);
}
