// Chooses the tokens that attention reads for each token, by the scores of an indexer over its own paged cache of keys.
//
// The score of a key is the sum over the indexer's heads of weight * max(q . k, 0). Its constant factors are left out,
// which change no choice. So is the Hadamard matrix by which DeepSeek's code turns queries and keys before it rounds them
// to 8 bits: the turn leaves products as they are, and nothing is rounded here beyond the type of the tensors.
//
// One order of sums: a product is summed as `latent_scores.h` says, and heads are added in their order, each by one fused
// multiplication and addition. So a token's choice is the same in any batch, wherever its prompt is cut. Of keys with
// equal scores the earlier ones are chosen.
#include <stdlib.h>

#include "latent_scores.h"
#include "rotation.h"
#include "call_arguments.h"

enum {
    TURNED_TOKENS = 16,      // tokens whose keys and queries are turned at a time
    MOST_SCORES = 16 << 20,  // of the tokens that are computed at once, if those are several
};

// Tokens of one sequence whose queries are a tile.
typedef struct {
    int row, first, count;
} run;

typedef struct {
    const void *q;         // [tokens, heads, dim]
    const void *key;       // [tokens, dim]
    const float *weights;  // [tokens, heads]
    paged_rows paged;      // rows [dim]
    const int64_t *slots;     // [tokens]
    const int *query_starts;  // [rows + 1]
    const int *kv_lens;       // [rows]
    long rows, heads, most;
    rotation rotation;
    scoring scoring;
    int *chosen;  // [tokens, most]
    // Of the tokens that are computed at once:
    long first, count, room;  // room: floats for the scores of a token, in whole chunks; 0: all keys are chosen
    char *turned;             // [count, heads, dim]
    float *scores;            // [count, room]
    int *seen;                // [count]: keys that each token sees
    run *runs;                // those of tokens that see more than `most`
} choice_job;

INLINE void turn_token(const choice_job *j, long token, kind k) {
    long dim = j->rotation.dim;
    rotate_head(&j->rotation, at(j->key, token * dim, k), j->paged.cache + j->slots[token] * j->paged.row_bytes, token,
                k, k);
    for (long head = 0; head < j->heads && j->room > 0; head++) {
        const void *query = at(j->q, (token * j->heads + head) * dim, k);
        rotate_head(&j->rotation, query, at_out(j->turned, ((token - j->first) * j->heads + head) * dim, k), token, k, k);
    }
}

static void turn_units(const void *task, long first, long last) {
    const choice_job *j = task;
    for (long i = first * TURNED_TOKENS; i < least(j->count, last * TURNED_TOKENS); i++) {
        if (j->scoring.kind == BFLOAT16) turn_token(j, j->first + i, BFLOAT16);
        else turn_token(j, j->first + i, FLOAT32);
    }
}

// Computes the scores of up to CHUNK keys from `start` on for the tokens of a run.
INLINE void score_chunk(const choice_job *j, latent_memory *m, const latent_form *f, scoring s, const run *r, long start,
                        long count) {
    long all = filled(count);
    cached_rows(&j->paged, r->row, start, start + count, m->keys);
    for (long i = count; i < all; i++) m->keys[i] = m->keys[i - 1];
    for (long key = 0; key < all; key += SIDE) score_tile(m, f, s, key);
    for (long token = r->first; token < r->first + r->count; token++) {
        const float *weights = j->weights + (j->first + token) * j->heads;
        const float *scores = m->scores + (token - r->first) * j->heads * SCORE_STRIDE;
        float *out = j->scores + token * j->room + start;
        for (long key = 0; key < all; key += LANES) {
            vec sum = vec_zero();
            for (long head = 0; head < j->heads; head++) {
                vec score = vec_max(vec_zero(), vec_load(scores + head * SCORE_STRIDE + key, FLOAT32));
                sum = vec_fma(score, vec_all(weights[head]), sum);
            }
            vec_store(out + key, sum, FLOAT32);
        }
    }
}

INLINE void score_units(const choice_job *j, long first, long last, kind k) {
    latent_form f = {.scoring = j->scoring};
    scoring s = j->scoring;
    s.kind = k;
    latent_memory *m = NULL;
    for (long i = first, chunks = j->room / CHUNK; i < last; i++) {
        const run *r = &j->runs[i / chunks];
        long start = i % chunks * CHUNK, end = j->seen[r->first + r->count - 1];
        if (start >= end) continue;
        if (m == NULL || start == 0) {
            f.rows = r->count * j->heads;
            m = latent_begin(&f);
            m->fetched = (fetched){0};
            lay_queries(m, &f, s, at(j->turned, r->first * j->heads * s.dim, k));
        }
        score_chunk(j, m, &f, s, r, start, least(CHUNK, end - start));
    }
}

static void score_float32(const void *task, long first, long last) { score_units(task, first, last, FLOAT32); }
static void score_bfloat16(const void *task, long first, long last) { score_units(task, first, last, BFLOAT16); }

// A whole number that is larger where the score is.
INLINE uint32_t ordered(float score) {
    uint32_t bits;
    memcpy(&bits, &score, 4);
    return bits >> 31 ? ~bits : bits | 1u << 31;
}

// Finds the least of the `most` highest of n scores, digit by digit; -> how many of those that equal it are among them.
static long find_least(const float *scores, long n, long most, uint32_t *found) {
    static const int shifts[] = {32, 21, 10, 0};
    *found = 0;
    for (int digit = 1; digit < 4; digit++) {
        int shift = shifts[digit], above = shifts[digit - 1], counts[1 << 11] = {0};
        uint32_t last = (1u << (above - shift)) - 1;
        for (long i = 0; i < n; i++) {
            uint32_t x = ordered(scores[i]);
            if (digit == 1 || (x ^ *found) >> above == 0) counts[x >> shift & last]++;
        }
        for (; most > counts[last]; last--) most -= counts[last];
        *found |= last << shift;
    }
    return most;
}

static void choose(const float *scores, long n, long most, int *out) {
    uint32_t lowest;
    long equal = find_least(scores, n, most, &lowest);
    for (long i = 0; i < n; i++) {
        uint32_t x = ordered(scores[i]);
        if (x > lowest || (x == lowest && equal-- > 0)) *out++ = (int)i;
    }
}

static void choose_units(const void *task, long first, long last) {
    const choice_job *j = task;
    for (long token = first; token < last; token++) {
        int *out = j->chosen + (j->first + token) * j->most;
        long seen = j->seen[token];
        if (seen > j->most) choose(j->scores + token * j->room, seen, j->most, out);
        else for (long i = 0; i < j->most; i++) out[i] = i < seen ? (int)i : -1;
    }
}

// Finds what tokens see, and joins those that do not read all of it; -> the number of runs.
static long find_runs(const choice_job *j) {
    long n = 0, most = LATENT_ROWS / j->heads;
    for (int row = 0; row < j->rows; row++) {
        long begin = j->query_starts[row] - j->first, end = j->query_starts[row + 1] - j->first;
        for (long token = begin < 0 ? 0 : begin; token < least(end, j->count); token++) {
            j->seen[token] = (int)(j->kv_lens[row] - (end - token) + 1);
            if (j->seen[token] <= j->most) continue;
            run *next = &j->runs[n];
            if (n > 0 && next[-1].row == row && next[-1].count < most) next[-1].count++;
            else *next = (run){row, (int)token, 1}, n++;
        }
    }
    return n;
}

static void compute(choice_job *j, long tokens) {
    long longest = 0, row = j->heads * j->paged.row_bytes;
    for (long i = 0; i < j->rows; i++) longest = j->kv_lens[i] > longest ? j->kv_lens[i] : longest;
    j->room = longest > j->most ? ceil_div(longest, CHUNK) * CHUNK : 0;
    long most = j->room > 0 ? least(tokens, 1 + MOST_SCORES / j->room) : tokens;
    size_t turned = j->room > 0 ? most * row : 0, scores = most * j->room * sizeof(float);
    char *memory = malloc(turned + scores + most * (sizeof(run) + sizeof(int)) + 128);
    if (memory == NULL) abort();  // out of memory, where torch would throw
    j->scores = (float *)(((uintptr_t)memory + 63) / 64 * 64);
    j->turned = (char *)j->scores + scores;
    j->runs = (run *)(j->turned + (turned + 3) / 4 * 4);
    j->seen = (int *)(j->runs + most);
    for (j->first = 0; j->first < tokens; j->first += j->count) {
        j->count = least(most, tokens - j->first);
        spread(ceil_div(j->count, TURNED_TOKENS), 1, turn_units, j);
        long units = find_runs(j) * (j->room / CHUNK);
        spread(units, 1 + units / (8 * threads), j->scoring.kind == BFLOAT16 ? score_bfloat16 : score_float32, j);
        spread(j->count, units ? 1 : j->count, choose_units, j);
    }
    free(memory);
}

// q [tokens, heads, dim], key [tokens, dim], weights [tokens, heads], cache [blocks, block_size, dim] and chosen [tokens,
// most] are contiguous. dim is an even number up to MAX_DIM; `rotated` of its columns are turned. Up to LATENT_ROWS heads.
EXPORT void choose_tokens(const void *q, const void *key, const float *weights, long heads, long dim, void *cache,
                          long block_size, const int64_t *slots, const float *cos_sin, long rotated,
                          const int *query_starts, const int *kv_lens, const int *block_table, long table_width, long rows,
                          long tokens, long most, int *chosen, int kind) {
    choice_job j = {.q = q, .key = key, .weights = weights, .slots = slots, .query_starts = query_starts,
                    .kv_lens = kv_lens, .rows = rows, .heads = heads, .most = most, .chosen = chosen};
    j.paged = (paged_rows){cache, block_size, dim * width_of(kind), block_table, table_width};
    j.rotation = (rotation){.norm_kind = kind, .cos_sin = cos_sin, .rotated = rotated, .dim = dim};
    j.scoring = (scoring){.kind = kind, .dim = dim};
    compute(&j, tokens);
}

EXPORT void choose_tokens_words(const word *a) {
    choose_tokens(a[0].pointer, a[1].pointer, a[2].pointer, a[3].whole, a[4].whole, a[5].pointer, a[6].whole, a[7].pointer,
                  a[8].pointer, a[9].whole, a[10].pointer, a[11].pointer, a[12].pointer, a[13].whole, a[14].whole,
                  a[15].whole, a[16].whole, a[17].pointer, (int)a[18].whole);
}
