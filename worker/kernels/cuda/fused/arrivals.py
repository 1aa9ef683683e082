"""How programs of one kernel find out which of them is the last, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def is_last(counter_ptr, count):
    """Whether this program is the last of `count` at a counter, so that it may read what all have written.

    The counter is 0 before the first and behind the last. Reads must pass by the cache of the first level
    (".cg").
    """
    tl.debug_barrier()  # all threads have written
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == count - 1
    if last:
        tl.store(counter_ptr, 0)
    return last
