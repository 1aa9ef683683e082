// The tokens of a step, one after the other: their ids, positions, and places in the cache.
#include "vec.h"
#include "call_arguments.h"

// columns [3 or 4, rows]: the slot of each sequence, its first position in this step, its number of new tokens, and if
// `merged` is given, how many of these are left out when the others are merged. tokens and blocks are the tables, with
// rows of these widths; block_size is 0 if there is no cache. Results: ids, positions and places of the tokens,
// query_starts [rows + 1], kv_lens [rows]; the block table of the step, `own` [rows, own_width], of which the columns
// that the longest sequence needs are written; and merged [rows, 3]: of each sequence the first of these tokens, the
// first that is merged, and the one behind the last.
EXPORT void lay_out(const int *columns, long rows, const int *tokens, long tokens_width, const int *blocks,
                    long blocks_width, long block_size, int64_t *ids, int64_t *positions, int64_t *places,
                    int *query_starts, int *kv_lens, int *own, long own_width, int *merged) {
    const int *slots = columns, *starts = columns + rows, *counts = columns + 2 * rows;
    long t = 0, longest = 0;
    for (long row = 0; row < rows; row++) {
        kv_lens[row] = starts[row] + counts[row];
        if (kv_lens[row] > longest) longest = kv_lens[row];
    }
    long own_blocks = block_size ? ceil_div(longest, block_size) : 0;
    for (long row = 0; row < rows; row++) {
        const int *text = tokens + slots[row] * tokens_width, *held = blocks + slots[row] * blocks_width;
        query_starts[row] = (int)t;
        if (merged) {
            int skipped = counts[rows + row];
            merged[3 * row] = (int)t;
            merged[3 * row + 1] = (int)t + (skipped < counts[row] ? skipped : 0);
            merged[3 * row + 2] = (int)t + counts[row];
        }
        memcpy(own + row * own_width, held, own_blocks * sizeof(int));
        for (long at = starts[row]; at < kv_lens[row]; at++, t++) {
            ids[t] = text[at];
            positions[t] = at;
            places[t] = block_size ? held[at / block_size] * block_size + at % block_size : at;
        }
    }
    query_starts[rows] = (int)t;
}

EXPORT void lay_out_words(const word *a) {
    lay_out(a[0].pointer, a[1].whole, a[2].pointer, a[3].whole, a[4].pointer, a[5].whole, a[6].whole, a[7].pointer,
            a[8].pointer, a[9].pointer, a[10].pointer, a[11].pointer, a[12].pointer, a[13].whole, a[14].pointer);
}
