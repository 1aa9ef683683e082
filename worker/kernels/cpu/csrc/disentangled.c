// DeBERTa's attention: tokens are compared with each other, and with the learned distance between them, both ways.
//
// A text has its own tiles and blocks, as in `encoder_attention.c`. Of the learned distances a block needs a run of rows,
// with which its queries and its keys are multiplied; each score then adds the two products of its own distance.
#include <stdlib.h>

#include "attention_tile.h"
#include "threads.h"
#include "attention_units.h"
#include "call_arguments.h"

typedef struct {
    const void *q, *k, *v;  // [tokens, heads, dim]; the heads of a token are contiguous, tokens have these strides:
    long q_stride, k_stride, v_stride;
    void *out;                    // [tokens, heads, dim]
    const int *query_starts;      // [rows + 1]
    long rows, heads;
    const void *keys, *queries;   // [heads, distances, dim]: learned distances; NULL: they are not compared with
    long distances;
    const int *order;             // by how far a query stands behind a key, from -(longest - 1) on, rising
    long longest;
    scoring scoring;
    const unit *units;
} packed;

typedef struct {
    tile own, of_queries, of_keys;  // the last two have products with distances as scores
    float added[KEYS * TILE];       // [key][row]
} tiles_of_distances;

// Rows of learned distances, from `first` on, and the queries and keys whose distances are looked for among them.
typedef struct {
    const int *order;  // the row of a query's distance from a key as far behind as itself
    long first, count, row, rows, key, keys;
} run;

INLINE void lay_distances(tile *t, scoring s, const void *table, const run *r) {
    for (long i = 0; i < r->count; i++) {
        t->key_rows[i] = at(table, (r->first + i) * s.dim, s.kind);
        if (in_pairs(s.kind) || s.kind == FLOAT32) continue;
        widen_row(t->wide_keys + i * s.dim, t->key_rows[i], s.dim, s.kind);
        t->key_rows[i] = t->wide_keys + i * s.dim;
    }
    for (long i = r->count; i % TALL; i++) t->key_rows[i] = t->key_rows[r->count - 1];
    if (by_amx(s)) find_spans(t, s, r->count);
}

// Adds products [row of distances][lane of a slice] to `added`; the lane is the query's, or the key's.
INLINE void add_products_of(tiles_of_distances *w, scoring s, const float *products, const run *r, int by_key) {
    const long stride = slice_of(s);
    for (long key = r->key; key < r->keys; key++) {
        const int *own = r->order - key;
        float *added = w->added + key * TILE;
        long from = r->row, to = r->rows;
        while (from < to && own[from] < r->first) from++;
        while (to > from && own[to - 1] >= r->first + r->count) to--;
        const float *of_lane = by_key ? products + key % stride : products;
        for (; from < to; from++) added[from] += of_lane[(own[from] - r->first) * stride + (by_key ? 0 : from % stride)];
    }
}

// Multiplies the queries of a tile, or keys in their place, with a run of distances, and adds the products to `added`.
INLINE void multiply_run(tiles_of_distances *w, tile *t, scoring s, const void *table, run r, int by_key) {
    long *first = by_key ? &r.key : &r.row, *end = by_key ? &r.keys : &r.rows;
    const long all = *end, stride = slice_of(s);
    lay_distances(t, s, table, &r);
    for (; *first < all; *first += stride) {
        *end = least(*first + stride, all);
        const long lanes = laid_rows(*end);
        score_slice(t, s, r.count, *first, lanes);
        for (long lane = *first; by_amx(s) && lane < lanes; lane += LANES)
            scale_scores(t->scores + lane % stride, stride, r.count, s.scale);
        add_products_of(w, s, t->scores, &r, by_key);
    }
}

// Fills in what is added to the scores of a block, whose first key stands `behind` the tile's first query by as much.
INLINE void compare_distances(tiles_of_distances *w, const packed *p, scoring s, long head, long behind, long keys, long rows) {
    const int *order = p->order + p->longest - 1 - behind;
    const long end = order[rows - 1] + 1, tables = head * p->distances * s.dim;
    for (long key = 0; key < keys; key++) memset(w->added + key * TILE, 0, laid_rows(rows) * sizeof(float));
    if (p->queries != NULL) {
        for (long r = 0; r < laid_rows(keys); r++) w->of_keys.query_rows[r] = w->own.key_rows[least(r, keys - 1)];
        tile_begin(&w->of_keys, s, keys);
    }
    for (run r = {order, order[-(keys - 1)], 0, 0, rows, 0, keys}; r.first < end; r.first += KEYS) {
        r.count = least(KEYS, end - r.first);
        if (p->keys != NULL) multiply_run(w, &w->of_queries, s, at(p->keys, tables, s.kind), r, 0);
        if (p->queries != NULL) multiply_run(w, &w->of_keys, s, at(p->queries, tables, s.kind), r, 1);
    }
}

// As `tile_block`, with `added`.
INLINE void attend_block(tiles_of_distances *w, scoring s, long start, long keys, long rows) {
    tile *t = &w->own;
    const long lanes = laid_rows(rows), all = weighed(s, keys), stride = slice_of(s);
    prepare_rows(t, s, keys);
    for (long first = 0; first < lanes; first += stride) {
        const long end = least(first + stride, lanes);
        score_slice(t, s, keys, first, end);
        for (long lane = first; lane < end; lane += LANES) {
            float *column = t->scores + lane % stride;
            if (by_amx(s)) scale_scores(column, stride, keys, s.scale);
            for (long key = 0; key < keys; key++) {
                vec added = vec_load(w->added + key * TILE + lane, FLOAT32);
                vec_store(column + key * stride, vec_add(vec_load(column + key * stride, FLOAT32), added), FLOAT32);
            }
            if (all > keys) hide_scores(t, column, stride, start, all, lane);
            weigh(t, s, all, lane, 1);
        }
        value_slice(t, s, in_pairs(s.kind) ? ceil_div(keys, 2) : keys, start == 0, first, end);
    }
}

INLINE void attend_tile(const packed *p, scoring s, const unit *u, long head) {
    tiles_of_distances *w = scratch(sizeof(tiles_of_distances));
    tile *t = &w->own;
    long text = p->query_starts[u->row], length = p->query_starts[u->row + 1] - text;
    for (long r = 0; r < laid_rows(u->count); r++) {
        long token = text + u->first + least(r, u->count - 1);
        t->query_rows[r] = at(p->q, token * p->q_stride + head * s.dim, s.kind);
        t->out_rows[r] = at_out(p->out, (token * p->heads + head) * s.dim, s.kind);
        t->first[r] = 0;
        t->last[r] = (float)(length - 1);
    }
    tile_begin(t, s, u->count);
    if (p->keys != NULL) {
        const long laid = ceil_div(u->count, slice_of(s)) * slice_of(s);
        memcpy(w->of_queries.queries, t->queries, words_of(s) * laid * sizeof(float));
        w->of_queries.lines = 0;
    }
    for (long start = 0; start < length; start += KEYS) {
        long keys = least(KEYS, length - start);
        for (long i = 0; i < keys; i++) {
            t->key_rows[i] = at(p->k, (text + start + i) * p->k_stride + head * s.dim, s.kind);
            t->value_rows[i] = at(p->v, (text + start + i) * p->v_stride + head * s.dim, s.kind);
        }
        compare_distances(w, p, s, head, start - u->first, keys, u->count);
        attend_block(w, s, start, keys, u->count);
    }
    tile_end(t, s, u->count);
}

INLINE void do_units(const packed *p, long first, long last, kind k) {
    scoring s = p->scoring;
    s.kind = s.outer = k;
    if (by_amx(s)) shape_for_tiles();
    for (long i = first; i < last; i++) attend_tile(p, s, p->units + i / p->heads, i % p->heads);
    if (by_amx(s)) release_registers();
}

static void do_float32(const void *task, long first, long last) { do_units(task, first, last, FLOAT32); }
static void do_bfloat16(const void *task, long first, long last) { do_units(task, first, last, BFLOAT16); }

// dim is a multiple of 8 up to MAX_DIM; texts have up to `longest` tokens.
EXPORT void disentangled_attention(const void *q, long q_stride, const void *k, long k_stride, const void *v,
                                   long v_stride, void *out, const int *query_starts, long rows, long heads, long dim,
                                   float scale, const void *keys, const void *queries, long distances, const int *order,
                                   long longest, int kind) {
    packed p = {q,    k,       v,         q_stride, k_stride, v_stride, out,
                query_starts, rows,    heads,     keys,     queries,  distances, order,
                longest, {kind, dim, scale * LOG2_E, 0, 0, 0, 0, kind}, NULL};
    long most = rows + query_starts[rows] / TILE, n = 0;
    unit *units = malloc(2 * most * sizeof(unit));
    if (units == NULL) abort();  // out of memory, where torch would throw
    for (long row = 0; row < rows; row++) {
        long length = query_starts[row + 1] - query_starts[row];
        for (long first = 0; first < length; first += TILE) {
            long count = least(TILE, length - first);
            units[n++] = (unit){(int)row, (int)first, (int)count, -1, length * count};
        }
    }
    longest_first(units + most, units, n);
    p.units = units + most;
    spread(n * heads, 1, kind == BFLOAT16 ? do_bfloat16 : do_float32, &p);
    free(units);
}

EXPORT void disentangled_attention_words(const word *a) {
    disentangled_attention(a[0].pointer, a[1].whole, a[2].pointer, a[3].whole, a[4].pointer, a[5].whole, a[6].pointer,
                           a[7].pointer, a[8].whole, a[9].whole, a[10].whole, a[11].real, a[12].pointer, a[13].pointer,
                           a[14].whole, a[15].pointer, a[16].whole, (int)a[17].whole);
}
