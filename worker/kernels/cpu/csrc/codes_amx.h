// A product of many rows with codes of up to 6 bits by AMX, where inputs have shifts, or scales are whole
// (`quantized_rows.h`). A run of a panel is unpacked once for all rows of a chunk.
//
// Codes and inputs are whole numbers of 8 bits, which bfloat16 holds exactly, and so it does inputs that are shifted to
// the scale of their run; float32 holds a group's sum of their products exactly. So a sum has the bits that products of
// bytes give it, and needs neither to be shifted nor to be made a float. The products of groups are stored, scaled and
// added up for a tile of rows at a time.
//
// Codes times whole scales are whole numbers of 16 bits, which are divided into two bytes. Inputs are multiplied by both,
// and a run is added up as whole numbers without a stop between its groups: the sum that `tile_runs.c` has.
#pragma once

#include "product.h"
#include "quantized_rows.h"
#include "threads.h"
#include "tile.h"
#include "tile_amx.h"

enum {
    STEP = 2 * PAIRS,          // inputs that one instruction multiplies as bfloat16,
    STEPS = CHUNK / STEP,      // of a run,
    DEPTH = 4 * PAIRS,         // and as bytes
    CODE_TILES = 16,           // the most tiles of a chunk, each of HALF_ROWS rows
    CODE_BYTES = 512 << 10,    // of a chunk's inputs, which stay in the second-level cache
    PART = HALF_ROWS * PANEL,  // numbers of a tile
};

// Whether rows of a matrix are multiplied so, from which number on it takes less time.
INLINE int has_codes_for_amx(const weights *w, long rows) {
    if (has_whole_scales(w)) {
        long inputs = w->run * w->group;
        return rows >= 2 * HALF_ROWS && inputs % DEPTH == 0 && section_inputs(w) % inputs == 0;
    }
    int fits = has_shifts(w) && w->bits <= 5 && w->group >= STEP && section_inputs(w) % STEP == 0;
    return fits && rows >= (w->bits == 4 ? 1 : 4) * HALF_ROWS;
}

typedef struct {
    product product;
    char *laid;      // [tile][section][step][row][input of a step]: bfloat16, or bytes if scales are whole
    float *numbers;  // [rows of whole tiles][numbers_of_row]
    long tiles, chunks, blocks;
} codes_job;

// A run of a panel: its codes as registers of bfloat16, one for each half of the columns, and what its groups are scaled by.
typedef struct {
    uint32_t codes[STEPS][COLUMNS][PAIRS * LANES];
    float scales[STEPS][PANEL], minimums[STEPS][PANEL];
    long groups, steps;  // of this run, and of a group
} code_run;

// A run with whole scales: codes times scales as two bytes, of which the first are 7 bits higher; and the factors of scales and
// of minimums.
typedef struct {
    uint32_t codes[CHUNK / DEPTH][COLUMNS][2][PAIRS * LANES];
    float factors[2][PANEL], minimums[CHUNK / GROUP_LEAST][PANEL];
    long groups, steps;  // of this run
} whole_run;

// The numbers of a row for a run: its scale, and what the inputs of each group add up to, if it is wanted.
INLINE int has_lows(const weights *w) { return w->offsets || w->minimums; }
INLINE long numbers_of_run(const weights *w) { return 1 + (has_lows(w) ? groups_rounded(w) : 0); }
INLINE long numbers_of_row(const weights *w) { return head_dwords(w) / head_of(w) * numbers_of_run(w); }

// Writes these numbers as floats, of the head that `round_row` has written.
INLINE void lay_numbers(float *to, const uint32_t *head, const weights *w) {
    memcpy(to, head, 4);
    for (long group = 0; has_lows(w) && group < groups_rounded(w); group++) {
        if (has_whole_scales(w)) to[1 + group] = (float)(int16_t)(head[1 + group / 2] >> group % 2 * 16);
        else memcpy(to + 1 + group, head + 1 + group * head_of_group(w) + 2, 4);
    }
}

enum { MOST_HEAD = CHUNK / GROUP_LEAST * 3 + 1 };  // dwords for a chunk of a row

INLINE long laid_bytes(const weights *w) { return w->inputs * (has_whole_scales(w) ? 1 : 2); }  // of a row

// Lays the bytes of a step as bfloat16, on the scale of their run.
INLINE void lay_shifted(char *to, const char *bytes, int32_t up) {
    for (long i = 0; i < STEP; i += LANES)
        vec_store(to + i * 2, vec_of_whole(whole_up_by(whole_of_signed(bytes + i), whole_all(up))), BFLOAT16);
}

// Rounds rows, and lays them as tiles read them.
static void lay_codes_rows(const void *task, long first, long last) {
    const codes_job *j = task;
    const weights *w = j->product.w;
    const long inputs = section_inputs(w), each = head_of_group(w), together = groups_rounded(w);
    const int wholes = has_whole_scales(w);
    const long step = wholes ? DEPTH : STEP;
    float *numbers = j->numbers + first * numbers_of_row(w);
    uint32_t head[MOST_HEAD], bytes[CHUNK / 4 + LANES];
    for (long r = first; r < last; r++) {
        const char *from = j->product.x + r * j->product.x_stride;
        char *to = j->laid + r / HALF_ROWS * HALF_ROWS * laid_bytes(w) + r % HALF_ROWS * STEP_BYTES;
        for (long section = 0; section < w->sections; section++, from += inputs * width_of(w->kind)) {
            for (long input = 0; input < inputs; input += CHUNK) {
                long group = shifted(input, w->group), count = least(CHUNK, inputs - input);
                round_row(bytes, head - shifted(group, together) * head_of(w), from, 1, group, w);
                for (long i = 0, run = 0; i < count; i += together * w->group, run++, numbers += numbers_of_run(w))
                    lay_numbers(numbers, head + run * head_of(w), w);
                for (long i = 0; i < count; i += step, to += HALF_ROWS * STEP_BYTES) {
                    if (wholes) memcpy(to, (char *)bytes + i, STEP_BYTES);
                    else lay_shifted(to, (char *)bytes + i, (int32_t)head[1 + shifted(i, w->group) * each]);
                }
            }
        }
    }
}

INLINE whole whole_of_bits(vec a) { return (whole)_mm512_castps_si512(a); }

// Where the pairs of the next quads of a run come, of which so many are done.
INLINE uint32_t *row_behind(uint32_t *row, long quads) {
    return row + 2 * quads % PAIRS * LANES + 2 * quads / PAIRS * COLUMNS * PAIRS * LANES;
}

// Unpacks the codes of a group, which have 4 bits; -> where those of the next one come.
INLINE uint32_t *unpack_halves(uint32_t *row, const char *from, long quads, whole below, whole above) {
    const whole *line = (const whole *)from;
    for (long quad = 0; quad < quads; quad += 2, line += COLUMNS) {
        for (int c = 0; c < COLUMNS; c++) {
            whole codes = whole_load(line + c);
            vec pairs[4];
            look_up_pairs(pairs, pairs + 1, low_nibbles(codes), below, above);
            look_up_pairs(pairs + 2, pairs + 3, high_nibbles(codes), below, above);
            for (int i = 0; i < 4; i++) vec_store(row_behind(row, quad) + (c * PAIRS + i) * LANES, pairs[i], FLOAT32);
        }
    }
    return row_behind(row, quads);
}

// The same of codes of 5 bits.
INLINE uint32_t *unpack_fives(uint32_t *row, const char *from, long quads, const weights *w) {
    whole bytes[CHUNK / 4 * COLUMNS], excess = whole_all(excess_of(w)), byte = whole_all(255);
    unpack_more(bytes, (const whole *)from, quads, 1);
    for (long quad = 0; quad < quads; quad++) {
        for (int c = 0; c < COLUMNS; c++) {
            whole numbers[4];
            for (int i = 0; i < 4; i++) {
                whole code = whole_down(bytes[quad * COLUMNS + c], 8 * i) & byte;
                numbers[i] = whole_of_bits(vec_of_whole(code - excess));
            }
            for (int i = 0; i < 4; i += 2) {  // bfloat16 is the upper half of float32
                whole pair = whole_down(numbers[i], 16) | (numbers[i + 1] & whole_all((int)0xffff0000));
                whole_store(row_behind(row, quad) + (c * PAIRS + i / 2) * LANES, pair);
            }
        }
    }
    return row_behind(row, quads);
}

// Unpacks a run; -> the beginning of the next one.
INLINE const char *unpack_run(code_run *to, const groups *from, const weights *w, whole below, whole above) {
    const char *panel = from->panel;
    uint32_t *row = to->codes[0][0];
    to->groups = from->end - from->group, to->steps = shifted(w->group, STEP);
    for (long group = from->group; group < from->end; group++) {
        vec scales[COLUMNS], minimums[COLUMNS];
        load_head(scales, minimums, panel, factors_for(from, group, w), w, 0, COLUMNS);
        for (int c = 0; c < COLUMNS; c++) {
            vec_store(to->scales[group - from->group] + c * LANES, scales[c], FLOAT32);
            vec_store(to->minimums[group - from->group] + c * LANES, minimums[c], FLOAT32);
        }
        row = w->bits == 4 ? unpack_halves(row, panel + group_head_bytes(w), quads_in(w, group), below, above)
                           : unpack_fives(row, panel + group_head_bytes(w), quads_in(w, group), w);
        panel += bytes_in(w, group);
    }
    return panel;
}

// Multiplies the codes of a quad of 16 columns, of which each is a byte, by scales in both words of their dwords; -> the
// two bytes of the products.
INLINE void scale_quads(uint32_t *high, uint32_t *low, __m512i quads, __m512i scales, __m512i excess) {
    const __m512i bytes = _mm512_set1_epi16(255), sevens = _mm512_set1_epi16(127);
    __m512i even = _mm512_mullo_epi16(_mm512_sub_epi16(_mm512_and_si512(quads, bytes), excess), scales);
    __m512i odd = _mm512_mullo_epi16(_mm512_sub_epi16(_mm512_srli_epi16(quads, 8), excess), scales);
    __m512i above = _mm512_and_si512(_mm512_srai_epi16(even, 7), bytes);
    _mm512_storeu_si512(high, _mm512_or_si512(above, _mm512_slli_epi16(_mm512_srai_epi16(odd, 7), 8)));
    __m512i below = _mm512_and_si512(even, sevens);
    _mm512_storeu_si512(low, _mm512_or_si512(below, _mm512_slli_epi16(_mm512_and_si512(odd, sevens), 8)));
}

// Unpacks a run with whole scales; -> the beginning of the next one.
INLINE const char *unpack_whole_run(whole_run *to, const groups *from, const weights *w) {
    const char *panel = from->panel, *factors = factors_for(from, from->group, w);
    const __m512i excess = _mm512_set1_epi16((short)excess_of(w));
    to->groups = from->end - from->group, to->steps = to->groups * w->group / DEPTH;
    for (long i = 0; i < PANEL * (1 + w->minimums); i += LANES)
        vec_store(to->factors[0] + i, load_numbers(factors, i, w->factor), FLOAT32);
    for (long group = 0, quad = 0; group < to->groups; group++) {
        whole bytes[GROUP_MOST / 4 * COLUMNS];
        const whole *codes = (const whole *)(panel + group_head_bytes(w));
        const long quads = w->group / 4;
        if (w->bits == 4) unpack_levels(bytes, codes, quads, levels_of(w));
        else unpack_more(bytes, codes, quads, w->bits - 4);
        for (int c = 0; c < COLUMNS; c++) {
            whole scale = load_whole(panel + c * LANES, w->scale);
            __m512i scales = (__m512i)in_words(scale, scale);
            for (long q = 0; q < quads; q++) {
                uint32_t(*pair)[PAIRS * LANES] = to->codes[(quad + q) / PAIRS][c];
                long place = (quad + q) % PAIRS * LANES;
                scale_quads(pair[0] + place, pair[1] + place, (__m512i)bytes[q * COLUMNS + c], scales, excess);
            }
            if (w->minimums)
                vec_store(to->minimums[group] + c * LANES, load_numbers(panel + scales_bytes(w), c * LANES, w->scale), FLOAT32);
        }
        quad += quads;
        panel += bytes_in(w, from->group + group);
    }
    return panel;
}

// The products of a tile with half of the columns of a run, and what they are scaled with. They lie in memory that stays in
// the first-level cache.
typedef struct {
    const float (*products)[HALF_ROWS * LANES];  // of each group
    const float *numbers;                        // of the run in the first row, `stride` before those of the next
    long stride;
    const code_run *run;
    int half;
    const char *next;  // the inputs of the next tile, which are prefetched
} half_run;

INLINE void multiply_half(const code_run *run, const char *x, int half, float products[][HALF_ROWS * LANES]) {
    for (long group = 0, step = 0; group < run->groups; group++) {
        _tile_zero(0);
        for (long end = step + run->steps; step < end; step++) {
            _tile_loadd(4, x + step * HALF_ROWS * STEP_BYTES, STEP_BYTES);
            _tile_loadd(6, run->codes[step][half], LANES * 4);
            _tile_dpbf16ps(0, 4, 6);
        }
        _tile_stored(0, products[group], LANES * 4);
    }
}

INLINE void prefetch_row(const half_run *h, long group, long row) {
    if (h->half == 0) _mm_prefetch(h->next + (group * HALF_ROWS + row) * STEP_BYTES, _MM_HINT_T0);
}

// Adds a half, scaled, to the sums of its tile in the order of `tile_shifts.c`.
INLINE void add_shifted_half(const half_run *h, int low, float *sums) {
    vec totals[HALF_ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < HALF_ROWS; r++) totals[r] = vec_zero();
    for (long group = 0; group < h->run->groups; group++) {
        vec scale = vec_load(h->run->scales[group] + h->half * LANES, FLOAT32);
        vec minimum = low ? vec_load(h->run->minimums[group] + h->half * LANES, FLOAT32) : vec_zero();
        const float *of = h->products[group];
#pragma GCC unroll 16
        for (int r = 0; r < HALF_ROWS; r++) {
            prefetch_row(h, group, r);
            if (low) totals[r] = vec_fma(minimum, vec_all(h->numbers[r * h->stride + 1 + group]), totals[r]);
            totals[r] = vec_fma(vec_load(of + r * LANES, FLOAT32), scale, totals[r]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < HALF_ROWS; r++, sums += PANEL)
        vec_store(sums, vec_fma(totals[r], vec_all(h->numbers[r * h->stride]), vec_load(sums, FLOAT32)), FLOAT32);
}

// Adds half of the columns of a run to the sums of its tile as `tile_runs.c` does. high, low: the sums of both bytes.
INLINE void add_whole_half(const whole_run *run, const int32_t *high, const int32_t *low, const float *numbers, long stride,
                           int half, int minimums, float *sums) {
    vec factor = vec_load(run->factors[0] + half * LANES, FLOAT32), lows[HALF_ROWS];
    vec behind = minimums ? vec_load(run->factors[1] + half * LANES, FLOAT32) : vec_zero();
#pragma GCC unroll 16
    for (int r = 0; r < HALF_ROWS; r++) lows[r] = vec_zero();
    for (long group = 0; minimums && group < run->groups; group++) {  // sums are exact in float32
        vec minimum = vec_load(run->minimums[group] + half * LANES, FLOAT32);
#pragma GCC unroll 16
        for (int r = 0; r < HALF_ROWS; r++)
            lows[r] = vec_fma(minimum, vec_all(numbers[r * stride + 1 + group]), lows[r]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < HALF_ROWS; r++, sums += PANEL) {
        vec scale = vec_all(numbers[r * stride]), before = vec_load(sums, FLOAT32);
        whole sum = whole_up(whole_load(high + r * LANES), 7) + whole_load(low + r * LANES);
        if (minimums) before = vec_fma(vec_mul(lows[r], behind), scale, before);
        vec_store(sums, vec_fma(vec_mul(vec_of_whole(sum), factor), scale, before), FLOAT32);
    }
}

// Multiplies a tile with a run: inputs are signed, the lower bytes of codes are not.
INLINE void add_whole_tile(const whole_run *run, const char *x, const float *numbers, long stride, int minimums, float *sums) {
    int32_t found[2 * COLUMNS][PART / COLUMNS] __attribute__((aligned(64)));
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long step = 0; step < run->steps; step++) {
        _tile_loadd(4, x + step * HALF_ROWS * STEP_BYTES, STEP_BYTES);
        _tile_loadd(5, run->codes[step][0][0], STEP_BYTES);
        _tile_dpbssd(0, 4, 5);
        _tile_loadd(6, run->codes[step][0][1], STEP_BYTES);
        _tile_dpbsud(1, 4, 6);
        _tile_loadd(7, run->codes[step][1][0], STEP_BYTES);
        _tile_dpbssd(2, 4, 7);
        _tile_loadd(5, run->codes[step][1][1], STEP_BYTES);
        _tile_dpbsud(3, 4, 5);
    }
    _tile_stored(0, found[0], STEP_BYTES);
    _tile_stored(1, found[1], STEP_BYTES);
    _tile_stored(2, found[2], STEP_BYTES);
    _tile_stored(3, found[3], STEP_BYTES);
    for (int half = 0; half < COLUMNS; half++)
        add_whole_half(run, found[2 * half], found[2 * half + 1], numbers, stride, half, minimums, sums + half * LANES);
}

// The two bytes of the 16 codes' numbers in bfloat16.
INLINE void bytes_of_levels(const weights *w, whole *below, whole *above) {
    whole levels = levels_of(w);
    int8_t low[16], high[16];
    for (int i = 0; i < 16; i++) {
        bf16 number = narrow((float)(((const uint8_t *)&levels)[i] - excess_of(w)));
        low[i] = (int8_t)number, high[i] = (int8_t)(number >> 8);
    }
    *below = table_of(low), *above = table_of(high);
}

// Multiplies the tiles [first, end) with a run of a panel that begins so many inputs and so many numbers of a row after the
// first one. It is one of both kinds.
INLINE void add_run(const codes_job *j, const code_run *run, const whole_run *wholes, long first, long end, long inputs,
                    long number, float sums[][MOST_SUMS * PART], long section, int low) {
    const weights *w = j->product.w;
    const long stride = numbers_of_row(w), row_bytes = laid_bytes(w), skipped = inputs * row_bytes / w->inputs;
    float products[STEPS][HALF_ROWS * LANES] __attribute__((aligned(64)));
    for (long tile = first; tile < end; tile++) {
        const char *x = j->laid + HALF_ROWS * (tile * row_bytes + skipped);
        const float *numbers = j->numbers + tile * HALF_ROWS * stride + number;
        float *to = place_of_section(sums[tile - first], HALF_ROWS, w, section, 0);
        if (wholes) {
            add_whole_tile(wholes, x, numbers, stride, low, to);
            continue;
        }
        for (int half = 0; half < COLUMNS; half++, to += LANES) {
            half_run h = {products, numbers, stride, run, half, x + HALF_ROWS * row_bytes};
            multiply_half(run, x, half, products);
            add_shifted_half(&h, low, to);
        }
    }
}

// Multiplies the tiles [first, end) with a panel.
INLINE void multiply_code_panel(const codes_job *j, long panel, long first, long end, float sums[][MOST_SUMS * PART],
                                const int wholes) {
    const product *p = &j->product;
    const weights *w = p->w;
    const long all = section_groups(w);
    const char *next = (const char *)panel_of(w, panel);
    code_run run __attribute__((aligned(64)));
    whole_run scaled __attribute__((aligned(64)));
    whole below, above;
    bytes_of_levels(w, &below, &above);
    for (long section = 0; section < w->sections; section++) {
        groups from = {.panel = next + section_head_bytes(w), .factors = next};
        for (long tile = first; tile < end; tile++)
            memset(place_of_section(sums[tile - first], HALF_ROWS, w, section, 0), 0, PART * sizeof(float));
        for (; from.group < all; from.group = from.end, from.panel = next) {
            from.end = least(from.group + groups_rounded(w), all);
            next = wholes ? unpack_whole_run(&scaled, &from, w) : unpack_run(&run, &from, w, below, above);
            long inputs = section * section_inputs(w) + from.group * w->group;
            long runs = section * section_head_dwords(w) / head_of(w) + from.group / groups_rounded(w);
            long number = runs * numbers_of_run(w);
            const whole_run *other = wholes ? &scaled : NULL;
            if (has_lows(w)) add_run(j, &run, other, first, end, inputs, number, sums, section, 1);
            else add_run(j, &run, other, first, end, inputs, number, sums, section, 0);
        }
        for (long tile = first; tile < end; tile++) join_section(sums[tile - first], HALF_ROWS, w, section);
    }
    for (long tile = first, start; tile < end; tile++) {
        start = tile * HALF_ROWS;
        finish_tile(p, sums[tile - first], start, least(HALF_ROWS, p->rows - start), panel);
    }
}

static void multiply_code_units(const void *task, long first, long last) {
    const codes_job *j = task;
    long panels = panels_of(j->product.w);
    float(*sums)[MOST_SUMS * PART] = scratch_beside(CODE_TILES * sizeof *sums);
    const int wholes = has_whole_scales(j->product.w);
    shape_tiles(wholes ? AMX_ROWS : HALF_ROWS);
    for (long unit = first; unit < last; unit++) {
        long chunk = unit / j->blocks, block = unit % j->blocks, end = panels * (block + 1) / j->blocks;
        for (long panel = panels * block / j->blocks; panel < end; panel++) {
            long from = j->tiles * chunk / j->chunks, to = j->tiles * (chunk + 1) / j->chunks;
            if (wholes) multiply_code_panel(j, panel, from, to, sums, 1);
            else multiply_code_panel(j, panel, from, to, sums, 0);
        }
    }
    _tile_release();
}

static void linear_codes_amx(const product *p) {
    const weights *w = p->w;
    codes_job j = {.product = *p, .tiles = ceil_div(p->rows, HALF_ROWS)};
    long rows = j.tiles * HALF_ROWS, most = CODE_BYTES / (HALF_ROWS * laid_bytes(w)), panels = panels_of(w);
    j.laid = scratch(rows * (laid_bytes(w) + numbers_of_row(w) * (long)sizeof *j.numbers));
    j.numbers = (float *)(j.laid + rows * laid_bytes(w));
    spread(p->rows, 8, lay_codes_rows, &j);
    j.chunks = ceil_div(j.tiles, most < 1 ? 1 : least(most, CODE_TILES));
    j.blocks = least(ceil_div(8 * threads, j.chunks), panels);
    spread(j.blocks * j.chunks, 1, multiply_code_units, &j);
}
