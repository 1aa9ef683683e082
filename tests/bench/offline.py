"""Speed of the engine in this process, without HTTP: prefill, decode steps, and embeddings.

python tests/bench/offline.py MODEL_FOLDER            # generation at concurrency 1, 8 and 32
python tests/bench/offline.py MODEL_FOLDER --embed    # texts per second, short and long
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

from facet import LLM, SamplingParams

PROMPT, STEPS = 256, 32


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def generation(folder: str) -> None:
    rnd = random.Random(0)
    with LLM(folder, kv_cache_memory_bytes=2 << 30, enable_prefix_caching=False) as llm:

        def run(prompts: list[list[int]], tokens: int) -> None:
            params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
            llm.generate(prompts, params, use_tqdm=False)

        for count in (1, 8, 32):
            prompts = [[rnd.randrange(llm.facts.vocab_size) for _ in range(PROMPT)] for _ in range(count)]
            run(prompts, 2)  # warm
            prefill = seconds(lambda prompts=prompts: run(prompts, 1))
            decode = seconds(lambda prompts=prompts: run(prompts, 1 + STEPS)) - prefill
            print(
                f"{count:3} at once: prefill {count * PROMPT / prefill:6.0f} tokens/s, "
                f"step {1000 * decode / STEPS:6.1f} ms, output {count * STEPS / decode:6.1f} tokens/s"
            )


def embeddings(folder: str) -> None:
    short = [f"The quick brown fox number {i} jumps over the lazy dog" for i in range(1000)]
    long = ["word " * 120 for _ in range(64)]
    with LLM(folder, runner="pooling", tasks=["embed"]) as llm:
        llm.embed(short[:8], use_tqdm=False)  # warm
        for name, texts in (("short", short), ("long", long)):
            taken = seconds(lambda texts=texts: llm.embed(texts, use_tqdm=False))
            print(f"{len(texts)} {name} texts: {taken:.2f} s, {len(texts) / taken:.0f} texts/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--embed", action="store_true")
    arguments = parser.parse_args()
    (embeddings if arguments.embed else generation)(arguments.folder)


if __name__ == "__main__":
    main()
