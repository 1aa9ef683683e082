// x [T, features] through the experts that each token chose: gates and ups, an activation, downs, and the sum of a
// token's experts by their weights.
//
// Rows are sorted by expert, so that an expert's matrices are read once for all its tokens, and those of experts that
// nobody chose are not read. Units of work are panels: of each expert for gates and ups, of the result for downs, where
// one thread adds up all experts in the order of their numbers, in float32. So the sum of a token has the same bits
// alone and in any batch. Sections of inputs are added up over the experts first, and then joined as in `sections.h`.
#include "gathered_codes.h"
#include "gathered_tile.h"
#include "product.h"
#include "threads.h"
#include "call_arguments.h"

enum {
    BLOCK_TOKENS = 1024,    // that are computed at once
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
    int coded;                // whether they are multiplied as `gathered_codes.h` does
    int place;                // in laid rows, among which coded tiles are whole
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
    long dwords;          // the most that a row has when it is laid
    char *inner;          // [rows, inner features]
    uint32_t *alone;      // rows of x, laid one by one if they are alike
    uint32_t *laid;       // rows of x, tile by tile, then rows of `inner`
} job;

INLINE long most(long a, long b) { return a > b ? a : b; }

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

INLINE uint32_t *laid_tile(const job *j, tile t) { return j->laid + t.place * j->dwords; }

// The rows of a tile as they are multiplied with gates and ups.
INLINE const uint32_t *inputs_of_tile(const job *j, tile t, const weights *w) {
    return j->alike && t.rows == 1 ? alone_row(j, t.start, w) : laid_tile(j, t);
}

static void lay_inputs(const void *task, long begin, long end) {
    const job *j = task;
    for (long i = begin; i < end; i++) {
        tile t = j->tiles[i];
        const weights *w = &j->of.gate_up[t.expert];
        uint32_t *to = laid_tile(j, t);
        if (j->alike) {
            const uint32_t *from[MOST_ROWS];
            for (long r = 0; r < t.rows; r++) from[r] = alone_row(j, t.start + r, w);
            if (t.coded) lay_laid_codes(to, from, t.rows, w);
            else if (t.rows > 1) lay_laid(to, from, t.rows, row_dwords(w));
            continue;
        }
        const char *rows[MOST_ROWS];
        for (long r = 0; r < t.rows; r++) rows[r] = j->x + j->place[t.start + r] / j->chosen * j->x_stride;
        if (t.coded) lay_codes(to, rows, t.rows, j->x_bytes, NULL, w);
        else lay_rows(to, rows, t.rows, j->x_bytes, w);
    }
}

// Multiplies tiles [first, last) of one expert with a panel of gates and ups.
INLINE void multiply_codes(const job *j, const product *p, long first, long last, long panel, float *sums, long *shaped) {
    const long size = CODED_ROWS * PANEL;
    for (long count; first < last; first += count) {
        const uint32_t *x[CODED_TILES];
        count = least(last - first, CODED_TILES);
        for (long i = 0; i < count; i++) x[i] = laid_tile(j, j->tiles[first + i]);
        memset(sums, 0, count * size * sizeof *sums);
        add_codes(x, count, p->w, panel, panel_of(p->w, panel + 1), sums, shaped);
        for (long i = 0; i < count; i++)
            finish_tile(p, sums + i * size, j->tiles[first + i].start, j->tiles[first + i].rows, panel);
    }
}

enum { GATE_SUMS = MOST_SUMS * MOST_ROWS > CODED_TILES * CODED_ROWS ? MOST_SUMS * MOST_ROWS : CODED_TILES * CODED_ROWS };

static void gate_units(const void *task, long begin, long end) {
    const job *j = task;
    long panels = panels_of(j->of.gate_up), shaped = 0;
    float sums[GATE_SUMS * PANEL] __attribute__((aligned(64)));
    for (long unit = begin; unit < end; unit++) {
        long number = unit / panels, panel = unit % panels, first = j->first[number], last = j->first[number + 1];
        long expert = j->tiles[first].expert;
        const weights *w = &j->of.gate_up[expert];
        product p = {.w = w, .out = j->inner, .out_kind = w->kind, .function = j->function};
        p.out_stride = columns_of(w) * width_of(w->kind);
        if (j->of.gate_up_bias) p.bias = j->of.gate_up_bias + expert * w->outputs * width_of(w->kind);
        if (j->tiles[first].coded) {
            multiply_codes(j, &p, first, last, panel, sums, &shaped);
            continue;
        }
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
        float shares[MOST_ROWS];
        for (long r = 0; r < t.rows; r++) shares[r] = j->shares[j->place[t.start + r]];
        uint32_t *to = laid_tile(j, t);
        if (t.coded) {
            lay_codes(to, rows, t.rows, bytes, adds_to_totals(w) ? shares : NULL, w);
            continue;
        }
        lay_rows(to, rows, t.rows, bytes, w);
        if (adds_to_totals(w)) scale_laid(to, shares, t.rows, w);
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

// Adds the sums of a tile, whose sections lie apart and have room for so many rows, to totals by the shares of rows.
INLINE void add_sums_to(float *const *totals, const float *sums, const float *shares, long rows, long room, long sections) {
    for (long section = 0; section < sections; section++, sums += room * PANEL)
        for (long r = 0; r < rows; r++)
            for (long c = 0; c < PANEL; c += LANES) {
                float *total = totals[r] + section * PANEL + c;
                vec sum = vec_load(sums + r * PANEL + c, FLOAT32);
                vec_store(total, vec_fma(sum, vec_all(shares[r]), vec_load(total, FLOAT32)), FLOAT32);
            }
}

// The rows of a tile in totals [T, sections, 32], and their shares.
INLINE void find_totals(const job *j, tile t, float *totals, float **rows, float *shares) {
    for (long r = 0; r < t.rows; r++) {
        long place = j->place[t.start + r];
        shares[r] = j->shares[place];
        rows[r] = totals + place / j->chosen * j->of.down->sections * PANEL;
    }
}

// Adds the bias of a tile's expert to totals, if there is one.
INLINE void add_bias_of(const job *j, tile t, long panel, float *const *rows, const float *shares) {
    const weights *w = &j->of.down[t.expert];
    if (!j->of.down_bias) return;
    const char *bias = at(j->of.down_bias, t.expert * w->outputs + panel * PANEL, w->kind);
    add_bias_to(rows, bias, shares, t.rows, least(PANEL, w->outputs - panel * PANEL), w->kind);
}

// Copies the totals of a tile's rows to its sums, or back.
INLINE void copy_totals(float *const *rows, float *sums, long count, long sections, int back) {
    for (long section = 0; section < sections; section++, sums += CODED_ROWS * PANEL)
        for (long r = 0; r < count; r++) {
            float *total = rows[r] + section * PANEL, *sum = sums + r * PANEL;
            memcpy(back ? total : sum, back ? sum : total, PANEL * sizeof *sum);
        }
}

// The panel that is read for the i-th tile: if there is none, the next one of the first tile.
INLINE const void *panel_after(const job *j, long i, long panel) {
    return i < j->count ? panel_of(&j->of.down[j->tiles[i].expert], panel) : panel_of(&j->of.down[j->tiles[0].expert], panel + 1);
}

// Adds the products of a panel and some tiles from the first one on, all of one expert, to totals; -> how many.
INLINE long add_coded_tiles(const job *j, long first, long panel, float *totals, float *sums, long *shaped) {
    const tile *tiles = j->tiles + first;
    const weights *w = &j->of.down[tiles->expert];
    const long size = coded_sums(w), end = least(CODED_TILES, j->count - first);
    const int direct = adds_to_totals(w);
    const uint32_t *x[CODED_TILES];
    float *rows[CODED_TILES][CODED_ROWS], shares[CODED_TILES][CODED_ROWS];
    long count = 0;
    for (; count < end && tiles[count].expert == tiles->expert; count++) {
        float *of_tile = sums + count * size;
        x[count] = laid_tile(j, tiles[count]);
        find_totals(j, tiles[count], totals, rows[count], shares[count]);
        if (direct) copy_totals(rows[count], of_tile, tiles[count].rows, w->sections, 0);
        else memset(of_tile, 0, size * sizeof *sums);
    }
    add_codes(x, count, w, panel, panel_after(j, first + count, panel), sums, shaped);
    for (long i = 0; i < count; i++, sums += size) {
        if (direct) copy_totals(rows[i], sums, tiles[i].rows, w->sections, 1);
        else add_sums_to(rows[i], sums, shares[i], tiles[i].rows, CODED_ROWS, w->sections);
        add_bias_of(j, tiles[i], panel, rows[i], shares[i]);
    }
    return count;
}

// Adds the products of a panel of all experts to the totals [T, sections, 32]. sums: room for those of tiles.
INLINE void add_experts(const job *j, long panel, int last, float *totals, float *sums, long *shaped) {
    float shares[MOST_ROWS], *rows[MOST_ROWS];
    for (long i = 0, count; i < j->count; i += count) {
        tile t = j->tiles[i];
        const weights *w = &j->of.down[t.expert];
        count = t.coded ? add_coded_tiles(j, i, panel, totals, sums, shaped) : 1;
        if (t.coded) continue;
        find_totals(j, t, totals, rows, shares);
        gathered_tile g = {.x = laid_tile(j, t), .rows = t.rows};
        g.leads = i == 0 || j->tiles[i - 1].expert != t.expert;
        if (i + 1 < j->count || !last) g.next = panel_after(j, i + 1, panel);
        if (adds_to_totals(w)) g.totals = rows;
        multiply_tile(&g, w, panel, sums, shaped);
        if (!g.totals) add_sums_to(rows, sums, shares, t.rows, t.rows, w->sections);
        add_bias_of(j, t, panel, rows, shares);
    }
}

static void down_units(const void *task, long begin, long end) {
    const job *j = task;
    const weights *any = j->of.down;
    long sections = any->sections, size = sections * PANEL, bytes = j->tokens * size * sizeof(float), shaped = 0;
    long room = most(CODED_TILES * coded_sums(any), MOST_SUMS * MOST_ROWS * PANEL);
    float *sums = scratch_beside((size_t)bytes + room * sizeof *sums), *totals = sums + room;
    for (long panel = begin; panel < end; panel++) {
        long left = least(PANEL, any->outputs - panel * PANEL);
        memset(totals, 0, bytes);
        add_experts(j, panel, panel == end - 1, totals, sums, &shaped);
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
    long rows = j->tokens * j->chosen, experts = j->of.experts, laid;
    int *starts = (int *)memory, *place = starts + experts + 1, *first = place + rows;
    tile *tiles = (tile *)(first + experts + 1);
    memset(starts, 0, (experts + 1) * sizeof *starts);
    for (long i = 0; i < rows; i++) {
        int held = chosen_place(ids, places, i);
        if (held >= 0) starts[held + 1]++;
    }
    for (long e = 0; e < experts; e++) starts[e + 1] += starts[e];
    j->count = j->touched = laid = 0;
    for (int e = 0; e < experts; e++) {
        long begin = starts[e], held = starts[e + 1] - begin;
        if (held == 0) continue;
        int coded = takes_codes(&j->of.gate_up[e], held) && takes_codes(&j->of.down[e], held);
        long size = coded ? CODED_ROWS : least(tile_rows(&j->of.gate_up[e]), tile_rows(&j->of.down[e]));
        long n = ceil_div(held, size);
        first[j->touched++] = (int)j->count;
        for (long i = 0; i < n; i++) {
            long start = held * i / n, held_here = held * (i + 1) / n - start;
            tiles[j->count++] = (tile){e, (int)(begin + start), (int)held_here, coded, (int)laid};
            laid += coded ? CODED_ROWS : held_here;
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

static void compute(job *j, const int *ids, const int *places, char *memory, long inner_bytes) {
    memory = sort_rows(j, ids, places, memory);
    j->inner = (char *)(((uintptr_t)memory + 63) / 64 * 64);
    j->alone = (uint32_t *)(((uintptr_t)j->inner + j->tokens * j->chosen * inner_bytes + 63) / 64 * 64);
    j->laid = j->alone + (j->tokens * j->dwords + 15) / 16 * 16;
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
    long block = least(tokens, BLOCK_TOKENS), rows = block * chosen, dwords = 0, coded = 0;
    for (long e = 0; e < count; e++) {
        dwords = most(dwords, most(row_dwords(&gate_up[e]), row_dwords(&down[e])));
        coded = most(coded, most(coded_dwords(&gate_up[e]), coded_dwords(&down[e])));
    }
    dwords = (most(dwords, coded) + 15) / 16 * 16;
    long inner_bytes = columns_of(gate_up) * width_of(gate_up->kind), row_bytes = x_stride * width_of(gate_up->kind);
    long lists = (2 * count + 2) * sizeof(int) + rows * (sizeof(int) + sizeof(tile));
    long laid = rows + (coded ? CODED_ROWS * least(count, rows / CODED_ROWS) : 0);
    char *memory = scratch(lists + rows * inner_bytes + (laid + block) * dwords * 4 + 256);
    for (long start = 0; start < tokens; start += block) {
        job j = {.of = of, .x_stride = row_bytes, .chosen = chosen, .out_kind = out_kind, .function = function, .dwords = dwords};
        j.x_bytes = width * width_of(gate_up->kind);
        j.tokens = least(block, tokens - start);
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
