"""An engine in a program: within a loop, asked by several threads, interrupted, dropped, closed."""

import gc
import signal
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from facet import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12)
CAPITAL = "The capital of France is"
OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": "64m", "cpu_threads": "1"}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", **OPTIONS) as llm:
        yield llm


def text(llm: LLM, prompt: str = CAPITAL) -> str:
    return llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].text


async def test_it_answers_within_a_loop_that_runs_as_in_notebooks(llm: LLM) -> None:
    assert "Paris" in text(llm)


def test_threads_share_it(llm: LLM) -> None:
    prompts = [CAPITAL, "The capital of Japan is"] * 4
    alone = [text(llm, prompt) for prompt in prompts[:2]]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda prompt: text(llm, prompt), prompts)) == alone * 4


def test_an_interrupt_ends_what_was_asked_and_nothing_else(llm: LLM) -> None:
    endless = SamplingParams(max_tokens=None, ignore_eos=True)
    # What runs in a shell's background has its interrupts ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    alarm = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(KeyboardInterrupt):
        while True:
            llm.generate([CAPITAL] * 32, endless, use_tqdm=False)
    signal.signal(signal.SIGALRM, alarm)
    signal.signal(signal.SIGINT, before)
    assert not llm.local.engine.busy and llm.frontend.live == 0
    assert "Paris" in text(llm)


def test_a_dropped_one_gives_all_back() -> None:
    dropped = LLM("demo", **OPTIONS)
    dropped.add_request("a", CAPITAL, GREEDY)
    dropped.step()
    engine = weakref.ref(dropped.local.engine)
    del dropped
    for _ in range(2):
        gc.collect()
    assert engine() is None


def test_a_closed_one_says_so() -> None:
    closed = LLM("demo", **OPTIONS)
    closed.close()
    closed.close()
    with pytest.raises(RuntimeError, match="has been shut down"):
        text(closed)
