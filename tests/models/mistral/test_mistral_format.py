"""Checkpoints in Mistral's own format, written from those of transformers."""

import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
import torch
from drive import assert_logits
from safetensors.torch import load_file, save_file
from tekken import SPECIAL, WORDS, write_tekken
from tiny import hf_logits, tiny_checkpoint
from torch import Tensor

from engine_core.config import EngineConfig
from engine_core.resolve_checkpoint import find_checkpoint
from models.mistral.folder import is_mistral, make_folder, raw_config
from models.plain_files import FileError
from server.text.tokenizer import Tokenizer
from server.text.tokenizer_files import TokenizerError, TokenizerFiles
from worker.options import WorkerOptions

PROMPT = [7, 80, 300, 12, 55, 9, 9]
NAMES = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
}


def in_pairs(tensor: Tensor, head_dim: int) -> Tensor:
    """Rows j and j + half a head side by side."""
    heads = tensor.split(head_dim)
    half = head_dim // 2
    return torch.cat([torch.stack([head[:half], head[half:]], dim=1).flatten(0, 1) for head in heads])


def write_mistral(source: Path, folder: Path) -> Path:
    config = json.loads((source / "config.json").read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    folder.mkdir()
    stored: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = in_pairs(tensor, head_dim)
        own = name.removesuffix(".weight")
        for theirs, ours in NAMES.items():
            own = own.replace(theirs, ours)
        own = own.replace("model.", "").replace("block_sparse_moe", "feed_forward")
        stored[f"{own}.weight"] = tensor.contiguous()
    save_file(stored, folder / "consolidated.safetensors")
    experts = config.get("num_local_experts")
    params = {
        "dim": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
        "head_dim": head_dim,
        "hidden_dim": config["intermediate_size"],
        "norm_eps": config["rms_norm_eps"],
        "rope_theta": config.get("rope_theta") or config["rope_parameters"]["rope_theta"],
        "vocab_size": config["vocab_size"],
        "sliding_window": config.get("sliding_window"),
        "max_seq_len": config["max_position_embeddings"],
    }
    if experts:
        params["moe"] = {"num_experts": experts, "num_experts_per_tok": config["num_experts_per_tok"]}
    (folder / "params.json").write_text(json.dumps(params))
    write_tekken(folder / "tekken.json")
    return folder


@pytest.mark.parametrize("architecture", ["MistralForCausalLM", "MixtralForCausalLM"])
def test_logits_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    source = tiny_checkpoint(architecture, tmp_path / "source")
    own = write_mistral(source, tmp_path / "own")
    cache = tmp_path / "cache"
    cache.mkdir()
    made = make_folder(own, cache)
    assert make_folder(own, cache) == made
    assert_logits(made, hf_logits(source, PROMPT), PROMPT, 1, 2)


def test_the_folder_is_found_by_its_files_or_by_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tiny_checkpoint("MistralForCausalLM", tmp_path / "source")
    own = write_mistral(source, tmp_path / "own")
    found = find_checkpoint(EngineConfig(model=str(own)), lambda _: None)
    assert found.is_relative_to(tmp_path / "cache" / "facet" / "mistral")
    for path in source.iterdir():
        shutil.copy(path, own)
    assert find_checkpoint(EngineConfig(model=str(own)), lambda _: None) == own
    asked = EngineConfig(model=str(own), worker=WorkerOptions(load_format="mistral"))
    assert find_checkpoint(asked, lambda _: None) != own
    with pytest.raises(FileError, match=r"--load-format, --tokenizer-mode and .* need .*params.json"):
        is_mistral(source, "mistral")


def by_ranks(word: bytes, ranks: dict[bytes, int]) -> list[int]:
    """Join the neighbours whose join has the lowest rank, until none has one, as the format defines it."""
    parts = [bytes([byte]) for byte in word]
    while len(parts) > 1 and word not in ranks:
        joined = [ranks.get(one + two, 1 << 30) for one, two in pairwise(parts)]
        if (least := min(joined)) == 1 << 30:
            break
        at = joined.index(least)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [ranks[word]] if word in ranks else [ranks[part] for part in parts]


@pytest.mark.parametrize("text", ["hello", " hello hellohe", "lo llo", "é!", "hell", " hellolo", ""])
def test_texts_become_tokens_by_ranks(text: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tmp_path)
    ranks = {bytes([byte]): byte for byte in range(256)} | {word: 256 + i for i, word in enumerate(WORDS)}
    pieces = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r" ?[a-z]+|[^a-z]"), "isolated")
    words = [piece for piece, _ in pieces.pre_tokenize_str(text)]
    expected = [len(SPECIAL) + 1 + rank for word in words for rank in by_ranks(word.encode(), ranks)]
    assert tokenizer.encode(text) == [1, *expected]
    assert tokenizer.encode("[INST]" + text, add_special_tokens=False)[0] == 3


def load_tokenizer(folder: Path, words: list[bytes] = WORDS) -> Tokenizer:
    write_tekken(folder / "tekken.json", words=words)
    return TokenizerFiles(str(folder), str(folder)).load()


TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]},
    {"role": "assistant", "content": "Yes"},
    {"role": "user", "content": "Why?"},
]


@pytest.mark.parametrize(
    ("version", "written"),
    [
        ("v7", "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]Hi\n\nthere[/INST]Yes</s>[INST]Why?[/INST]"),
        ("v3", "<s>[INST]Hi\n\nthere[/INST]Yes</s>[INST]Be brief.\n\nWhy?[/INST]"),
    ],
)
def test_conversations_are_written_with_control_tokens(version: str, written: str, tmp_path: Path) -> None:
    write_tekken(tmp_path / "tekken.json", version=version)
    tokenizer = TokenizerFiles(str(tmp_path), str(tmp_path)).load()
    assert tokenizer.chat.render(TALK, add_generation_prompt=True) == written


@pytest.mark.parametrize(
    ("version", "written"),
    [
        (
            "v7",
            "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]Hi[/INST]Yes</s>[INST]Why?\n\nNow![/INST]As",
        ),
        ("v3", "<s>[INST]Hi[/INST]Yes</s>[INST]Be brief.\n\nWhy?\n\nNow![/INST]As"),
    ],
)
def test_messages_of_one_user_are_one_turn(version: str, written: str, tmp_path: Path) -> None:
    write_tekken(tmp_path / "tekken.json", version=version)
    said = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Yes "), ("user", "Why?")]
    said += [("user", "Now!"), ("assistant", "As ")]
    talk = [{"role": role, "content": content} for role, content in said]
    tokenizer = TokenizerFiles(str(tmp_path), str(tmp_path)).load()
    assert tokenizer.chat.render(talk, continue_final_message=True) == written


BROKEN = {
    "pictures": ({"vision_encoder": {"hidden_size": 8}}, "'vision_encoder' is not read"),
    "a wrong type": ({"n_heads": "4"}, "n_heads"),
    "nothing": ({"n_heads": None}, "n_heads"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_not_read_is_refused_in_a_sentence(name: str) -> None:
    change, said = BROKEN[name]
    whole = {"dim": 8, "n_layers": 1, "n_heads": 2, "hidden_dim": 8, "vocab_size": 9, "rope_theta": 1e6}
    with pytest.raises(FileError, match=f"params.json: .*{said}"):
        raw_config(whole | change, Path("params.json"))


@pytest.mark.parametrize("words", [[b"he", b"he"], [b"a"]])
def test_a_broken_list_of_tokens_is_refused(words: list[bytes], tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="has a token twice"):
        load_tokenizer(tmp_path, words=words)
    (tmp_path / "tekken.json").write_text("{")
    from models.mistral.tokenizer import tokenizer_json

    with pytest.raises(FileError, match=r"is not a tekken.json"):
        tokenizer_json(tmp_path / "tekken.json")
