// Token embeddings that are quantized: rows of a matrix in panels, which an LM head may multiply with, are widened.
#include "threads.h"
#include "weights.h"
#include "call_arguments.h"

typedef struct {
    const weights *w;
    const int64_t *ids;
    char *out;            // [tokens, inputs] of the type of the model
    const float *levels;  // what codes of 4 bits mean, or NULL: whole numbers
} lookup;

INLINE float power_of(uint8_t exponent) {  // 2^(exponent - 127)
    uint32_t bits = exponent ? (uint32_t)exponent << 23 : 1u << 22;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

INLINE float number_at(const char *numbers, int type, long i) {
    switch (type) {
        case FLOAT32: return ((const float *)numbers)[i];
        case BFLOAT16: return widen(((const bf16 *)numbers)[i]);
        case FLOAT16: return _cvtsh_ss(((const uint16_t *)numbers)[i]);
        case POWER: return power_of(((const uint8_t *)numbers)[i]);
        case UNSIGNED: return ((const uint8_t *)numbers)[i];
        default: return ((const int8_t *)numbers)[i];
    }
}

// The code of an input of a group; `first` is where the first quad of the row's column begins.
INLINE int code_at(const uint8_t *first, long input, int bits) {
    long units = unit_quads(bits), quad = input / 4, in_unit = quad % units, row_bytes = PANEL * 4;
    const uint8_t *unit = first + quad / units * (units * PANEL * bits / 2) + input % 4;
    if (bits == 8) return *unit;
    int code = unit[in_unit / 2 * row_bytes] >> in_unit % 2 * 4 & 15;
    if (bits == 4) return code;
    int mask = (1 << (bits - 4)) - 1;
    return code | (unit[units / 2 * row_bytes] >> in_unit * (bits - 4) & mask) << 4;
}

INLINE void widen_codes(float *out, const uint8_t *first, long count, int bits, const float *levels, float zero) {
    for (long i = 0; i < count; i++) {
        int code = code_at(first, i, bits);
        out[i] = levels ? levels[code] : (float)code - zero;
    }
}

// Widens the column of a group, whose factors are given.
INLINE void widen_group(float *out, const char *group, long column, long number, const float *factors, const lookup *l) {
    const weights *w = l->w;
    float scale = number_at(group, w->scale, column) * factors[0], minimum = 0;
    float zero = w->minimums ? 0 : (float)(1 << (w->bits - 1));
    const char *next = group + scales_bytes(w);
    if (w->offsets) {
        zero = (float)((const uint8_t *)next)[column];
        next += PANEL;
    }
    if (w->minimums) {
        minimum = number_at(next, w->scale, column) * factors[1];
        next += scales_bytes(w);
    }
    const uint8_t *first = (const uint8_t *)next + column * 4;
    long count = inputs_in(w, number);
    switch (w->bits) {
        case 4: widen_codes(out, first, count, 4, l->levels, zero); break;
        case 5: widen_codes(out, first, count, 5, NULL, zero); break;
        case 6: widen_codes(out, first, count, 6, NULL, zero); break;
        default: widen_codes(out, first, count, 8, NULL, zero);
    }
    for (long i = 0; i < count; i++) out[i] = out[i] * scale + minimum;
}

static void widen_row(char *out, long row, const lookup *l) {
    const weights *w = l->w;
    const char *at = (const char *)panel_of(w, row / PANEL);
    long column = row % PANEL, factor_bytes = PANEL * number_bytes(w->factor);
    for (long section = 0; section < w->sections; section++) {
        const char *heads = at;
        at += section_head_bytes(w);
        for (long number = 0; number < section_groups(w); number++) {
            float numbers[GROUP_MOST], factors[2] = {1, 1};
            for (int which = 0; w->run && which <= w->minimums; which++)
                factors[which] =
                    number_at(heads + number / w->run * factors_bytes(w) + which * factor_bytes, w->factor, column);
            widen_group(numbers, at, column, number, factors, l);
            long count = inputs_in(w, number);
            if (w->kind == FLOAT32) memcpy(out, numbers, count * sizeof *numbers);
            else for (long i = 0; i < count; i++) ((bf16 *)out)[i] = narrow(numbers[i]);
            out += count * width_of(w->kind);
            at += bytes_in(w, number);
        }
    }
}

// An id that the matrix does not have gets a row of NaN, as in `embed`.
static void look_up(const void *task, long first, long last) {
    const lookup *l = task;
    long width = l->w->inputs * width_of(l->w->kind);
    for (long i = first; i < last; i++) {
        char *row = l->out + i * width;
        if (l->ids[i] < 0 || l->ids[i] >= l->w->outputs) memset(row, 0xff, width);
        else widen_row(row, l->ids[i], l);
    }
}

enum { GRAIN = 4096 };  // numbers that are worth handing to another thread

EXPORT void embed_packed(const int64_t *ids, const weights *w, const float *levels, void *out, long tokens) {
    lookup l = {w, ids, out, levels};
    spread(tokens, grain_of(GRAIN, w->inputs), look_up, &l);
}

EXPORT void embed_packed_words(const word *a) {
    embed_packed(a[0].pointer, a[1].pointer, a[2].pointer, a[3].pointer, a[4].whole);
}
