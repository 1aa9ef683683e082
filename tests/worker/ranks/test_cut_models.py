"""Models of every family, spread over real rank processes under a real engine, give one worker's results."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from internlm2 import make_internlm2, rewrite
from packed import Recipe, write_pair
from pooled import sibling_checkpoint
from ranks import Layout, RankError, Ranks, RanksOfTests, make
from safetensors.torch import load_file
from sizes import change_options, engine_config, worker_config
from tiny import ARCHITECTURES, ENCODERS, tiny_checkpoint
from tiny_shapes import SHARED_CACHES

from engine_core.engine import Engine
from engine_core.protocol import AddRequest, Failed, Pooled, Tokens
from models import registry
from models.config import read_config
from worker.config import WorkerConfig
from worker.protocol import Pooling, Sampling

BOTH = Layout(2, 2)
LAYOUTS = [Layout(2), Layout(4), Layout(1, 2), BOTH]
DECODERS = [name for name in ARCHITECTURES if name in registry.ARCHITECTURES]
"""Decoders with a page of their own. The others run on transformers' code, which cannot be cut."""
OUTPUT = 6

_random = random.Random(1)
SHARED = _random.choices(range(5, 300), k=12)
TEXTS = [_random.choices(range(5, 300), k=length) for length in (7, 1, 23, 3)]
TEXTS += [SHARED + text for text in TEXTS[:3]]


@dataclass
class Results:
    """Results by the ids of requests."""

    tokens: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    logprobs: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    vectors: dict[int, np.ndarray] = field(default_factory=dict[int, np.ndarray])

    def assert_same(self, other: Results) -> None:
        """Compare all bits."""
        assert self.tokens == other.tokens
        assert self.logprobs == other.logprobs
        assert self.vectors.keys() == other.vectors.keys()
        for id, vector in other.vectors.items():
            np.testing.assert_array_equal(self.vectors[id], vector)

    def assert_like(self, other: Results) -> None:
        """Compare without the last digits, which differ if prompts were divided into other chunks."""
        assert self.tokens == other.tokens
        for id, values in other.logprobs.items():
            assert self.logprobs[id] == pytest.approx(values, abs=1e-5)
        assert self.vectors.keys() == other.vectors.keys()
        for id, vector in other.vectors.items():
            np.testing.assert_allclose(self.vectors[id], vector, atol=1e-5, rtol=0)


def run(engine: Engine, adds: list[AddRequest]) -> Results:
    for add in adds:
        engine.add(0, add)
    results = Results()
    while engine.busy:
        for output in engine.step().get(0, []):
            match output:
                case Failed():
                    raise RuntimeError(output.message)
                case Tokens():
                    results.tokens.setdefault(output.id, []).extend(output.tokens)
                    values = [entry.values[0] for entry in output.logprobs]
                    results.logprobs.setdefault(output.id, []).extend(values)
                case Pooled():
                    vectors = output.vectors
                    results.vectors[output.id] = np.frombuffer(vectors.data, "<f4").reshape(vectors.shape)
    return results


def write(id: int, tokens: list[int], **given: object) -> AddRequest:
    params = {"max_tokens": OUTPUT, "temperature": 0, "logprobs": 0, **given}
    return AddRequest(id=id, tokens=tokens, params=Sampling(**params))  # pyright: ignore[reportArgumentType]


def pools(task: str, first_id: int = 0) -> list[AddRequest]:
    """All texts, to be pooled."""
    params = Pooling(task=task)  # pyright: ignore[reportArgumentType]
    return [AddRequest(id=id, tokens=text, params=params) for id, text in enumerate(TEXTS, first_id)]


WRITES = [write(id, text) for id, text in enumerate(TEXTS)]


Open = Callable[..., tuple[Engine, RanksOfTests | None]]


@pytest.fixture
def open_engine(ranks: Ranks) -> Iterator[Open]:
    engine: Engine | None = None

    def start(folder: Path, layout: Layout = Layout(), **given: object) -> tuple[Engine, RanksOfTests | None]:
        sizes = {"block_size": 4, "num_gpu_blocks_override": 128, "max_model_len": 64, "cpu_threads": 1}
        cut = {"tensor_parallel_size": layout.tensor, "pipeline_parallel_size": layout.stages}
        config = engine_config(folder, **{**cut, **sizes, **given})
        made: list[RanksOfTests] = []
        executor = make(ranks, layout, made) if layout.size > 1 else None
        nonlocal engine
        if engine is not None:
            engine.stop()
        engine = Engine.start(config, lambda _: None, executor)
        return engine, made[0] if made else None

    yield start
    if engine is not None:
        engine.stop()


def compare(
    open_engine: Open,
    folder: Path,
    adds: list[AddRequest],
    layouts: Sequence[Layout] = LAYOUTS,
    **given: object,
) -> None:
    """Compare each layout with one worker. Several stages may divide prompts into other chunks."""
    expected = run(open_engine(folder, **given)[0], adds)
    for layout in layouts:
        engine, _ = open_engine(folder, layout, **given)
        results = run(engine, adds)
        if layout.stages == 1 or not given.get("enable_prefix_caching", True):
            results.assert_same(expected)
        else:
            results.assert_like(expected)


@pytest.mark.parametrize("architecture", [*DECODERS, "InternLM2ForCausalLM"])
def test_decoders_write(architecture: str, open_engine: Open, tmp_path: Path) -> None:
    """Prompts are read in chunks and behind cached prefixes, in steps with changing others."""
    if architecture == "InternLM2ForCausalLM":
        # Its key heads are stored with their queries, so that there must be one for each rank.
        shape = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64}
        folder = make_internlm2(tiny_checkpoint("LlamaForCausalLM", tmp_path, **shape))
    else:
        folder = tiny_checkpoint(architecture, tmp_path)
    compare(open_engine, folder, WRITES, [BOTH], tasks=["generate"], max_num_batched_tokens=9, max_num_seqs=4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["Gemma3nForCausalLM", "Gemma4ForCausalLM"])
def test_every_stage_makes_vectors_of_tokens(
    architecture: str, dtype: str, open_engine: Open, tmp_path: Path
) -> None:
    """The middle stage knows no sampled token but from the stream."""
    shape = SHARED_CACHES if architecture == "Gemma4ForCausalLM" else {}
    folder = tiny_checkpoint(architecture, tmp_path, **shape)
    given = {"tasks": ["generate", "embed"], "enable_prefix_caching": False, "max_num_seqs": 4}
    compare(open_engine, folder, WRITES + pools("embed", 10), [Layout(1, 3), BOTH], dtype=dtype, **given)


PAIRS = [
    (f"{family}ForCausalLM", quantization, ("float32", "bfloat16")[(row + column) % 2])
    for row, family in enumerate(("Llama", "Qwen3", "Olmo2", "Gemma3n"))
    for column, quantization in enumerate((None, "int8", "int4"))
]
"""Each two of an architecture, a quantization and a number type are met together."""


@pytest.mark.parametrize(("architecture", "quantization", "dtype"), PAIRS)
def test_all_layouts_give_the_same_bits(
    architecture: str, quantization: str | None, dtype: str, open_engine: Open, tmp_path: Path
) -> None:
    """Matrices have a section for each of up to eight ranks, and groups of quantized inputs end with them."""
    shape = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64, "intermediate_size": 208}
    folder = tiny_checkpoint(architecture, tmp_path, **shape)
    adds = WRITES + pools("embed", 10)
    given = {"tasks": ["generate", "embed"], "enable_prefix_caching": False, "max_num_seqs": 4}
    compare(open_engine, folder, adds, dtype=dtype, quantization=quantization, **given)


@pytest.mark.parametrize("act_order", [False, True], ids=["in order", "act-order"])
def test_quantized_checkpoints(act_order: bool, open_engine: Open, tmp_path: Path) -> None:
    """Groups of 32 are cut by sections of 48. With an order of inputs each rank adds up its own."""
    shape = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64, "intermediate_size": 384}
    recipe = Recipe(method="gptq", group=32, symmetric=False, act_order=act_order, head=True)
    folder = write_pair(tmp_path, recipe, **shape).packed
    given = {"tasks": ["generate"], "enable_prefix_caching": False, "max_num_seqs": 4}
    if not act_order:
        for dtype in ("float32", "bfloat16"):
            compare(open_engine, folder, WRITES, dtype=dtype, **given)
        return
    expected = run(open_engine(folder, **given)[0], WRITES)
    for layout in LAYOUTS:
        results = run(open_engine(folder, layout, **given)[0], WRITES)
        assert results.tokens == expected.tokens
        for id, values in expected.logprobs.items():
            assert results.logprobs[id] == pytest.approx(values, abs=1e-3)


WHOLE = [Layout(2, experts="linear"), Layout(4, experts="round_robin"), Layout(2, 2, "linear")]


@pytest.mark.parametrize(
    ("architecture", "given"),
    [
        ("Qwen2MoeForCausalLM", {"num_experts": 8}),
        ("GptOssForCausalLM", {"num_local_experts": 8, "intermediate_size": 33}),
    ],
)
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_whole_experts(
    architecture: str, given: dict[str, object], quantization: str | None, open_engine: Open, tmp_path: Path
) -> None:
    """Sums of experts are made in another order than by one worker, so the last digits differ."""
    folder = tiny_checkpoint(architecture, tmp_path, **given)
    more = {"tasks": ["generate"], "max_num_seqs": 4, "quantization": quantization}
    expected = run(open_engine(folder, **more)[0], WRITES)
    for layout in WHOLE:
        results = run(open_engine(folder, layout, **more)[0], WRITES)
        assert results.tokens == expected.tokens
        for id, values in expected.logprobs.items():  # kernels of quantized weights round their inputs
            assert results.logprobs[id] == pytest.approx(values, abs=1e-3 if quantization else 1e-4)


def test_a_vocabulary_that_does_not_divide(open_engine: Open, tmp_path: Path) -> None:
    """Four ranks hold 128, 128, 45 and no rows of the vocabulary; the head is tied, and so in two stages."""
    folder = tiny_checkpoint("LlamaForCausalLM", tmp_path, vocab_size=301, tie_word_embeddings=True)
    adds = [write(id, text, temperature=1.0, seed=id) for id, text in enumerate(TEXTS)]
    compare(open_engine, folder, adds, tasks=["generate"])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


def test_stages_work_at_the_same_time(llama: Path, open_engine: Open) -> None:
    """The middle stage, which neither embeds nor samples, works at the same time, too."""
    adds = [write(id, text, temperature=1.0, seed=id) for id, text in enumerate(TEXTS)]
    expected = run(open_engine(llama)[0], adds)
    engine, executor = open_engine(llama, Layout(1, 3))
    run(engine, adds).assert_like(expected)
    assert executor is not None
    assert executor.most_in_flight == 3


@pytest.mark.parametrize("family", ENCODERS)
def test_encoders(family: str, open_engine: Open, tmp_path: Path) -> None:
    heads = ("Model", "ForSequenceClassification", "ForTokenClassification")
    for head, task in zip(heads, ("embed", "classify", "token_classify"), strict=True):
        labels = {} if head == "Model" else {"num_labels": 3}
        folder = tiny_checkpoint(f"{family}{head}", tmp_path / head, **labels)
        compare(open_engine, folder, pools(task), [Layout(4), BOTH] if head == "Model" else [BOTH])


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPT2LMHeadModel", "OPTForCausalLM"])
@pytest.mark.parametrize("mode", ["LAST", "MEAN"])
def test_embedders_made_of_decoders(architecture: str, mode: str, open_engine: Open, tmp_path: Path) -> None:
    """A mean needs the hidden states of earlier chunks and of cached prefixes."""
    folder = tiny_checkpoint(architecture, tmp_path)
    given = {"convert": "embed", "runner": "pooling", "pooler_config": {"pooling_type": mode}}
    compare(open_engine, folder, pools("embed"), [BOTH], max_num_batched_tokens=9, max_num_seqs=4, **given)


def test_classifiers_made_of_decoders(open_engine: Open, tmp_path: Path) -> None:
    folder = sibling_checkpoint("Qwen2ForSequenceClassification", "Qwen2ForCausalLM", tmp_path, num_labels=3)
    compare(open_engine, folder, pools("classify"))


def test_labels_that_are_tokens(llama: Path, open_engine: Open) -> None:
    """Every rank of the last stage has the labels' rows of the head. Generation asks its whole head."""
    labels = {"classifier_from_token": ["a", "b"], "method": "no_post_processing"}
    given = {"hf_overrides": labels, "max_num_batched_tokens": 9}
    adds = pools("classify")
    compare(open_engine, llama, adds, convert="classify", runner="pooling", max_num_seqs=4, **given)
    adds += [write(10 + id, text) for id, text in enumerate(TEXTS)]
    compare(open_engine, llama, adds, tasks=["generate", "classify"], max_num_seqs=4, **given)


def test_rewards(open_engine: Open, tmp_path: Path) -> None:
    folder = tiny_checkpoint("Qwen2ForCausalLM", tmp_path, tie_word_embeddings=False)
    torch.manual_seed(0)
    head = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"score.{name}": tensor for name, tensor in head.state_dict().items()}
    rewrite(folder, tensors, architectures=["Qwen2ForRewardModel"])
    compare(open_engine, folder, pools("token_classify"))


def test_texts_and_vectors_from_one_copy(llama: Path, open_engine: Open) -> None:
    adds = WRITES + pools("embed", 10) + pools("token_embed", 20)
    given = {"runner": "generate", "tasks": ["generate", "embed", "token_embed"]}
    compare(open_engine, llama, adds, max_num_batched_tokens=9, max_num_seqs=4, **given)


def configs(folder: Path, layout: Layout, ranks: Ranks, **given: object) -> list[WorkerConfig]:
    sizes = {"block_size": 4, "max_model_len": 32, "max_num_seqs": 4, "cpu_threads": 1, **given}
    whole = worker_config(folder=str(folder), model=read_config(folder), **sizes)
    return [msgspec.structs.replace(whole, place=place) for place in layout.places(ranks.rendezvous())]


def test_all_ranks_have_room_for_as_much_as_the_smallest(ranks: Ranks, llama: Path) -> None:
    """The stages have two layers and one, so their blocks differ in size."""
    own = configs(llama, Layout(2, 2), ranks)
    block = 2 * 4 * 8 * 4  # of one layer: keys and values of four positions of a head, on each tensor rank
    room = [20 * 2 * block, 20 * 2 * block, 15 * block, 12 * block]
    told = [
        change_options(config, kv_cache_memory_bytes=nbytes) for config, nbytes in zip(own, room, strict=True)
    ]
    facts = [facts for facts, _ in ranks.open(told)]
    ranks.close_model(4)
    assert [each.num_blocks for each in facts] == [12] * 4
    assert [each.kv_bytes for each in facts] == [12 * 2 * block] * 2 + [12 * block] * 2
    assert len({each.max_model_len for each in facts}) == 1


def test_one_rank_without_room_stops_all(ranks: Ranks, llama: Path) -> None:
    own = configs(llama, Layout(2), ranks, kv_cache_memory_bytes=1 << 20)
    own[1] = change_options(own[1], kv_cache_memory_bytes=4000)
    with pytest.raises(RankError, match="raise --kv-cache-memory-bytes"):
        ranks.open(own)


@pytest.mark.parametrize("layout", [Layout(2), Layout(1, 2)], ids=str)
def test_each_rank_reads_its_part_only(layout: Layout, ranks: Ranks, tmp_path: Path) -> None:
    folder = tiny_checkpoint("LlamaForCausalLM", tmp_path, vocab_size=256, num_hidden_layers=4)
    whole = (folder / "model.safetensors").stat().st_size
    model = msgspec.structs.replace(read_config(folder), vocab_size=256)
    own = [msgspec.structs.replace(config, model=model) for config in configs(folder, layout, ranks)]
    opened = ranks.open(own)
    ranks.close_model(2)
    for facts, read in opened:
        assert 0.45 * whole < read < 0.52 * whole
        assert facts.weight_bytes < 0.6 * whole  # matrices may be padded


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (Layout(3), "--tensor-parallel-size 3: 4 attention heads cannot be divided evenly; choose"),
        (
            Layout(1, 4),
            "--pipeline-parallel-size 4: there are 3 layers, and each stage must have one; choose 3",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_cut_is_refused(layout: Layout, says: str, ranks: Ranks, llama: Path) -> None:
    with pytest.raises(RankError, match=says):
        ranks.open(configs(llama, layout, ranks))


def test_a_hybrid_in_stages_with_states_on_disk_takes_no_guesses(ranks: Ranks, tmp_path: Path) -> None:
    """A state might be written before it has gone on by the guesses that hold."""
    hybrid = tiny_checkpoint("Qwen3_5ForCausalLM", tmp_path / "hybrid")
    given = {"num_gpu_blocks_override": 96, "max_model_len": 64, "guesses": True}
    opened = ranks.open(configs(hybrid, Layout(1, 2), ranks, kv_cache_dir=str(tmp_path / "disk"), **given))
    ranks.close_model(2)
    assert [facts.most_rows for facts, _ in opened] == [0, 0]
