// The choice of experts from the logits of a router, and what a shared expert adds to theirs.
#include "functions.h"
#include "threads.h"
#include "call_arguments.h"

typedef struct {
    const float *logits;      // [T, E]
    const float *correction;  // [E] that is added to scores for the choice, or NULL
    const float *factors;     // [E] of the shares of each expert, or NULL
    int *ids;                 // [T, k]
    float *shares;            // [T, k]
    long experts, chosen;
    int sigmoid;  // else scores are a softmax
    int normalised;
    long groups, kept, summed;
    float epsilon, least_sum, factor;
} choice;

// Marks the largest `count` of the values that are not marked: of equal ones the first.
static void mark_best(const float *values, char *marks, long n, long count) {
    for (; count > 0; count--) {
        long best = -1;
        for (long i = 0; i < n; i++)
            if (!marks[i] && (best < 0 || values[i] > values[best])) best = i;
        marks[best] = 1;
    }
}

static void score(float *scores, const float *logits, const choice *c) {
    float most = logits[0], total = 0.0f;
    for (long e = 1; e < c->experts; e++)
        if (logits[e] > most) most = logits[e];
    for (long e = 0; e < c->experts; e += LANES) {
        vec x = vec_load_upto(logits + e, c->experts - e, FLOAT32);
        vec y = c->sigmoid ? vec_sigmoid(x) : vec_exp(vec_sub(x, vec_all(most)));
        vec_store_upto(scores + e, y, c->experts - e, FLOAT32);
    }
    if (c->sigmoid) return;
    for (long e = 0; e < c->experts; e++) total += scores[e];
    for (long e = 0; e < c->experts; e++) scores[e] /= total;
}

// Marks the experts of all groups but the best, by the sums of the two best of each, or by the best alone.
static void mark_groups(const float *ranked, char *marks, float *sums, char *kept, const choice *c) {
    long size = c->experts / c->groups;
    int alone = c->summed == 1;
    for (long g = 0; g < c->groups; g++) {
        const float *of = ranked + g * size;
        float first = of[0], second = -INFINITY;
        for (long e = 1; e < size; e++) {
            if (of[e] > first) second = first, first = of[e];
            else if (of[e] > second) second = of[e];
        }
        sums[g] = alone ? first : first + second;
    }
    memset(kept, 0, c->groups);
    mark_best(sums, kept, c->groups, c->kept);
    for (long g = 0; g < c->groups; g++) memset(marks + g * size, !kept[g], size);
}

// memory: for three numbers and three marks of each expert.
static void choose_row(const choice *c, long row, float *memory) {
    long experts = c->experts;
    float *scores = memory, *ranked = scores + experts, *sums = ranked + experts;
    char *barred = (char *)(sums + experts), *marks = barred + experts, *kept = marks + experts;
    score(scores, c->logits + row * experts, c);
    for (long e = 0; e < experts; e++) ranked[e] = scores[e] + (c->correction ? c->correction[e] : 0.0f);
    memset(barred, 0, experts);
    if (c->kept < c->groups) mark_groups(ranked, barred, sums, kept, c);
    memcpy(marks, barred, experts);
    mark_best(ranked, marks, experts, c->chosen);
    int *ids = c->ids + row * c->chosen;
    float *shares = c->shares + row * c->chosen, total = 0.0f;
    long found = 0;
    for (long e = 0; e < experts; e++) {
        if (!marks[e] || barred[e]) continue;
        ids[found] = (int)e;
        total += shares[found++] = scores[e];
    }
    float divisor = total + c->epsilon, factor = c->factor;
    if (divisor < c->least_sum) divisor = c->least_sum;
    for (long i = 0; i < c->chosen; i++) shares[i] = (c->normalised ? shares[i] / divisor : shares[i]) * factor;
    for (long i = 0; c->factors && i < c->chosen; i++) shares[i] *= c->factors[ids[i]];
}

static void choose_rows(const void *task, long first, long last) {
    const choice *c = task;
    float *memory = scratch((size_t)(3 * c->experts) * (sizeof(float) + 1));
    for (long row = first; row < last; row++) choose_row(c, row, memory);
}

EXPORT void choose(const void *logits, const void *correction, const void *factors, void *ids, void *shares, long rows,
                   long experts, long chosen, int sigmoid, int normalised, long groups, long kept, long summed,
                   float epsilon, float least_sum, float factor) {
    choice c = {logits, correction, factors, ids,    shares,  experts,   chosen, sigmoid,
                normalised, groups, kept,    summed, epsilon, least_sum, factor};
    spread(rows, 16, choose_rows, &c);
}

EXPORT void choose_words(const word *a) {
    choose(a[0].pointer, a[1].pointer, a[2].pointer, a[3].pointer, a[4].pointer, a[5].whole, a[6].whole, a[7].whole,
           (int)a[8].whole, (int)a[9].whole, a[10].whole, a[11].whole, a[12].whole, a[13].real, a[14].real,
           a[15].real);
}

typedef struct {
    const char *x, *rows, *gate, *total;
    char *out;
    long width;
    kind k;
} gated_sum;

INLINE void add_gated_row(const gated_sum *t, long row, kind k) {
    long bytes = t->width * width_of(k);
    const char *x = t->x + row * bytes, *from = t->rows + row * bytes, *total = t->total + row * bytes;
    vec sum = vec_zero();
    for (long i = 0; i < t->width; i += LANES) {
        long left = t->width - i;
        sum = vec_fma(vec_load_upto(at(x, i, k), left, k), vec_load_upto(at(t->gate, i, k), left, k), sum);
    }
    vec factor = vec_sigmoid(vec_all(vec_sum(sum)));
    for (long i = 0; i < t->width; i += LANES) {
        long left = t->width - i;
        vec y = vec_fma(vec_load_upto(at(from, i, k), left, k), factor, vec_load_upto(at(total, i, k), left, k));
        vec_store_upto(at_out(t->out + row * bytes, i, k), y, left, k);
    }
}

static void add_gated_rows(const void *task, long first, long last) {
    const gated_sum *t = task;
    for (long row = first; row < last; row++) {
        if (t->k == FLOAT32) add_gated_row(t, row, FLOAT32);
        else add_gated_row(t, row, BFLOAT16);
    }
}

// All are contiguous and of the type k.
EXPORT void add_gated(const void *x, const void *rows, const void *gate, const void *total, void *out, long count,
                      long width, int k) {
    gated_sum t = {x, rows, gate, total, out, width, k};
    spread(count, grain_of(4096, width), add_gated_rows, &t);
}

EXPORT void add_gated_words(const word *a) {
    add_gated(a[0].pointer, a[1].pointer, a[2].pointer, a[3].pointer, a[4].pointer, a[5].whole, a[6].whole,
              (int)a[7].whole);
}
