// x [rows, inputs] times a packed matrix, followed by a bias, an activation and a gate, if there are any.
//
// An output is summed up over the inputs in their order, in float32, in one accumulator for each section of the
// inputs, however many rows there are: so it has the same bits alone and in any batch. Rows are computed in tiles,
// whose sums fill the registers with the 32 columns of a panel. One tile reads the panel from memory, the others from
// the cache.
#if defined(__AMX_BF16__)
#include "linear_amx.h"
#include "codes_amx.h"
#endif
#include <stdatomic.h>

#include "tile_methods.h"
#include "product.h"
#include "threads.h"
#include "call_arguments.h"

typedef struct {
    product product;
    method method;
    long tiles;
    long groups;  // groups of tiles: if there are few panels, threads share the tiles of each
    uint32_t *laid;  // NULL: each thread lays the rows for itself
    long number;     // of the job, by which a thread knows for which one it has done so
} job;

enum { FEW_TILES = 4 };  // so few that one thread lays them as quickly as several, which would wait for each other

// Tiles are as equal as possible, because one with few rows does not fill the registers.
INLINE long tile_start(const job *j, long tile) { return j->product.rows * tile / j->tiles; }

static void lay_tiles(const void *task, long first, long last) {
    const job *j = task;
    const product *p = &j->product;
    for (long tile = first; tile < last; tile++) {
        long start = tile_start(j, tile), rows = tile_start(j, tile + 1) - start;
        j->method.lay(j->laid + start * j->method.dwords, p->x + start * p->x_stride, p->x_stride, rows, p->w);
    }
}

static const uint32_t *laid_rows(const job *j) {
    static _Thread_local long laid;
    if (j->laid) return j->laid;
    job own = *j;
    own.laid = scratch(j->product.rows * j->method.dwords * 4 + 64);
    if (laid != j->number) lay_tiles(&own, 0, j->tiles);
    laid = j->number;
    return own.laid;
}

static void multiply(const void *task, long first, long last) {
    const job *j = task;
    const product *p = &j->product;
    const uint32_t *laid = laid_rows(j);
    float sums[TILES_AT_ONCE][MOST_SUMS * METHOD_ROWS * PANEL] __attribute__((aligned(64)));
    for (long unit = first; unit < last; unit++) {
        long panel = unit / j->groups, group = unit % j->groups;
        long begin = j->tiles * group / j->groups, end = j->tiles * (group + 1) / j->groups;
        tiles t = {.all = end - begin};
        for (long tile = begin; tile < end; tile += t.count) {
            t.first = tile - begin;
            t.count = ceil_div(end - tile, ceil_div(end - tile, j->method.tiles));
            for (long i = 0; i < t.count; i++) {
                long start = tile_start(j, tile + i);
                t.rows[i] = tile_start(j, tile + i + 1) - start;
                t.x[i] = laid + start * j->method.dwords;
                t.sums[i] = sums[i];
            }
            j->method.multiply(&t, p->w, panel);
            for (long i = 0; i < t.count; i++)
                finish_tile(p, sums[i], tile_start(j, tile + i), t.rows[i], panel);
        }
    }
}

enum { LAID_BYTES = 512 << 10 };  // rows that are laid out at once: they stay in the second-level cache beside a panel

// Several small units are taken at once. Units of several tiles are not, because the last one to end is waited for.
INLINE long grain_for(const job *j, long units) {
    enum { TILES = 4 };
    long grain = least(units / (4 * threads), TILES * j->groups / j->tiles);
    return grain > 1 ? grain : 1;
}

static void linear_laid(const product *whole) {
    static _Atomic long jobs;
    method method = method_for(whole->w);
    long panels = panels_of(whole->w), most = LAID_BYTES / (method.dwords * 4) / method.rows * method.rows;
    if (most < method.rows) most = method.rows;
    long rows = whole->rows, blocks = ceil_div(rows, most);
    job j = {.product = *whole, .method = method};
    for (long block = 0; block < blocks; block++) {
        long start = rows * block / blocks;
        j.product.rows = rows * (block + 1) / blocks - start;
        j.product.first = start;
        j.product.x = whole->x + start * whole->x_stride;
        j.product.out = whole->out + start * whole->out_stride;
        j.tiles = ceil_div(j.product.rows, method.rows);
        j.groups = least(j.tiles, ceil_div(4 * threads, panels));
        j.number = atomic_fetch_add(&jobs, 1) + 1;
        j.laid = j.tiles <= FEW_TILES ? NULL : scratch(j.product.rows * method.dwords * 4 + 64);
        if (j.laid) spread(j.tiles, FEW_TILES, lay_tiles, &j);
        long units = panels * j.groups;
        spread_streams(units, grain_for(&j, units), multiply, &j);
    }
}

static void multiply_product(const product *p) {
#if defined(__AMX_BF16__)
    if (is_for_amx(p->w)) {
        linear_amx(p);
        return;
    }
    if (has_codes_for_amx(p->w, p->rows)) {
        linear_codes_amx(p);
        return;
    }
#endif
    linear_laid(p);
}

EXPORT void linear(const weights *w, const void *x, long x_stride, const void *bias, void *out, long out_stride,
                   long rows, int out_kind, int function) {
    product p = {.w = w, .x = x, .bias = bias, .out = out, .out_kind = out_kind, .function = function, .rows = rows};
    p.x_stride = x_stride * width_of(w->kind);
    p.out_stride = out_stride * width_of(out_kind);
    multiply_product(&p);
}

EXPORT void linear_words(const word *a) {
    linear(a[0].pointer, a[1].pointer, a[2].whole, a[3].pointer, a[4].pointer, a[5].whole, a[6].whole,
           (int)a[7].whole, (int)a[8].whole);
}

// The same for a layer with adapters, of which `lora` has computed `low`. numbers: those of the rows' adapters.
EXPORT void linear_adapted(const weights *w, const void *x, long x_stride, const void *bias, void *out, long out_stride,
                           long rows, int out_kind, int function, const void *table, const int *numbers,
                           const float *low, long low_stride) {
    added a = {table, numbers, low, low_stride};
    product p = {.w = w, .x = x, .bias = bias, .out = out, .out_kind = out_kind, .function = function, .rows = rows};
    p.x_stride = x_stride * width_of(w->kind);
    p.out_stride = out_stride * width_of(out_kind);
    p.added = &a;
    multiply_product(&p);
}

EXPORT void linear_adapted_words(const word *a) {
    linear_adapted(a[0].pointer, a[1].pointer, a[2].whole, a[3].pointer, a[4].pointer, a[5].whole, a[6].whole,
                   (int)a[7].whole, (int)a[8].whole, a[9].pointer, a[10].pointer, a[11].pointer, a[12].whole);
}
