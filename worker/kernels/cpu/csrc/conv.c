// Short convolutions over the tokens of each sequence, channel by channel, which go on where the last step ended.
#include "functions.h"
#include "sequences.h"
#include "threads.h"
#include "call_arguments.h"

typedef struct {
    const void *x;  // [tokens, channels]
    long x_stride;
    const float *weight;  // [taps, channels], the oldest input first
    const float *bias;    // [channels]; NULL: there is none
    float *states;        // [places, taps - 1, channels]: the last inputs of a sequence, the oldest first
    long place_stride;
    sequences rows;
    void *out;  // [tokens, channels]
    long channels, taps, slabs;
    function f;
    kind k;
} convolution;

enum {
    SLAB = 16 * LANES,  // channels that a thread takes at a time
    AHEAD = 4,          // tokens from what is computed to what is prefetched
};

// The input of token j of a step; negative ones are those of the state.
INLINE vec input_at(const convolution *c, const char *x, const float *past, long j, long left, kind k) {
    if (j >= 0) return vec_load_upto(at(x, j * c->x_stride, k), left, k);
    return past == NULL ? vec_zero() : vec_load_upto(past + (c->taps - 1 + j) * c->channels, left, FLOAT32);
}

INLINE float *state_at(const convolution *c, long place, long channel) {
    return c->states + place * c->place_stride + channel;
}

// The last inputs of the first `count` tokens. Where the state before lies in the same place, what is read lies behind
// what is written.
INLINE void store_state(const convolution *c, float *state, const char *x, const float *past, long count, long left,
                        kind k) {
    for (long i = 0; i < c->taps - 1; i++)
        vec_store_upto(state + i * c->channels, input_at(c, x, past, count + i - (c->taps - 1), left, k), left, FLOAT32);
}

// A vector of channels of a row, or the `left` ones that are left of it.
typedef struct {
    long channel, left;
    const char *x;
    const float *past;  // the inputs before the first token; NULL: there are none
    char *out;
} strip;

INLINE strip strip_at(const convolution *c, long row, long channel, long left, kind k) {
    long first = c->rows.starts[row];
    const float *past = begins(&c->rows, row) ? NULL : state_at(c, source_of(&c->rows, row), channel);
    return (strip){channel, left, at(c->x, first * c->x_stride + channel, k), past, at_out(c->out, first * c->channels + channel, k)};
}

// Computes token j.
INLINE void convolve(const convolution *c, strip s, long j, function f, kind k) {
    vec sum = c->bias == NULL ? vec_zero() : vec_load_upto(c->bias + s.channel, s.left, FLOAT32);
    for (long tap = 0; tap < c->taps; tap++) {
        vec weight = vec_load_upto(c->weight + tap * c->channels + s.channel, s.left, FLOAT32);
        sum = vec_fma(input_at(c, s.x, s.past, j + tap - (c->taps - 1), s.left, k), weight, sum);
    }
    _mm_prefetch((const char *)at(s.x, (j + AHEAD) * c->x_stride, k), _MM_HINT_T0);
    vec_store_upto(at_out(s.out, j * c->channels, k), vec_function(sum, f, k), s.left, k);
}

INLINE void store_states(const convolution *c, long row, strip s, kind k) {
    long count = count_of(&c->rows, row), target = target_of(&c->rows, row);
    for (int i = 0; i < KEPT; i++) {
        long kept = kept_count(&c->rows, row, i), place = kept_place(&c->rows, row, i);
        if (kept) store_state(c, state_at(c, place, s.channel), s.x, s.past, kept, s.left, k);
    }
    if (target >= 0) store_state(c, state_at(c, target, s.channel), s.x, s.past, count, s.left, k);
}

// Token by token: rows lie so far apart that processors do not read them ahead by themselves.
INLINE void convolve_slab(const convolution *c, long row, long slab, function f, kind k) {
    long count = count_of(&c->rows, row), begin = slab * SLAB, stop = least(c->channels, begin + SLAB);
    if (!count) return;
    for (long j = 0; j < count; j++)
        for (long channel = begin; channel < stop; channel += LANES) {
            if (stop - channel >= LANES) convolve(c, strip_at(c, row, channel, LANES, k), j, f, k);
            else convolve(c, strip_at(c, row, channel, stop - channel, k), j, f, k);
        }
    for (long channel = begin; channel < stop; channel += LANES)
        store_states(c, row, strip_at(c, row, channel, least(LANES, stop - channel), k), k);
}

static void convolve_units(const void *task, long first, long last) {
    const convolution *c = task;
    for (long unit = first; unit < last; unit++) {
        long row = unit / c->slabs, slab = unit % c->slabs;
        if (c->k == FLOAT32 && c->f == SILU) convolve_slab(c, row, slab, SILU, FLOAT32);
        else if (c->k == FLOAT32) convolve_slab(c, row, slab, NONE, FLOAT32);
        else if (c->f == SILU) convolve_slab(c, row, slab, SILU, BFLOAT16);
        else convolve_slab(c, row, slab, NONE, BFLOAT16);
    }
}

enum { GRAIN = 4096 };  // elements that are worth handing to another thread

// f: NONE or SILU. out is contiguous.
EXPORT void causal_conv(const void *x, long x_stride, const float *weight, const float *bias, float *states,
                        long place_stride, const int32_t *starts, const int64_t *positions, const int32_t *table,
                        long table_stride, void *out, long rows, long tokens, long channels, long taps, int f, int kind) {
    convolution c = {x, x_stride, weight, bias, states, place_stride, {starts, positions, table, table_stride},
                     out, channels, taps, ceil_div(channels, SLAB), f, kind};
    spread(rows * c.slabs, grain_of(GRAIN, SLAB * ceil_div(tokens, rows)), convolve_units, &c);
}

// Copies the rows of x that belong to guesses, of `bytes` each, one after the other. x_stride: bytes between rows.
EXPORT void keep_guesses(const void *x, long x_stride, void *kept, const int32_t *starts, const int32_t *table,
                         long table_stride, long rows, long bytes) {
    sequences s = {starts, NULL, table, table_stride};
    char *to = kept;
    for (long row = 0; row < rows; row++) {
        for (long i = 0; i < more_of(&s, row); i++, to += bytes)
            memcpy(to, (const char *)x + (starts[row + 1] + i) * x_stride, bytes);
    }
}

EXPORT void keep_guesses_words(const word *a) {
    keep_guesses(a[0].pointer, a[1].whole, a[2].pointer, a[3].pointer, a[4].pointer, a[5].whole, a[6].whole,
                 a[7].whole);
}

EXPORT void causal_conv_words(const word *a) {
    causal_conv(a[0].pointer, a[1].whole, a[2].pointer, a[3].pointer, a[4].pointer, a[5].whole, a[6].pointer,
                a[7].pointer, a[8].pointer, a[9].whole, a[10].pointer, a[11].whole, a[12].whole, a[13].whole,
                a[14].whole, (int)a[15].whole, (int)a[16].whole);
}
