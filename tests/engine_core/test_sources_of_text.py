"""Models that answer to a text, in whole engines: the logits of transformers, however steps fall."""

from pathlib import Path
from typing import Any

import pytest
import torch
from sourced import Found, answer_all
from tiny_sources import FAMILIES, make

from engine_core.protocol import AddRequest, Source
from worker.protocol import Sampling

OUTPUT = 6
_random = torch.Generator().manual_seed(1)
SOURCES = [torch.randint(4, 300, [length], generator=_random).tolist() for length in (5, 40, 1, 17)]
PROMPTS = [[2], [2, 7, 9, 11, 13, 15, 17, 19, 21], [2, 7], [2, 5, 6]]


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, make(request.param, folder)


def asked(id: int, **changes: Any) -> AddRequest:
    tokens = SOURCES[id % len(SOURCES)]
    params = Sampling(max_tokens=OUTPUT, temperature=0, logprobs=0)
    source = Source(str(id % len(SOURCES)), len(tokens), tokens=tokens)
    return AddRequest(
        id=id, tokens=PROMPTS[(id // 2) % len(PROMPTS)], params=params, source=source, **changes
    )


@torch.inference_mode()
def check(model: Any, requests: list[AddRequest], found: Found) -> None:
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
    found, engine = answer_all(folder, requests)
    check(model, requests, found)
    assert engine.stats().media_encoded == len(SOURCES), "each source is encoded once"
    assert answer_all(folder, [requests[1]])[0][1] == found[1], "bits depend on what else is in a step"
    cut: dict[str, Any] = {"max_num_batched_tokens": 7, "max_num_seqs": 3, "num_gpu_blocks_override": 4}
    again = [asked(id, priority=-id) for id in range(8)]
    anew, engine = answer_all(folder, again, 1, scheduling_policy="priority", **cut)
    assert anew == found
    assert engine.stats().preemptions > 0
