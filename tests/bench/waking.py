"""How long a model takes to wake from sleep, and what of that is processor time.

    python tests/bench/checkpoints.py qwen3-0.6b FOLDER
    python tests/bench/waking.py FOLDER [TIMES]

On a virtual machine the host backs memory when it is first used: that is in the seconds, and in neither of
the other two. Compare the least of each. The answers before and after are compared as well.
"""

import os
import sys
import time

_CACHE = 1 << 30


def main() -> None:
    from facet import LLM, SamplingParams

    folder, times = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 5
    options = {"dtype": "bfloat16", "kv_cache_memory_bytes": _CACHE, "max_model_len": 4096}
    llm = LLM(folder, enable_sleep_mode=True, **options)

    def answer() -> list[int]:
        asked = SamplingParams(max_tokens=4, temperature=0)
        return list(llm.generate(["A sentence of a few words. " * 100], asked)[0].outputs[0].token_ids)

    expected = answer()
    for _ in range(times):
        llm.sleep(level=1)
        before, started = os.times(), time.monotonic()
        llm.wake_up()
        seconds, after = time.monotonic() - started, os.times()
        user, system = after.user - before.user, after.system - before.system
        print(f"{seconds:.2f} s; {user:.2f} s of processor time and {system:.2f} s of the system")
        assert answer() == expected


if __name__ == "__main__":
    main()
