// Passes over logits [rows, groups, GROUP] float32 for `worker/sampling/grouped_logits.py`.
#include "threads.h"

enum { GROUP = 64, GRAIN = 32 };  // GRAIN: groups that a thread takes at a time to sum up

typedef struct {
    const float *logits;
    long rows, groups;
    int *tokens, *finite;  // [rows]
    float *largest;        // [rows, groups]
} search;

static void search_rows(const void *task, long first, long last) {
    const search *s = task;
    const vec lowest = vec_all(-INFINITY);
    for (long row = first; row < last; row++) {
        const float *logits = s->logits + row * s->groups * GROUP;
        float *largest = s->largest + row * s->groups, best = -INFINITY;
        vec numbers = vec_zero();  // becomes NaN where a logit is, which a maximum would not show
        long best_group = 0;
        for (long group = 0; group < s->groups; group++) {
            vec most = lowest;
            for (long i = 0; i < GROUP; i += LANES) {
                vec x = vec_load(logits + group * GROUP + i, FLOAT32);
                most = vec_max(x, most);
                numbers = vec_add(numbers, vec_min(vec_zero(), vec_max(lowest, x)));
            }
            largest[group] = vec_largest(most);
            if (largest[group] > best) best = largest[group], best_group = group;
        }
        const float *group = logits + best_group * GROUP;
        long place = 0;
        while (place < GROUP - 1 && group[place] != best) place++;
        float whole = vec_sum(numbers);
        s->tokens[row] = (int)(best_group * GROUP + place);
        s->finite[row] = whole == whole && best > -INFINITY && best < INFINITY;
    }
}

// best [2, rows]: the first of the largest logits, and whether it is finite and the row has no NaN.
EXPORT void find_largest(const float *logits, long rows, long groups, int *best, float *largest) {
    search s = {logits, rows, groups, best, best + rows, largest};
    spread(rows, 1, search_rows, &s);
}

typedef struct {
    const float *logits, *peaks, *temperatures;
    const int64_t *rows;
    long groups;
    float *sums;
} mass;

static void add_mass(const void *task, long first, long last) {
    const mass *m = task;
    for (long i = first; i < last; i++) {
        long row = i / m->groups, group = i % m->groups;
        const float *logits = m->logits + (m->rows[row] * m->groups + group) * GROUP;
        vec peak = vec_all(m->peaks[row]), temperature = vec_all(m->temperatures[row]), sum = vec_zero();
        for (long j = 0; j < GROUP; j += LANES) {
            vec x = vec_sub(vec_load(logits + j, FLOAT32), peak);
            sum = vec_add(sum, vec_exp(vec_div(x, temperature)));
        }
        m->sums[i] = vec_sum(sum);
    }
}

// sums [count, groups]: the mass of each group, the sum of exp((logit - peak) / temperature), in `count` rows.
EXPORT void sum_mass(const float *logits, const int64_t *rows, long count, long groups, const float *peaks,
                     const float *temperatures, float *sums) {
    mass m = {logits, peaks, temperatures, rows, groups, sums};
    spread(count * groups, GRAIN, add_mass, &m);
}

typedef struct {
    float *x;
    const float *peaks, *temperatures;
    long width;
} conversion;

static void convert_rows(const void *task, long first, long last) {
    const conversion *c = task;
    for (long row = first; row < last; row++) {
        float *x = c->x + row * c->width;
        vec peak = vec_all(c->peaks[row]), temperature = vec_all(c->temperatures[row]);
        for (long i = 0; i < c->width; i += LANES) {
            vec distance = vec_sub(vec_load_upto(x + i, c->width - i, FLOAT32), peak);
            vec_store_upto(x + i, vec_exp(vec_div(distance, temperature)), c->width - i, FLOAT32);
        }
    }
}

enum { MASSES = 4096 };  // numbers that are worth handing to another thread

// Logits x [rows, width] become masses, the same numbers that sum_mass adds up.
EXPORT void find_mass(float *x, const float *peaks, const float *temperatures, long rows, long width) {
    conversion c = {x, peaks, temperatures, width};
    spread(rows, grain_of(MASSES, width), convert_rows, &c);
}

typedef struct {
    const float *masses, *floors;
    float *sums;
} filter;

static void add_above(const void *task, long first, long last) {
    const filter *f = task;
    for (long i = first; i < last; i++) {
        vec floor = vec_all(f->floors[i]), sum = vec_zero();
        for (long j = 0; j < GROUP; j += LANES) {
            vec x = vec_load(f->masses + i * GROUP + j, FLOAT32);
            sum = vec_add(sum, vec_where_greater(floor, x, vec_zero(), x));
        }
        f->sums[i] = vec_sum(sum);
    }
}

// sums [count]: the sum of the masses [count, GROUP] that are not under their floors, in the order of sum_mass.
EXPORT void sum_above(const float *masses, const float *floors, long count, float *sums) {
    filter f = {masses, floors, sums};
    spread(count, grain_of(MASSES, GROUP), add_above, &f);
}
