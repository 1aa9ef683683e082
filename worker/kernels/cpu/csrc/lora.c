// The products A x of adapters, for the rows of a step that have one.
//
// Each run of rows with the same adapter is cut into tiles, and a unit of work is a tile times a panel of A, by the
// method of `linear.c`: so a row has the same bits whatever run it is in. Runs of different adapters are computed by
// all threads at once.
#include "adapted.h"
#include "tile_methods.h"
#include "threads.h"
#include "call_arguments.h"

typedef struct {
    const adapted *table;
    const char *x;
    long x_stride;  // in bytes
    float *low;
    long low_stride;
    const int *runs;  // their number, and then for each the adapter, its first row and the count of rows
} shrink_job;

typedef struct {
    const weights *a;
    method method;
    long first, rows, tiles, units;
} run;

static run run_of(const shrink_job *j, long number) {
    const int *given = j->runs + 1 + 3 * number;
    run r = {.a = j->table[given[0]].a, .first = given[1], .rows = given[2]};
    if (r.a == NULL) return r;
    r.method = method_for(r.a);
    r.tiles = ceil_div(r.rows, r.method.rows);
    r.units = r.tiles * panels_of(r.a);
    return r;
}

static void shrink_tile(const shrink_job *j, const run *r, long tile, long panel) {
    float sums[MOST_SUMS * METHOD_ROWS * PANEL] __attribute__((aligned(64)));
    long begin = r->rows * tile / r->tiles, rows = r->rows * (tile + 1) / r->tiles - begin, start = r->first + begin;
    uint32_t *laid = scratch(rows * r->method.dwords * 4 + 64);
    r->method.lay(laid, j->x + start * j->x_stride, j->x_stride, rows, r->a);
    tiles t = {.count = 1, .all = 1, .x = {laid}, .rows = {rows}, .sums = {sums}};
    r->method.multiply(&t, r->a, panel);
    long first = panel * PANEL, width = least(PANEL, r->a->outputs - first);
    for (long row = 0; row < rows; row++)
        memcpy(j->low + (start + row) * j->low_stride + first, sums + row * PANEL, width * sizeof(float));
}

static void shrink(const void *task, long first, long last) {
    const shrink_job *j = task;
    long before = 0;
    for (long number = 0; number < j->runs[0] && before < last; number++) {
        run r = run_of(j, number);
        for (long unit = first > before ? first - before : 0; unit < r.units && before + unit < last; unit++)
            shrink_tile(j, &r, unit % r.tiles, unit / r.tiles);
        before += r.units;
    }
}

// low [rows, low_stride]: what rows without an adapter have there is never read.
EXPORT void lora(const void *table, const void *x, long x_stride, float *low, long low_stride, long rows,
                 const int *runs, int x_kind) {
    (void)rows;  // the runs say which
    shrink_job j = {table, x, x_stride * width_of(x_kind), low, low_stride, runs};
    long units = 0, inputs = 1;
    for (long number = 0; number < runs[0]; number++) {
        run r = run_of(&j, number);
        units += r.units;
        if (r.a != NULL) inputs = r.a->inputs;
    }
    enum { WORTH = 16384 };
    spread(units, grain_of(WORTH, inputs * PANEL), shrink, &j);
}

EXPORT void lora_words(const word *a) {
    lora(a[0].pointer, a[1].pointer, a[2].whole, a[3].pointer, a[4].whole, a[5].whole, a[6].pointer,
         (int)a[7].whole);
}

typedef struct {
    const adapted *table;
    const int64_t *ids;
    const int *numbers;
    char *rows;
    long size;
    kind kind;
} embedded;

// A row of A is what a token has for all numbers, so A x is read and not computed.
static void adapt_row(const embedded *j, long row) {
    const weights *a = j->table[j->numbers[row]].a;
    float sums[PANEL] __attribute__((aligned(64))), *low = NULL;
    if (a != NULL) {
        if (j->ids[row] < 0 || j->ids[row] >= a->inputs) return;  // its embedding is NaN
        low = scratch(a->outputs * sizeof(float));
        const void *numbers = at(a->panels, j->ids[row] * a->outputs, a->kind);
        for (long i = 0; i < a->outputs; i++)
            low[i] = a->kind == BFLOAT16 ? widen(((const bf16 *)numbers)[i]) : ((const float *)numbers)[i];
    }
    added own = {j->table, j->numbers, low, 0};
    char *out = at_out(j->rows, row * j->size, j->kind), numbers[PANEL * sizeof(float)];
    for (long panel = 0; panel * PANEL < j->size; panel++) {
        long first = panel * PANEL, bytes = least(PANEL, j->size - first) * width_of(j->kind);
        memcpy(numbers, at(out, first, j->kind), bytes);
        for (long c = 0; c < PANEL; c += LANES) {
            if (j->kind == BFLOAT16) vec_store(sums + c, vec_load(numbers + 2 * c, BFLOAT16), FLOAT32);
            else vec_store(sums + c, vec_load(numbers + 4 * c, FLOAT32), FLOAT32);
        }
        add_adapters(&own, sums, row, 1, panel);
        for (long c = 0; c < PANEL; c += LANES) {
            vec sum = vec_load(sums + c, FLOAT32);
            if (j->kind == BFLOAT16) vec_store(numbers + 2 * c, sum, BFLOAT16);
            else vec_store(numbers + 4 * c, sum, FLOAT32);
        }
        memcpy(at_out(out, first, j->kind), numbers, bytes);
    }
}

static void adapt_rows(const void *task, long first, long last) {
    const embedded *j = task;
    for (long row = first; row < last; row++)
        if (j->numbers[row]) adapt_row(j, row);
}

// Changes embeddings [rows, size] in place. A of these adapters is no matrix in panels: [inputs, outputs].
EXPORT void adapt_embeddings(const void *table, const int64_t *ids, const int *numbers, void *rows, long count,
                             long size, int row_kind) {
    embedded j = {table, ids, numbers, rows, size, row_kind};
    enum { WORTH = 4096 };
    spread(count, grain_of(WORTH, size), adapt_rows, &j);
}

EXPORT void adapt_embeddings_words(const word *a) {
    adapt_embeddings(a[0].pointer, a[1].pointer, a[2].pointer, a[3].pointer, a[4].whole, a[5].whole,
                     (int)a[6].whole);
}
