// Packs a matrix into panels of whole numbers, when it is loaded.
#include "threads.h"
#include "weights.h"

typedef struct {
    const weights *to;
    const part *from;
    const float *largest;
    int count;
} packing;

typedef struct {
    int16_t values[GROUP_MOST];
    bf16 scale;
    float error;  // squared
} group;

INLINE group round_group(const float *x, bf16 scale, const weights *w) {
    group to = {.scale = scale};
    float half = (float)(1 << (w->bits - 1));
    int all_zero = (scale & 0x7fff) == 0;
    vec step = vec_all(widen(scale)), divisor = all_zero ? vec_all(1.0f) : step, error = vec_zero();
    for (long i = 0; i < w->group; i += LANES) {
        vec v = vec_load(x + i, FLOAT32), whole = vec_round(vec_div(v, divisor));
        whole = vec_max(vec_all(-half), vec_min(vec_all(half - 1), whole));
        vec_store_words(to.values + i, whole);
        vec off = vec_fma_minus(whole, step, v);
        error = vec_fma(off, off, error);
    }
    to.error = vec_sum(error);
    return to;
}

// Tries several scales, by which the largest element becomes each of `largest` with the other sign; -> the best.
INLINE group quantize(const packing *p, const char *from, long count) {
    float x[GROUP_MOST] = {0};
    vec high = vec_zero(), low = vec_zero();  // the last group is filled up with zeros
    for (long i = 0; i < count; i += LANES) {
        vec v = vec_load_upto(at(from, i, p->to->kind), count - i, p->to->kind);
        vec_store(x + i, v, FLOAT32);
        high = vec_max(v, high);
        low = vec_max(vec_sub(vec_zero(), v), low);
    }
    float most = vec_largest(high), least = -vec_largest(low), extreme = most > -least ? most : least;
    group best = round_group(x, narrow(extreme / -p->largest[0]), p->to);
    for (int i = 1; i < p->count; i++) {
        group other = round_group(x, narrow(extreme / -p->largest[i]), p->to);
        if (other.error < best.error) best = other;
    }
    return best;
}

// Packs a group of a section, which begins with the input `start`.
static void pack_group(const packing *p, uint8_t *to, long panel, long start, long number) {
    const weights *w = p->to;
    long quads = quads_in(w, number), step = 8 / w->bits;
    int16_t excess = (int16_t)(1 << (w->bits - 1));
    for (long column = 0; column < PANEL; column++) {
        long row = row_at(w, panel, column);
        group g = {.scale = 0};
        if (row < w->outputs) {
            const char *from = row_of(p->from, row, w->inputs * width_of(w->kind));
            g = quantize(p, at(from, start + number * w->group, w->kind), inputs_in(w, number));
        }
        memcpy(to + column * 2, &g.scale, 2);
        for (long i = 0; i < quads * 4; i++) {
            long quad = i / 4;
            uint8_t *byte = to + group_head_bytes(w) + (quad / step * PANEL + column) * 4 + i % 4;
            uint8_t bits = (uint8_t)(g.values[i] + excess);
            *byte = quad % step ? (uint8_t)(*byte | bits << 4) : bits;
        }
    }
}

static void pack_panels(const void *task, long first, long last) {
    const packing *p = task;
    for (long panel = first; panel < last; panel++) {
        uint8_t *to = (uint8_t *)panel_of(p->to, panel);
        for (long start = 0; start < p->to->inputs; start += section_inputs(p->to)) {
            for (long number = 0; number < section_groups(p->to); number++) {
                pack_group(p, to, panel, start, number);
                to += group_head_bytes(p->to) + quads_in(p->to, number) * PANEL * p->to->bits / 2;
            }
        }
    }
}

// `largest` has `count` numbers.
EXPORT void pack_quantized(const weights *to, const part *matrix, const float *largest, int count) {
    packing task = {to, matrix, largest, count};
    spread(panels_of(to), 1, pack_panels, &task);
}
