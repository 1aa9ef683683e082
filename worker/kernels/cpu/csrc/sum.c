// Sums of rows where no norm follows, and rows times a number, one for all or one that grows with their position.
#include "threads.h"
#include "call_arguments.h"

typedef struct {
    const void *x, *y;  // rows with these strides; a stride of 0 repeats one row
    long x_stride, y_stride;
    void *out;
    long width;
    kind k;
} sum;

INLINE void add_row(const sum *s, long row, kind k) {
    const char *x = at(s->x, row * s->x_stride, k), *y = at(s->y, row * s->y_stride, k);
    char *out = at_out(s->out, row * s->width, k);
    for (long i = 0; i < s->width; i += LANES) {
        long left = s->width - i;
        vec total = vec_add(vec_load_upto(at(x, i, k), left, k), vec_load_upto(at(y, i, k), left, k));
        vec_store_upto(at_out(out, i, k), total, left, k);
    }
}

static void add_rows(const void *task, long first, long last) {
    const sum *s = task;
    for (long row = first; row < last; row++) {
        if (s->k == FLOAT32) add_row(s, row, FLOAT32);
        else add_row(s, row, BFLOAT16);
    }
}

enum { GRAIN = 16384 };  // elements that are worth handing to another thread

// out is contiguous.
EXPORT void add(const void *x, long x_stride, const void *y, long y_stride, void *out, long rows, long width,
                int kind) {
    sum s = {x, y, x_stride, y_stride, out, width, kind};
    spread(rows, grain_of(GRAIN, width), add_rows, &s);
}

EXPORT void add_words(const word *a) {
    add(a[0].pointer, a[1].whole, a[2].pointer, a[3].whole, a[4].pointer, a[5].whole, a[6].whole, (int)a[7].whole);
}

typedef struct {
    const void *x;
    long x_stride;
    void *out;
    long width;
    float factor;
    kind k;
} scaling;

INLINE void scale_row(const scaling *s, long row, kind k) {
    const char *x = at(s->x, row * s->x_stride, k);
    char *out = at_out(s->out, row * s->width, k);
    for (long i = 0; i < s->width; i += LANES) {
        long left = s->width - i;
        vec_store_upto(at_out(out, i, k), vec_mul(vec_load_upto(at(x, i, k), left, k), vec_all(s->factor)), left, k);
    }
}

static void scale_rows(const void *task, long first, long last) {
    const scaling *s = task;
    for (long row = first; row < last; row++) {
        if (s->k == FLOAT32) scale_row(s, row, FLOAT32);
        else scale_row(s, row, BFLOAT16);
    }
}

// out is contiguous.
EXPORT void scale(const void *x, long x_stride, void *out, long rows, long width, float factor, int kind) {
    scaling s = {x, x_stride, out, width, factor, kind};
    spread(rows, grain_of(GRAIN, width), scale_rows, &s);
}

EXPORT void scale_words(const word *a) {
    scale(a[0].pointer, a[1].whole, a[2].pointer, a[3].whole, a[4].whole, a[5].real, (int)a[6].whole);
}

typedef struct {
    const void *x;
    long x_stride;
    const int64_t *positions;
    void *out;
    long width;
    float rate, length;
    kind k;
} growth;

static void grow_rows(const void *task, long first, long last) {
    const growth *g = task;
    for (long row = first; row < last; row++) {
        float before = floorf((float)g->positions[row] / g->length);
        scaling s = {g->x, g->x_stride, g->out, g->width, 1.0f + g->rate * logf(1.0f + before), g->k};
        scale_rows(&s, row, row + 1);
    }
}

// positions [rows]; out is contiguous.
EXPORT void scale_by_position(const void *x, long x_stride, const int64_t *positions, void *out, long rows,
                              long width, float rate, float length, int kind) {
    growth g = {x, x_stride, positions, out, width, rate, length, kind};
    spread(rows, grain_of(GRAIN, width), grow_rows, &g);
}

EXPORT void scale_by_position_words(const word *a) {
    scale_by_position(a[0].pointer, a[1].whole, a[2].pointer, a[3].pointer, a[4].whole, a[5].whole, a[6].real,
                      a[7].real, (int)a[8].whole);
}
