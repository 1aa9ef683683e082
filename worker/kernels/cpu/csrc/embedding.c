// Token embeddings, rotary angles and patches of pictures, with which a model begins.
#include "threads.h"
#include "call_arguments.h"

typedef struct {
    const char *table;
    const int64_t *ids;
    char *out;
    long width;  // in bytes
    long ids_known;  // rows of the table
} lookup;

// An id that the table does not have gets a row of NaN (0xff in every type), so only its sequence fails.
static void look_up(const void *task, long first, long last) {
    const lookup *l = task;
    for (long i = first; i < last; i++) {
        char *row = l->out + i * l->width;
        if (l->ids[i] < 0 || l->ids[i] >= l->ids_known) memset(row, 0xff, l->width);
        else memcpy(row, l->table + l->ids[i] * l->width, l->width);
    }
}

enum { GRAIN = 65536 };  // bytes that are worth handing to another thread

// table [ids_known, width in bytes], out [tokens, width].
EXPORT void embed(const int64_t *ids, const void *table, void *out, long tokens, long ids_known, long width) {
    lookup l = {table, ids, out, width, ids_known};
    spread(tokens, grain_of(GRAIN, width), look_up, &l);
}

EXPORT void embed_words(const word *a) {
    embed(a[0].pointer, a[1].pointer, a[2].pointer, a[3].whole, a[4].whole, a[5].whole);
}

typedef struct {
    const int64_t *positions;
    const float *frequencies;
    const int64_t *axes;  // [pairs], or NULL for positions [tokens]
    float *out;
    long tokens, pairs;
    float scale;
} rotations;

static void find_angles(const void *task, long first, long last) {
    const rotations *r = task;
    for (long token = first; token < last; token++) {
        float *cosines = r->out + 2 * token * r->pairs, *sines = cosines + r->pairs;
        for (long i = 0; i < r->pairs; i++) {
            long place = r->axes ? r->axes[i] * r->tokens + token : token;
            float angle = (float)r->positions[place] * r->frequencies[i];
            cosines[i] = cosf(angle) * r->scale;
            sines[i] = sinf(angle) * r->scale;
        }
    }
}

enum { ANGLES = 1024 };  // angles that are worth handing to another thread

// out [tokens, 2 * pairs]: cosines, then sines. With axes, positions [their number, tokens].
EXPORT void angles(const int64_t *positions, const float *frequencies, const int64_t *axes, void *out,
                   long tokens, long pairs, float scale) {
    rotations r = {positions, frequencies, axes, out, tokens, pairs, scale};
    spread(tokens, grain_of(ANGLES, pairs), find_angles, &r);
}

EXPORT void angles_words(const word *a) {
    angles(a[0].pointer, a[1].pointer, a[2].pointer, a[3].pointer, a[4].whole, a[5].whole, a[6].real);
}

typedef struct {
    const uint8_t *pixels;  // [frames, height, width, 3]
    const void *levels;     // [3, 256]: the number that stands for each value of each channel
    char *out;              // [patches, 3, depth, side, side]
    long frames, height, width, side, depth, merge, bytes;
    long rows, columns;  // of squares of patches
} cutting;

// The numbers of one channel of a patch of a frame, whose first pixel is at `from`.
INLINE void cut(const cutting *c, const uint8_t *from, char *to, long channel, long bytes) {
    for (long y = 0; y < c->side; y++, from += 3 * c->width)
        for (long x = 0; x < c->side; x++, to += bytes)
            memcpy(to, (const char *)c->levels + (256 * channel + from[3 * x]) * bytes, bytes);
}

static void cut_patches(const void *task, long first, long last) {
    const cutting *c = task;
    long in_square = c->merge * c->merge, squares = c->rows * c->columns, area = c->side * c->side * c->bytes;
    for (long patch = first; patch < last; patch++) {
        long square = patch / in_square % squares, within = patch % in_square, frame = patch / in_square / squares * c->depth;
        long top = (square / c->columns * c->merge + within / c->merge) * c->side;
        long left = (square % c->columns * c->merge + within % c->merge) * c->side;
        char *to = c->out + patch * 3 * c->depth * area;
        for (long channel = 0; channel < 3; channel++)
            for (long i = 0; i < c->depth; i++, to += area) {
                const uint8_t *from = c->pixels + (((frame + i) * c->height + top) * c->width + left) * 3 + channel;
                if (frame + i >= c->frames) memcpy(to, to - area, area);  // the last frame is repeated
                else if (c->bytes == 4) cut(c, from, to, channel, 4);
                else cut(c, from, to, channel, 2);
            }
    }
}

enum { NUMBERS = 16384 };  // numbers of patches that are worth handing to another thread

// Patches come frame by frame, square by square of merge x merge of them. bytes: of a number, 2 or 4.
EXPORT void patches(const uint8_t *pixels, const void *levels, void *out, long frames, long height, long width, long side,
                    long depth, long merge, long bytes) {
    long rows = height / (side * merge), columns = width / (side * merge);
    cutting c = {pixels, levels, out, frames, height, width, side, depth, merge, bytes, rows, columns};
    spread(ceil_div(frames, depth) * rows * columns * merge * merge, grain_of(NUMBERS, 3 * depth * side * side), cut_patches,
           &c);
}
