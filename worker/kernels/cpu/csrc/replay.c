// Makes recorded calls of kernels one after the other, without Python between them.
#include "vec.h"
#include "call_arguments.h"

// Each call is the kernel's entry, the number of its arguments, and the arguments. places: the words among them that
// are the number of tokens, and then those that are the number of rows.
EXPORT void replay(word *calls, long count, const long *places, long of_tokens, long of_rows, long tokens, long rows) {
    for (long i = 0; i < of_tokens; i++) calls[*places++].whole = tokens;
    for (long i = 0; i < of_rows; i++) calls[*places++].whole = rows;
    for (; count > 0; count--) {
        calls[0].entry(calls + 2);
        calls += 2 + calls[1].whole;
    }
}
