"""What a token takes behind a long context and behind a short one, and what a cached prefix takes; a table.

    python tests/bench/contexts.py MODEL [--contexts 1000 32000] [--turns 9]

Each context is read once and found in the cache from then on. In each turn every context is continued, so a
machine that is busy for a while slows all of them down; medians count. A hit is one token behind a cached
prefix; beside it stands a prompt of one token alone.
"""

import argparse
import random
import statistics
import time

from server.offline.llm import LLM
from server.requests.sampling import SamplingParams

_TOKENS = 24


def _seconds(llm: LLM, prompt: list[int], tokens: int) -> float:
    params = SamplingParams(temperature=0, max_tokens=tokens, min_tokens=tokens)
    started = time.perf_counter()
    llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1000, 32000])
    parser.add_argument("--hit", type=int, default=2016)
    parser.add_argument("--turns", type=int, default=9)
    given = parser.parse_args()
    llm = LLM(given.model, max_model_len=max(given.contexts) + 1024, max_num_seqs=4)
    random.seed(0)
    drawn = [random.randrange(1000, 20000) for _ in range(max(*given.contexts, given.hit) + 1)]
    prompts = {length: drawn[:length] for length in given.contexts}
    for prompt in (*prompts.values(), drawn[: given.hit]):
        _seconds(llm, prompt, 1)
    tokens: dict[int, list[float]] = {length: [] for length in prompts}
    hits: list[float] = []
    alone: list[float] = []
    for turn in range(given.turns):
        for length, prompt in prompts.items():
            first = _seconds(llm, prompt, 1)
            tokens[length].append((_seconds(llm, prompt, 1 + _TOKENS) - first) / _TOKENS)
        hits.append(_seconds(llm, [*drawn[: given.hit], 30000 + turn], 1))
        alone.append(_seconds(llm, [40000 + turn], 1))
    print("| context | ms per token | beside the shortest |\n|---:|---:|---:|")
    least = tokens[min(tokens)]
    for length, found in tokens.items():
        ratio = statistics.median(one / other for one, other in zip(found, least, strict=True))
        print(f"| {length} | {statistics.median(found) * 1e3:.1f} | {ratio:.2f} |")
    more = statistics.median(hit - one for hit, one in zip(hits, alone, strict=True))
    print(
        f"\none token behind {given.hit} cached ones: {statistics.median(hits) * 1e3:.1f} ms, "
        f"alone: {statistics.median(alone) * 1e3:.1f} ms, in the mean turn {more * 1e3:.1f} ms more"
    )


if __name__ == "__main__":
    main()
