// What a thread keeps while it computes rows of one new token, and how it prefetches the rows of the cache.
#pragma once

#include "attention_tile.h"

enum {
    HELD = 17 << 10,         // bytes of values that are used together: they stay in the first-level cache
    AHEAD = 16 << 10,        // bytes between a prefetch and its use,
    MOST_AHEAD = 128,        // which are so many rows at most
    PAST = MOST_AHEAD + 16,  // 16: the most lanes
    HEADS = 4,               // heads that are computed at a time
    SQUARES = 2,             // vectors of keys that they are multiplied with at a time,
    STRIPE = 64,             // over so many columns: those stay in the first-level cache
    HEAD_VECS = 8,           // vectors of dimensions at a time, at most
};

// Vectors of dimensions whose sums fill the registers best, beside those of so many heads.
INLINE int vecs_beside(int heads) {
    if (LANES == 16) return heads <= 2 ? HEAD_VECS : HEAD_VECS / 2;
    return heads == 1 ? 8 : heads == 4 ? 2 : 4;
}

// The memory of one thread. The caller fills in the rows: keys, then values, then PAST rows that are read next. A head
// is one of those of any of the queries that are computed together.
typedef struct {
    const void *rows[2 * CHUNK + PAST];
    const void *const *values;  // those of `rows`
    row_stream stream;          // `rows`, while they are computed for the first heads
    long held;                  // values that are used together, a power of 2
    float *queries;             // [head][word], each head padded to whole vectors; for AMX [`beside` heads][word][head]
    float *factors;             // [head]: of queries in words, their scales times `scale`
    float *scores;              // [head][CHUNK], by position in the chunk; then weights, or words of them
    float *decays;              // [head][CHUNK / KEYS]
    float *parts;               // [2][head][part_size]
    float *raw;                 // for AMX: [`beside` heads][key][head], scores as they are stored
    long beside;                // heads that AMX multiplies with keys at a time
    const float *slopes;        // [head], or NULL; the caller fills them in, too, and
    const float *bias;          // [head][2 * reach + 1], or NULL,
    long reach;
    float distance;             // from the query to the first position of the chunk, at most 0
} row_memory;

// Keys of a chunk: `count` from the position `first` in it, a multiple of LANES. The first `hidden` are not seen.
typedef struct {
    long first, count, hidden;
} span;

INLINE long padded(long words) { return ceil_div(words, LANES) * LANES; }

// The state of a head after some keys: the largest score, the sum of weights, and the sum of weighted values.
INLINE long part_size(scoring s) { return 2 + s.dim; }

// The first key of a chunk or a window shares a register with those before it.
INLINE long unseen_before(scoring s, long start) { return start % (by_amx(s) ? DEPTH : LANES); }

INLINE row_memory *row_begin(scoring s, long heads) {
    const long beside = beside_of(heads), raw = by_amx(s) ? CHUNK : 0;
    if (by_amx(s)) heads = (ceil_div(heads, SPAN) + 1) * SPAN;  // so many are read from any one on
    long stride = padded(words_of(s)), floats = heads * (stride + 1 + CHUNK + raw + CHUNK / KEYS + 2 * part_size(s));
    row_memory *m = scratch(sizeof(row_memory) + floats * sizeof(float));
    m->beside = beside;
    m->queries = (float *)(m + 1);
    m->stream.bytes = row_numbers(s.dim, s.kind) * width_of(s.kind);
    for (m->held = KEYS; m->held * m->stream.bytes > HELD;) m->held /= 2;
    m->scores = m->queries + heads * stride;
    m->decays = m->scores + heads * CHUNK;
    m->parts = m->decays + heads * (CHUNK / KEYS);
    m->factors = m->parts + heads * 2 * part_size(s);
    m->raw = m->factors + heads;
    return m;
}

// Lays the words of a query where those of heads alternate.
INLINE void lay_query(float *to, const void *query, long words, long beside) {
    for (long i = 0; i < words; i++) memcpy(to + i * beside, (const char *)query + i * 4, 4);
}

// The queries of a row [group, dim], whose first head is `head`.
INLINE void row_queries(const row_memory *m, scoring s, long group, long head, const void *query) {
    const long words = words_of(s), stride = padded(words), beside = m->beside;
    for (long last = head + group; head < last; head++, query = at(query, s.dim, s.outer)) {
        float *to = m->queries + head * stride;
        if (by_amx(s)) lay_query(m->queries + head / beside * beside * words + head % beside, query, words, beside);
        else if (s.kind == INT8) {
            m->factors[head] = write_words((int16_t *)to, query, s.dim, s.outer) * s.scale;
            memset(to + words, 0, (stride - words) * sizeof(float));
        } else
            for (long i = 0; i < words; i += LANES)
                vec_store(to + i, load_words(query, i, words - i, s), FLOAT32);
    }
}

// Goes over `count` rows, from those on that lie AHEAD.
INLINE void stream_begin(row_stream *f, const void *const *rows, long count) {
    f->row = rows + least(MOST_AHEAD, AHEAD / f->bytes), f->last = f->row + count - 1;
    f->line = *f->row, f->left = f->bytes;
}

// How many of the heads [head, last) are computed at a time: about as many each time.
INLINE long heads_of(long head, long last) { return ceil_div(last - head, ceil_div(last - head, HEADS)); }
