"""Caches that are cut over real ranks by tokens hold longer sequences, and give the bits of one worker."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ranks import Layout, RankError, Ranks, RanksOfTests, make
from sizes import engine_config
from tiny import tiny_checkpoint

from engine_core.engine import Engine
from engine_core.protocol import Add, Tokens
from worker.protocol import Sampling

_random = random.Random(3)
SHARED = _random.choices(range(5, 300), k=1050)
TEXTS = [_random.choices(range(5, 300), k=length) for length in (3, 255, 530, 1100)]
TEXTS += [SHARED + text for text in TEXTS[:2]]
SHAPE = {"num_attention_heads": 8, "hidden_size": 128, "intermediate_size": 208}
SHAPE |= {"max_position_embeddings": 2048, "num_hidden_layers": 2}
CUTS = [Layout(2, contexts=2), Layout(4, contexts=2), Layout(4, contexts=4), Layout(2, 2, contexts=2)]


def run(engine: Engine, texts: list[list[int]] = TEXTS) -> dict[int, list[tuple[int, float]]]:
    """The tokens and logprobs of answers, which are more than the last rows of a chunk."""
    for id, text in enumerate(texts):
        params = Sampling(max_tokens=8, temperature=1.0, seed=id, logprobs=0)
        engine.add(0, Add(id=id, tokens=text, params=params))
    results: dict[int, list[tuple[int, float]]] = {}
    while engine.busy:
        for output in engine.step().get(0, []):
            assert isinstance(output, Tokens), output
            values = [entry.values[0] for entry in output.logprobs]
            results.setdefault(output.id, []).extend(zip(output.tokens, values, strict=True))
    return results


Open = Callable[..., Engine]


@pytest.fixture
def open_engine(ranks: Ranks) -> Iterator[Open]:
    engine: Engine | None = None

    def start(folder: Path, layout: Layout = Layout(), **given: object) -> Engine:
        nonlocal engine
        if engine is not None:
            engine.stop()
        cut = {"tensor_parallel_size": layout.tensor, "pipeline_parallel_size": layout.stages}
        sizes = {"max_model_len": 1536, "cpu_threads": 1, "max_num_batched_tokens": 300, "max_num_seqs": 4}
        config = engine_config(folder, **{**cut, **sizes, **given})
        made: list[RanksOfTests] = []
        executor: Any = make(ranks, layout, made) if layout.size > 1 else None
        engine = Engine.start(config, lambda _: None, executor)
        return engine

    yield start
    if engine is not None:
        engine.stop()


FULL = {"layer_types": ["full_attention"] * 2, "num_local_experts": 8, "num_key_value_heads": 4}
FULL |= {"rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}}


@pytest.mark.parametrize(
    ("architecture", "shape", "given"),
    [
        ("Qwen3ForCausalLM", {"num_key_value_heads": 2, "head_dim": 32}, {"dtype": "bfloat16"}),
        ("LlamaForCausalLM", {"num_key_value_heads": 4}, {"dtype": "float32", "kv_cache_dtype": "int8"}),
        ("GptOssForCausalLM", FULL, {"dtype": "bfloat16"}),
        ("BloomForCausalLM", {"n_head": 8, "n_layer": 2, "seq_length": 2048}, {"dtype": "float32"}),
    ],
    ids=["fewer heads than ranks", "codes", "sinks", "slopes"],
)
def test_all_cuts_give_the_same_bits(
    architecture: str, shape: dict[str, Any], given: dict[str, Any], open_engine: Open, tmp_path: Path
) -> None:
    """Prompts come in chunks of 300 and behind cached prefixes, and in steps with changing others."""
    folder = tiny_checkpoint(architecture, tmp_path, **{**SHAPE, **shape})
    expected = run(open_engine(folder, **given))
    for layout in CUTS:
        assert run(open_engine(folder, layout, **given)) == expected, layout


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("llama"), **SHAPE)


def test_a_sequence_may_be_longer_than_the_memory_of_a_rank(open_engine: Open, llama: Path) -> None:
    """Two blocks of 1,024 positions of 2 layers, 2 key heads and 16 dimensions lie on each of four ranks."""
    room = 2 * 256 * 2 * 2 * 2 * 16 * 4
    given = {"dtype": "float32", "kv_cache_memory_bytes": room, "max_num_seqs": 1}
    engine = open_engine(llama, Layout(4, contexts=4), **given)
    assert engine.ready.worker.cached_tokens == 2048
    assert engine.ready.worker.kv_bytes == room
    longest = [TEXTS[3] + TEXTS[2][:400]]
    found = run(engine, longest)
    with pytest.raises(RankError, match="raise --kv-cache-memory-bytes"):
        open_engine(llama, Layout(4), **given)
    assert run(open_engine(llama, dtype="float32"), longest) == found


@pytest.mark.parametrize(
    ("architecture", "given", "says"),
    [
        ("MistralForCausalLM", {}, "a layer reads the last 6 tokens only"),
        ("DeepseekV2ForCausalLM", {}, "latent attention"),
        ("FalconH1ForCausalLM", {}, "some layers keep a state"),
        ("BertModel", {}, "it reads each text as a whole"),
        ("LlamaForCausalLM", {"block_size": 32}, "--block-size 32: where caches are cut over 2 workers"),
    ],
)
def test_what_cannot_be_cut_is_refused(
    architecture: str, given: dict[str, Any], says: str, open_engine: Open, tmp_path: Path
) -> None:
    folder = tiny_checkpoint(architecture, tmp_path)
    with pytest.raises(RankError, match=says):
        open_engine(folder, Layout(2, contexts=2), max_model_len=64, **given)
