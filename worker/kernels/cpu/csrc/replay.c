// Makes recorded calls of kernels one after the other, without Python between them.
#include "vec.h"
#include "call_arguments.h"

// Each call is the kernel's entry, the number of its arguments, and the arguments.
EXPORT void replay(const word *calls, long count) {
    for (; count > 0; count--) {
        calls[0].entry(calls + 2);
        calls += 2 + calls[1].whole;
    }
}
