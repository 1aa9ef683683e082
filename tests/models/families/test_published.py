"""Well-known checkpoints by their own files, made small: each is served as what it is without any option."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from pooling_files import ST, put_json
from shape_files import read_shapes
from tiny import write_tokenizer

from models.config import read_config
from models.conversion.conversion_choice import Conversion, resolve_conversion
from models.loader import LoadOptions, load_model
from models.pooling.config import PoolingConfig, read_pooling
from models.pooling.pooler import Merged
from models.pooling.sentence_files import Dense

CONFIGS = read_shapes("published")
"""The config.json of well-known checkpoints, with sizes made small."""
OLDER_FLAGS = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")
FLAGS = (*OLDER_FLAGS, "weightedmean_tokens", "lasttoken")
ONE_LABEL = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def modules(*kinds: str) -> list[dict[str, object]]:
    paths = ["" if kind == "Transformer" else f"{index}_{kind}" for index, kind in enumerate(kinds)]
    return [
        {"idx": index, "name": str(index), "path": path, "type": f"{ST}.{kind}"}
        for index, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]


def pooling(flag: str, flags: tuple[str, ...] = FLAGS, **more: object) -> dict[str, object]:
    modes = {f"pooling_mode_{name}": name == flag for name in flags}
    return {"word_embedding_dimension": 32, **modes, **more}


def sentence(length: int, *, lower_case: bool = False) -> dict[str, object]:
    return {"max_seq_length": length, "do_lower_case": lower_case}


def dense(inputs: int, outputs: int) -> dict[str, object]:
    identity = "torch.nn.modules.linear.Identity"
    return {"in_features": inputs, "out_features": outputs, "bias": False, "activation_function": identity}


@dataclass(frozen=True, kw_only=True)
class Published:
    name: str
    config: dict[str, Any]
    files: dict[str, object] = field(default_factory=dict)

    architecture: str
    """The architecture whose class is built."""
    convert: str = "none"
    causal: bool = False
    mode: str
    normalize: bool = True
    max_len: int
    """The most tokens of a text."""
    prompts: tuple[str, ...] = ()
    widths: tuple[int, ...] = ()
    """The widths of the projections after pooling."""
    activation: str | None = None
    """The activation of scores."""

    def __str__(self) -> str:
        return self.name


PUBLISHED = [
    Published(
        name="Qwen3-Embedding-0.6B",
        config=CONFIGS["qwen3"],
        files={
            "modules.json": modules("Transformer", "Pooling", "Normalize"),
            "1_Pooling/config.json": pooling("lasttoken", include_prompt=True),
            "config_sentence_transformers.json": {
                "prompts": {
                    "query": "Instruct: Given a web search query, retrieve relevant passages that answer "
                    "the query\nQuery:",
                    "document": "",
                },
                "default_prompt_name": None,
                "similarity_fn_name": "cosine",
            },
        },
        architecture="Qwen3ForCausalLM",
        convert="embed",
        causal=True,
        mode="LAST",
        max_len=32768,
        prompts=("query", "document"),
    ),
    Published(
        name="embeddinggemma-300m",
        config=CONFIGS["gemma"],
        files={
            "modules.json": modules("Transformer", "Pooling", "Dense", "Dense", "Normalize"),
            "1_Pooling/config.json": pooling("mean_tokens", include_prompt=True),
            "2_Dense/config.json": dense(32, 128),
            "3_Dense/config.json": dense(128, 32),
            "sentence_bert_config.json": sentence(2048),
            "config_sentence_transformers.json": {
                "model_type": "SentenceTransformer",
                "prompts": {"query": "task: search result | query: ", "document": "title: none | text: "},
                "default_prompt_name": None,
                "similarity_fn_name": "cosine",
            },
        },
        architecture="Gemma3ForCausalLM",
        convert="embed",
        causal=False,
        mode="MEAN",
        max_len=2048,
        prompts=("query", "document"),
        widths=(128, 32),
    ),
    Published(
        name="bge-base-en-v1.5",
        config=CONFIGS["bert"] | ONE_LABEL,
        files={
            "modules.json": modules("Transformer", "Pooling", "Normalize"),
            "1_Pooling/config.json": pooling("cls_token", OLDER_FLAGS),
            "sentence_bert_config.json": sentence(512, lower_case=True),
            "config_sentence_transformers.json": {"__version__": {"sentence_transformers": "2.2.2"}},
        },
        architecture="BertModel",
        mode="CLS",
        max_len=512,
    ),
    Published(
        name="e5-base-v2",
        config=CONFIGS["bert"],
        files={
            "modules.json": modules("Transformer", "Pooling", "Normalize"),
            "1_Pooling/config.json": pooling("mean_tokens", OLDER_FLAGS),
            "sentence_bert_config.json": sentence(512),
        },
        architecture="BertModel",
        mode="MEAN",
        max_len=512,
    ),
    Published(
        name="gte-modernbert-base",
        config=CONFIGS["modernbert"],
        files={
            "modules.json": modules("Transformer", "Pooling"),
            "1_Pooling/config.json": pooling("cls_token", include_prompt=True),
            "sentence_bert_config.json": sentence(8192),
            "config_sentence_transformers.json": {
                "__version__": {"sentence_transformers": "3.3.1"},
                "prompts": {},
                "default_prompt_name": None,
                "similarity_fn_name": "cosine",
            },
        },
        architecture="ModernBertModel",
        mode="CLS",
        normalize=False,
        max_len=8192,
    ),
    Published(
        name="nomic-embed-text-v1.5",
        config=CONFIGS["nomic"],
        files={
            "modules.json": modules("Transformer", "Pooling"),
            "1_Pooling/config.json": pooling("mean_tokens", OLDER_FLAGS),
            "sentence_bert_config.json": sentence(8192),
            "config_sentence_transformers.json": {"__version__": {"sentence_transformers": "2.4.0.dev0"}},
        },
        architecture="NomicBertModel",
        mode="MEAN",
        normalize=False,
        max_len=2048,
    ),
    Published(
        name="ms-marco-MiniLM-L6-v2",
        config=CONFIGS["bert"]
        | ONE_LABEL
        | {
            "architectures": ["BertForSequenceClassification"],
            "sentence_transformers": {
                "activation_fn": "torch.nn.modules.linear.Identity",
                "version": "4.1.0.dev0",
            },
        },
        architecture="BertForSequenceClassification",
        mode="CLS",
        max_len=512,
        activation="identity",
    ),
    Published(
        name="ms-marco-MiniLM-L6-v2, as it was before",
        config=CONFIGS["bert"]
        | ONE_LABEL
        | {
            "architectures": ["BertForSequenceClassification"],
            "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity",
        },
        architecture="BertForSequenceClassification",
        mode="CLS",
        max_len=512,
        activation="identity",
    ),
    Published(
        name="bge-reranker-v2-m3",
        config=CONFIGS["xlm_roberta"]
        | ONE_LABEL
        | {"architectures": ["XLMRobertaForSequenceClassification"]},
        architecture="XLMRobertaForSequenceClassification",
        mode="CLS",
        max_len=8192,
        activation="sigmoid",
    ),
]


def put(folder: Path, config: dict[str, Any], files: dict[str, object]) -> None:
    for name, content in (files | {"config.json": config}).items():
        put_json(folder, name, content)


def resolve(
    folder: Path, overrides: dict[str, object] | None = None
) -> tuple[Conversion, PoolingConfig, Any]:
    """Load a checkpoint with dummy weights -> (its conversion, its pooling, the model)."""
    config = read_config(folder, overrides)
    conversion = resolve_conversion(config, folder)
    facts = read_pooling(folder, config, {})
    options = LoadOptions(
        config,
        folder,
        dtype=torch.float32,
        load_format="dummy",
        max_len=32,
        conversion=conversion,
        pooling=facts,
    )
    return conversion, facts, load_model(options)


@pytest.mark.parametrize("published", PUBLISHED, ids=str)
def test_a_checkpoint_is_taken_for_what_it_is(published: Published, tmp_path: Path) -> None:
    put(tmp_path, published.config, published.files)
    conversion, facts, model = resolve(tmp_path)
    assert (conversion.runner, conversion.convert) == ("pooling", published.convert)
    assert conversion.architecture == published.architecture
    assert model.causal == published.causal
    length = read_config(tmp_path).max_len
    assert min(length, facts.texts.max_len or length) == published.max_len
    assert tuple(facts.texts.prompts) == published.prompts
    assert facts.texts.lower_case == published.name.startswith("bge-base")
    assert tuple(step.out_features for step in facts.steps if isinstance(step, Dense)) == published.widths
    scores = published.activation is not None
    assert model.pooler.tasks == ({"classify", "token_classify"} if scores else {"embed", "token_embed"})
    head = model.pooler.heads["classify" if scores else "embed"]
    assert isinstance(head.rows, Merged)
    assert head.rows.modes == (published.mode,)
    assert head.width == (1 if scores else 32)
    if scores:
        assert (facts.num_labels, facts.activation) == (1, published.activation)
    else:
        assert head.activates == published.normalize


def test_qwen3_reranker(tmp_path: Path) -> None:
    """The checkpoint generates unless options say what it was made for."""
    put(tmp_path, CONFIGS["qwen3"] | {"max_position_embeddings": 40960}, {})
    write_tokenizer(tmp_path)
    conversion, facts, model = resolve(tmp_path)
    assert (conversion.runner, conversion.architecture) == ("generate", "Qwen3ForCausalLM")
    assert model.pooler.tasks == {"embed", "token_embed"}
    said: dict[str, object] = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["n", "y"],
        "is_original_qwen3_reranker": True,
    }
    conversion, facts, model = resolve(tmp_path, said)
    assert (conversion.runner, conversion.convert) == ("pooling", "classify")
    assert conversion.architecture == "Qwen3ForCausalLM"
    assert (facts.num_labels, facts.two_way, facts.activation) == (1, True, "sigmoid")
    assert model.pooler.tasks == {"classify", "token_classify"}
    assert model.pooler.heads["classify"].rows.modes == ("LAST",)
