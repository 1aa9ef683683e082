// x [rows, inputs] times a packed matrix, followed by a bias, an activation and a gate, if there are any.
//
// An output is summed up over the inputs in their order, in float32, in one accumulator for each section of the
// inputs, however many rows there are: so it has the same bits alone and in any batch. Rows are computed in tiles,
// whose sums fill the registers with the 32 columns of a panel. One tile reads the panel from memory, the others from
// the cache.
#include "functions.h"
#include "quantized.h"
#include "threads.h"
#if defined(__AMX_BF16__)
#include "tile_amx.h"
#else
#include "tile.h"
#endif
#include "weights.h"
#include "words.h"

// The functions that compute a tile: by vectors, by AMX, or from a quantized matrix.
typedef struct {
    long rows;    // the most rows of a tile
    long dwords;  // the size of a row as `lay` writes it
    void (*lay)(uint32_t *to, const char *x, long stride, long rows, const weights *w);
    void (*multiply)(const uint32_t *x, long rows, const weights *w, long panel, fetch ahead, float *sums);
} method;

static method method_for(const weights *w) {
    if (w->bits) return (method){quantized_rows(w), quantized_dwords(w), lay_quantized, multiply_quantized};
#if defined(__AMX_BF16__)
    if (w->kind == BFLOAT16) return (method){AMX_ROWS, laid_dwords(w), lay_blocks, multiply_amx};
#endif
    return (method){TILE_ROWS, laid_dwords(w), lay_dwords, multiply_vec};
}

#if defined(__AMX_BF16__)
enum { MOST_ROWS = AMX_ROWS };
#else
enum { MOST_ROWS = TILE_ROWS };
#endif

typedef struct {
    const weights *w;
    method method;
    const char *x;
    long x_stride;  // in bytes
    const void *bias;
    char *out;
    long out_stride;  // in bytes
    kind out_kind;
    function function;
    long rows;
    long tiles;
    long groups;  // groups of tiles: if there are few panels, threads share the tiles of each
    uint32_t *laid;
} product;

// Tiles are as equal as possible, because one with few rows does not fill the registers.
INLINE long tile_start(const product *p, long tile) { return p->rows * tile / p->tiles; }

static void lay_tiles(const void *task, long first, long last) {
    const product *p = task;
    for (long tile = first; tile < last; tile++) {
        long start = tile_start(p, tile), rows = tile_start(p, tile + 1) - start;
        p->method.lay(p->laid + start * p->method.dwords, p->x + start * p->x_stride, p->x_stride, rows, p->w);
    }
}

INLINE vec add_bias(const product *p, vec sum, long column, long left) {
    kind k = p->w->kind;
    return p->bias == NULL ? sum : vec_add(sum, vec_load_upto(at(p->bias, column, k), left, k));
}

INLINE void finish_rows(const product *p, const float *sums, long start, long rows, long panel, function f, kind k) {
    long columns = columns_of(p->w), first = panel * PANEL, width = least(PANEL, columns - first);
    for (long r = 0; r < rows; r++, sums += PANEL) {
        char *row = at_out(p->out + (start + r) * p->out_stride, first, k);
        for (long i = 0; i < width; i += LANES) {
            vec sum = add_bias(p, vec_load(sums + i, FLOAT32), first + i, width - i);
            vec_store_upto(at_out(row, i, k), vec_function(sum, f, k), width - i, k);
        }
    }
}

INLINE void finish_gated_rows(const product *p, const float *sums, long start, long rows, long panel, function f,
                              kind k) {
    long columns = columns_of(p->w), half = PANEL / 2, first = panel * half, width = least(half, columns - first);
    for (long r = 0; r < rows; r++, sums += PANEL) {
        char *row = at_out(p->out + (start + r) * p->out_stride, first, k);
        for (long i = 0; i < width; i += LANES) {
            vec gate = add_bias(p, vec_load(sums + i, FLOAT32), first + i, width - i);
            vec value = add_bias(p, vec_load(sums + half + i, FLOAT32), columns + first + i, width - i);
            vec_store_upto(at_out(row, i, k), vec_mul(vec_function(gate, f, k), value), width - i, k);
        }
    }
}

#define FINISH(f)                                                                                \
    case f:                                                                                      \
        if (p->w->gated && p->out_kind == BFLOAT16)                                              \
            finish_gated_rows(p, sums, start, rows, panel, f, BFLOAT16);                         \
        else if (p->w->gated) finish_gated_rows(p, sums, start, rows, panel, f, FLOAT32);        \
        else if (p->out_kind == BFLOAT16) finish_rows(p, sums, start, rows, panel, f, BFLOAT16); \
        else finish_rows(p, sums, start, rows, panel, f, FLOAT32);                               \
        break;

static void finish_tile(const product *p, const float *sums, long start, long rows, long panel) {
    switch (p->function) { FINISH(NONE) FINISH(SILU) FINISH(GELU) FINISH(GELU_TANH) FINISH(RELU) }
}

enum { AHEAD_BYTES = 4096 };

// The memory that a tile prefetches: its own panel, a little ahead; or if this panel is in the cache because it has
// several tiles, its share of the next panel.
INLINE fetch fetch_for(const product *p, long panel, long tile, long tiles) {
    long lines = panel_bytes(p->w) / (PANEL * 4), step = PANEL * 4 / tiles;
    if (tiles == 1) return (fetch){(const char *)panel_of(p->w, panel) + AHEAD_BYTES, step};
    return (fetch){(const char *)panel_of(p->w, panel + 1) + tile * step * lines, step};
}

static void multiply(const void *task, long first, long last) {
    const product *p = task;
    float sums[MOST_SUMS * MOST_ROWS * PANEL] __attribute__((aligned(64)));
    for (long unit = first; unit < last; unit++) {
        long panel = unit / p->groups, group = unit % p->groups;
        long begin = p->tiles * group / p->groups, end = p->tiles * (group + 1) / p->groups;
        for (long tile = begin; tile < end; tile++) {
            long start = tile_start(p, tile), rows = tile_start(p, tile + 1) - start;
            fetch ahead = fetch_for(p, panel, tile - begin, end - begin);
            p->method.multiply(p->laid + start * p->method.dwords, rows, p->w, panel, ahead, sums);
            finish_tile(p, sums, start, rows, panel);
        }
    }
}

enum { LAID_BYTES = 512 << 10 };  // rows that are laid out at once: they stay in the second-level cache beside a panel

// Several small units are taken at once. Units of several tiles are not, because the last one to end is waited for.
INLINE long grain_for(const product *p, long units) {
    enum { TILES = 4 };
    long grain = least(units / (4 * threads), TILES * p->groups / p->tiles);
    return grain > 1 ? grain : 1;
}

EXPORT void linear(const weights *w, const void *x, long x_stride, const void *bias, void *out, long out_stride,
                   long rows, int out_kind, int function) {
    method method = method_for(w);
    long panels = panels_of(w), most = LAID_BYTES / (method.dwords * 4) / method.rows * method.rows;
    if (most < method.rows) most = method.rows;
    long blocks = ceil_div(rows, most);
    product p = {.w = w, .method = method, .bias = bias, .out_kind = out_kind, .function = function};
    p.x_stride = x_stride * width_of(w->kind);
    p.out_stride = out_stride * width_of(out_kind);
    p.laid = scratch((rows < most ? rows : most) * method.dwords * 4 + 64);
    for (long block = 0; block < blocks; block++) {
        long start = rows * block / blocks;
        p.rows = rows * (block + 1) / blocks - start;
        p.x = (const char *)x + start * p.x_stride;
        p.out = (char *)out + start * p.out_stride;
        p.tiles = ceil_div(p.rows, method.rows);
        p.groups = least(p.tiles, ceil_div(4 * threads, panels));
        spread(p.tiles, 4, lay_tiles, &p);
        long units = panels * p.groups;
        spread(units, grain_for(&p, units), multiply, &p);
    }
}

EXPORT void linear_words(const word *a) {
    linear(a[0].pointer, a[1].pointer, a[2].whole, a[3].pointer, a[4].pointer, a[5].whole, a[6].whole,
           (int)a[7].whole, (int)a[8].whole);
}
