// Takes codes out of the blocks of bytes in which GGUF files hold them.
#include "threads.h"

enum { WORTH = 1 << 16 };  // codes

// The bytes of a block that hold some bits of all its codes: `BitPlane` in `models/ops/block_codes.py`.
typedef struct {
    int64_t place, bits, span;
} bit_plane;

typedef struct {
    const uint8_t *blocks;
    long row_step, per_row, block_bytes;
    long count;  // codes of a block
    const bit_plane *planes;
    int plane_count;
    uint8_t flipped;
    uint8_t *codes;  // [rows, per_row * count]
} splitting;

// Adds the bits of a plane, which all begin at `above` in their codes.
INLINE void add_bits(uint8_t *restrict to, const uint8_t *restrict from, long count, long bits, long span, int above) {
    uint8_t mask = (uint8_t)((1 << bits) - 1);
    for (const uint8_t *end = to + count; to < end; from += span)
        for (int low = 0; low < 8; low += (int)bits, to += span)
            for (long i = 0; i < span; i++) to[i] ^= (uint8_t)((from[i] >> low & mask) << above);
}

static void split_rows(const void *task, long first, long last) {
    const splitting *s = task;
    for (long row = first; row < last; row++) {
        const uint8_t *block = s->blocks + row * s->row_step;
        uint8_t *to = s->codes + row * s->per_row * s->count;
        for (long b = 0; b < s->per_row; b++, block += s->block_bytes, to += s->count) {
            memset(to, s->flipped, (size_t)s->count);
            int above = 0;
            for (const bit_plane *p = s->planes; p < s->planes + s->plane_count; above += (int)p++->bits)
                add_bits(to, block + p->place, s->count, p->bits, p->span, above);
        }
    }
}

EXPORT void split_blocks(
    const uint8_t *blocks, long row_step, long rows, long per_row, long block_bytes, long count, const int64_t *planes,
    int plane_count, int flipped, uint8_t *codes
) {
    const bit_plane *given = (const bit_plane *)planes;
    splitting task = {blocks, row_step, per_row, block_bytes, count, given, plane_count, (uint8_t)flipped, codes};
    spread(rows, grain_of(WORTH, per_row * count), split_rows, &task);
}
