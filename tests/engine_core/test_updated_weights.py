"""Engines of real workers that compute with the weights of another folder from some moment on."""

# pyright: reportPrivateUsage=false

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sizes import engine_config
from tiny import tiny_checkpoint
from toy_language import Language, ToyMatcher

from engine_core.engine import Engine
from engine_core.protocol import AddRequest, OutputsByClient, Tokens
from worker.host.progress_page import IDLE, ProgressPage, ProgressWriter
from worker.protocol import Sampling

PROMPT = [5, 17, 40, 99, 250, 31, 8, 12, 13]
FILE = "model.safetensors"


def open_engine(folder: Path, **given: Any) -> Engine:
    sizes = {"block_size": 4, "num_gpu_blocks_override": 64, "max_model_len": 64, "cpu_threads": 1}
    return Engine.start(engine_config(folder, **{**sizes, "dtype": "float32", **given}), lambda _: None)


def asked(tokens: list[int], most: int = 12, prompt_len: int = 0) -> AddRequest:
    return AddRequest(0, tokens, Sampling(most, temperature=0), prompt_len=prompt_len)


def tokens_of(outputs: OutputsByClient) -> list[int]:
    return [token for one in outputs.get(0, []) if isinstance(one, Tokens) for token in one.tokens]


def read(engine: Engine, count: int = 64) -> list[int]:
    """Run the engine until it has nothing to do, or has emitted so many tokens."""
    tokens: list[int] = []
    while engine.busy and len(tokens) < count:
        tokens += tokens_of(engine.step())
    return tokens


def answer(engine: Engine, request: AddRequest) -> list[int]:
    engine.add(0, request)
    return read(engine)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Two checkpoints of one model, with other weights."""
    one, other = (tiny_checkpoint("LlamaForCausalLM", tmp_path / name, head_dim=16) for name in "ab")
    changed = {name: tensor.flip(-1).contiguous() for name, tensor in load_file(other / FILE).items()}
    save_file(changed, other / FILE)
    return one, other


@pytest.mark.parametrize(
    "options", [{}, {"quantization": "int8", "dtype": "bfloat16"}], ids=["plain", "int8"]
)
def test_what_runs_goes_on_and_what_comes_is_answered_by_the_new_weights(
    folders: tuple[Path, Path], options: dict[str, Any]
) -> None:
    one, other = folders
    engine, right = open_engine(one, **options), open_engine(other, **options)
    before = answer(engine, asked(PROMPT))
    engine.add(0, asked(PROMPT))
    begun = read(engine, 3)
    engine.pause_all("keep")
    engine.update_weights(str(other))
    engine.resume_all()
    begun += tokens_of(engine.take_outputs())  # of steps that were under way
    rest = read(engine)
    assert begun == before[: len(begun)] and len(begun) + len(rest) == 12
    assert rest == answer(right, asked([*PROMPT, *begun], prompt_len=len(PROMPT)))
    after = answer(engine, asked(PROMPT))  # whose prefix is that of the old weights
    assert after == answer(right, asked(PROMPT)) != before
    assert engine.ready.worker.fingerprint == right.ready.worker.fingerprint
    for each in (engine, right):
        each.stop()


def test_an_answer_whose_matcher_is_late_does_not_stand_still_for_ever(folders: tuple[Path, Path]) -> None:
    one, other = folders
    engine = open_engine(one)
    matcher = ToyMatcher(Language(320, shortest=20), slow=frozenset({3}))
    engine.intake.add(0, asked(PROMPT), matcher)
    begun = read(engine, 3)
    assert matcher.late
    engine.update_weights(str(other))
    assert not engine.idle and len(begun) + len(read(engine)) == 12
    engine.stop()


def test_an_engine_that_loads_weights_under_load_does_not_seem_to_hang(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = folders
    engine, page, states = open_engine(one), ProgressPage(tmp_path / "progress"), list[int]()
    engine.progress._writer = ProgressWriter(str(page.path))
    engine.add(0, asked(PROMPT))
    begun = read(engine, 3)
    assert engine._in_flight.is_busy
    reload = engine._reload
    monkeypatch.setattr(engine, "_reload", lambda load: (states.append(page.read(0).state), reload(load)))
    engine.update_weights(str(other))
    assert states == [IDLE] and len(begun) + len(read(engine)) == 12
    engine.stop()


def test_what_does_not_fit_is_refused_and_changes_nothing(folders: tuple[Path, Path], tmp_path: Path) -> None:
    one, other = folders
    engine = open_engine(one)
    before = answer(engine, asked(PROMPT))
    tensors = load_file(other / FILE)
    name = "model.layers.0.mlp.up_proj.weight"
    for changed, reason in (
        ({**tensors, name: tensors[name][1:].clone()}, rf"{name} in .* has the shape"),
        ({key: tensor for key, tensor in tensors.items() if key != name}, rf"{name} is missing"),
        ({**tensors, name: tensors[name].to(torch.int8)}, "holds numbers of the type int8"),
        ({**tensors, name: torch.full_like(tensors[name], torch.nan)}, "not finite|NaN"),
    ):
        save_file(changed, other / FILE)
        engine.add(0, asked(PROMPT))
        begun = read(engine, 3)
        with pytest.raises((ValueError, RuntimeError), match=reason):
            engine.update_weights(str(other))
        assert [*begun, *read(engine)] == before, reason
    wide = tiny_checkpoint("LlamaForCausalLM", tmp_path / "wide", head_dim=16, hidden_size=64)
    for folder, reason in ((wide, "its hidden_size is 64"), (tmp_path / "none", "is not a folder")):
        with pytest.raises(ValueError, match=reason):
            engine.update_weights(str(folder))
    assert answer(engine, asked(PROMPT)) == before and not engine.ready.weights
    engine.stop()
