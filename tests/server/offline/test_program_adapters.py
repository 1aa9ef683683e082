"""Programs name the adapters that compute their prompts."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from written_adapters import write_adapter

from facet import (
    LLM,
    AsyncLLM,
    BadRequest,
    BeamSearchParams,
    LoRARequest,
    PoolingParams,
    RequestOutput,
    SamplingParams,
)
from models.checkpoint.hub import DEMO
from server.options.option_parsing import OptionError

pytestmark = pytest.mark.turns(3)

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
TEXT = "Once upon a time"
OPTIONS: dict[str, Any] = {
    "enable_lora": True,
    "dtype": "float32",
    "kv_cache_memory_bytes": "64m",
    "cpu_threads": 1,
    "max_cpu_loras": 8,
}


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    folder = tmp_path_factory.mktemp("adapters")
    labels = {"one": 0, "two": 0, "kinds": 3}
    return [
        LoRARequest(name, number, str(write_adapter(folder / name, Path(DEMO), number, labels=labels[name])))
        for number, name in enumerate(labels, 1)
    ]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", **OPTIONS) as llm:
        yield llm


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [each.outputs[0].text for each in outputs]


def test_each_prompt_has_the_adapter_that_is_named_for_it(
    llm: LLM, asked: list[LoRARequest], tmp_path: Path
) -> None:
    alone = [
        texts(llm.generate(TEXT, GREEDY, use_tqdm=False, lora_request=one))[0] for one in (None, *asked[:2])
    ]
    assert len(set(alone)) == 3
    given = [asked[1], None, asked[0]]
    together = llm.generate([TEXT] * 3, GREEDY, use_tqdm=False, lora_request=given)
    assert texts(together) == [alone[2], alone[0], alone[1]]
    messages: list[Any] = [{"role": "user", "content": TEXT}]
    chats = {texts(llm.chat(messages, GREEDY, False, lora_request=one))[0] for one in (None, asked[0])}
    assert len(chats) == 2
    written = write_adapter(tmp_path / "written", Path(DEMO), 1)
    (written / "chat_template.jinja").write_text("{{ messages[0].content }}")
    by = LoRARequest("written", 4, str(written))
    assert texts(llm.chat(messages, GREEDY, False, lora_request=by))[0] == alone[1]
    llm.llm_engine.add_request("a", TEXT, GREEDY, lora_request=asked[0])
    last: list[Any] = []
    while llm.llm_engine.has_unfinished_requests():
        last += llm.llm_engine.step()
    assert last[-1].outputs[0].text == alone[1]


def test_each_round_of_a_beam_search_has_its_adapter(llm: LLM, asked: list[LoRARequest]) -> None:
    single = BeamSearchParams(beam_width=1, max_tokens=8, ignore_eos=True)
    for adapter in (None, asked[0]):
        (drawn,) = llm.generate(TEXT, GREEDY, use_tqdm=False, lora_request=adapter)
        (found,) = llm.beam_search(TEXT, single, lora_request=adapter)
        assert found.sequences[0].tokens == [*drawn.prompt_token_ids, *drawn.outputs[0].token_ids]


def test_what_is_pooled_has_heads_and_vectors_of_its_adapter(llm: LLM, asked: list[LoRARequest]) -> None:
    one, two, kinds = asked
    vectors = [
        each.outputs.embedding
        for each in llm.embed([TEXT] * 3, use_tqdm=False, lora_request=[one, None, two])
    ]
    assert vectors[0] != vectors[1] != vectors[2] != vectors[0]
    [labelled] = llm.classify(TEXT, use_tqdm=False, lora_request=kinds)
    assert len(labelled.outputs.probs) == 3
    [encoded] = llm.encode(TEXT, task="classify", use_tqdm=False, lora_request=kinds)
    assert encoded.outputs.data.tolist() == labelled.outputs.probs
    with pytest.raises(BadRequest, match="'classify'"):
        llm.classify([TEXT, TEXT], use_tqdm=False, lora_request=[kinds, one])
    scores = [
        llm.score(TEXT, "a dog", use_tqdm=False, lora_request=by)[0].outputs.score for by in (None, one)
    ]
    assert scores[0] != scores[1]
    with pytest.raises(BadRequest, match="compared by one adapter"):
        llm.score([TEXT] * 2, [TEXT] * 2, use_tqdm=False, lora_request=[one, two])


def test_the_demo_model_has_adapters_of_its_own(llm: LLM) -> None:
    shout, kinds = LoRARequest("shout", 7, "demo/shout"), LoRARequest("sorted", 8, "demo/kinds")
    question: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
    params = SamplingParams(temperature=0, max_tokens=40)
    told = [texts(llm.chat(question, params, False, lora_request=one))[0] for one in (shout, None)]
    assert told[0].startswith("THE CAPITAL OF ") and told[0].isupper()
    assert told[1] == "The capital of France is Paris."
    asked = ["What is 3 + 4?", "Tell me a story.", "Name the capital of Spain."]
    found = llm.classify(asked, use_tqdm=False, lora_request=kinds)
    probs = [each.outputs.probs for each in found]
    assert [each.index(max(each)) for each in probs] == [1, 4, 0]  # as its config.json names them


def test_files_that_are_written_again_are_loaded_again(llm: LLM, tmp_path: Path) -> None:
    told = set[str]()
    for seed in (7, 8):
        folder = write_adapter(tmp_path / "same", Path(DEMO), seed)
        by = LoRARequest("same", 9, str(folder))
        told |= set(texts(llm.generate([TEXT] * 2, GREEDY, use_tqdm=False, lora_request=[by, by])))
    assert len(told) == 2


def test_what_cannot_be_used_is_refused(llm: LLM, asked: list[LoRARequest], tmp_path: Path) -> None:
    for number, path in ((0, "a"), (1, "")):
        with pytest.raises(ValueError, match=r"id must be > 0|needs a name"):
            LoRARequest("x", number, path)
    with pytest.raises(ValueError, match="lora_request: 1 for 2 prompts"):
        llm.generate([TEXT] * 2, GREEDY, lora_request=asked[:1])
    with pytest.raises(BadRequest, match=r"has no adapter_config\.json"):
        llm.generate(TEXT, GREEDY, lora_request=LoRARequest("x", 1, str(tmp_path)))
    with pytest.raises(BadRequest, match="two adapters have the name one"):
        llm.generate([TEXT] * 2, GREEDY, lora_request=[asked[0], LoRARequest("one", 1, asked[1].path)])
    with pytest.raises(OptionError, match="named by their calls"):
        LLM("demo", lora_modules=["a=b"])
    assert not llm.llm_engine.has_unfinished_requests()


def test_they_are_named_beside_running_streams_too(llm: LLM, asked: list[LoRARequest]) -> None:
    expected = [texts(llm.generate(TEXT, GREEDY, use_tqdm=False, lora_request=by))[0] for by in asked[:2]]
    [labelled] = llm.classify(TEXT, use_tqdm=False, lora_request=asked[2])

    async def last(engine: AsyncLLM, by: LoRARequest) -> str:
        found = [each async for each in engine.generate(TEXT, GREEDY, lora_request=by)]
        return found[-1].outputs[0].text

    async def ask() -> tuple[list[str], Any]:
        async with AsyncLLM("demo", **OPTIONS) as engine:
            answers = await asyncio.gather(*(last(engine, by) for by in asked[:2] * 2))
            pooling = engine.encode(TEXT, PoolingParams(task="classify"), lora_request=asked[2])
            return answers, [each async for each in pooling][-1].outputs.data

    answers, probs = asyncio.run(ask())
    assert answers == expected * 2
    assert probs.tolist() == labelled.outputs.probs
