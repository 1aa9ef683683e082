// The selective scan of Mamba-2, token by token. A state S [size, width] of a head forgets by `decay`, then adds the
// values v of a token, times its time step, under the keys b of the head's group, and is read by their queries c:
//     S <- decay * S + b (time * v);  out = c S + skip * v
// Columns of a state are independent of each other, so a slab of some columns stays in the nearest cache while all
// tokens of a step pass, and a state is read and written once for each token.
#include "sequences.h"
#include "threads.h"
#include "call_arguments.h"

typedef struct {
    const void *x;  // [tokens, ...]: values of all heads, then keys of all groups, then their queries
    long x_stride;
    const void *steps;  // [tokens, heads]
    long steps_stride;
    const float *speeds, *shifts, *skips;  // [heads]: time = softplus(step + shift), decay = e^(speed * time)
    float least, most;                     // bounds of times
    float *states;                         // [places, heads, size, width]
    long place_stride;
    sequences rows;
    void *out;  // [tokens, heads * width]
    long groups, heads, size, width, slabs;
    kind k;
} scan;

// A token as a head sees it.
typedef struct {
    float *key, *query;
    float time, decay;
} head_token;

enum {
    VECTORS = 4,  // of a slab
    SLAB = VECTORS * LANES,
    CHUNK = 32,  // tokens that are prepared at a time
};

static void prepare(head_token *t, const scan *s, long token, long head, kind k) {
    const char *x = at(s->x, token * s->x_stride, k);
    long group = head / (s->heads / s->groups), keys = s->heads * s->width + group * s->size;
    widen_row(t->key, at(x, keys, k), s->size, k);
    widen_row(t->query, at(x, keys + s->groups * s->size, k), s->size, k);
    float time = number_at(at(s->steps, token * s->steps_stride, k), head, k) + s->shifts[head];
    time = time > 20.0f ? time : log1pf(expf(time));
    t->time = fminf(s->most, fmaxf(s->least, time));
    t->decay = expf(s->speeds[head] * t->time);
}

// Forgets, adds `taught` under the key, and asks: asked = c S.
INLINE void pass(float *state, long stride, const head_token *t, const vec *taught, vec *asked, long size, int vectors,
                 long lanes) {
    vec decay = vec_all(t->decay);
    for (int v = 0; v < vectors; v++) asked[v] = vec_zero();
    for (long i = 0; i < size; i++) {
        vec key = vec_all(t->key[i]), query = vec_all(t->query[i]);
        for (int v = 0; v < vectors; v++) {
            float *place = state + i * stride + v * LANES;
            vec x = vec_fma(key, taught[v], vec_mul(vec_load_upto(place, lanes, FLOAT32), decay));
            asked[v] = vec_fma(query, x, asked[v]);
            vec_store_upto(place, x, lanes, FLOAT32);
        }
    }
}

INLINE float *state_at(const scan *s, long place, long head, long column) {
    return s->states + place * s->place_stride + head * s->size * s->width + column;
}

// Computes `vectors` vectors of columns of a head, from `column` on; lanes: the columns of a vector that is alone.
INLINE void read_on(const scan *s, long row, long head, long column, int vectors, long lanes, kind k) {
    long first = s->rows.starts[row], count = count_of(&s->rows, row), size = s->size, width = s->width;
    long held = vectors * LANES, columns = lanes == LANES ? held : lanes;
    long source = source_of(&s->rows, row), target = target_of(&s->rows, row);
    if (!count) return;
    float *state = state_at(s, source, head, column);
    float *memory = scratch((CHUNK * 2 + held) * size * sizeof(float));
    float *slab = memory + CHUNK * 2 * size;
    long stride = held;
    if (begins(&s->rows, row)) memset(slab, 0, size * held * sizeof(float));
    else if (count == 1 && source == target) slab = state, stride = width;
    else copy_columns(slab, held, state, width, size, columns);

    vec taught[VECTORS], asked[VECTORS], values[VECTORS], skip = vec_all(s->skips[head]);
    for (long begin = 0; begin < count; begin += CHUNK) {
        head_token tokens[CHUNK];
        long n = least(CHUNK, count - begin);
        for (long j = 0; j < n; j++) {
            tokens[j].key = memory + 2 * j * size;
            tokens[j].query = tokens[j].key + size;
            prepare(&tokens[j], s, first + begin + j, head, k);
        }
        for (long j = 0; j < n; j++) {
            const head_token *t = &tokens[j];
            long token = first + begin + j, place = head * width + column;
            for (int v = 0; v < vectors; v++) {
                values[v] = vec_load_upto(at(s->x, token * s->x_stride + place + v * LANES, k), lanes, k);
                taught[v] = vec_mul(vec_all(t->time), values[v]);
            }
            pass(slab, stride, t, taught, asked, size, vectors, lanes);
            for (int v = 0; v < vectors; v++) {
                vec out = vec_fma(skip, values[v], asked[v]);
                vec_store_upto(at_out(s->out, token * s->heads * width + place + v * LANES, k), out, lanes, k);
            }
            for (int i = 0; i < KEPT; i++)
                if (kept_count(&s->rows, row, i) == begin + j + 1)
                    copy_columns(state_at(s, kept_place(&s->rows, row, i), head, column), width, slab, stride, size,
                                 columns);
        }
    }
    if (slab == state || target < 0) return;
    copy_columns(state_at(s, target, head, column), width, slab, stride, size, columns);
}

INLINE void read_slab(const scan *s, long row, long head, long slab, kind k) {
    long column = slab * SLAB, stop = least(s->width, column + SLAB);
    if (stop - column == SLAB) {
        read_on(s, row, head, column, VECTORS, LANES, k);
        return;
    }
    for (; column < stop; column += LANES) {
        if (stop - column >= LANES) read_on(s, row, head, column, 1, LANES, k);
        else read_on(s, row, head, column, 1, stop - column, k);
    }
}

static void read_units(const void *task, long first, long last) {
    const scan *s = task;
    for (long unit = first; unit < last; unit++) {
        long slab = unit % s->slabs, head = unit / s->slabs % s->heads, row = unit / s->slabs / s->heads;
        if (s->k == FLOAT32) read_slab(s, row, head, slab, FLOAT32);
        else read_slab(s, row, head, slab, BFLOAT16);
    }
}

// out is contiguous, and so is a place of `states`.
EXPORT void selective_scan(const void *x, long x_stride, const void *steps, long steps_stride, const float *speeds,
                           const float *shifts, const float *skips, float least_time, float most_time, float *states,
                           long place_stride, const int32_t *starts, const int64_t *positions, const int32_t *table,
                           long table_stride, void *out, long rows, long groups, long heads, long size, long width,
                           int kind) {
    scan s = {x, x_stride, steps, steps_stride, speeds, shifts, skips, least_time, most_time, states, place_stride,
              {starts, positions, table, table_stride}, out, groups, heads, size, width, ceil_div(width, SLAB), kind};
    spread(rows * heads * s.slabs, 1, read_units, &s);
}

EXPORT void selective_scan_words(const word *a) {
    selective_scan(a[0].pointer, a[1].whole, a[2].pointer, a[3].whole, a[4].pointer, a[5].pointer, a[6].pointer,
                   a[7].real, a[8].real, a[9].pointer, a[10].whole, a[11].pointer, a[12].pointer, a[13].pointer,
                   a[14].whole, a[15].pointer, a[16].whole, a[17].whole, a[18].whole, a[19].whole, a[20].whole,
                   (int)a[21].whole);
}
