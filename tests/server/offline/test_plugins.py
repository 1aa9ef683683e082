"""Plug-ins of workers in a program: logits processors, methods of a class of one's own, the profiler."""

import asyncio
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from operator_plugins import Extension, OneToken

from facet import LLM, AsyncLLM, BadRequest, SamplingParams, StatLoggerBase
from server.metrics import stat_loggers
from worker.calls.messages import CallFailed

pytestmark = pytest.mark.slow(2)

OPTIONS = {"dtype": "float32", "kv_cache_memory_bytes": "64m", "cpu_threads": "1"}
CAPITAL = "The capital of France is"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    profiler = {"profiler": "torch", "torch_profiler_dir": str(folder)}
    plugs: dict[str, Any] = {"logits_processors": [OneToken], "worker_extension_cls": Extension}
    with LLM("demo", profiler_config=profiler, **plugs, **OPTIONS) as llm:
        yield llm


def params(**arguments: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, extra_args=arguments)


def test_requests_give_arguments_to_processors_and_others_stay_as_they_are(llm: LLM) -> None:
    with LLM("demo", **OPTIONS) as plain:
        [expected] = plain.generate(CAPITAL, params(), use_tqdm=False)
        with pytest.raises(BadRequest, match="started without --logits-processors"):
            plain.generate(CAPITAL, params(target_token=9), use_tqdm=False)
    free, bound, other = llm.generate(
        [CAPITAL] * 3, [params(), params(target_token=9), params(target_token=11)], use_tqdm=False
    )
    assert free.outputs[0].token_ids == expected.outputs[0].token_ids
    first = expected.outputs[0].token_ids[0]
    assert bound.outputs[0].token_ids == [first] + [9] * 5
    assert other.outputs[0].token_ids == [first] + [11] * 5


def test_drawn_tokens_pass_processors_too(llm: LLM) -> None:
    drawn = params(target_token=9).clone()
    drawn.temperature, drawn.presence_penalty, drawn.logprobs = 1.0, 0.5, 1
    [output] = llm.generate(CAPITAL, drawn, use_tqdm=False)
    assert output.outputs[0].token_ids[1:] == [9] * 5


def test_arguments_that_a_class_refuses(llm: LLM) -> None:
    with pytest.raises(BadRequest, match="target_token should be a token id"):
        llm.generate(CAPITAL, params(target_token="x"), use_tqdm=False)
    with pytest.raises(BadRequest, match="at most 16384 bytes"):
        llm.generate(CAPITAL, params(target_token="x" * 20000), use_tqdm=False)
    with pytest.raises(BadRequest, match="vllm_xargs: "):
        llm.generate(CAPITAL, params(target_token=object()), use_tqdm=False)


def test_methods_of_ones_own_class_run_in_the_worker(llm: LLM) -> None:
    [found] = llm.collective_rpc("describe", args=["hello"], kwargs={"loud": True})
    assert found == {"rank": 0, "said": "HELLO", "device": "cpu", "weights": True}
    for method, said in (("fail", "no such thing"), ("no_such", "Extension has no method no_such")):
        with pytest.raises(CallFailed, match=said):
            llm.collective_rpc(method)
    with pytest.raises(CallFailed, match="Encoding objects of type object is unsupported"):
        llm.collective_rpc("return_an_object")
    assert llm.generate(CAPITAL, params(), use_tqdm=False)


def test_a_recording_of_steps_is_a_trace_that_perfetto_opens(llm: LLM, folder: Path) -> None:
    llm.start_profile("ours/1")
    with pytest.raises(CallFailed, match="the profiler runs already"):
        llm.start_profile()
    llm.generate(CAPITAL, params(), use_tqdm=False)
    [path] = llm.stop_profile()
    assert Path(path).parent == folder and Path(path).name.startswith("ours_1.rank0.")
    with gzip.open(path) as file:
        trace = json.load(file)
    names = {event.get("name", "") for event in trace["traceEvents"]}
    assert any(name.startswith("aten::") for name in names)
    assert any("compute.py" in name and "choose" in name for name in names), "Python's own calls are there"
    with pytest.raises(CallFailed, match="the profiler does not run"):
        llm.stop_profile()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"logits_processors": ["no_such:Class"]}, "No module named 'no_such'"),
        ({"worker_extension_cls": "operator_plugins.NOTHING"}, "it is not a class"),
        ({"worker_extension_cls": "nothing"}, "write it as module:Name"),
        ({"profiler_config": {"profiler": "cuda"}}, "the profiler is torch"),
        ({"profiler_config": {"torch_dir": "x"}}, "its fields are profiler, torch_profiler_dir"),
    ],
)
def test_plugins_that_cannot_be_used_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        LLM("demo", **options, **OPTIONS)
    with pytest.raises(ValueError, match="leave one of them out"):
        LLM("demo", logits_processors=[OneToken], speculative_config={"method": "ngram"})


class Recorder(StatLoggerBase):
    """Keeps what it is told; a second of its kind breaks."""

    told: ClassVar[list[str]] = []

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.told.append(f"engine {engine_index} of {vllm_config.engine.model}")

    def log_engine_initialized(self) -> None:
        self.told.append("initialized")

    def record(self, scheduler_stats: Any, iteration_stats: Any, engine_idx: int = 0) -> None:
        self.told.append(f"{iteration_stats.num_generation_tokens} tokens, {scheduler_stats is not None}")


class Broken(Recorder):
    def record(self, scheduler_stats: Any, iteration_stats: Any, engine_idx: int = 0) -> None:
        self.told.append("broken")
        raise RuntimeError("the program's bug")


async def test_stat_loggers_are_told_how_the_engine_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stat_loggers, "LOOK_SECONDS", 0.05)
    async with AsyncLLM("demo", stat_loggers=[Recorder, Broken], **OPTIONS) as engine:
        async for _ in engine.generate(CAPITAL, SamplingParams(max_tokens=5, ignore_eos=True)):
            pass
        async with asyncio.timeout(60):
            while sum(int(each.split()[0]) for each in Recorder.told if "tokens" in each) < 5:
                await asyncio.sleep(0.02)
    assert Recorder.told[0] == "engine 0 of demo" and "initialized" in Recorder.told
    assert Recorder.told.count("broken") == 1, "one that broke is told no more"
    assert any(each.endswith("True") for each in Recorder.told)
