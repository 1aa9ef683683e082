// The mean of a text's rows, summed up in their order in float32, and rows divided by their length.
#include "threads.h"

enum { AT_ONCE = 4, BLOCK = AT_ONCE * LANES };  // columns that are summed up side by side

typedef struct {
    const void *x;
    long stride;
    long rows;
    long width;
    float *out;
    kind k;
} mean_task;

INLINE void mean_block(const mean_task *m, long first, kind k) {
    long width = least(BLOCK, m->width - first);
    vec sums[AT_ONCE], count = vec_all((float)m->rows);
    for (int i = 0; i < AT_ONCE; i++) sums[i] = vec_zero();
    for (long row = 0; row < m->rows; row++) {
        const void *x = at(m->x, row * m->stride + first, k);
        for (long i = 0; i < AT_ONCE && i * LANES < width; i++)
            sums[i] = vec_add(sums[i], vec_load_upto(at(x, i * LANES, k), width - i * LANES, k));
    }
    for (long i = 0; i < AT_ONCE && i * LANES < width; i++)
        vec_store_upto(m->out + first + i * LANES, vec_div(sums[i], count), width - i * LANES, FLOAT32);
}

static void mean_blocks(const void *task, long first, long last) {
    const mean_task *m = task;
    for (long block = first; block < last; block++) {
        if (m->k == FLOAT32) mean_block(m, block * BLOCK, FLOAT32);
        else mean_block(m, block * BLOCK, BFLOAT16);
    }
}

enum { GRAIN = 65536 };  // elements that are worth handing to another thread

// x [rows, width] -> out [width].
EXPORT void mean(const void *x, long stride, long rows, long width, float *out, int kind) {
    mean_task m = {x, stride, rows, width, out, kind};
    spread(ceil_div(width, BLOCK), grain_of(GRAIN, rows * BLOCK), mean_blocks, &m);
}

typedef struct {
    const float *x;
    long stride;
    long width;
    float *out;
} lengths;

static const float SHORTEST = 1e-12f;  // so that a row of zeros stays a row of zeros

static void normalize_rows(const void *task, long first, long last) {
    const lengths *n = task;
    for (long row = first; row < last; row++) {
        const float *x = n->x + row * n->stride;
        float *out = n->out + row * n->width;
        vec sum = vec_zero();
        for (long i = 0; i < n->width; i += LANES) {
            vec part = vec_load_upto(x + i, n->width - i, FLOAT32);
            sum = vec_fma(part, part, sum);
        }
        float length = sqrtf(vec_sum(sum));
        vec divisor = vec_all(length < SHORTEST ? SHORTEST : length);
        for (long i = 0; i < n->width; i += LANES) {
            long left = n->width - i;
            vec_store_upto(out + i, vec_div(vec_load_upto(x + i, left, FLOAT32), divisor), left, FLOAT32);
        }
    }
}

// x [rows, width] -> out [rows, width].
EXPORT void normalize(const float *x, long stride, long rows, long width, float *out) {
    lengths n = {x, stride, width, out};
    spread(rows, grain_of(GRAIN, width), normalize_rows, &n);
}
