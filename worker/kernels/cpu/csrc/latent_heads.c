// Products of tokens whose heads have a matrix each: what latent attention makes of queries, and of weighted latents.
//
// As in `linear.c` an output is summed over the inputs in their order, so it has the same bits alone and in any batch.
#include "latent_heads.h"

#include "gathered_tile.h"
#include "product.h"
#include "threads.h"

enum { UNITS = 8 };  // for each thread, at least: memory is read evenly

INLINE weights matrix_of(const by_head *h, long head) {
    weights w = *h->w;
    w.outputs = h->outputs;
    w.panels = (void *)panel_of(h->w, head * panels_of(&w));
    return w;
}

INLINE long tile_start(const by_head *h, long tile) { return h->tokens * tile / h->tiles; }

long divide_heads(by_head *h) {
    h->tiles = ceil_div(h->tokens, tile_rows(h->w));
    h->groups = ceil_div(h->tiles, TILES_AT_ONCE);
    h->parts = least(ceil_div(h->outputs, PANEL), ceil_div(UNITS * threads, h->heads * h->groups));
    return h->heads * h->groups * h->parts;
}

// Lays the rows of some tiles of a head, tile by tile.
INLINE void lay_head(const by_head *h, long head, long begin, long end, const weights *w, uint32_t *to) {
    for (long tile = begin; tile < end; tile++) {
        long start = tile_start(h, tile), count = tile_start(h, tile + 1) - start;
        const char *rows[MOST_ROWS];
        for (long r = 0; r < count; r++) rows[r] = h->x + (start + r) * h->x_stride + head * h->x_head;
        lay_rows(to, rows, count, w->inputs * width_of(w->kind), w);
        to += count * row_dwords(w);
    }
}

void multiply_heads(const by_head *h, long first, long last) {
    long dwords = row_dwords(h->w), shaped = 0;
    float sums[MOST_ROWS * PANEL] __attribute__((aligned(64)));
    uint32_t *laid = scratch(TILES_AT_ONCE * MOST_ROWS * dwords * sizeof *laid);
    for (long unit = first; unit < last; unit++) {
        long part = unit % h->parts, group = unit / h->parts % h->groups, head = unit / (h->parts * h->groups);
        long begin = h->tiles * group / h->groups, end = h->tiles * (group + 1) / h->groups;
        weights w = matrix_of(h, head);
        product p = {.w = &w, .out = h->out + head * h->out_head, .out_stride = h->out_stride, .out_kind = w.kind};
        lay_head(h, head, begin, end, &w, laid);
        long stop = panels_of(&w) * (part + 1) / h->parts;
        for (long panel = panels_of(&w) * part / h->parts; panel < stop; panel++) {
            const uint32_t *x = laid;
            for (long tile = begin; tile < end; tile++) {
                long start = tile_start(h, tile), rows = tile_start(h, tile + 1) - start;
                gathered_tile t = {.x = x, .rows = rows, .leads = tile == begin};
                multiply_tile(&t, &w, panel, sums, &shaped);
                finish_tile(&p, sums, start, rows, panel);
                x += rows * dwords;
            }
        }
    }
    release(shaped);
}
