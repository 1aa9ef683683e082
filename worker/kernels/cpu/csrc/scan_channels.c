// The selective scan of the first Mamba, token by token. A state s [size] of a channel, each number of which forgets at
// its own speed, adds the value v of a token, times its time step, under keys b that all channels share, and is read by
// queries c that all share, too:
//     s <- e^(speed * time) * s + b (time * v);  out = c s + skip * v
// The numbers of a state lie in a column, and neighbouring channels side by side. A slab of some channels stays in the
// nearest cache while all tokens of a step pass, and a state is read and written once for each token.
#include "functions.h"
#include "sequences.h"
#include "threads.h"
#include "call_arguments.h"

typedef struct {
    const void *x;  // [tokens, channels]
    long x_stride;
    const void *steps;  // [tokens, channels]: time = softplus(step + shift)
    long steps_stride;
    const void *keys, *queries;  // [tokens, size]
    long keys_stride, queries_stride;
    const float *speeds;          // [size, channels]
    const float *shifts, *skips;  // [channels]
    float *states;                // [places, size, channels]
    long place_stride;
    sequences rows;
    void *out;  // [tokens, channels]
    long size, channels, slabs;
    kind k;
} scan;

enum {
    VECTORS = LANES == 16 ? 4 : 2,  // of a slab
    SLAB = VECTORS * LANES,
    CHUNK = 32,  // tokens whose keys and queries are prepared at a time
};

// Forgets, adds `taught` under the key, and asks: asked = c S.
INLINE void pass(float *state, long stride, const float *speeds, long speeds_stride, const float *key, const vec *time,
                 const vec *taught, vec *asked, long size, int vectors, long lanes) {
    const float *query = key + size;
    for (int v = 0; v < vectors; v++) asked[v] = vec_zero();
    for (long i = 0; i < size; i++) {
        for (int v = 0; v < vectors; v++) {
            float *place = state + i * stride + v * LANES;
            vec speed = vec_load_upto(speeds + i * speeds_stride + v * LANES, lanes, FLOAT32);
            vec x = vec_mul(vec_load_upto(place, lanes, FLOAT32), vec_exp2(vec_mul(speed, time[v]), FLOAT32));
            x = vec_fma(vec_all(key[i]), taught[v], x);
            asked[v] = vec_fma(vec_all(query[i]), x, asked[v]);
            vec_store_upto(place, x, lanes, FLOAT32);
        }
    }
}

INLINE float *state_at(const scan *s, long place, long channel) {
    return s->states + place * s->place_stride + channel;
}

// Computes `vectors` vectors of channels, from `channel` on; lanes: the channels of a vector that is alone.
INLINE void read_on(const scan *s, long row, long channel, int vectors, long lanes, kind k) {
    long first = s->rows.starts[row], count = count_of(&s->rows, row), size = s->size, width = s->channels;
    long held = vectors * LANES, columns = lanes == LANES ? held : lanes;
    long source = source_of(&s->rows, row), target = target_of(&s->rows, row);
    if (!count) return;
    float *state = state_at(s, source, channel);
    float *keys = scratch((CHUNK * 2 + held) * size * sizeof(float)), *slab = keys + CHUNK * 2 * size;
    long stride = held;
    if (begins(&s->rows, row)) memset(slab, 0, size * held * sizeof(float));
    else if (count == 1 && source == target) slab = state, stride = width;
    else copy_columns(slab, held, state, width, size, columns);

    vec time[VECTORS], taught[VECTORS], asked[VECTORS], value[VECTORS];
    for (long j = 0; j < count; j++) {
        long token = first + j;
        for (long i = j; j % CHUNK == 0 && i < least(count, j + CHUNK); i++) {
            float *key = keys + (i - j) * 2 * size;
            widen_row(key, at(s->keys, (first + i) * s->keys_stride, k), size, k);
            widen_row(key + size, at(s->queries, (first + i) * s->queries_stride, k), size, k);
        }
        for (int v = 0; v < vectors; v++) {
            long place = channel + v * LANES;
            vec step = vec_load_upto(at(s->steps, token * s->steps_stride + place, k), lanes, k);
            time[v] = vec_softplus(vec_add(step, vec_load_upto(s->shifts + place, lanes, FLOAT32)));
            value[v] = vec_load_upto(at(s->x, token * s->x_stride + place, k), lanes, k);
            taught[v] = vec_mul(time[v], value[v]);
            time[v] = vec_mul(time[v], vec_all(1.44269504f));  // for powers of 2
        }
        pass(slab, stride, s->speeds + channel, width, keys + j % CHUNK * 2 * size, time, taught, asked, size, vectors,
             lanes);
        for (int v = 0; v < vectors; v++) {
            long place = channel + v * LANES;
            vec out = vec_fma(vec_load_upto(s->skips + place, lanes, FLOAT32), value[v], asked[v]);
            vec_store_upto(at_out(s->out, token * width + place, k), out, lanes, k);
        }
        for (int i = 0; i < KEPT; i++)
            if (kept_count(&s->rows, row, i) == j + 1)
                copy_columns(state_at(s, kept_place(&s->rows, row, i), channel), width, slab, stride, size, columns);
    }
    if (slab == state || target < 0) return;
    copy_columns(state_at(s, target, channel), width, slab, stride, size, columns);
}

INLINE void read_slab(const scan *s, long row, long slab, kind k) {
    long channel = slab * SLAB, stop = least(s->channels, channel + SLAB);
    if (stop - channel == SLAB) {
        read_on(s, row, channel, VECTORS, LANES, k);
        return;
    }
    for (; channel < stop; channel += LANES) {
        if (stop - channel >= LANES) read_on(s, row, channel, 1, LANES, k);
        else read_on(s, row, channel, 1, stop - channel, k);
    }
}

static void read_units(const void *task, long first, long last) {
    const scan *s = task;
    for (long unit = first; unit < last; unit++) {
        if (s->k == FLOAT32) read_slab(s, unit / s->slabs, unit % s->slabs, FLOAT32);
        else read_slab(s, unit / s->slabs, unit % s->slabs, BFLOAT16);
    }
}

// out is contiguous, and so are speeds and a place of `states`.
EXPORT void channel_scan(const void *x, long x_stride, const void *steps, long steps_stride, const void *keys,
                         long keys_stride, const void *queries, long queries_stride, const float *speeds,
                         const float *shifts, const float *skips, float *states, long place_stride,
                         const int32_t *starts, const int64_t *positions, const int32_t *table, long table_stride,
                         void *out, long rows, long size, long channels, int kind) {
    scan s = {x, x_stride, steps, steps_stride, keys, queries, keys_stride, queries_stride, speeds, shifts, skips,
              states, place_stride, {starts, positions, table, table_stride}, out, size, channels,
              ceil_div(channels, SLAB), kind};
    spread(rows * s.slabs, 1, read_units, &s);
}

EXPORT void channel_scan_words(const word *a) {
    channel_scan(a[0].pointer, a[1].whole, a[2].pointer, a[3].whole, a[4].pointer, a[5].whole, a[6].pointer,
                 a[7].whole, a[8].pointer, a[9].pointer, a[10].pointer, a[11].pointer, a[12].whole, a[13].pointer,
                 a[14].pointer, a[15].pointer, a[16].whole, a[17].pointer, a[18].whole, a[19].whole, a[20].whole,
                 (int)a[21].whole);
}
