// Bits of what may be sampled, written into logits, for `worker/sampling/token_bounds.py`.
#include "threads.h"

enum { WORD = 32, WORTH = 16384 };  // WORTH: logits that are worth handing to another thread

typedef struct {
    float *logits;
    const int64_t *rows;
    const uint32_t *bits;
    long vocabulary, words;
} bounds;

static void forbid_rows(const void *task, long first, long last) {
    const bounds *b = task;
    for (long i = first; i < last; i++) {
        float *logits = b->logits + b->rows[i] * b->vocabulary;
        const uint32_t *bits = b->bits + i * b->words;
        for (long word = 0; word < b->words; word++) {
            uint32_t forbidden = ~bits[word];
            if (!forbidden) continue;  // most words of a text in quotes: its logits are not even read
            float *logit = logits + word * WORD;
            long count = least(WORD, b->vocabulary - word * WORD);
            if (count < WORD) forbidden &= (1u << count) - 1;
            if (forbidden == 0xffffffffu) {
                for (long j = 0; j < WORD; j++) logit[j] = -INFINITY;
                continue;
            }
            for (; forbidden; forbidden &= forbidden - 1) logit[__builtin_ctz(forbidden)] = -INFINITY;
        }
    }
}

// In `count` of the rows of logits [.., vocabulary], those whose bit is 0 become -inf. bits [count, words], where the
// words are as many as hold a bit for each token, the lowest bit first.
EXPORT void forbid(float *logits, const int64_t *rows, long count, const uint32_t *bits, long vocabulary) {
    bounds b = {logits, rows, bits, vocabulary, ceil_div(vocabulary, WORD)};
    spread(count, grain_of(WORTH, vocabulary), forbid_rows, &b);
}
