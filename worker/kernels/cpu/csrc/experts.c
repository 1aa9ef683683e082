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
#include "call_arguments.h"

enum {
    BLOCK_TOKENS = 256,    // that are computed at once
    LAY_WORTH = 16 << 10,  // bytes of rows that are worth handing to another thread
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
    int alike;            // whether a row is laid in the same way for all experts that were chosen
    char *inner;          // [rows, inner features]
    uint32_t *alone;      // rows of x, laid one by one if they are alike
    uint32_t *laid;       // rows of x, tile by tile, then rows of `inner`
} job;

static void lay_alone(const void *task, long begin, long end) {
    const job *j = task;
    const weights *w = &j->of.gate_up[j->tiles[0].expert];
    for (long token = begin; token < end; token++) {
        const char *row = j->x + token * j->x_stride;
        lay_rows(j->alone + token * row_dwords(w), &row, 1, j->x_bytes, w);
    }
}

// The row of x that was laid alone for a row in sorted order.
INLINE const uint32_t *alone_row(const job *j, long row, const weights *w) {
    return j->alone + j->place[row] / j->chosen * row_dwords(w);
}

// The rows of a tile as they are multiplied with gates and ups.
INLINE const uint32_t *inputs_of_tile(const job *j, tile t, const weights *w) {
    return j->alike && t.rows == 1 ? alone_row(j, t.start, w) : j->laid + t.start * row_dwords(w);
}

static void lay_inputs(const void *task, long begin, long end) {
    const job *j = task;
    for (long i = begin; i < end; i++) {
        tile t = j->tiles[i];
        const weights *w = &j->of.gate_up[t.expert];
        uint32_t *to = j->laid + t.start * row_dwords(w);
        if (j->alike) {
            const uint32_t *from[MOST_ROWS];
            for (long r = 0; r < t.rows; r++) from[r] = alone_row(j, t.start + r, w);
            if (t.rows > 1) lay_laid(to, from, t.rows, row_dwords(w));
            continue;
        }
        const char *rows[MOST_ROWS];
        for (long r = 0; r < t.rows; r++) rows[r] = j->x + j->place[t.start + r] / j->chosen * j->x_stride;
        lay_rows(to, rows, t.rows, j->x_bytes, w);
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
            gathered_tile g = {.rows = t.rows, .leads = i == first};
            g.x = inputs_of_tile(j, t, w);
            multiply_tile(&g, w, panel, sums, &shaped);
            finish_tile(&p, sums, t.start, t.rows, panel);
        }
    }
    release(shaped);
}

static void lay_inner(const void *task, long begin, long end) {
    const job *j = task;
    for (long i = begin; i < end; i++) {
        tile t = j->tiles[i];
        const weights *w = &j->of.down[t.expert];
        long bytes = columns_of(j->of.gate_up) * width_of(w->kind);
        const char *rows[MOST_ROWS];
        for (long r = 0; r < t.rows; r++) rows[r] = j->inner + (t.start + r) * bytes;
        uint32_t *to = j->laid + t.start * row_dwords(w);
        lay_rows(to, rows, t.rows, bytes, w);
        if (!adds_to_totals(w)) continue;
        float shares[MOST_ROWS];
        for (long r = 0; r < t.rows; r++) shares[r] = j->shares[j->place[t.start + r]];
        scale_laid(to, shares, t.rows, w);
    }
}

// Adds a bias to totals of the first section, by the shares of rows.
INLINE void add_bias_to(float *const *totals, const char *bias, const float *shares, long rows, long left, kind k) {
    for (long c = 0; c < least(left, PANEL); c += LANES) {
        vec added = vec_load_upto(at(bias, c, k), left - c, k);
        for (long r = 0; r < rows; r++) {
            float *total = totals[r] + c;
            vec_store(total, vec_fma(added, vec_all(shares[r]), vec_load(total, FLOAT32)), FLOAT32);
        }
    }
}

// Adds the sums of a tile, whose sections lie apart, to totals by the shares of rows.
INLINE void add_sums_to(float *const *totals, const float *sums, const float *shares, long rows, long sections) {
    for (long section = 0; section < sections; section++)
        for (long r = 0; r < rows; r++, sums += PANEL)
            for (long c = 0; c < PANEL; c += LANES) {
                float *total = totals[r] + section * PANEL + c;
                vec sum = vec_fma(vec_load(sums + c, FLOAT32), vec_all(shares[r]), vec_load(total, FLOAT32));
                vec_store(total, sum, FLOAT32);
            }
}

// Adds the products of a panel of all experts to the totals [T, sections, 32].
INLINE void add_experts(const job *j, long panel, int last, float *totals, long *shaped) {
    float sums[MOST_SUMS * MOST_ROWS * PANEL] __attribute__((aligned(64))), shares[MOST_ROWS];
    float *rows[MOST_ROWS];
    long left = least(PANEL, j->of.down->outputs - panel * PANEL), size = j->of.down->sections * PANEL;
    for (long i = 0; i < j->count; i++) {
        tile t = j->tiles[i];
        const weights *w = &j->of.down[t.expert];
        for (long r = 0; r < t.rows; r++) {
            long place = j->place[t.start + r];
            shares[r] = j->shares[place];
            rows[r] = totals + place / j->chosen * size;
        }
        gathered_tile g = {.x = j->laid + t.start * row_dwords(w), .rows = t.rows};
        g.leads = i == 0 || j->tiles[i - 1].expert != t.expert;
        if (i + 1 < j->count) g.next = panel_of(&j->of.down[j->tiles[i + 1].expert], panel);
        else if (!last) g.next = panel_of(&j->of.down[j->tiles[0].expert], panel + 1);
        if (adds_to_totals(w)) g.totals = rows;
        multiply_tile(&g, w, panel, sums, shaped);
        if (!g.totals) add_sums_to(rows, sums, shares, t.rows, w->sections);
        if (!j->of.down_bias) continue;
        const char *bias = at(j->of.down_bias, t.expert * w->outputs + panel * PANEL, w->kind);
        add_bias_to(rows, bias, shares, t.rows, left, w->kind);
    }
}

static void down_units(const void *task, long begin, long end) {
    const job *j = task;
    const weights *any = j->of.down;
    long sections = any->sections, size = sections * PANEL, bytes = j->tokens * size * sizeof(float), shaped = 0;
    float *totals = scratch_beside((size_t)bytes);
    for (long panel = begin; panel < end; panel++) {
        long left = least(PANEL, any->outputs - panel * PANEL);
        memset(totals, 0, bytes);
        add_experts(j, panel, panel == end - 1, totals, &shaped);
        for (long token = 0; token < j->tokens; token++) {
            float *total = totals + token * size;
            join_apart(total, PANEL, sections);
            for (long c = 0; c < left; c += LANES) {
                char *to = at_out(j->out + token * j->out_stride, panel * PANEL + c, j->out_kind);
                vec_store_upto(to, vec_load(total + c, FLOAT32), left - c, j->out_kind);
            }
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

// Whether a row is laid in the same way for all experts that were chosen, one like several.
static int all_alike(const job *j) {
    if (j->count == 0 || is_for_amx(&j->of.gate_up[j->tiles[0].expert])) return 0;
    const char *first = (const char *)&j->of.gate_up[j->tiles[0].expert];
    long skipped = sizeof(void *);  // where the panels lie
    for (long i = 1; i < j->count; i++) {
        const char *other = (const char *)&j->of.gate_up[j->tiles[i].expert];
        if (memcmp(first + skipped, other + skipped, sizeof(weights) - skipped)) return 0;
    }
    return 1;
}

// dwords: the most that a row has when it is laid.
static void compute(job *j, const int *ids, const int *places, char *memory, long inner_bytes, long dwords) {
    memory = sort_rows(j, ids, places, memory);
    j->inner = (char *)(((uintptr_t)memory + 63) / 64 * 64);
    j->alone = (uint32_t *)(((uintptr_t)j->inner + j->tokens * j->chosen * inner_bytes + 63) / 64 * 64);
    j->laid = j->alone + (j->tokens * dwords + 15) / 16 * 16;
    j->alike = all_alike(j);
    long grain = grain_of(LAY_WORTH, j->tokens * j->chosen / (j->count > 0 ? j->count : 1) * j->x_bytes);
    if (j->alike) spread(j->tokens, grain_of(LAY_WORTH, j->x_bytes), lay_alone, j);
    // There are no tiles if all choices are of other ranks.
    if (j->tokens > 1 || !j->alike) spread(j->count, grain, lay_inputs, j);
    long units = j->touched * panels_of(j->of.gate_up), several = units / (8 * threads);
    spread_streams(units, several > 1 ? several : 1, gate_units, j);
    spread(j->count, grain, lay_inner, j);
    long panels = panels_of(j->of.down), neighbours = panels / (8 * threads);
    spread_streams(panels, neighbours > 1 ? neighbours : 1, down_units, j);
}

// ids [T, k] in ascending order and shares [T, k] as `route` wrote them; out [T, outputs of down] is contiguous. places:
// that of each expert's matrices, or -1 if another rank holds them; NULL if all are here, in the order of their numbers.
EXPORT void experts(const weights *gate_up, const weights *down, long count, const void *x, long x_stride,
                    long width, const int *ids, const int *places, const float *shares, long chosen,
                    const void *gate_up_bias, const void *down_bias, void *out, long tokens, int out_kind, int function) {
    layer of = {gate_up, down, gate_up_bias, down_bias, count};
    long most = least(tokens, BLOCK_TOKENS), rows = most * chosen, dwords = 0;
    for (long e = 0; e < count; e++) {
        long wanted = row_dwords(&down[e]), inputs = row_dwords(&gate_up[e]);
        if (wanted > dwords) dwords = wanted;
        if (inputs > dwords) dwords = inputs;
    }
    long inner_bytes = columns_of(gate_up) * width_of(gate_up->kind), row_bytes = x_stride * width_of(gate_up->kind);
    long lists = (2 * count + 2) * sizeof(int) + rows * (sizeof(int) + sizeof(tile));
    char *memory = scratch(lists + rows * (inner_bytes + dwords * 4) + most * dwords * 4 + 256);
    for (long start = 0; start < tokens; start += most) {
        job j = {.of = of, .x_stride = row_bytes, .chosen = chosen, .out_kind = out_kind, .function = function};
        j.x_bytes = width * width_of(gate_up->kind);
        j.tokens = least(most, tokens - start);
        j.x = (const char *)x + start * row_bytes;
        j.shares = shares + start * chosen;
        j.out_stride = down->outputs * width_of(out_kind);
        j.out = (char *)out + start * j.out_stride;
        compute(&j, ids + start * chosen, places, memory, inner_bytes, dwords);
    }
}

EXPORT void experts_words(const word *a) {
    experts(a[0].pointer, a[1].pointer, a[2].whole, a[3].pointer, a[4].whole, a[5].whole, a[6].pointer, a[7].pointer,
            a[8].pointer, a[9].whole, a[10].pointer, a[11].pointer, a[12].pointer, a[13].whole, (int)a[14].whole,
            (int)a[15].whole);
}
