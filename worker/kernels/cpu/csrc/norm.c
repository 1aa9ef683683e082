// Norms of rows, and of sums of two rows. Everything is added up in float32, in the same order for every row.
#include "sections.h"
#include "threads.h"
#include "call_arguments.h"

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
    const float *squares;  // NULL: the mean of the squares is that of the row; else their sums, one for each row
    long count;            // the numbers in each of these sums
    long passed;           // numbers behind those of a row that are copied as they are
} norm_task;

// Writes x + residual, rounded, if there is a residual; -> the row to be normalised.
INLINE const void *add_row(const norm_task *n, long row, kind k) {
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

INLINE float sum_of_squares(const void *row, long width, float mean, kind k) {
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
    return vec_sum(sum);
}

INLINE float mean_square(const norm_task *n, long row, const void *x, float mean, kind k) {
    if (n->squares != NULL) return n->squares[row] / (float)n->count;
    return sum_of_squares(x, n->width, mean, k) / (float)n->width;
}

INLINE void normalise(const norm_task *n, long row, kind k, kind weight_kind) {
    const char *x = add_row(n, row, k);
    float mean = n->centred ? mean_of(x, n->width, k) : 0.0f;
    vec centre = vec_all(mean), scale = vec_all(1.0f / sqrtf(mean_square(n, row, x, mean, k) + n->eps));
    char *out = at_out(n->out, row * (n->width + n->passed), k);
    if (n->passed) memcpy(at_out(out, n->width, k), at(x, n->width, k), n->passed * width_of(k));
    for (long i = 0; i < n->width; i += LANES) {
        long left = n->width - i;
        vec value = vec_mul(vec_sub(vec_load_upto(at(x, i, k), left, k), centre), scale);
        value = vec_mul(value, vec_load_upto(at(n->weight, i, weight_kind), left, weight_kind));
        if (n->bias != NULL) value = vec_add(value, vec_load_upto(at(n->bias, i, weight_kind), left, weight_kind));
        vec_store_upto(at_out(out, i, k), value, left, k);
    }
}

static void normalise_rows(const void *task, long first, long last) {
    const norm_task *n = task;
    for (long row = first; row < last; row++) {
        if (n->k == FLOAT32) normalise(n, row, FLOAT32, FLOAT32);
        else if (n->weight_kind == FLOAT32) normalise(n, row, BFLOAT16, FLOAT32);
        else normalise(n, row, BFLOAT16, BFLOAT16);
    }
}

enum { GRAIN = 4096 };  // elements that are worth handing to another thread

// Arguments are the fields of `norm`; out and sum are contiguous. If x is float32, so is the weight, and the bias
// has the weight's type.
EXPORT void norm(const void *x, long x_stride, const void *residual, long residual_stride, void *sum,
                 const void *weight, const void *bias, void *out, long rows, long width, float eps, int kind,
                 int weight_kind, int centred, const float *squares, long count, long passed) {
    norm_task n = {x,   x_stride, residual, residual_stride, sum,         weight,  bias,
                   out, width,    eps,      kind,            weight_kind, centred, squares, count, passed};
    spread(rows, grain_of(GRAIN, width), normalise_rows, &n);
}

EXPORT void norm_words(const word *a) {
    norm(a[0].pointer, a[1].whole, a[2].pointer, a[3].whole, a[4].pointer, a[5].pointer, a[6].pointer, a[7].pointer,
         a[8].whole, a[9].whole, a[10].real, (int)a[11].whole, (int)a[12].whole, (int)a[13].whole, a[14].pointer,
         a[15].whole, a[16].whole);
}

typedef struct {
    const void *x;
    long x_stride;
    float *out;
    long width;
    int sections;
    kind k;
} squares;

// Adds up each section of a row, then neighbouring sections, then their sums, as `linear` does.
INLINE float square_row(const squares *s, long row, kind k) {
    long width = s->width / s->sections;
    float sums[MOST_SECTIONS];
    for (int i = 0; i < s->sections; i++)
        sums[i] = sum_of_squares(at(s->x, row * s->x_stride + i * width, k), width, 0.0f, k);
    for (int left = s->sections; left > 1; left /= 2)
        for (int i = 0; i < left / 2; i++) sums[i] = sums[2 * i] + sums[2 * i + 1];
    return sums[0];
}

static void square_rows(const void *task, long first, long last) {
    const squares *s = task;
    for (long row = first; row < last; row++)
        s->out[row] = s->k == FLOAT32 ? square_row(s, row, FLOAT32) : square_row(s, row, BFLOAT16);
}

// The width divides into `sections`, which are 1, 2, 4 or 8.
EXPORT void sum_squares(const void *x, long x_stride, float *out, long rows, long width, int sections, int kind) {
    squares s = {x, x_stride, out, width, sections, kind};
    spread(rows, grain_of(GRAIN, width), square_rows, &s);
}

EXPORT void sum_squares_words(const word *a) {
    sum_squares(a[0].pointer, a[1].whole, a[2].pointer, a[3].whole, a[4].whole, (int)a[5].whole, (int)a[6].whole);
}
