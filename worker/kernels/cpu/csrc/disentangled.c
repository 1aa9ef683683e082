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

// Multiplies the queries of `t`, or keys in their place, with so many rows of distances, up to KEYS.
INLINE void multiply_rows(tile *t, scoring s, const void *table, long first, long count, long lanes) {
    for (long i = 0; i < count; i++) {
        t->key_rows[i] = at(table, (first + i) * s.dim, s.kind);
        if (in_pairs(s.kind) || s.kind == FLOAT32) continue;
        widen_row(t->wide_keys + i * s.dim, t->key_rows[i], s.dim, s.kind);
        t->key_rows[i] = t->wide_keys + i * s.dim;
    }
    for (long i = count; i % TALL; i++) t->key_rows[i] = t->key_rows[count - 1];
    if (by_amx(s)) find_spans(t, s, count);
    score_all(t, s, count, lanes);
}

// Adds products [row of distances][lane] to `added`; the lane is the query's, or the key's. `order` has the row of a
// query's distance from a key as far behind as itself.
INLINE void add_products_of(tiles_of_distances *w, const float *products, const int *order, long first, long count, long keys, long rows,
                            int by_key) {
    for (long key = 0; key < keys; key++) {
        const int *own = order - key;
        float *added = w->added + key * TILE;
        long from = 0, to = rows;
        while (from < to && own[from] < first) from++;
        while (to > from && own[to - 1] >= first + count) to--;
        if (by_key)
            for (long r = from; r < to; r++) added[r] += products[(own[r] - first) * TILE + key];
        else
            for (long r = from; r < to; r++) added[r] += products[(own[r] - first) * TILE + r];
    }
}

// Fills in what is added to the scores of a block, whose first key stands `behind` the tile's first query by as much.
INLINE void compare_distances(tiles_of_distances *w, const packed *p, scoring s, long head, long behind, long keys, long rows) {
    const int *order = p->order + p->longest - 1 - behind;
    long first = order[-(keys - 1)], end = order[rows - 1] + 1, lanes = ceil_div(rows, LANES) * LANES;
    memset(w->added, 0, keys * TILE * sizeof(float));
    if (p->queries != NULL) {
        for (long r = 0; r < TILE; r++) w->of_keys.query_rows[r] = w->own.key_rows[least(r, keys - 1)];
        tile_begin(&w->of_keys, s);
    }
    for (long start = first; start < end; start += KEYS) {
        long count = least(KEYS, end - start);
        if (p->keys != NULL) {
            multiply_rows(&w->of_queries, s, at(p->keys, head * p->distances * s.dim, s.kind), start, count, lanes);
            add_products_of(w, w->of_queries.scores, order, start, count, keys, rows, 0);
        }
        if (p->queries == NULL) continue;
        const void *table = at(p->queries, head * p->distances * s.dim, s.kind);
        multiply_rows(&w->of_keys, s, table, start, count, ceil_div(keys, LANES) * LANES);
        add_products_of(w, w->of_keys.scores, order, start, count, keys, rows, 1);
    }
}

// As `tile_block`, with `added`.
INLINE void attend_block(tiles_of_distances *w, scoring s, long start, long keys, long rows) {
    tile *t = &w->own;
    long lanes = ceil_div(rows, LANES) * LANES, all = weighed(s, keys);
    prepare_rows(t, s, keys);
    score_all(t, s, keys, lanes);
    for (long lane = 0; lane < lanes; lane += LANES) {
        for (long key = 0; key < keys; key++) {
            float *score = t->scores + key * TILE + lane;
            vec added = vec_load(w->added + key * TILE + lane, FLOAT32);
            vec_store(score, vec_add(vec_load(score, FLOAT32), added), FLOAT32);
        }
        if (all > keys) hide_scores(t, start, all, lane);
        weigh(t, s, all, lane);
    }
    value_all(t, s, in_pairs(s.kind) ? ceil_div(keys, 2) : keys, start == 0, lanes);
}

INLINE void attend_tile(const packed *p, scoring s, const unit *u, long head) {
    tiles_of_distances *w = scratch(sizeof(tiles_of_distances));
    tile *t = &w->own;
    long text = p->query_starts[u->row], length = p->query_starts[u->row + 1] - text;
    for (long r = 0; r < TILE; r++) {
        long token = text + u->first + least(r, u->count - 1);
        t->query_rows[r] = at(p->q, token * p->q_stride + head * s.dim, s.kind);
        t->out_rows[r] = at_out(p->out, (token * p->heads + head) * s.dim, s.kind);
        t->first[r] = 0;
        t->last[r] = (float)(length - 1);
    }
    tile_begin(t, s);
    if (p->keys != NULL) memcpy(w->of_queries.queries, t->queries, words_of(s) * TILE * sizeof(float));
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
