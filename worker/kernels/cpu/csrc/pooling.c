// Merges the rows of texts, divides rows by their length, and finds rows that are not finite.
#include "threads.h"
#include "call_arguments.h"

enum { AT_ONCE = 4, BLOCK = AT_ONCE * LANES };  // columns that are added up side by side
enum { CLS, LAST, MEAN };                       // ways to merge: the first row, the last, or the mean of all

typedef struct {
    const void *x;
    long stride;
    const int *places;  // [texts, 3]: the first row of a text, the first that is merged, and the one behind the last
    long width;
    long blocks;  // of columns
    float *out;
    int mode;
    kind k;
} merge_task;

// Rows are added up in their order in float32, so a text has the same bits in any batch.
INLINE void merge_block(const merge_task *m, long text, long first, kind k) {
    long width = least(BLOCK, m->width - first), row = m->places[3 * text + 1], end = m->places[3 * text + 2];
    if (m->mode == CLS) end = row + 1;
    if (m->mode == LAST) row = end - 1;
    vec sums[AT_ONCE], count = vec_all((float)(end - row));
    for (int i = 0; i < AT_ONCE; i++) sums[i] = vec_zero();
    for (; row < end; row++) {
        const void *x = at(m->x, row * m->stride + first, k);
        for (long i = 0; i < AT_ONCE && i * LANES < width; i++)
            sums[i] = vec_add(sums[i], vec_load_upto(at(x, i * LANES, k), width - i * LANES, k));
    }
    float *out = m->out + text * m->width + first;
    for (long i = 0; i < AT_ONCE && i * LANES < width; i++)
        vec_store_upto(out + i * LANES, vec_div(sums[i], count), width - i * LANES, FLOAT32);
}

static void merge_blocks(const void *task, long first, long last) {
    const merge_task *m = task;
    for (long unit = first; unit < last; unit++) {
        long text = unit / m->blocks, column = unit % m->blocks * BLOCK;
        if (m->k == FLOAT32) merge_block(m, text, column, FLOAT32);
        else merge_block(m, text, column, BFLOAT16);
    }
}

enum { GRAIN = 65536 };  // elements that are worth handing to another thread

// x [rows, width] -> out [texts, width].
EXPORT void pool(const void *x, long stride, const int *places, long texts, long width, float *out, int mode,
                 int kind) {
    merge_task m = {x, stride, places, width, ceil_div(width, BLOCK), out, mode, kind};
    long rows = mode == MEAN && texts ? places[3 * texts - 1] / texts : 1;
    spread(texts * m.blocks, grain_of(GRAIN, rows * BLOCK), merge_blocks, &m);
}

EXPORT void pool_words(const word *a) {
    pool(a[0].pointer, a[1].whole, a[2].pointer, a[3].whole, a[4].whole, a[5].pointer, (int)a[6].whole,
         (int)a[7].whole);
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

EXPORT void normalize_words(const word *a) {
    normalize(a[0].pointer, a[1].whole, a[2].whole, a[3].whole, a[4].pointer);
}

// Writes 1 for each row of x [rows, width] of which all numbers are finite, else 0.
EXPORT void find_finite(const float *x, long rows, long width, char *finite) {
    for (long row = 0; row < rows; row++) {
        const uint32_t exponent = 0x7f800000;
        int broken = 0;
        for (long i = 0; i < width; i++) {
            uint32_t bits;
            memcpy(&bits, x + row * width + i, sizeof bits);
            broken |= (bits & exponent) == exponent;
        }
        finite[row] = !broken;
    }
}

EXPORT void find_finite_words(const word *a) { find_finite(a[0].pointer, a[1].whole, a[2].whole, a[3].pointer); }
