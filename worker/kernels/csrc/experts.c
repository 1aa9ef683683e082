// x [T, features] through the experts that each token chose: gates and ups, an activation, downs, and the sum of a
// token's experts by their weights.
//
// Rows are sorted by expert, so that an expert's matrices are read once for all its tokens, and those of experts that
// nobody chose are not read. Units of work are panels: of each expert for gates and ups, of the result for downs, where
// one thread adds up all experts in the order of their numbers, in float32. So the sum of a token has the same bits
// alone and in any batch. Sections of inputs are added up over the experts first, and then joined as in `sections.h`.
#include "gathered_tile.h"
#include "product.h"
#include "threads.h"
#include "words.h"

enum {
    BLOCK_TOKENS = 256,    // that are computed at once
    LAY_WORTH = 64 << 10,  // bytes of rows that are worth handing to another thread
};

// The matrices of a layer. Those of an expert have the same sizes, but may differ in form.
typedef struct {
    const weights *gate_up, *down;
    const char *gate_up_bias, *down_bias;  // [E, outputs], or NULL
    long experts;
} layer;

// Rows of one expert that are computed at once.
typedef struct {
    int expert, start, rows;  // of rows in sorted order
} tile;

typedef struct {
    layer of;
    const char *x;
    long x_stride, x_bytes;  // of rows, in bytes
    const float *shares;  // [T, k]
    long tokens, chosen;
    char *out;
    long out_stride;  // in bytes
    kind out_kind;
    function function;
    const int *place;    // the place [token, choice] of each row in sorted order
    const tile *tiles;   // in the order of experts
    const int *first;    // the first tile of each touched expert, and behind the last
    long touched, count;  // the number of touched experts and of tiles
    int one_row;          // whether there is one token: all tiles have the same row
    char *inner;          // [rows, inner features]
    uint32_t *laid;       // rows of x, then rows of `inner`
} job;

// A section as a matrix of its own, of which only this panel can be read, as its first.
INLINE weights section_at(const weights *w, long panel, long section) {
    weights s = *w;
    s.inputs = section_inputs(w);
    s.sections = 1;
    s.panels = (char *)panel_of(w, panel) + section * panel_bytes(&s);
    return s;
}

static void lay_inputs(const void *task, long begin, long end) {
    const job *j = task;
    for (long i = begin; i < end; i++) {
        tile t = j->tiles[i];
        const weights *w = &j->of.gate_up[t.expert];
        const char *rows[MOST_ROWS];
        for (long r = 0; r < t.rows; r++) rows[r] = j->x + j->place[t.start + r] / j->chosen * j->x_stride;
        lay_rows(j->laid + t.start * row_dwords(w), rows, t.rows, j->x_bytes, w);
    }
}

static void gate_units(const void *task, long begin, long end) {
    const job *j = task;
    long panels = panels_of(j->of.gate_up), shaped = 0;
    float sums[MOST_SUMS * MOST_ROWS * PANEL] __attribute__((aligned(64)));
    for (long unit = begin; unit < end; unit++) {
        long number = unit / panels, panel = unit % panels, first = j->first[number], last = j->first[number + 1];
        long expert = j->tiles[first].expert;
        const weights *w = &j->of.gate_up[expert];
        product p = {.w = w, .out = j->inner, .out_kind = w->kind, .function = j->function};
        p.out_stride = columns_of(w) * width_of(w->kind);
        if (j->of.gate_up_bias) p.bias = j->of.gate_up_bias + expert * w->outputs * width_of(w->kind);
        for (long i = first; i < last; i++) {
            tile t = j->tiles[i];
            const uint32_t *x = j->laid + (j->one_row ? 0 : t.start * row_dwords(w));
            multiply_tile(x, t.rows, w, panel, i == first, sums, &shaped);
            finish_tile(&p, sums, t.start, t.rows, panel);
        }
    }
    release(shaped);
}

static void lay_inner(const void *task, long begin, long end) {
    const job *j = task;
    for (long i = begin; i < end; i++) {
        tile t = j->tiles[i];
        const weights *w = &j->of.down[t.expert], s = section_at(w, 0, 0);
        long row_bytes = columns_of(j->of.gate_up) * width_of(w->kind), bytes = row_bytes / w->sections;
        uint32_t *to = j->laid + t.start * w->sections * row_dwords(&s);
        for (long section = 0; section < w->sections; section++, to += t.rows * row_dwords(&s)) {
            const char *rows[MOST_ROWS];
            for (long r = 0; r < t.rows; r++) rows[r] = j->inner + (t.start + r) * row_bytes + section * bytes;
            lay_rows(to, rows, t.rows, bytes, &s);
        }
    }
}

// Adds the rows of a tile, by their shares, to the totals [T, 32] of a section.
INLINE void add_tile(float *totals, const float *sums, const char *bias, tile t, long left, const job *j, kind k) {
    vec added[COLUMNS];
    for (int c = 0; c < COLUMNS; c++) {
        long rest = left - c * LANES;
        added[c] = bias == NULL || rest <= 0 ? vec_zero() : vec_load_upto(at(bias, c * LANES, k), rest, k);
    }
    for (long r = 0; r < t.rows; r++) {
        long place = j->place[t.start + r];
        float *total = totals + place / j->chosen * PANEL;
        vec share = vec_all(j->shares[place]);
        for (int c = 0; c < COLUMNS; c++) {
            vec sum = vec_add(vec_load(sums + r * PANEL + c * LANES, FLOAT32), added[c]);
            vec_store(total + c * LANES, vec_fma(sum, share, vec_load(total + c * LANES, FLOAT32)), FLOAT32);
        }
    }
}

// Joins the totals of sections: neighbours, then their sums. All of them are lost but the first.
static void join_totals(float *totals, long sections, long size) {
    for (long step = 1; step < sections; step *= 2)
        for (long s = 0; s + step < sections; s += 2 * step)
            for (long i = 0; i < size; i += LANES) {
                float *to = totals + s * size + i;
                vec sum = vec_add(vec_load(to, FLOAT32), vec_load(to + step * size, FLOAT32));
                vec_store(to, sum, FLOAT32);
            }
}

static void down_units(const void *task, long begin, long end) {
    const job *j = task;
    const weights *any = j->of.down;
    long sections = any->sections, size = j->tokens * PANEL, shaped = 0;
    float sums[MOST_SUMS * MOST_ROWS * PANEL] __attribute__((aligned(64)));
    float *totals = (float *)__builtin_alloca_with_align(sections * size * sizeof(float), 512);
    for (long panel = begin; panel < end; panel++) {
        long left = least(PANEL, any->outputs - panel * PANEL);
        memset(totals, 0, sections * size * sizeof(float));
        for (long i = 0; i < j->count; i++) {
            tile t = j->tiles[i];
            const weights *w = &j->of.down[t.expert];
            const char *bias = NULL;
            int leads = i == 0 || j->tiles[i - 1].expert != t.expert;
            if (j->of.down_bias) bias = at(j->of.down_bias, t.expert * w->outputs + panel * PANEL, w->kind);
            for (long section = 0; section < sections; section++) {
                weights s = section_at(w, panel, section);
                const uint32_t *x = j->laid + (t.start * sections + section * t.rows) * row_dwords(&s);
                multiply_tile(x, t.rows, &s, 0, leads, sums, &shaped);
                add_tile(totals + section * size, sums, section ? NULL : bias, t, left, j, w->kind);
            }
        }
        join_totals(totals, sections, size);
        for (long token = 0; token < j->tokens; token++)
            for (long c = 0; c < left; c += LANES) {
                char *to = at_out(j->out + token * j->out_stride, panel * PANEL + c, j->out_kind);
                vec_store_upto(to, vec_load(totals + token * PANEL + c, FLOAT32), left - c, j->out_kind);
            }
    }
    release(shaped);
}

// The matrices that a choice takes: those of the expert, or where `places` says that they are; -1: another rank's.
INLINE int chosen_place(const int *ids, const int *places, long i) { return places ? places[ids[i]] : ids[i]; }

// Sorts the rows of a job by expert, and divides them into tiles as equal as possible; -> memory behind what was used.
// Choices of experts that another rank holds are left out.
static char *sort_rows(job *j, const int *ids, const int *places, char *memory) {
    long rows = j->tokens * j->chosen, experts = j->of.experts;
    int *starts = (int *)memory, *place = starts + experts + 1, *first = place + rows;
    tile *tiles = (tile *)(first + experts + 1);
    memset(starts, 0, (experts + 1) * sizeof *starts);
    for (long i = 0; i < rows; i++) {
        int held = chosen_place(ids, places, i);
        if (held >= 0) starts[held + 1]++;
    }
    for (long e = 0; e < experts; e++) starts[e + 1] += starts[e];
    j->count = j->touched = 0;
    for (int e = 0; e < experts; e++) {
        long begin = starts[e], held = starts[e + 1] - begin;
        if (held == 0) continue;
        long most = least(tile_rows(&j->of.gate_up[e]), tile_rows(&j->of.down[e])), n = ceil_div(held, most);
        first[j->touched++] = (int)j->count;
        for (long i = 0; i < n; i++) {
            long start = held * i / n;
            tiles[j->count++] = (tile){e, (int)(begin + start), (int)(held * (i + 1) / n - start)};
        }
    }
    first[j->touched] = (int)j->count;
    for (int i = 0; i < rows; i++) {  // in the order of tokens
        int held = chosen_place(ids, places, i);
        if (held >= 0) place[starts[held]++] = i;
    }
    j->place = place;
    j->tiles = tiles;
    j->first = first;
    return (char *)(tiles + rows);
}

// Whether a row is laid in the same way for all experts that were chosen.
static int all_alike(const job *j) {
    const char *first = (const char *)&j->of.gate_up[j->tiles[0].expert];
    long skipped = sizeof(void *);  // where the panels lie
    for (long i = 1; i < j->count; i++) {
        const char *other = (const char *)&j->of.gate_up[j->tiles[i].expert];
        if (memcmp(first + skipped, other + skipped, sizeof(weights) - skipped)) return 0;
    }
    return 1;
}

static void compute(job *j, const int *ids, const int *places, char *memory, long inner_bytes) {
    memory = sort_rows(j, ids, places, memory);
    j->inner = (char *)(((uintptr_t)memory + 63) / 64 * 64);
    j->laid = (uint32_t *)(((uintptr_t)j->inner + j->tokens * j->chosen * inner_bytes + 63) / 64 * 64);
    j->one_row = j->tokens == 1 && j->count > 0 && all_alike(j);
    long grain = grain_of(LAY_WORTH, j->tokens * j->chosen / (j->count > 0 ? j->count : 1) * j->x_bytes);
    spread(j->one_row ? 1 : j->count, grain, lay_inputs, j);  // nothing, if all choices are of other ranks
    long units = j->touched * panels_of(j->of.gate_up), several = units / (8 * threads);
    spread(units, several > 1 ? several : 1, gate_units, j);
    spread(j->count, grain, lay_inner, j);
    spread(panels_of(j->of.down), 1, down_units, j);
}

// ids [T, k] in ascending order and shares [T, k] as `route` wrote them; out [T, outputs of down] is contiguous. places:
// that of each expert's matrices, or -1 if another rank holds them; NULL if all are here, in the order of their numbers.
EXPORT void experts(const weights *gate_up, const weights *down, long count, const void *x, long x_stride,
                    long width, const int *ids, const int *places, const float *shares, long chosen,
                    const void *gate_up_bias, const void *down_bias, void *out, long tokens, int out_kind, int function) {
    layer of = {gate_up, down, gate_up_bias, down_bias, count};
    weights section = section_at(down, 0, 0);
    long most = least(tokens, BLOCK_TOKENS), rows = most * chosen, dwords = 0;
    for (long e = 0; e < count; e++) {
        section = section_at(&down[e], 0, 0);
        long wanted = down->sections * row_dwords(&section), inputs = row_dwords(&gate_up[e]);
        if (wanted > dwords) dwords = wanted;
        if (inputs > dwords) dwords = inputs;
    }
    long inner_bytes = columns_of(gate_up) * width_of(gate_up->kind), row_bytes = x_stride * width_of(gate_up->kind);
    long lists = (2 * count + 2) * sizeof(int) + rows * (sizeof(int) + sizeof(tile));
    char *memory = scratch(lists + rows * (inner_bytes + dwords * 4) + 256);
    for (long start = 0; start < tokens; start += most) {
        job j = {.of = of, .x_stride = row_bytes, .chosen = chosen, .out_kind = out_kind, .function = function};
        j.x_bytes = width * width_of(gate_up->kind);
        j.tokens = least(most, tokens - start);
        j.x = (const char *)x + start * row_bytes;
        j.shares = shares + start * chosen;
        j.out_stride = down->outputs * width_of(out_kind);
        j.out = (char *)out + start * j.out_stride;
        compute(&j, ids + start * chosen, places, memory, inner_bytes);
    }
}

EXPORT void experts_words(const word *a) {
    experts(a[0].pointer, a[1].pointer, a[2].whole, a[3].pointer, a[4].whole, a[5].whole, a[6].pointer, a[7].pointer,
            a[8].pointer, a[9].whole, a[10].pointer, a[11].pointer, a[12].pointer, a[13].whole, (int)a[14].whole,
            (int)a[15].whole);
}
