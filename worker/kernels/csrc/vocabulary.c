// Looks through logits [rows, groups, GROUP], float32: what `worker/sampling/groups.py` and `worker/sampling/mass.py` ask about.
#include "threads.h"

enum { GROUP = 64, GRAIN = 32 };  // GRAIN: groups that a thread takes at a time, of sums

typedef struct {
    const float *logits;
    long rows, groups;
    int *tokens, *finite;  // [rows]
    float *largest;        // [rows, groups]
} survey_task;

static void survey_rows(const void *task, long first, long last) {
    const survey_task *s = task;
    const vec lowest = vec_all(-INFINITY);
    for (long row = first; row < last; row++) {
        const float *logits = s->logits + row * s->groups * GROUP;
        float *largest = s->largest + row * s->groups, best = -INFINITY;
        vec numbers = vec_zero();  // NaN where one is, for that is lost in a maximum
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

// told [2, rows]: the first of the largest, and whether the row has one, which it has not if it has a NaN.
EXPORT void survey(const float *logits, long rows, long groups, int *told, float *largest) {
    survey_task s = {logits, rows, groups, told, told + rows, largest};
    spread(rows, 1, survey_rows, &s);
}

typedef struct {
    const float *logits, *ones, *temperatures;
    const int64_t *rows;
    long groups;
    float *sums;
} weighing;

static void add_weights(const void *task, long first, long last) {
    const weighing *w = task;
    for (long i = first; i < last; i++) {
        long row = i / w->groups, group = i % w->groups;
        const float *logits = w->logits + (w->rows[row] * w->groups + group) * GROUP;
        vec one = vec_all(w->ones[row]), temperature = vec_all(w->temperatures[row]), sum = vec_zero();
        for (long j = 0; j < GROUP; j += LANES) {
            vec x = vec_sub(vec_load(logits + j, FLOAT32), one);
            sum = vec_add(sum, vec_exp(vec_div(x, temperature)));
        }
        w->sums[i] = vec_sum(sum);
    }
}

// sums [count, groups] of the weights exp((logit - one) / temperature) of some rows.
EXPORT void sum_weights(const float *logits, const int64_t *rows, long count, long groups, const float *ones,
                        const float *temperatures, float *sums) {
    weighing w = {logits, ones, temperatures, rows, groups, sums};
    spread(count * groups, GRAIN, add_weights, &w);
}
