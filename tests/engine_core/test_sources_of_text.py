"""Models that answer to a text, in whole engines: the logits of transformers, however steps fall."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sizes import engine_config
from tiny_sources import FAMILIES, make

from engine_core.engine import Engine
from engine_core.protocol import Add, Failed, Source, Tokens
from worker.protocol import Sampling

OUTPUT = 6
_random = torch.Generator().manual_seed(1)
SOURCES = [torch.randint(4, 300, [length], generator=_random).tolist() for length in (5, 40, 1, 17)]
PROMPTS = [[2], [2, 7, 9, 11, 13, 15, 17, 19, 21], [2, 7], [2, 5, 6]]

Found = dict[int, tuple[list[int], list[float]]]


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, make(request.param, folder)


def asked(id: int, **changes: Any) -> Add:
    tokens = SOURCES[id % len(SOURCES)]
    params = Sampling(max_tokens=OUTPUT, temperature=0, logprobs=0)
    source = Source(str(id % len(SOURCES)), len(tokens), tokens=tokens)
    return Add(id=id, tokens=PROMPTS[(id // 2) % len(PROMPTS)], params=params, source=source, **changes)


def answer(folder: Path, requests: list[Add], at_once: int = 99, **options: Any) -> tuple[Found, Engine]:
    """Run requests, of which `at_once` come with each step -> tokens and logprobs of each."""
    sizes = {"block_size": 16, "num_gpu_blocks_override": 32, "max_num_batched_tokens": 64, **options}
    engine = Engine.start(engine_config(folder, cpu_threads=1, **sizes), lambda _: None)
    found: Found = {each.id: ([], []) for each in requests}
    waiting = list(requests)
    while waiting or engine.busy:
        for each in waiting[:at_once]:
            engine.add(0, each)
        del waiting[:at_once]
        for answer in engine.step().get(0, []):
            assert not isinstance(answer, Failed), answer
            if isinstance(answer, Tokens):
                tokens, logprobs = found[answer.id]
                tokens += answer.tokens
                logprobs += [each.values[0] for each in answer.logprobs]
    engine.stop()
    return found, engine


@torch.inference_mode()
def check(model: Any, requests: list[Add], found: Found) -> None:
    """Assert that tokens are the likeliest of transformers' model, and logprobs its own."""
    for each in requests:
        tokens, logprobs = found[each.id]
        assert each.source is not None
        read, written = torch.tensor([each.source.tokens]), torch.tensor([each.tokens + tokens])
        logits = model(read, decoder_input_ids=written).logits[0, len(each.tokens) - 1 : -1]
        assert logits.argmax(-1).tolist() == tokens
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(tokens).unsqueeze(1)).flatten().tolist()
        assert logprobs == pytest.approx(wanted, abs=1e-4)


def test_answers_are_those_of_transformers_however_steps_fall(checkpoint: tuple[Path, Any]) -> None:
    folder, model = checkpoint
    requests = [asked(id) for id in range(8)]
    found, engine = answer(folder, requests)
    check(model, requests, found)
    assert engine.stats().media_encoded == len(SOURCES), "each source is encoded once"
    assert answer(folder, [requests[1]])[0][1] == found[1], "bits depend on what else is in a step"
    cut = {"max_num_batched_tokens": 7, "max_num_seqs": 3, "num_gpu_blocks_override": 4}
    again = [asked(id, priority=-id) for id in range(8)]
    assert answer(folder, again, 1, scheduling_policy="priority", **cut)[0] == found
