"""Models of which some layers have a window: they share a cache, and texts are those of transformers."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from bits_schedule import ALONE
from bits_traffic import answers
from ranks import Layout, Ranks, RanksOfTests, make
from sizes import engine_config
from tiny import VOCAB_SIZE, tiny_checkpoint
from tiny_shapes import SHARED_CACHES

from engine_core.engine import Engine
from engine_core.protocol import AddRequest
from worker.protocol import Sampling
from worker.worker_facts import blocks_held

WINDOW, BLOCK, LONGEST = 24, 16, 512
READ = WINDOW + 63
"""The positions that kernels read, which take 64 at a time."""
KINDS = ["sliding_attention", "sliding_attention", "full_attention"]
TEXT = [5 + number * number % (VOCAB_SIZE - 5) for number in range(400)]


def gemma(folder: Path, layers: int = 6) -> Path:
    """A model with two layers of each three that have a window."""
    kinds = [KINDS[index % 3] for index in range(layers)]
    changes = {"num_hidden_layers": layers, "layer_types": kinds, "sliding_window": WINDOW}
    return tiny_checkpoint("Gemma3ForCausalLM", folder, **changes, max_position_embeddings=LONGEST)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gemma(tmp_path_factory.mktemp("groups") / "gemma")


@dataclass
class Served:
    """An engine with this model, whose steps are short."""

    folder: Path
    options: dict[str, object] = field(default_factory=dict[str, object])
    layout: Layout = ALONE
    ranks: Ranks | None = None

    def __enter__(self) -> Served:
        sizes = {"block_size": BLOCK, "max_num_batched_tokens": 40, "max_num_seqs": 4, "steps_ahead": 1}
        config = engine_config(
            self.folder,
            tensor_parallel_size=self.layout.tensor,
            pipeline_parallel_size=self.layout.stages,
            **{**sizes, "max_model_len": LONGEST, **self.options},
        )
        made: list[RanksOfTests] = []
        executor = None if self.ranks is None else make(self.ranks, self.layout, made)
        self.engine = Engine.start(config, lambda _: None, executor)  # pyright: ignore[reportArgumentType]
        self.scheduler = self.engine._scheduler  # pyright: ignore[reportPrivateUsage]
        self.facts = self.scheduler._facts  # pyright: ignore[reportPrivateUsage]
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.stop()

    def texts(self, *prompts: list[int], count: int = 30) -> list[list[int]]:
        params = Sampling(max_tokens=count, temperature=0)
        results = answers(self.engine, [AddRequest(id, prompt, params) for id, prompt in enumerate(prompts)])
        return [results[id].tokens for id in range(len(prompts))]


def assert_likeliest(folder: Path, prompts: list[list[int]], texts: list[list[int]], count: int = 30) -> None:
    """Each token is the one that transformers finds likeliest after those before it, without a cache."""
    for prompt, text in zip(prompts, texts, strict=True):
        with torch.inference_mode():
            logits = oracle(folder)(torch.tensor([prompt + text]), use_cache=False).logits[0]
        assert text == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert len(text) == count


@cache
def oracle(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def test_texts_beyond_the_window_are_those_of_transformers(folder: Path) -> None:
    prompts = [TEXT[:300], TEXT[50:90], TEXT[100:330]]
    with Served(folder) as served:
        assert served.facts.windows == (0, READ, READ)
        assert_likeliest(folder, prompts, served.texts(*prompts))


def test_preempted_texts_go_on_as_they_would_have(folder: Path) -> None:
    prompts = [TEXT[:70], TEXT[5:80], TEXT[100:160]]
    blocks = blocks_held(220, 40, BLOCK, (0, READ, READ))
    with Served(folder, {"max_model_len": 220, "num_gpu_blocks_override": blocks}) as served:
        assert_likeliest(folder, prompts, served.texts(*prompts, count=130), 130)
        assert served.scheduler.counters.preemptions > 0


def test_prefixes_are_found_as_far_as_windows_reach(folder: Path) -> None:
    """The end of a text is found, and so is its middle until the blocks of windows there are taken."""
    blocks = blocks_held(400, 40, BLOCK, (0, READ, READ)) + 8
    with Served(folder, {"max_model_len": 400, "num_gpu_blocks_override": blocks}) as served:
        counters, found = served.scheduler.counters, []
        for prompt in (TEXT[:300], TEXT[:299], [*TEXT[:200], 7], [*TEXT[:120], 8], TEXT[:310]):
            before = counters.prefix_hits
            assert_likeliest(folder, [prompt], served.texts(prompt, count=5), 5)
            found.append(counters.prefix_hits - before)
    assert found[:2] == [0, 288]
    assert min(found[2:4]) == 0 < found[4], "the middle is gone, and the end is there"


@pytest.mark.parametrize("layout", [Layout(2), Layout(1, 2)], ids=str)
def test_ranks_have_the_same_groups(folder: Path, ranks: Ranks, layout: Layout) -> None:
    """The first stage has one layer without a window, and so has the second."""
    prompts = [TEXT[:300], TEXT[50:90]]
    with Served(folder, layout=layout, ranks=ranks) as served:
        assert served.facts.windows == (0, READ, READ)
        assert_likeliest(folder, prompts, served.texts(*prompts))


def test_stages_may_have_layers_of_different_kinds(tmp_path: Path, ranks: Ranks) -> None:
    """The first stage has two layers with a window and one without, and the second has two with one."""
    prompts = [TEXT[:200], TEXT[50:300]]
    other = gemma(tmp_path / "gemma", layers=5)
    with Served(other, layout=Layout(1, 2), ranks=ranks) as served:
        assert served.facts.windows == (0, READ, READ)
        assert_likeliest(other, prompts, served.texts(*prompts))


@pytest.mark.parametrize("layers", [2, 3])
def test_a_model_may_have_windows_only(tmp_path: Path, layers: int) -> None:
    shape = {"num_hidden_layers": layers, "sliding_window": WINDOW, "max_position_embeddings": LONGEST}
    mistral = tiny_checkpoint("MistralForCausalLM", tmp_path / "mistral", **shape)
    prompts = [TEXT[:300], TEXT[50:90]]
    with Served(mistral) as served:
        assert served.facts.windows == (READ,)
        assert_likeliest(mistral, prompts, served.texts(*prompts))


def test_layers_that_read_the_cache_of_another_read_its_blocks(tmp_path: Path) -> None:
    """Layers without a window have wider heads, too, so that others lie side by side in memory."""
    shape = {**SHARED_CACHES, "sliding_window": WINDOW, "max_position_embeddings": LONGEST}
    other = tiny_checkpoint("Gemma4ForCausalLM", tmp_path / "gemma4", **shape)
    prompts = [TEXT[:200], TEXT[50:120]]
    with Served(other) as served:
        assert served.facts.windows == (0, READ, READ)
        assert_likeliest(other, prompts, served.texts(*prompts, count=8), 8)


def test_groups_can_be_switched_off(folder: Path) -> None:
    with Served(folder, {"disable_hybrid_kv_cache_manager": True}) as served:
        assert served.facts.windows == (0,)
        assert_likeliest(folder, [TEXT[:300]], served.texts(TEXT[:300], count=5), 5)


def test_windows_that_hold_every_text_make_no_groups(folder: Path) -> None:
    with Served(folder, {"max_model_len": READ}) as served:
        assert served.facts.windows == (0,)
