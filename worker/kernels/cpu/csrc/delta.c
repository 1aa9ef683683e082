// The gated delta rule, token by token. A state S [key dim, value dim] of a head forgets by `decay`, then learns the
// value v under the key k as far as it does not know it yet:
//     S <- decay * S;  u = rate * (v - k S);  S <- S + k u;  out = q S
// Columns of a state are independent of each other, so a slab of some columns stays in the nearest cache while all
// tokens of a step pass. A state is read and written once for each token: k u of the token before is added by the pass
// that also forgets and asks, and q S is known without another pass, as (q S before) + (q k) u.
#include "functions.h"
#include "sequences.h"
#include "threads.h"
#include "call_arguments.h"

typedef struct {
    const void *x;  // [tokens, ...]: queries and keys of the key heads, then values
    long x_stride;
    const void *rates, *decays;  // [tokens, value_heads]: gates; of each key of a head, too, if decays are by channel
    long rates_stride, decays_stride;
    const float *speeds;  // [value_heads]: the decay is e^(speed * softplus(gate + shift))
    const float *shifts;  // of each gate of decays
    float *states;                 // [places, value_heads, key_dim, value_dim]
    long place_stride;
    sequences rows;
    void *out;  // [tokens, value_heads * value_dim]
    long key_heads, value_heads, key_dim, value_dim, slabs;
    float most_rate;
    int takes_turns;  // value head i has key head i modulo their number; else neighbours share one
    float *by_channel;  // [tokens, value_heads * key_dim]: decays, each number of a key by itself; NULL: heads decay
    kind k;
} delta;

// A token as a head sees it.
typedef struct {
    float *key, *query;  // of length 1, and key_dim^-0.5
    const float *decays;  // of each number of the key, if they are by channel
    float decay, rate, product;  // product: of query and key
} head_token;

enum {
    VECTORS = LANES == 16 ? 4 : 2,  // of a slab
    SLAB = VECTORS * LANES,
    CHUNK = 32,  // tokens that are prepared at a time
};

static void of_length(float *to, const char *from, long n, float length, kind k) {
    vec sum = vec_zero();
    for (long i = 0; i < n; i += LANES) {
        vec x = vec_load_upto(at(from, i, k), n - i, k);
        sum = vec_fma(x, x, sum);
    }
    float scale = length / sqrtf(vec_sum(sum) + 1e-6f);
    for (long i = 0; i < n; i += LANES)
        vec_store_upto(to + i, vec_mul(vec_load_upto(at(from, i, k), n - i, k), vec_all(scale)), n - i, FLOAT32);
}

static float product_of(const float *a, const float *b, long n) {
    vec sum = vec_zero();
    for (long i = 0; i < n; i += LANES)
        sum = vec_fma(vec_load_upto(a + i, n - i, FLOAT32), vec_load_upto(b + i, n - i, FLOAT32), sum);
    return vec_sum(sum);
}

static void prepare_decays(const delta *d, long token, long head, kind k) {
    const char *gates = at(d->decays, token * d->decays_stride + head * d->key_dim, k);
    const float *shifts = d->shifts + head * d->key_dim;
    float *to = d->by_channel + (token * d->value_heads + head) * d->key_dim;
    for (long i = 0; i < d->key_dim; i += LANES) {
        long left = d->key_dim - i;
        vec gate = vec_add(vec_load_upto(at(gates, i, k), left, k), vec_load_upto(shifts + i, left, FLOAT32));
        vec_store_upto(to + i, vec_exp(vec_mul(vec_all(d->speeds[head]), vec_softplus(gate))), left, FLOAT32);
    }
}

static void prepare(head_token *t, const delta *d, long token, long head, kind k) {
    const char *x = at(d->x, token * d->x_stride, k);
    long key_head = d->takes_turns ? head % d->key_heads : head / (d->value_heads / d->key_heads), n = d->key_dim;
    of_length(t->query, at(x, key_head * n, k), n, 1.0f / sqrtf((float)n), k);
    of_length(t->key, at(x, (d->key_heads + key_head) * n, k), n, 1.0f, k);
    t->product = product_of(t->query, t->key, n);
    t->rate = d->most_rate / (1.0f + expf(-number_at(at(d->rates, token * d->rates_stride, k), head, k)));
    if (d->by_channel != NULL) {
        t->decays = d->by_channel + (token * d->value_heads + head) * d->key_dim;
        return;
    }
    float gate = number_at(at(d->decays, token * d->decays_stride, k), head, k) + d->shifts[head];
    t->decay = expf(d->speeds[head] * (gate > 20.0f ? gate : log1pf(expf(gate))));
}

// Adds what the token before has taught, forgets, and asks: seen = k S, asked = q S. stores: whether the state is written.
INLINE void pass(float *s, long stride, const head_token *t, const float *key_before, const vec *taught, vec *seen,
                 vec *asked, long dim, int vectors, long lanes, int by_channel, int stores) {
    vec decay = vec_all(by_channel ? 1.0f : t->decay);
    for (int v = 0; v < vectors; v++) seen[v] = asked[v] = vec_zero();
    for (long i = 0; i < dim; i++) {
        vec key = vec_all(t->key[i]), query = vec_all(t->query[i]);
        if (by_channel) decay = vec_all(t->decays[i]);
        for (int v = 0; v < vectors; v++) {
            float *place = s + i * stride + v * LANES;
            vec x = vec_load_upto(place, lanes, FLOAT32);
            if (key_before != NULL) x = vec_fma(vec_all(key_before[i]), taught[v], x);
            x = vec_mul(x, decay);
            seen[v] = vec_fma(key, x, seen[v]);
            asked[v] = vec_fma(query, x, asked[v]);
            if (stores) vec_store_upto(place, x, lanes, FLOAT32);
        }
    }
}

// Writes a state to its place, with what the last token has taught.
INLINE void store_state(float *to, long to_stride, const float *s, long stride, const float *key, const vec *taught,
                        long dim, int vectors, long lanes) {
    for (long i = 0; i < dim; i++) {
        for (int v = 0; v < vectors; v++) {
            vec x = vec_load_upto(s + i * stride + v * LANES, lanes, FLOAT32);
            vec_store_upto(to + i * to_stride + v * LANES, vec_fma(vec_all(key[i]), taught[v], x), lanes, FLOAT32);
        }
    }
}

INLINE float *state_at(const delta *d, long place, long head, long column) {
    return d->states + place * d->place_stride + head * d->key_dim * d->value_dim + column;
}

// Learns a token's value, and writes its result.
INLINE void answer(const delta *d, const head_token *t, long token, long head, long column, vec *taught, const vec *seen,
                   const vec *asked, int vectors, long lanes, kind k) {
    long values = 2 * d->key_heads * d->key_dim + head * d->value_dim + column;
    for (int v = 0; v < vectors; v++) {
        vec value = vec_load_upto(at(d->x, token * d->x_stride + values + v * LANES, k), lanes, k);
        taught[v] = vec_mul(vec_all(t->rate), vec_sub(value, seen[v]));
        vec out = vec_fma(vec_all(t->product), taught[v], asked[v]);
        long place = (token * d->value_heads + head) * d->value_dim + column + v * LANES;
        vec_store_upto(at_out(d->out, place, k), out, lanes, k);
    }
}

// Writes a state that is forgotten and taught at once to its place, and prefetches so much of what is read next.
INLINE void renew_state(float *to, const float *s, const float *next, const head_token *t, const vec *taught, long width,
                        long dim, int vectors, long lanes, int by_channel) {
    vec decay = vec_all(by_channel ? 1.0f : t->decay);
    for (long i = 0; i < dim; i++, to += width, s += width, next += width) {
        vec key = vec_all(t->key[i]);
        if (by_channel) decay = vec_all(t->decays[i]);
        for (int v = 0; v < vectors; v++) {
            _mm_prefetch((const char *)(next + v * LANES), _MM_HINT_T1);
            vec x = vec_mul(vec_load_upto(s + v * LANES, lanes, FLOAT32), decay);
            vec_store_upto(to + v * LANES, vec_fma(key, taught[v], x), lanes, FLOAT32);
        }
    }
}

// The only token of a row that goes on, for some columns of a head: the state is read from where it lies, and written
// once. next: the place that is read after it.
INLINE void learn_one(const delta *d, const head_token *t, long row, long head, long column, const float *next, int vectors,
                      long lanes, int by_channel, kind k) {
    float *s = state_at(d, source_of(&d->rows, row), head, column);
    long dim = d->key_dim, width = d->value_dim, target = target_of(&d->rows, row);
    vec taught[VECTORS], seen[VECTORS], asked[VECTORS];
    pass(s, width, t, NULL, taught, seen, asked, dim, vectors, lanes, by_channel, 0);
    answer(d, t, d->rows.starts[row], head, column, taught, seen, asked, vectors, lanes, k);
    for (int i = 0; i < KEPT; i++) {
        if (kept_count(&d->rows, row, i) != 1) continue;
        float *kept = state_at(d, kept_place(&d->rows, row, i), head, column);
        renew_state(kept, s, next, t, taught, width, dim, vectors, lanes, by_channel);
    }
    if (target < 0) return;
    renew_state(state_at(d, target, head, column), s, next, t, taught, width, dim, vectors, lanes, by_channel);
}

// All tokens of a row, for some columns of a head. lanes: LANES, or fewer of a single vector.
INLINE void learn(const delta *d, long row, long head, long column, int vectors, long lanes, int by_channel, kind k) {
    long first = d->rows.starts[row], count = count_of(&d->rows, row), dim = d->key_dim;
    long width = d->value_dim, held = vectors * LANES;
    long source = source_of(&d->rows, row), target = target_of(&d->rows, row);
    if (!count) return;
    float *state = state_at(d, source, head, column);
    float *memory = scratch(((CHUNK + 1) * 2 * dim + dim * held) * sizeof(float));
    float *last_key = memory + CHUNK * 2 * dim, *slab = memory + (CHUNK + 1) * 2 * dim;
    long bytes = lanes == LANES ? held * 4 : lanes * 4, stride = held;
    if (begins(&d->rows, row)) memset(slab, 0, dim * held * sizeof(float));
    else
        for (long i = 0; i < dim; i++) memcpy(slab + i * held, state + i * width, bytes);

    vec taught[VECTORS], seen[VECTORS], asked[VECTORS];
    for (int v = 0; v < vectors; v++) taught[v] = vec_zero();
    const float *before = NULL;
    for (long begin = 0; begin < count; begin += CHUNK) {
        head_token tokens[CHUNK];
        long n = least(CHUNK, count - begin);
        if (before != NULL) before = memcpy(last_key, before, dim * sizeof(float));
        for (long j = 0; j < n; j++) {
            tokens[j].query = memory + 2 * j * dim;
            tokens[j].key = tokens[j].query + dim;
            prepare(&tokens[j], d, first + begin + j, head, k);
        }
        for (long j = 0; j < n; j++) {
            const head_token *t = &tokens[j];
            if (before == NULL) pass(slab, stride, t, NULL, taught, seen, asked, dim, vectors, lanes, by_channel, 1);
            else pass(slab, stride, t, before, taught, seen, asked, dim, vectors, lanes, by_channel, 1);
            answer(d, t, first + begin + j, head, column, taught, seen, asked, vectors, lanes, k);
            before = t->key;
            for (int i = 0; i < KEPT; i++) {
                if (kept_count(&d->rows, row, i) != begin + j + 1) continue;
                float *kept = state_at(d, kept_place(&d->rows, row, i), head, column);
                store_state(kept, width, slab, stride, before, taught, dim, vectors, lanes);
            }
        }
    }
    if (target < 0) return;
    store_state(state_at(d, target, head, column), width, slab, stride, before, taught, dim, vectors, lanes);
}

// The place that a unit reads; of one whose row has none, any.
INLINE const float *place_of_unit(const delta *d, long unit) {
    long slab = unit % d->slabs, head = unit / d->slabs % d->value_heads, row = unit / d->slabs / d->value_heads;
    long source = source_of(&d->rows, row);
    return state_at(d, source < 0 ? 0 : source, head, slab * SLAB);
}

// Some columns of a head. next: the unit that this thread takes after it.
INLINE void learn_slab(const delta *d, long row, long head, long slab, long next, int by_channel, kind k) {
    long column = slab * SLAB, stop = least(d->value_dim, column + SLAB);
    if (stop - column == SLAB && count_of(&d->rows, row) == 1 && !begins(&d->rows, row)) {
        head_token t;
        t.query = scratch(2 * d->key_dim * sizeof(float));
        t.key = t.query + d->key_dim;
        prepare(&t, d, d->rows.starts[row], head, k);
        learn_one(d, &t, row, head, column, place_of_unit(d, next), VECTORS, LANES, by_channel, k);
        return;
    }
    if (stop - column == SLAB) {
        learn(d, row, head, column, VECTORS, LANES, by_channel, k);
        return;
    }
    for (; column < stop; column += LANES) {
        if (stop - column >= LANES) learn(d, row, head, column, 1, LANES, by_channel, k);
        else learn(d, row, head, column, 1, stop - column, by_channel, k);
    }
}

static void learn_units(const void *task, long first, long last) {
    const delta *d = task;
    for (long unit = first; unit < last; unit++) {
        long slab = unit % d->slabs, head = unit / d->slabs % d->value_heads, row = unit / d->slabs / d->value_heads;
        long next = least(unit + 1, last - 1);
        if (d->k == FLOAT32 && d->by_channel != NULL) learn_slab(d, row, head, slab, next, 1, FLOAT32);
        else if (d->k == FLOAT32) learn_slab(d, row, head, slab, next, 0, FLOAT32);
        else if (d->by_channel != NULL) learn_slab(d, row, head, slab, next, 1, BFLOAT16);
        else learn_slab(d, row, head, slab, next, 0, BFLOAT16);
    }
}

// Units are taken one after the other, as their states lie, where there are many.
INLINE long grain_for(const delta *d, long rows) {
    enum { SHARES = 8 };
    return ceil_div(rows * d->value_heads * d->slabs, SHARES * threads);
}

// gates [tokens, 2 * value_heads]: of rates, then of decays. out is contiguous, and so is a place of `states`.
EXPORT void gated_delta(const void *x, long x_stride, const void *gates, long gates_stride, const float *speeds,
                        const float *shifts, float *states, long place_stride, const int32_t *starts,
                        const int64_t *positions, const int32_t *table, long table_stride, void *out, long rows,
                        long key_heads, long value_heads, long key_dim, long value_dim, int takes_turns,
                        float most_rate, int kind) {
    delta d = {x, x_stride, gates, at(gates, value_heads, kind), gates_stride, gates_stride, speeds, shifts, states,
               place_stride, {starts, positions, table, table_stride}, out, key_heads, value_heads, key_dim, value_dim,
               ceil_div(value_dim, SLAB), most_rate, takes_turns, NULL, kind};
    spread(rows * value_heads * d.slabs, grain_for(&d, rows), learn_units, &d);
}

EXPORT void gated_delta_words(const word *a) {
    gated_delta(a[0].pointer, a[1].whole, a[2].pointer, a[3].whole, a[4].pointer, a[5].pointer, a[6].pointer,
                a[7].whole, a[8].pointer, a[9].pointer, a[10].pointer, a[11].whole, a[12].pointer, a[13].whole,
                a[14].whole, a[15].whole, a[16].whole, a[17].whole, (int)a[18].whole,
                a[19].real, (int)a[20].whole);
}

static void prepare_units(const void *task, long first, long last) {
    const delta *d = task;
    for (long unit = first; unit < last; unit++) {
        if (d->k == FLOAT32) prepare_decays(d, unit / d->value_heads, unit % d->value_heads, FLOAT32);
        else prepare_decays(d, unit / d->value_heads, unit % d->value_heads, BFLOAT16);
    }
}

enum { GRAIN = 1024 };  // decays that are worth handing to another thread

// The rule of Kimi Linear: as many key heads as value heads, and a decay for each number of a key. `made` is memory
// for these: [tokens, heads * key_dim].
EXPORT void channel_delta(const void *x, long x_stride, const void *rates, long rates_stride, const void *decays,
                          long decays_stride, const float *speeds, const float *shifts, float *states,
                          long place_stride, const int32_t *starts, const int64_t *positions, const int32_t *table,
                          long table_stride, void *out, float *made, long rows, long tokens, long heads, long key_dim,
                          long value_dim, int kind) {
    delta d = {x, x_stride, rates, decays, rates_stride, decays_stride, speeds, shifts, states, place_stride,
               {starts, positions, table, table_stride}, out, heads, heads, key_dim, value_dim,
               ceil_div(value_dim, SLAB), 1.0f, 0, made, kind};
    spread(tokens * heads, grain_of(GRAIN, key_dim), prepare_units, &d);
    spread(rows * heads * d.slabs, grain_for(&d, rows), learn_units, &d);
}

EXPORT void channel_delta_words(const word *a) {
    channel_delta(a[0].pointer, a[1].whole, a[2].pointer, a[3].whole, a[4].pointer, a[5].whole, a[6].pointer,
                  a[7].pointer, a[8].pointer, a[9].whole, a[10].pointer, a[11].pointer, a[12].pointer, a[13].whole,
                  a[14].pointer, a[15].pointer, a[16].whole, a[17].whole, a[18].whole, a[19].whole, a[20].whole,
                  (int)a[21].whole);
}
