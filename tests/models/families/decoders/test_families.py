"""Every family on tiny random checkpoints has Hugging Face's logits, in whatever steps tokens arrive."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

import msgspec
import pytest
import torch
import transformers
from drive import Driver, load_ranks, run_in_chunks
from shape_files import read_shapes
from tiny import hf_logits, hf_model, tiny_checkpoint
from torch import Tensor

from models.registry import ARCHITECTURES


@dataclass(frozen=True)
class Case:
    """A case of the table: an architecture, and the unusual fields of its config.json."""

    architecture: str
    variant: str = ""
    overrides: dict[str, object] = field(default_factory=dict)
    ranks: Sequence[int] = (2, 4)

    def __str__(self) -> str:
        return f"{self.architecture}-{self.variant}" if self.variant else self.architecture


CASES = [
    Case(
        architecture,
        variant,
        {name: fields[name] for name in fields if name != "ranks"},
        fields.get("ranks", [2, 4]),
    )
    for architecture, variants in read_shapes("variants").items()
    for variant, fields in variants.items()
]

PROMPT = random.Random(1).choices(range(5, 300), k=23)
"""A prompt that is longer than the windows."""


@dataclass(frozen=True)
class Built:
    case: Case
    folder: Path
    expected: Tensor
    """Hugging Face's logits after each token of PROMPT."""


@pytest.fixture(scope="module", params=CASES, ids=str)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    case: Case = request.param
    folder = tiny_checkpoint(case.architecture, tmp_path_factory.mktemp("checkpoint"), **case.overrides)
    return Built(case, folder, hf_logits(folder, PROMPT))


def assert_equal(logits: Tensor, expected: Tensor) -> None:
    """Compare as strictly as Hugging Face's own two attention implementations agree on these models."""
    torch.testing.assert_close(logits.log_softmax(-1), expected.log_softmax(-1), atol=1e-4, rtol=0)
    assert logits.argmax(-1).tolist() == expected.argmax(-1).tolist()


def test_logits_are_worth_comparing(built: Built) -> None:
    """A model that predicts hardly anything, or the same everywhere, would pass the other tests by chance."""
    assert built.expected.std() > 0.3
    assert len(set(built.expected.argmax(-1).tolist())) > 3


def test_sequences_packed_into_steps(built: Built) -> None:
    """A whole prompt, others in pieces and single tokens share steps, and each row is as if it were alone."""
    driver = Driver(load_ranks(built.folder))
    pieces: dict[int, list[Tensor]] = {row: [] for row in range(4)}
    for step in (
        {3: PROMPT[:10], 1: PROMPT[:1], 0: PROMPT},
        {1: PROMPT[1:9], 3: PROMPT[10:11]},
        {3: PROMPT[11:12], 1: PROMPT[9:10]},
        {3: PROMPT[12:13], 2: PROMPT[:5], 1: PROMPT[10:]},
        {3: PROMPT[13:]},
    ):
        for row, logits in driver.step(step).items():
            pieces[row].append(logits)
    for row, count in ((0, 23), (1, 23), (2, 5), (3, 23)):
        assert_equal(torch.cat(pieces[row]), built.expected[:count])


def test_spread_over_ranks(built: Built) -> None:
    """Two ranks halve everything; four ranks share two key/value heads. Variants are held by the most."""
    for size in built.case.ranks[-1:] if built.case.variant else built.case.ranks:
        driver = Driver(load_ranks(built.folder, size))
        assert_equal(run_in_chunks(driver, 0, PROMPT, 12), built.expected)


def test_bfloat16_is_as_near_to_float32_as_hugging_faces(built: Built) -> None:
    driver = Driver(load_ranks(built.folder, dtype=torch.bfloat16), dtype=torch.bfloat16)
    logits = driver.step({0: PROMPT})[0]
    assert logits.dtype == torch.float32
    theirs = hf_model(built.folder, torch.bfloat16)
    with torch.inference_mode():
        limit = 1.3 * distance(theirs(torch.tensor([PROMPT])).logits[0].float(), built.expected)
    assert 0 < distance(logits, built.expected) < limit


def test_nothing_is_left_on_the_host(built: Built) -> None:
    """Tensors on meta do not mix with the host's, so a model that runs there runs on CUDA."""
    driver = Driver(load_ranks(built.folder, device="meta"), device="meta")
    assert driver.step({0: PROMPT, 1: PROMPT[:1]})[1].is_meta


@pytest.mark.parametrize("scale", [0.25, "inv_sqrt_d_model"])
def test_logits_of_mpt_are_scaled(scale: object, tmp_path: Path) -> None:
    """The code of its makers does so, and transformers' does not."""
    folder = tiny_checkpoint("MptForCausalLM", tmp_path, logit_scale=scale)
    logits = Driver(load_ranks(folder)).step({0: PROMPT})[0]
    factor = 32**-0.5 if isinstance(scale, str) else 0.25
    torch.testing.assert_close(logits, factor * hf_logits(folder, PROMPT), atol=1e-4, rtol=0)


def distance(logits: Tensor, expected: Tensor) -> float:
    """The distance of the middle token: where two experts nearly tie, a digit may choose another one."""
    return float(((logits - expected).norm(dim=-1) / expected.norm(dim=-1)).median())


@pytest.mark.parametrize(
    ("architecture", "built_with", "published_with"),
    [
        ("Qwen2ForCausalLM", {}, {}),
        ("Gemma2ForCausalLM", {}, {}),
        ("SmolLM3ForCausalLM", {"use_sliding_window": True, "sliding_window": 5}, {}),
        (
            "Gemma3ForCausalLM",
            {},
            {
                "sliding_window_pattern": 2,
                "rope_theta": 1000000.0,
                "rope_local_base_freq": 10000.0,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                "rope_parameters": None,
            },
        ),
    ],
)
def test_config_as_first_published(
    architecture: str, built_with: dict[str, object], published_with: dict[str, object], tmp_path: Path
) -> None:
    """Each family had its own rule for the kinds of layers before configs listed them."""
    folder = tiny_checkpoint(architecture, tmp_path, **built_with)
    expected = hf_logits(folder, PROMPT)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | published_with
    del config["layer_types"]
    path.write_text(json.dumps(config))
    assert_equal(Driver(load_ranks(folder)).step({0: PROMPT})[0], expected)


@pytest.mark.parametrize(
    "architecture", sorted({case.architecture for case in CASES} - {"Gemma3nForCausalLM"})
)
def test_an_epsilon_that_is_left_out_is_hugging_faces(architecture: str) -> None:
    module, _, name = ARCHITECTURES[architecture].partition(":")
    fields = getattr(import_module(f"models.families.{module}"), name).fields
    ours = next(each for each in msgspec.structs.fields(fields) if each.name == "rms_norm_eps")
    theirs = getattr(transformers, architecture).config_class()
    assert ours.default == getattr(theirs, ours.encode_name, ours.default)
