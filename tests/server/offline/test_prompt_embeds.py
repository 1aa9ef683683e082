"""Prompts of embeddings: answers are those to the tokens whose embeddings they are, however steps are cut."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny_checkpoint

from facet import AsyncLLM, BadRequest
from server.offline.llm import LLM
from server.requests.sampling_params import SamplingParams

IDS = [[0, *range(7, 90), 5], [0, *range(7, 60)], [0, 9, 9, 30, 4], [0, *range(7, 90), 8, 3]]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "enable_prompt_embeds": True,
    "block_size": 4,
    "cpu_threads": 1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), num_gpu_blocks_override=200, **OPTIONS) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> LLM:
    """An engine that several tests ask, and that knows no prefix."""
    shared.reset_prefix_cache()
    return shared


@pytest.fixture(scope="module")
def table(folder: Path) -> torch.Tensor:
    return load_file(folder / "model.safetensors")["model.embed_tokens.weight"].float()


def answers(llm: LLM, prompts: Any, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [one.outputs[0].token_ids for one in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.turns
@pytest.mark.parametrize(
    ("options", "preempts"),
    [
        ({}, False),
        ({"max_num_batched_tokens": 5, "max_num_seqs": 4}, False),
        ({"num_gpu_blocks_override": 40, "max_model_len": 128}, True),
        ({"pipeline_parallel_size": 2}, False),
    ],
)
def test_embeddings_of_tokens_are_answered_as_these(
    folder: Path, table: torch.Tensor, options: dict[str, Any], preempts: bool
) -> None:
    rows: list[Any] = [{"prompt_embeds": table[ids]} for ids in IDS]
    rows[1] = {"prompt_embeds": table[IDS[1]].numpy()}
    with LLM(str(folder), **{"num_gpu_blocks_override": 200, **OPTIONS, **options}) as llm:
        right = answers(llm, IDS, LONG)
        before = llm.local.engine.stats().preemptions
        assert answers(llm, rows, LONG) == right
        assert (llm.local.engine.stats().preemptions > before) == preempts
        again = llm.generate([*rows, IDS[0]], LONG, use_tqdm=False)
        assert [one.outputs[0].token_ids for one in again] == [*right, right[0]]
        assert preempts or all(one.num_cached_tokens for one in again)
        assert (again[0].prompt, again[0].prompt_token_ids) == (None, [])


def test_embeddings_that_differ_share_no_prefix(llm: LLM, table: torch.Tensor) -> None:
    one, other = table[IDS[1]], table[IDS[1]].flip(0)
    for rows in (one, other, table[IDS[0]]):
        [answer] = llm.generate({"prompt_embeds": rows}, GREEDY)
        assert not answer.num_cached_tokens
    right = answers(llm, [IDS[1][::-1]])
    assert answers(llm, {"prompt_embeds": other}) == answers(llm, {"prompt_embeds": other[None]}) == right


def test_penalties_see_no_tokens_of_a_prompt(llm: LLM, table: torch.Tensor) -> None:
    strong = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, repetition_penalty=50.0)
    [plain] = answers(llm, {"prompt_embeds": table[IDS[2]]})
    [penalised] = answers(llm, {"prompt_embeds": table[IDS[2]]}, strong)
    assert penalised[0] == plain[0], "the first token has none before it"
    first = SamplingParams(temperature=0, max_tokens=1, repetition_penalty=50.0)
    for ids in ([plain[0]] * 3, [*IDS[2], plain[0]]):
        [[token]] = answers(llm, {"prompt_embeds": table[ids]}, first)
        assert [[token]] == answers(llm, [ids], SamplingParams(temperature=0, max_tokens=1))
    assert len(set(penalised)) == 8


def test_what_is_no_prompt_is_refused(llm: LLM, table: torch.Tensor) -> None:
    rows = table[IDS[2]]
    broken = rows.clone()
    broken[1, 3] = float("nan")
    wrong = (broken, rows[0], rows[:, :5], rows.long(), rows.to_sparse(), np.array([["a"]]), "rows")
    for each in wrong:
        with pytest.raises(BadRequest, match="finite numbers in rows of"):
            llm.generate({"prompt_embeds": each}, GREEDY)
    with pytest.raises(BadRequest, match="cannot be empty"):
        llm.generate({"prompt_embeds": rows[:0]}, GREEDY)
    with pytest.raises(BadRequest, match="no tokens that could have logprobs"):
        llm.generate({"prompt_embeds": rows}, SamplingParams(prompt_logprobs=1))
    with pytest.raises(BadRequest, match="answered, not pooled"):
        llm.embed({"prompt_embeds": rows})
    with pytest.raises(TypeError, match="has no text, no token ids"):
        llm.generate({"prompt_embeds": rows, "prompt": "a"}, GREEDY)  # pyright: ignore[reportArgumentType]
    cut = SamplingParams(temperature=0, max_tokens=4, truncate_prompt_tokens=3)
    assert answers(llm, {"prompt_embeds": rows}, cut) == answers(llm, [IDS[2]], cut)


def test_embeddings_are_read_only_if_the_engine_was_told_so(folder: Path, table: torch.Tensor) -> None:
    rows = table[IDS[2]]
    with (
        LLM(str(folder), num_gpu_blocks_override=200, dtype="float32") as llm,
        pytest.raises(BadRequest, match="--enable-prompt-embeds"),
    ):
        llm.generate({"prompt_embeds": rows}, GREEDY)


def test_models_that_read_more_of_a_prompt_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="reads more of a prompt than embeddings"):
        LLM(str(tiny_checkpoint("BertModel", tmp_path)), **OPTIONS)


@pytest.mark.slow
async def test_asyncio_programs_give_embeddings(folder: Path, table: torch.Tensor) -> None:
    async with AsyncLLM(str(folder), num_gpu_blocks_override=200, **OPTIONS) as engine:
        found = []
        prompts: list[Any] = [IDS[0], {"prompt_embeds": table[IDS[0]]}]
        for prompt in prompts:
            outputs = [one async for one in engine.generate(prompt, GREEDY)]
            found.append(outputs[-1].outputs[0].token_ids)
    assert found[0] == found[1]
