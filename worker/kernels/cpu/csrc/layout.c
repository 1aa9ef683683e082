// The tokens of a step, one after the other: their ids, positions, and places in the cache.
#include "vec.h"

// columns [3, rows]: the slot of each sequence, its first position in this step, and its number of new tokens. tokens
// and blocks are the tables, with rows of these widths; block_size is 0 if there is no cache. Results: ids, positions
// and places of the tokens, query_starts [rows + 1], kv_lens [rows], and the block table of the step, `own`
// [rows, own_width], of which the first own_blocks columns are written.
EXPORT void lay_out(const int *columns, long rows, const int *tokens, long tokens_width, const int *blocks,
                    long blocks_width, long block_size, int64_t *ids, int64_t *positions, int64_t *places,
                    int *query_starts, int *kv_lens, int *own, long own_blocks, long own_width) {
    const int *slots = columns, *starts = columns + rows, *counts = columns + 2 * rows;
    long t = 0;
    for (long row = 0; row < rows; row++) {
        const int *text = tokens + slots[row] * tokens_width, *held = blocks + slots[row] * blocks_width;
        query_starts[row] = (int)t;
        kv_lens[row] = starts[row] + counts[row];
        memcpy(own + row * own_width, held, own_blocks * sizeof(int));
        for (long at = starts[row]; at < kv_lens[row]; at++, t++) {
            ids[t] = text[at];
            positions[t] = at;
            places[t] = block_size ? held[at / block_size] * block_size + at % block_size : at;
        }
    }
    query_starts[rows] = (int)t;
}
