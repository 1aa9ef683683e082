// Takes codes of a few bits out of the words of 32 bits in which checkpoints hold them.
#include "threads.h"

enum { ROWS = 32, WORDS = 8 };  // of a block: words that lie column by column are turned there

typedef struct {
    const uint32_t *words;
    long row_step, column_step;  // in words
    long rows, columns;          // of words
    int bits;                    // 8 or 4
    const uint8_t *order;        // the place in a word of each of its eight codes of 4 bits
    uint8_t *codes;              // [rows, columns * 32 / bits]
} splitting;

// The eight codes of each word, a byte each.
INLINE void split_nibbles(uint64_t *to, const uint32_t *words, const uint8_t *order) {
    for (long w = 0; w < WORDS; w++) to[w] = 0;
    for (int i = 0; i < 8; i++)
        for (long w = 0; w < WORDS; w++) to[w] |= (uint64_t)(words[w] >> order[i] * 4 & 15) << i * 8;
}

static void split_rows(const void *task, long first, long last) {
    const splitting *s = task;
    long each = 32 / s->bits, width = s->columns * each;
    for (long block = first; block < last; block++) {
        long row = block * ROWS, rows = least(ROWS, s->rows - row);
        uint32_t words[ROWS][WORDS] = {{0}};
        for (long column = 0; column < s->columns; column += WORDS) {
            long count = least(WORDS, s->columns - column);
            const uint32_t *from = s->words + row * s->row_step + column * s->column_step;
            for (long w = 0; w < count; w++)
                for (long r = 0; r < rows; r++) words[r][w] = from[r * s->row_step + w * s->column_step];
            for (long r = 0; r < rows; r++) {
                uint64_t codes[WORDS];
                if (s->bits == 4) split_nibbles(codes, words[r], s->order);
                else memcpy(codes, words[r], sizeof words[r]);
                memcpy(s->codes + (row + r) * width + column * each, codes, (size_t)(count * each));
            }
        }
    }
}

EXPORT void split_words(
    const uint32_t *words, long row_step, long column_step, long rows, long columns, int bits, const uint8_t *order,
    uint8_t *codes
) {
    splitting task = {words, row_step, column_step, rows, columns, bits, order, codes};
    spread(ceil_div(rows, ROWS), 1, split_rows, &task);
}
