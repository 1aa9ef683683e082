// The rows of a tile as its innermost loop reads them: side by side, input by input.
#pragma once

#include "weights.h"

#if defined(__AVX512BF16__)
#define DOTS 1  // pairs of bfloat16 are multiplied by one instruction; else both are widened, the rows beforehand
#else
#define DOTS 0
#endif

INLINE int widened(const weights *w) { return w->kind == BFLOAT16 && !DOTS; }

// The size of a row as `lay_dwords` writes it.
INLINE long laid_dwords(const weights *w) { return widened(w) ? 2 * dwords_of(w) : dwords_of(w); }

INLINE uint32_t pair_at(const char *row, long i, long inputs) {
    uint32_t pair = 0;
    memcpy(&pair, row + i * 4, 2 * i + 1 < inputs ? 4 : 2);
    return pair;
}

#if LANES == 16
// Transposes 16 rows, of which `rows` are wanted: 16 rows of `rows` columns, one directly after the other.
INLINE void transpose_loaded(uint32_t *to, __m512i *in, long rows) {
    __m512i half[16];
    for (int r = 0; r < 16; r += 2) {
        half[r] = _mm512_unpacklo_epi32(in[r], in[r + 1]);
        half[r + 1] = _mm512_unpackhi_epi32(in[r], in[r + 1]);
    }
    for (int r = 0; r < 16; r += 4) {
        in[r] = _mm512_unpacklo_epi64(half[r], half[r + 2]);
        in[r + 1] = _mm512_unpackhi_epi64(half[r], half[r + 2]);
        in[r + 2] = _mm512_unpacklo_epi64(half[r + 1], half[r + 3]);
        in[r + 3] = _mm512_unpackhi_epi64(half[r + 1], half[r + 3]);
    }
    for (int r = 0; r < 16; r += 8) {
        for (int i = r; i < r + 4; i++) {
            half[i] = _mm512_shuffle_i32x4(in[i], in[i + 4], 0x88);
            half[i + 4] = _mm512_shuffle_i32x4(in[i], in[i + 4], 0xdd);
        }
    }
    for (int i = 0; i < 8; i++) {
        in[i] = _mm512_shuffle_i32x4(half[i], half[i + 8], 0x88);
        in[i + 8] = _mm512_shuffle_i32x4(half[i], half[i + 8], 0xdd);
    }
    __mmask16 kept = lanes_mask(rows);
    for (long i = 0; i < 16; i++) _mm512_mask_storeu_epi32(to + i * rows, kept, in[i]);
}

// Transposes columns [0, 16) of up to 16 rows.
INLINE void transpose_rows(uint32_t *to, const char *x, long stride, long rows) {
    __m512i in[16];
    for (long r = 0; r < 16; r++) in[r] = r < rows ? _mm512_loadu_si512(x + r * stride) : _mm512_setzero_si512();
    transpose_loaded(to, in, rows);
}

// Lays up to 16 rows side by side that were laid alone.
static void lay_laid(uint32_t *to, const uint32_t *const *from, long rows, long dwords) {
    long done = 0;
    for (; done + 16 <= dwords; done += 16) {
        __m512i in[16];
        for (long r = 0; r < 16; r++) in[r] = r < rows ? _mm512_loadu_si512(from[r] + done) : _mm512_setzero_si512();
        transpose_loaded(to + done * rows, in, rows);
    }
    for (; done < dwords; done++)
        for (long r = 0; r < rows; r++) to[done * rows + r] = from[r][done];
}
#else
static void lay_laid(uint32_t *to, const uint32_t *const *from, long rows, long dwords) {
    for (long i = 0; i < dwords; i++)
        for (long r = 0; r < rows; r++) to[i * rows + r] = from[r][i];
}

INLINE void transpose_rows(uint32_t *to, const char *x, long stride, long rows) {
    for (long r = 0; r < rows; r++)
        for (long i = 0; i < 16; i++) memcpy(&to[i * rows + r], x + r * stride + i * 4, 4);
}
#endif

static void lay_widened(uint32_t *to, const char *x, long stride, long rows, long dwords, const weights *w) {
    for (long r = 0; r < rows; r++) {
        for (long i = 0; i < dwords; i++) {
            uint32_t pair = pair_at(x + r * stride, i, w->inputs);
            to[2 * i * rows + r] = pair << 16;
            to[(2 * i + 1) * rows + r] = pair & 0xffff0000u;
        }
    }
}

// Lays so many dwords of rows side by side: the first dword of each row, then the second of each.
static void lay_first_dwords(uint32_t *to, const char *x, long stride, long rows, long dwords, const weights *w) {
    if (widened(w)) {
        lay_widened(to, x, stride, rows, dwords, w);
        return;
    }
    long whole = w->inputs * width_of(w->kind) / 4, done = 0;
    if (rows == 1) memcpy(to, x, (done = whole) * 4);
    for (; done + 16 <= whole; done += 16) transpose_rows(to + done * rows, x + done * 4, stride, rows);
    for (long r = 0; r < rows; r++) {
        const char *row = x + r * stride;
        for (long i = done; i < whole; i++) memcpy(&to[i * rows + r], row + i * 4, 4);
        if (whole < dwords) to[whole * rows + r] = pair_at(row, whole, w->inputs);
    }
}
