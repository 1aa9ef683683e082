// Token embeddings and rotary angles, with which a model begins.
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
