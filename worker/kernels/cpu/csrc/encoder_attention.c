// Attention of encoders: a query sees the keys of its own text, all of them or those near it.
//
// Tiles begin at multiples of a number of tokens within each text, so a text has the same bits in any batch.
#include <stdlib.h>

#include "attention_tile.h"
#include "threads.h"
#include "attention_units.h"
#include "call_arguments.h"

typedef struct {
    const void *q, *k, *v;  // [tokens, heads, dim]; the heads of a token are contiguous, tokens have these strides:
    long q_stride, k_stride, v_stride;
    void *out;                // [tokens, heads, dim]
    const int *query_starts;  // [rows + 1]
    long rows, heads, kv_heads;
    long window;        // positions that are seen on each side; -1: all
    int causal;         // whether no later positions are seen
    const float *bias;  // [heads, 2 * reach + 1], by the distance from query to key; NULL: there is none
    long reach;
    scoring scoring;
    const unit *units;
} packed;

INLINE void attend_tile(const packed *p, scoring s, const unit *u, long head) {
    tile *t = scratch(sizeof(tile));
    long group = p->heads / p->kv_heads, rows = u->count * group, text = p->query_starts[u->row];
    long length = p->query_starts[u->row + 1] - text, window = p->window < 0 ? length : p->window;
    for (long r = 0; r < laid_rows(rows); r++) {
        long position = u->first + least(r, rows - 1) / group, token = text + position;
        long query = head * group + least(r, rows - 1) % group;
        t->query_rows[r] = at(p->q, token * p->q_stride + query * s.dim, s.kind);
        t->out_rows[r] = at_out(p->out, (token * p->heads + query) * s.dim, s.kind);
        t->first[r] = position > window ? (float)(position - window) : 0;
        t->last[r] = (float)(p->causal ? position : least(position + window, length - 1));
    }
    tile_begin(t, s, rows);
    long begin = (long)t->first[0] / KEYS * KEYS, end = (long)t->last[rows - 1] + 1, block = block_of(s);
    for (long start = begin, keys; start < end; start += keys) {
        keys = least(block - start % block, end - start);
        for (long i = 0; i < keys; i++) {
            t->key_rows[i] = at(p->k, (text + start + i) * p->k_stride + head * s.dim, s.kind);
            t->value_rows[i] = at(p->v, (text + start + i) * p->v_stride + head * s.dim, s.kind);
        }
        if (s.biased) lay_bias(t, bias_of(p->bias, p->reach, head), p->reach, start - u->first);
        tile_block(t, s, start, keys, rows, start == begin);
    }
    tile_end(t, s, rows);
}

INLINE void do_units(const packed *p, long first, long last, kind k) {
    scoring s = p->scoring;
    s.kind = s.outer = k;
    s.softcap = 0;
    s.sloping = 0;
    if (by_amx(s)) shape_for_tiles();
    for (long i = first; i < last; i++) attend_tile(p, s, p->units + i / p->kv_heads, i % p->kv_heads);
    if (by_amx(s)) release_registers();
}

static void do_float32(const void *task, long first, long last) { do_units(task, first, last, FLOAT32); }
static void do_bfloat16(const void *task, long first, long last) { do_units(task, first, last, BFLOAT16); }

// dim is a multiple of 8 up to MAX_DIM. Up to TILE heads share a key head; with a bias, none share one.
EXPORT void encoder_attention(const void *q, long q_stride, const void *k, long k_stride, const void *v, long v_stride,
                              void *out, const int *query_starts, long rows, long heads, long kv_heads, long dim,
                              float scale, long window, const float *bias, long reach, int causal, int kind) {
    packed p = {q, k, v, q_stride, k_stride, v_stride, out, query_starts, rows, heads, kv_heads, window, causal, bias, reach,
                {kind, dim, scale * LOG2_E, 0, bias != NULL, 0, 0, kind}, NULL};
    long step = queries_of_tile(query_starts[rows], heads / kv_heads, kv_heads), most = rows + query_starts[rows] / step, n = 0;
    unit *units = malloc(2 * most * sizeof(unit));
    if (units == NULL) abort();  // out of memory, where torch would throw
    for (long row = 0; row < rows; row++) {
        long length = query_starts[row + 1] - query_starts[row], seen = window < 0 ? length : least(length, 2 * window);
        for (long first = 0; first < length; first += step) {
            long count = least(step, length - first);
            units[n++] = (unit){(int)row, (int)first, (int)count, -1, seen * count};
        }
    }
    longest_first(units + most, units, n);
    p.units = units + most;
    spread(n * kv_heads, 1, kind == BFLOAT16 ? do_bfloat16 : do_float32, &p);
    free(units);
}

EXPORT void encoder_attention_words(const word *a) {
    encoder_attention(a[0].pointer, a[1].whole, a[2].pointer, a[3].whole, a[4].pointer, a[5].whole, a[6].pointer,
                      a[7].pointer, a[8].whole, a[9].whole, a[10].whole, a[11].whole, a[12].real, a[13].whole,
                      a[14].pointer, a[15].whole, (int)a[16].whole, (int)a[17].whole);
}
