"""Well-known checkpoints by their own files, made small: each is served as what it is without any option."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import VOCAB_SIZE, write_tokenizer

from models.config import read_config
from models.conversion.served_as import Conversion, resolve_conversion
from models.loader import LoadOptions, load_model
from models.pooling.config import PoolingConfig, read_pooling
from models.pooling.pooler import Merged
from models.pooling.sentence_files import Dense

ST = "sentence_transformers.models"
OLDER_FLAGS = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")
FLAGS = (*OLDER_FLAGS, "weightedmean_tokens", "lasttoken")


def pooling(flag: str, flags: tuple[str, ...] = FLAGS, **more: object) -> dict[str, object]:
    modes = {f"pooling_mode_{name}": name == flag for name in flags}
    return {"word_embedding_dimension": 32, **modes, **more}


def modules(*kinds: str) -> list[dict[str, object]]:
    paths = ["" if kind == "Transformer" else f"{index}_{kind}" for index, kind in enumerate(kinds)]
    return [
        {"idx": index, "name": str(index), "path": path, "type": f"{ST}.{kind}"}
        for index, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]


QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 3,
    "eos_token_id": 3,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "max_position_embeddings": 32768,
    "max_window_layers": 2,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": VOCAB_SIZE,
}
GEMMA = {
    "_sliding_window_pattern": 6,
    "architectures": ["Gemma3TextModel"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "dtype": "float32",
    "eos_token_id": 1,
    "final_logit_softcapping": None,
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 32,
    "intermediate_size": 48,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 2048,
    "model_type": "gemma3_text",
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 16,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": 512,
    "use_bidirectional_attention": True,
    "vocab_size": VOCAB_SIZE,
}
BERT = {
    "architectures": ["BertModel"],
    "attention_probs_dropout_prob": 0.1,
    "classifier_dropout": None,
    "gradient_checkpointing": False,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "model_type": "bert",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "torch_dtype": "float32",
    "type_vocab_size": 2,
    "use_cache": True,
    "vocab_size": VOCAB_SIZE,
}
ONE_LABEL = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
MODERNBERT = {
    "architectures": ["ModernBertModel"],
    "attention_bias": False,
    "bos_token_id": 1,
    "classifier_activation": "gelu",
    "classifier_bias": False,
    "classifier_pooling": "mean",
    "cls_token_id": 1,
    "decoder_bias": True,
    "deterministic_flash_attn": False,
    "eos_token_id": 2,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "hidden_activation": "gelu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "layer_norm_eps": 1e-05,
    "local_attention": 128,
    "local_rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "modernbert",
    "norm_bias": False,
    "norm_eps": 1e-05,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "pad_token_id": 3,
    "position_embedding_type": "absolute",
    "reference_compile": None,
    "sep_token_id": 2,
    "torch_dtype": "float16",
    "vocab_size": VOCAB_SIZE,
}
NOMIC = {
    "activation_function": "swiglu",
    "architectures": ["NomicBertModel"],
    "auto_map": {"AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"},
    "bos_token_id": None,
    "causal": False,
    "dense_seq_output": True,
    "eos_token_id": None,
    "fused_bias_fc": True,
    "layer_norm_epsilon": 1e-12,
    "max_trained_positions": 2048,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "model_type": "nomic_bert",
    "n_embd": 32,
    "n_head": 4,
    "n_inner": 48,
    "n_layer": 2,
    "n_positions": 8192,
    "pad_vocab_size_multiple": 64,
    "parallel_block": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "torch_dtype": "float32",
    "type_vocab_size": 2,
    "use_flash_attn": True,
    "use_rms_norm": False,
    "vocab_size": VOCAB_SIZE,
}
XLM_ROBERTA = BERT | {
    "bos_token_id": 0,
    "eos_token_id": 2,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 8194,
    "model_type": "xlm-roberta",
    "output_past": True,
    "pad_token_id": 1,
    "type_vocab_size": 1,
}


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


def sentence(length: int, *, lower_case: bool = False) -> dict[str, object]:
    return {"max_seq_length": length, "do_lower_case": lower_case}


def dense(inputs: int, outputs: int) -> dict[str, object]:
    identity = "torch.nn.modules.linear.Identity"
    return {"in_features": inputs, "out_features": outputs, "bias": False, "activation_function": identity}


PUBLISHED = [
    Published(
        name="Qwen3-Embedding-0.6B",
        config=QWEN3,
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
        config=GEMMA,
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
        config=BERT | ONE_LABEL,
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
        config=BERT,
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
        config=MODERNBERT,
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
        config=NOMIC,
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
        config=BERT
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
        config=BERT
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
        config=XLM_ROBERTA | ONE_LABEL | {"architectures": ["XLMRobertaForSequenceClassification"]},
        architecture="XLMRobertaForSequenceClassification",
        mode="CLS",
        max_len=8192,
        activation="sigmoid",
    ),
]


def put(folder: Path, config: dict[str, Any], files: dict[str, object]) -> None:
    for name, content in (files | {"config.json": config}).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))


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
    assert tuple(step.outputs for step in facts.steps if isinstance(step, Dense)) == published.widths
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
    put(tmp_path, QWEN3 | {"max_position_embeddings": 40960}, {})
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
