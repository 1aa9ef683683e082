// Causal attention over the paged cache, in place, for any mix of rows that compute one new token and rows that
// compute many.
//
// A row with one new token, whose heads are whole vectors, is computed by `attention_row.h`, any other by
// `attention_tile.h`. Both add in the one order that the latter specifies, by positions alone. So a token's bits do
// not depend on how many new tokens its row has, where a prompt is cut, other rows, or threads.
//
// Rows of one new token that follow each other in a sequence, as guesses do, are computed together: they read the cache
// once. A unit of them is known by the last one, whose keys are those of all.
#include <stdlib.h>

#include "attention_row.h"
#include "attention_tile.h"
#include "threads.h"
#include "attention_units.h"
#include "call_arguments.h"

typedef struct {
    const void *q;              // [tokens, heads, dim]
    void *out;                  // as q
    const void *keys, *values;  // [blocks, kv_heads, block_size, row_numbers]
    const int *query_starts;    // [rows + 1]
    const int *kv_lens;         // [rows]
    const int *block_table;     // [rows, table_width]
    const float *sinks;         // [heads], or NULL
    const float *slopes;        // [heads], or NULL
    const float *bias;          // [heads, 2 * reach + 1], by the distance from query to key, or NULL
    long reach;
    const int *last;            // [tokens]: the last positions that tokens see; NULL: their own
    long table_width, rows, heads, kv_heads, block_size;
    long window;  // 0: none
    long lowest;  // the first position that is seen; a token before it sees itself alone
    scoring scoring;
    long queries;       // of a tile
    const unit *units;  // first those of tiles, which are all computed for one head before the next: keys that they
    long tiles;         // share stay in the cache of a core
    int *together;  // [rows]: how many rows are computed with a row of one new token that is the last of them
    // If the chunks of a row are units of their own:
    long chunks;   // the most chunks of a row
    float *parts;  // for each split row and those before it [kv_heads, chunks, rows, group, part_size]
    int *missing;  // [split, kv_heads]: chunks that are not yet computed
} paged;

INLINE long group_of(const paged *p) { return p->heads / p->kv_heads; }
INLINE long new_tokens(const paged *p, long row) { return p->query_starts[row + 1] - p->query_starts[row]; }
INLINE const float *sinks_of(const paged *p, long head) { return p->sinks ? p->sinks + head * group_of(p) : NULL; }
INLINE int is_single(const paged *p, long row) { return new_tokens(p, row) == 1 && p->scoring.dim % LANES == 0; }

// The first position that a query sees.
INLINE long first_seen(const paged *p, long position) {
    long first = p->window && position >= p->window ? position - p->window + 1 : 0;
    return first < p->lowest ? least(p->lowest, position) : first;
}

// The last position that a query sees; it does not fall within a row. That of a row with one new token is its own.
INLINE long last_seen(const paged *p, long token, long position) { return p->last ? p->last[token] : position; }

// The index of a head's key at `position`, and of its value; those up to the end of the cache block follow.
INLINE long place_of(const paged *p, kind k, long row, long head, long position) {
    long block = p->block_table[row * p->table_width + position / p->block_size];
    long place = (block * p->kv_heads + head) * p->block_size + position % p->block_size;
    return place * row_numbers(p->scoring.dim, k);
}

INLINE long left_in_block(const paged *p, long position) { return p->block_size - position % p->block_size; }

// Finds the keys and values of positions [start, start + count).
INLINE void find_rows(const paged *p, kind k, long row, long head, long start, long count, const void **keys,
                      const void **values) {
    for (long i = 0; i < count;) {
        long place = place_of(p, k, row, head, start + i), stop = least(count, i + left_in_block(p, start + i));
        for (; i < stop; i++, place += row_numbers(p->scoring.dim, k)) {
            keys[i] = at(p->keys, place, k);
            values[i] = at(p->values, place, k);
        }
    }
}

// Prefetches keys and values into the second-level cache.
INLINE void fetch_rows(const paged *p, kind k, long row, long head, long start, long stop) {
    for (long next; start < stop; start = next) {
        next = least(stop, start + left_in_block(p, start));
        long place = place_of(p, k, row, head, start);
        long bytes = (next - start) * row_numbers(p->scoring.dim, k) * width_of(k);
        for (long i = 0; i < bytes; i += 64) {
            _mm_prefetch((const char *)at(p->keys, place, k) + i, _MM_HINT_T1);
            _mm_prefetch((const char *)at(p->values, place, k) + i, _MM_HINT_T1);
        }
    }
}

// Has the keys and values of a block prefetched evenly while the one before it is computed: a burst would keep loads waiting.
// For AMX that is ahead of each product and of each vector of weights; not while values are transposed, which loads others.
INLINE void fetch_next(const paged *p, scoring s, tile *t, long row, long head, long start, long keys, long rows) {
    find_rows(p, s.kind, row, head, start, keys, t->next_rows, t->next_rows + keys);
    const long bytes = row_numbers(s.dim, s.kind) * width_of(s.kind), lanes = ceil_div(rows, LANES);
    t->stream = (row_stream){t->next_rows, t->next_rows + 2 * keys - 1, t->next_rows[0], keys > 0 ? bytes : 0, bytes};
    long times;
    if (by_amx(s)) times = ceil_div(lanes, 2) * (CHUNK + s.dim) / DEPTH + lanes * CHUNK / LANES;
    else {
        long words = in_pairs(s.kind) ? KEYS / 2 : KEYS, passes = lanes / VECS * (TALL / ROWS) + (lanes % VECS > 0);
        times = passes * (KEYS / TALL * ceil_div(words_of(s), PACE) + s.dim / TALL * (words / PACE));
    }
    t->lines = ceil_div(2 * keys * bytes / 64, times);
}

// Computes some of the new tokens of a row, with all query heads that share the key head.
INLINE void attend_tile(const paged *p, scoring s, const unit *u, long head) {
    tile *t = scratch(sizeof(tile));
    long group = group_of(p), rows = u->count * group, token = p->query_starts[u->row] + u->first;
    long position = p->kv_lens[u->row] - new_tokens(p, u->row) + u->first;
    for (long r = 0; r < laid_rows(rows); r++) {
        long i = least(r, rows - 1) / group, place = (token + i) * p->heads + head * group + least(r, rows - 1) % group;
        t->query_rows[r] = at(p->q, place * s.dim, s.outer);
        t->out_rows[r] = at_out(p->out, place * s.dim, s.outer);
        if (p->sinks) t->sinks[r] = p->sinks[place % p->heads] * LOG2_E;
        if (p->slopes) t->slopes[r] = p->slopes[place % p->heads] * LOG2_E;
        t->first[r] = (float)first_seen(p, position + i);
        t->last[r] = (float)last_seen(p, token + i, position + i);
    }
    long begin = first_seen(p, position) / KEYS * KEYS, block = block_of(s);
    long end = last_seen(p, token + u->count - 1, position + u->count - 1) + 1;
    if (!by_amx(s)) fetch_rows(p, s.kind, u->row, head, begin, least(begin + block, end));
    tile_begin(t, s, rows);
    for (long start = begin, keys; start < end; start += keys) {
        keys = least(block - start % block, end - start);
        fetch_next(p, s, t, u->row, head, start + keys, least(block, end - start - keys), rows);
        find_rows(p, s.kind, u->row, head, start, keys, t->key_rows, t->value_rows);
        if (s.biased) lay_bias(t, bias_of(p->bias, p->reach, head), p->reach, start - position);
        if (start % CHUNK == 0 && start > begin) tile_merge(t, s, rows);
        tile_block(t, s, start, keys, rows, start == begin || start % CHUNK == 0);
    }
    tile_end(t, s, rows);
}

// Finds the keys that a thread reads after those of a unit up to `stop`, for prefetches; `next` is its next unit.
INLINE void find_next(const paged *p, kind k, const unit *u, long head, long stop, const unit *next,
                      const void **rows) {
    const void *values[PAST];
    long left = u->first + u->count - stop;
    if (left == 0 && next && is_single(p, next->row)) {
        head = head + 1 < p->kv_heads ? head + 1 : 0;
        u = next, stop = next->first, left = next->count;
    }
    left = least(PAST, left);
    find_rows(p, k, u->row, head, stop, left, rows, values);
    for (long i = left; i < PAST; i++) rows[i] = rows[i - 1];
}

// The first row of a unit that has keys from `start` on; `start` is seen by the last one.
INLINE long first_row(const paged *p, const unit *u, long start) {
    long shortest = p->kv_lens[u->row] - p->together[u->row] + 1;
    return start < shortest ? 0 : start - shortest + 1;
}

// Computes the keys in [start, stop), which are of one chunk, for the rows that have some of them. In place of those
// before `start` that share its vector, and are not seen, the first one is repeated.
INLINE void attend_chunk(const paged *p, scoring s, row_memory *m, const unit *u, long head, long start, long stop,
                         const unit *next, float *parts) {
    long hidden = unseen_before(s, start), keys = stop - start + hidden;
    find_rows(p, s.kind, u->row, head, start, stop - start, m->rows + hidden, m->rows + keys + hidden);
    for (long i = 0; i < hidden; i++) m->rows[i] = m->rows[hidden], m->rows[keys + i] = m->rows[keys + hidden];
    find_next(p, s.kind, u, head, stop, next, m->rows + 2 * keys);
    long length = p->kv_lens[u->row], rows = p->together[u->row];
    m->distance = (float)(start / CHUNK * CHUNK - (length - 1));
    row_chunk(m, s, group_of(p), first_row(p, u, start), rows, (span){(start - hidden) % CHUNK, keys, hidden},
              stop - (length - rows + 1), parts);
}

// Merges the parts of a chunk that begins at `start` into those of the chunks before it.
INLINE void merge_chunk(const paged *p, scoring s, const unit *u, long start, float *into, const float *next) {
    long first = first_row(p, u, start), heads = (p->together[u->row] - first) * group_of(p);
    long before = first * group_of(p) * part_size(s);
    merge_parts(into + before, next + before, s, heads);
}

// Writes the results of a unit's rows.
INLINE void finish_rows(const paged *p, scoring s, const unit *u, long head, const float *parts) {
    long group = group_of(p), rows = p->together[u->row], token = p->query_starts[u->row] - rows + 1;
    for (long row = 0; row < rows; row++, token++, parts += group * part_size(s))
        finish_parts(at_out(p->out, (token * p->heads + head * group) * s.dim, s.outer), parts, s, group,
                     sinks_of(p, head));
}

// Computes one of a row's chunks; the thread that computes the last one merges them all.
INLINE void attend_split(const paged *p, scoring s, row_memory *m, const unit *u, long head, const unit *next) {
    long rows = p->together[u->row], size = rows * group_of(p) * part_size(s), of = u->split * p->kv_heads + head;
    long length = p->kv_lens[u->row], before = first_seen(p, length - 1) / CHUNK;
    long place = (u->row - rows + 1) * p->kv_heads + head * rows;  // in parts of single rows
    float *parts = p->parts + place * p->chunks * group_of(p) * part_size(s);
    attend_chunk(p, s, m, u, head, u->first, u->first + u->count, next, parts + (u->first / CHUNK - before) * size);
    if (__atomic_sub_fetch(&p->missing[of], 1, __ATOMIC_ACQ_REL) > 0) return;
    for (long c = 1; c < ceil_div(length, CHUNK) - before; c++)
        merge_chunk(p, s, u, (before + c) * CHUNK, parts, parts + c * size);
    finish_rows(p, s, u, head, parts);
}

// Computes the new tokens of rows that have only one.
INLINE void attend_rows(const paged *p, scoring s, const unit *u, long head, const unit *next) {
    long group = group_of(p), rows = p->together[u->row], token = p->query_starts[u->row] - rows + 1;
    row_memory *m = row_begin(s, rows * group);
    for (long row = 0; row < rows; row++)
        row_queries(m, s, group, row * group, at(p->q, ((token + row) * p->heads + head * group) * s.dim, s.outer));
    m->slopes = p->slopes ? p->slopes + head * group : NULL;
    if (p->bias) m->bias = p->bias + head * (2 * p->reach + 1), m->reach = p->reach;
    if (u->split >= 0) {
        attend_split(p, s, m, u, head, next);
        return;
    }
    float *others = m->parts + rows * group * part_size(s);
    long end = u->first + u->count;
    for (long start = u->first, stop; start < end; start = stop) {
        stop = least(end, (start / CHUNK + 1) * CHUNK);
        attend_chunk(p, s, m, u, head, start, stop, next, start == u->first ? m->parts : others);
        if (start != u->first) merge_chunk(p, s, u, start, m->parts, others);
    }
    finish_rows(p, s, u, head, m->parts);
}

// Sets up the registers of AMX for a unit, unless they were set up for such a one before.
INLINE void shape_for(const paged *p, const unit *u, long *shaped) {
    long heads = is_single(p, u->row) ? p->together[u->row] * group_of(p) : 0;
    if (heads == *shaped) return;
    *shaped = heads;
    if (heads) shape_for_heads(heads);
    else shape_for_tiles();
}

// The unit and the head of number i.
INLINE const unit *unit_of(const paged *p, long i, long *head) {
    long of_tiles = p->tiles * p->kv_heads;
    *head = i < of_tiles ? i / p->tiles : (i - of_tiles) % p->kv_heads;
    return p->units + (i < of_tiles ? i % p->tiles : p->tiles + (i - of_tiles) / p->kv_heads);
}

INLINE void do_units(const paged *p, long first, long last, kind k) {
    scoring s = p->scoring;
    s.kind = k;
    if (k != INT8) s.outer = k;
    long shaped = -1;  // heads of their own that registers were set up for; 0: tiles; -1: nothing
    for (long i = first; i < last; i++) {
        long head, other;
        const unit *u = unit_of(p, i, &head), *next = i + 1 < last ? unit_of(p, i + 1, &other) : NULL;
        if (by_amx(s)) shape_for(p, u, &shaped);
        if (is_single(p, u->row)) attend_rows(p, s, u, head, next);
        else attend_tile(p, s, u, head);
    }
    if (by_amx(s)) release_registers();
}

static void do_float32(const void *task, long first, long last) { do_units(task, first, last, FLOAT32); }
static void do_bfloat16(const void *task, long first, long last) { do_units(task, first, last, BFLOAT16); }
static void do_int8(const void *task, long first, long last) { do_units(task, first, last, INT8); }

static long tile_units(const paged *p, long row, unit *units) {
    long tokens = new_tokens(p, row), step = p->queries, before = p->kv_lens[row] - tokens, n = 0;
    for (long first = 0; first < tokens; first += step) {
        long count = least(step, tokens - first), end = first + count - 1;
        long stop = last_seen(p, p->query_starts[row] + end, before + end) + 1;
        long lanes = ceil_div(count * group_of(p), LANES), keys = stop - first_seen(p, before + first);
        units[n++] = (unit){(int)row, (int)first, (int)count, -1, keys * (1 + lanes * LANES / 2)};
    }
    return n;
}

static long row_units(const paged *p, long row, unit *units, int split) {
    long length = p->kv_lens[row], n = 0;
    for (long first = first_seen(p, length - 1), stop; first < length; first = stop) {
        stop = split ? least(length, (first / CHUNK + 1) * CHUNK) : length;
        long keys = stop - first;
        units[n++] = (unit){(int)row, (int)first, (int)keys, split ? (int)row : -1, keys * p->together[row]};
    }
    return n;
}

// Whether a row goes on where the one before it ends, in the same cache blocks. Slopes, biases and windows differ by
// position.
INLINE int follows(const paged *p, long row) {
    const int *table = p->block_table + row * p->table_width;
    long before = p->kv_lens[row - 1];
    return p->slopes == NULL && p->bias == NULL && is_single(p, row) && is_single(p, row - 1) && p->kv_lens[row] == before + 1 &&
           first_seen(p, before) == 0 &&
           memcmp(table, table - p->table_width, ceil_div(before, p->block_size) * sizeof(int)) == 0;
}

// Finds rows that are computed together; others have 0. -> how many units there are of rows of one new token.
static long find_together(const paged *p) {
    long most = TILE / group_of(p), n = 0;
    for (long row = 0; row < p->rows; row++) {
        p->together[row] = is_single(p, row);
        n += p->together[row];
        if (row == 0 || p->together[row - 1] >= most || !follows(p, row)) continue;
        p->together[row] += p->together[row - 1];
        p->together[row - 1] = 0;
        n--;
    }
    return n;
}

// Whether chunks are units of their own: if there are few rows, all with one new token.
static int is_split(const paged *p, long singles) {
    return p->query_starts[p->rows] == p->rows && singles > 0 && singles * p->kv_heads < 4 * threads && p->chunks > 1;
}

enum {
    SMALL = 512,  // keys of all heads that one thread has computed before another wakes up
    SHARES = 16,  // at least so many times a thread takes units, if there are enough: it prefetches for its next one
};

static const work works[] = {[FLOAT32] = do_float32, [BFLOAT16] = do_bfloat16, [INT8] = do_int8};

static void run(paged *p, int split, unit *units, unit *sorted) {
    long n = 0, cost = 0, most = 0;
    for (long row = 0; row < p->rows; row++)
        if (!is_single(p, row)) n += tile_units(p, row, units + n);
    p->tiles = n;
    for (long row = 0; row < p->rows; row++)
        if (p->together[row]) n += row_units(p, row, units + n, split);
    for (long i = 0; i < n; i++) {
        cost += units[i].cost;
        if (units[i].cost > most) most = units[i].cost;
    }
    longest_first(sorted, units, p->tiles);
    longest_first(sorted + p->tiles, units + p->tiles, n - p->tiles);
    p->units = sorted;
    long all = n * p->kv_heads, grain = 1;
    if (cost * p->kv_heads < SMALL) grain = all;
    else if (most > 0) grain += cost * p->kv_heads / (most * threads * SHARES);
    spread(all, grain, works[p->scoring.kind], p);
}

static void run_split(paged *p, unit *units, unit *sorted) {
    long parts = p->rows * p->kv_heads;
    p->parts = malloc(parts * p->chunks * group_of(p) * part_size(p->scoring) * sizeof(float));
    p->missing = malloc(parts * sizeof(int));
    if (p->parts == NULL || p->missing == NULL) abort();
    for (long i = 0; i < parts; i++) {
        long length = p->kv_lens[i / p->kv_heads];
        p->missing[i] = (int)(ceil_div(length, CHUNK) - first_seen(p, length - 1) / CHUNK);
    }
    run(p, 1, units, sorted);
    free(p->parts);
    free(p->missing);
}

// q and out [tokens, heads, dim], kv [2, blocks, kv_heads, block_size, row_numbers], all contiguous. dim is a multiple of
// 8 up to MAX_DIM, and up to TILE heads share a key head. softcap and window are 0 if there are none, and sinks [heads]
// and slopes [heads] NULL. So is last [tokens], which may not be given beside slopes, and bias, beside which no heads may
// share a key head. lowest: as in `paged`. kv is of the kind of q, or INT8.
EXPORT void attention(const void *q, void *out, const void *kv, long blocks, long kv_heads, long block_size, long dim,
                      long heads, const int *query_starts, const int *kv_lens, const int *block_table,
                      long table_width, long rows, float scale, float softcap, long window, int kind, int cached,
                      const float *sinks, const float *slopes, const int *last, long lowest, const float *bias,
                      long reach) {
    long half = blocks * kv_heads * block_size * row_numbers(dim, cached);
    paged p = {.q = q, .out = out, .keys = kv, .values = at(kv, half, cached),
               .query_starts = query_starts, .kv_lens = kv_lens, .block_table = block_table,
               .table_width = table_width, .rows = rows, .heads = heads, .kv_heads = kv_heads,
               .block_size = block_size, .window = window, .sinks = sinks, .slopes = slopes, .last = last,
               .lowest = lowest, .bias = bias, .reach = reach,
               .scoring = {cached, dim, scale * LOG2_E, softcap, bias != NULL, sinks != NULL, slopes != NULL, kind}};
    p.queries = queries_of_tile(query_starts[rows], group_of(&p), kv_heads);
    long most = rows + query_starts[rows] / p.queries;  // units, if none is split
    for (long row = 0; row < rows; row++) {
        long chunks = ceil_div(kv_lens[row], CHUNK);
        if (chunks > p.chunks) p.chunks = chunks;
    }
    p.together = malloc(rows * sizeof(int));
    if (p.together == NULL) abort();  // out of memory, where torch would throw
    int split = is_split(&p, find_together(&p));
    if (split) most = rows * p.chunks;
    unit *units = malloc(2 * most * sizeof(unit));
    if (units == NULL) abort();
    if (split) run_split(&p, units, units + most);
    else run(&p, 0, units, units + most);
    free(units);
    free(p.together);
}

EXPORT void attention_words(const word *a) {
    attention(a[0].pointer, a[1].pointer, a[2].pointer, a[3].whole, a[4].whole, a[5].whole, a[6].whole, a[7].whole,
              a[8].pointer, a[9].pointer, a[10].pointer, a[11].whole, a[12].whole, a[13].real, a[14].real,
              a[15].whole, (int)a[16].whole, (int)a[17].whole, a[18].pointer, a[19].pointer, a[20].pointer,
              a[21].whole, a[22].pointer, a[23].whole);
}
