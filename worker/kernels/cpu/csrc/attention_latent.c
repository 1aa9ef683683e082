// Causal latent attention over the paged cache, whose rows are key and value of all heads.
//
// The matrices that would make keys and values of a cached row are applied to the other side instead: a head's query
// is multiplied with its matrix of keys, so that it can be compared with latents as they lie, and the weighted sum of
// latents with its matrix of values. A token's bits are the same wherever its prompt is cut, for every token is computed
// in this one way (`latent_tile.h`), though a long prompt would need fewer products if keys and values were made.
//
// An indexer may have chosen the keys that a token reads (`token_indexer.c`). They take the places of all keys, in
// ascending order, so that a token for which all are chosen has the bits of one that reads all.
#include <limits.h>
#include <stdlib.h>

#include "latent_heads.h"
#include "latent_tile.h"
#include "rotation.h"
#include "threads.h"
#include "attention_units.h"
#include "call_arguments.h"

enum {
    BLOCK_ROWS = 4096,      // queries of all heads that are computed at once
    TURNED_TOKENS = 16,     // tokens whose keys and queries are turned at a time
    SPLIT_MOST = 64 << 20,  // bytes of states, if the chunks of a tile are units of their own
    SMALL_COST = 2048,      // products of a query and a key that one thread has computed before another wakes up
};

typedef struct {
    const char *q;       // [tokens, heads, nope + rope]
    const char *latent;  // [tokens, rank + rope]
    long latent_stride;  // in bytes
    paged_rows paged;    // rows [rank + rope]
    const int64_t *slots;     // [tokens]
    const int *query_starts;  // [rows + 1]
    const int *kv_lens;       // [rows]
    const int *chosen;        // [tokens, most]: the keys of tokens that see more than `most`; NULL: all are read
    long lowest;         // the first position that is read, where nothing is chosen
    long most, rows, heads, nope, rank;
    rotation rotation;  // of the last columns of queries and cached rows
    scoring scoring;    // of cached rows
    by_head absorb, expand;  // the products before attention, and after
    // Of the tokens that are computed at once:
    long first, count;
    char *absorbed;     // [count, heads, rank + rope]: queries as they are compared with cached rows
    char *mixed;        // [count, heads, rank]: weighted sums of latents
    const unit *tiles;  // rows of `absorbed` that belong to one sequence
    // If the chunks of a tile are units of their own:
    long chunks;    // the most chunks of a tile
    long room;      // floats of the states after a chunk
    float *states;  // [tile, chunk, room]
    int *missing;   // [tile]: chunks that are not yet computed
} latent_job;

INLINE long row_bytes(const latent_job *j) { return j->paged.row_bytes; }

// The first positions of a sequence that are not read, if it has others.
INLINE long skipped(const latent_job *j, long row) { return least(j->lowest, j->kv_lens[row] - 1); }

// The keys of its sequence that a token sees. One before all that are read has some result of no meaning.
INLINE long seen_by(const latent_job *j, long row, long token) {
    long seen = j->kv_lens[row] - (j->query_starts[row + 1] - token) + 1 - skipped(j, row);
    return seen < 1 ? 1 : seen;
}

// Writes a token's row to the cache, and the turned parts of its queries behind those to be multiplied.
INLINE void turn_token(const latent_job *j, long token, kind k) {
    long rope = j->rotation.dim, rank = j->rank;
    const char *latent = j->latent + token * j->latent_stride;
    char *row = j->paged.cache + j->slots[token] * row_bytes(j);
    memcpy(row, latent, rank * width_of(k));
    rotate_head(&j->rotation, at(latent, rank, k), at_out(row, rank, k), token, k, k);
    for (long head = 0; head < j->heads; head++) {
        const void *query = at(j->q, (token * j->heads + head) * (j->nope + rope) + j->nope, k);
        long place = ((token - j->first) * j->heads + head) * (rank + rope) + rank;
        rotate_head(&j->rotation, query, at_out(j->absorbed, place, k), token, k, k);
    }
}

static void prepare_units(const void *task, long first, long last) {
    const latent_job *j = task;
    long turns = ceil_div(j->count, TURNED_TOKENS);
    for (long unit = first; unit < least(turns, last); unit++) {
        long end = j->first + least(j->count, (unit + 1) * TURNED_TOKENS);
        for (long token = j->first + unit * TURNED_TOKENS; token < end; token++) {
            if (j->scoring.kind == BFLOAT16) turn_token(j, token, BFLOAT16);
            else turn_token(j, token, FLOAT32);
        }
    }
    if (last > turns) multiply_heads(&j->absorb, first > turns ? first - turns : 0, last - turns);
}

static void expand_units(const void *task, long first, long last) {
    multiply_heads(&((const latent_job *)task)->expand, first, last);
}

INLINE long token_of(const latent_job *j, const unit *u, long row) { return j->first + (u->first + row) / j->heads; }

// The number of keys that a row of a tile reads.
INLINE long keys_of(const latent_job *j, const unit *u, long row) {
    return least(seen_by(j, u->row, token_of(j, u, row)), j->most);
}

// Finds the rows of keys [start, stop) of a tile: of all, or of those that were chosen for its only token.
INLINE void tile_keys(const latent_job *j, const unit *u, long start, long stop, const char **to) {
    long token = token_of(j, u, 0);
    if (seen_by(j, u->row, token) <= j->most) {
        cached_rows(&j->paged, u->row, start + skipped(j, u->row), stop + skipped(j, u->row), to);
        return;
    }
    const int *chosen = j->chosen + token * j->most;
    for (; start < stop; start++) cached_rows(&j->paged, u->row, chosen[start], chosen[start] + 1, to++);
}

// Finds the rows of keys [start, start + count), and those that fill the last side; -> their number. Those up to `end`
// that follow in the next chunk are prefetched meanwhile; and if it is the `first` chunk, so are most of its own.
INLINE long find_rows(const latent_job *j, latent_memory *m, const latent_form *f, scoring s, const unit *u, long start,
                      long count, long end, int first) {
    long all = filled(count), following = least(end - start - count, CHUNK);
    tile_keys(j, u, start, start + count, m->keys);
    for (long i = count; i < all; i++) m->keys[i] = m->keys[i - 1];
    tile_keys(j, u, start + count, start + count + following, m->keys + all);
    fetch_rows(m, f, s, first ? SIDE : all, all + following, all);
    return all;
}

// Computes a chunk of a tile that sees keys up to `end`; `first`: no other was computed before it.
INLINE void attend_chunk(const latent_job *j, latent_memory *m, const latent_form *f, scoring s, const unit *u,
                         long chunk, long end, int first, float *states) {
    long start = chunk * CHUNK, count = least(CHUNK, end - start);
    long all = find_rows(j, m, f, s, u, start, count, end, first);
    latent_chunk(m, f, s, start, count, all, states);
}

INLINE void finish_tile_rows(const latent_job *j, const latent_form *f, scoring s, const unit *u, const float *states) {
    for (long row = 0; row < f->rows; row++) {
        void *out = at_out(j->mixed, (u->first + row) * f->rank, s.kind);
        finish_row(out, states + row * state_size(f), f, s);
    }
}

INLINE latent_memory *begin_tile(const latent_job *j, const latent_form *f, scoring s, const unit *u) {
    latent_memory *m = latent_begin(f);
    lay_queries(m, f, s, j->absorbed + u->first * row_bytes(j));
    for (long row = 0; row < f->rows; row++) m->seen[row] = keys_of(j, u, row);
    return m;
}

INLINE void attend_tile(const latent_job *j, const latent_form *f, scoring s, const unit *u) {
    latent_memory *m = begin_tile(j, f, s, u);
    long end = m->seen[f->rows - 1], size = f->rows * state_size(f);
    for (long chunk = 0; chunk * CHUNK < end; chunk++) {
        float *states = m->states + (chunk ? size : 0);
        attend_chunk(j, m, f, s, u, chunk, end, chunk == 0, states);
        if (chunk) merge_states(m->states, states, f);
    }
    finish_tile_rows(j, f, s, u, m->states);
}

// Computes some chunks of a tile; the thread that computes the last one merges them all.
INLINE void attend_split(const latent_job *j, const latent_form *f, scoring s, long tile, long chunk, long stop) {
    const unit *u = &j->tiles[tile];
    latent_memory *m = begin_tile(j, f, s, u);
    long end = m->seen[f->rows - 1], chunks = ceil_div(end, CHUNK), done = 0;
    float *states = j->states + tile * j->chunks * j->room;
    for (; chunk < least(chunks, stop); chunk++, done++)
        attend_chunk(j, m, f, s, u, chunk, least(end, stop * CHUNK), done == 0, states + chunk * j->room);
    if (done == 0 || __atomic_sub_fetch(&j->missing[tile], (int)done, __ATOMIC_ACQ_REL) > 0) return;
    for (long next = 1; next < chunks; next++) merge_states(states, states + next * j->room, f);
    finish_tile_rows(j, f, s, u, states);
}

INLINE void do_units(const latent_job *j, long first, long last, kind k) {
    latent_form f = {.scoring = j->scoring, .rank = j->rank};
    scoring s = j->scoring;
    s.kind = k;
    s.softcap = 0;
    for (long i = first, stop; i < last; i = stop) {
        long tile = j->states ? i / j->chunks : i;
        stop = j->states ? least(last, (tile + 1) * j->chunks) : i + 1;
        f.rows = j->tiles[tile].count;
        if (j->states) attend_split(j, &f, s, tile, i - tile * j->chunks, stop - tile * j->chunks);
        else attend_tile(j, &f, s, &j->tiles[tile]);
    }
}

static void do_float32(const void *task, long first, long last) { do_units(task, first, last, FLOAT32); }
static void do_bfloat16(const void *task, long first, long last) { do_units(task, first, last, BFLOAT16); }

// Divides the queries of tokens [begin, end) of a sequence into tiles as equal as possible; -> their number.
static long divide_queries(const latent_job *j, int row, long begin, long end, unit *tiles) {
    long all = (end - begin) * j->heads, count = ceil_div(all, LATENT_ROWS);
    for (long i = 0; i < count; i++) {
        long first = all * i / count, rows = all * (i + 1) / count - first;
        unit *u = &tiles[i];
        *u = (unit){row, (int)((begin - j->first) * j->heads + first), (int)rows, -1, 0};
        u->cost = rows * keys_of(j, u, rows - 1);
    }
    return count;
}

// Tokens for which keys were chosen have tiles of their own.
static long find_tiles(const latent_job *j, unit *tiles) {
    long n = 0, stop = j->first + j->count;
    for (int row = 0; row < j->rows; row++) {
        long begin = j->query_starts[row], end = least(j->query_starts[row + 1], stop);
        if (begin < j->first) begin = j->first;
        if (begin >= end) continue;
        long apart = begin + j->most - seen_by(j, row, begin) + 1;  // the first token for which keys were chosen
        if (apart > begin) n += divide_queries(j, row, begin, least(apart, end), tiles + n);
        for (long token = apart > begin ? apart : begin; token < end; token++)
            n += divide_queries(j, row, token, token + 1, tiles + n);
    }
    return n;
}

// Lets the chunks of tiles be units of their own, if there are few tiles.
static void split_tiles(latent_job *j, const unit *tiles, long n) {
    long rows = 0;
    j->chunks = 0;
    for (long i = 0; i < n; i++) {
        long chunks = ceil_div(keys_of(j, &tiles[i], tiles[i].count - 1), CHUNK);
        if (chunks > j->chunks) j->chunks = chunks;
        if (tiles[i].count > rows) rows = tiles[i].count;
    }
    latent_form f = {j->scoring, j->rank, rows};
    j->room = rows * state_size(&f);
    size_t bytes = n * j->chunks * j->room * sizeof(float);
    j->states = NULL;
    if (threads == 1 || n >= 4 * threads || j->chunks == 1 || bytes > SPLIT_MOST) return;
    j->states = malloc(bytes);
    j->missing = malloc(n * sizeof(int));
    if (j->states == NULL || j->missing == NULL) abort();  // out of memory, where torch would throw
    for (long i = 0; i < n; i++)
        j->missing[i] = (int)ceil_div(keys_of(j, &tiles[i], tiles[i].count - 1), CHUNK);
}

static void attend(latent_job *j, unit *tiles, unit *sorted) {
    long n = find_tiles(j, tiles), cost = 0;
    for (long i = 0; i < n; i++) cost += tiles[i].cost;
    longest_first(sorted, tiles, n);
    j->tiles = sorted;
    split_tiles(j, sorted, n);
    long units = j->states ? n * j->chunks : n, grain = 1;
    if (cost < SMALL_COST) grain = units;
    else if (j->states && units >= 4 * threads) grain = units / (2 * threads);
    spread(units, grain, j->scoring.kind == BFLOAT16 ? do_bfloat16 : do_float32, j);
    if (j->states == NULL) return;
    free(j->states);
    free(j->missing);
}

// Points products to the tokens that are computed at once; q and out are of all tokens.
static void point_products(latent_job *j, char *out) {
    long bytes = width_of(j->scoring.kind), query = (j->nope + j->rotation.dim) * bytes;
    by_head *a = &j->absorb, *e = &j->expand;
    long value = e->outputs * bytes;
    a->tokens = e->tokens = j->count;
    a->heads = e->heads = j->heads;
    a->x = j->q + j->first * j->heads * query;
    a->x_head = query, a->x_stride = j->heads * query;
    a->out = j->absorbed;
    a->out_head = row_bytes(j), a->out_stride = j->heads * row_bytes(j);
    e->x = j->mixed;
    e->x_head = j->rank * bytes, e->x_stride = j->heads * j->rank * bytes;
    e->out = out + j->first * j->heads * value;
    e->out_head = value, e->out_stride = j->heads * value;
}

static void compute(latent_job *j, long tokens, char *out) {
    long most = BLOCK_ROWS / j->heads * (1 + threads / 8);
    most = most < 1 ? 1 : least(most, tokens);
    long rows = most * j->heads, runs = j->chosen ? most : least(j->rows, most), tiles = runs + rows / LATENT_ROWS + 1;
    size_t absorbed = rows * row_bytes(j), mixed = rows * j->rank * width_of(j->scoring.kind);
    char *memory = malloc(absorbed + mixed + 2 * tiles * sizeof(unit) + 128);
    if (memory == NULL) abort();  // out of memory, where torch would throw
    j->absorbed = (char *)(((uintptr_t)memory + 63) / 64 * 64);
    j->mixed = j->absorbed + absorbed;
    unit *units = (unit *)(((uintptr_t)(j->mixed + mixed) + 63) / 64 * 64);
    for (j->first = 0; j->first < tokens; j->first += j->count) {
        j->count = least(most, tokens - j->first);
        point_products(j, out);
        spread(ceil_div(j->count, TURNED_TOKENS) + divide_heads(&j->absorb), 1, prepare_units, j);
        attend(j, units, units + tiles);
        spread(divide_heads(&j->expand), 1, expand_units, j);
    }
    free(memory);
}

// q [tokens, heads, nope + rope] and out [tokens, heads, value], contiguous, as is the cache; latent [tokens, rank +
// rope] has rows anywhere. keys: the heads' matrices [rank, nope], values: [value, rank], each filled up with rows to
// whole panels. rank is a multiple of 16, rope an even number up to MAX_DIM; `rotated` of its columns are turned.
// chosen [tokens, most] is what `choose_tokens` returned, or NULL.
EXPORT void attention_latent(const void *q, const void *latent, long latent_stride, const weights *keys,
                             const weights *values, long heads, long rope, long rank, long value, void *cache,
                             long block_size, const int64_t *slots, const float *cos_sin, long rotated,
                             const int *query_starts, const int *kv_lens, const int *block_table, long table_width,
                             long rows, long tokens, const int *chosen, long most, float scale, void *out,
                             long lowest) {
    kind k = keys->kind;
    latent_job j = {.q = q, .latent = latent, .latent_stride = latent_stride * width_of(k), .slots = slots,
                    .query_starts = query_starts, .kv_lens = kv_lens, .chosen = chosen, .lowest = lowest,
                    .most = chosen ? most : INT_MAX, .rows = rows, .heads = heads, .nope = keys->inputs, .rank = rank};
    j.paged = (paged_rows){cache, block_size, (rank + rope) * width_of(k), block_table, table_width};
    j.rotation = (rotation){.norm_kind = k, .cos_sin = cos_sin, .rotated = rotated, .dim = rope};
    j.scoring = (scoring){.kind = k, .dim = rank + rope, .scale = scale * LOG2_E};
    j.absorb.w = keys, j.absorb.outputs = rank;
    j.expand.w = values, j.expand.outputs = value;
    compute(&j, tokens, out);
}

EXPORT void attention_latent_words(const word *a) {
    attention_latent(a[0].pointer, a[1].pointer, a[2].whole, a[3].pointer, a[4].pointer, a[5].whole, a[6].whole,
                     a[7].whole, a[8].whole, a[9].pointer, a[10].whole, a[11].pointer, a[12].pointer, a[13].whole,
                     a[14].pointer, a[15].pointer, a[16].pointer, a[17].whole, a[18].whole, a[19].whole, a[20].pointer,
                     a[21].whole, a[22].real, a[23].pointer, a[24].whole);
}
