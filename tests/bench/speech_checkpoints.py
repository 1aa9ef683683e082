"""Checkpoints of Whisper in real shapes with random weights, and what the peers read in their place.

    python tests/bench/speech_checkpoints.py SHAPE FOLDER

Neither the end nor timestamps are ever likely, so that each text has as many tokens as it may, whoever writes
it, and a piece of the recording is read once.
"""

import json
import struct
import sys
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration

from models.media.whisper import mel_filters
from server.api.audio.form import LANGUAGES

SHAPES = {"tiny": (384, 4, 6), "base": (512, 6, 8), "small": (768, 12, 12)}
"""Name -> width, layers of the encoder and as many of the decoder, heads."""
END, START, STAMPS = 50257, 50258, 1501
_CODES = [code for code in LANGUAGES if code != "yue"]
_SPECIAL = [
    "<|endoftext|>",
    "<|startoftranscript|>",
    *(f"<|{code}|>" for code in _CODES),
    *(
        f"<|{name}|>"
        for name in ("translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps")
    ),
]
IDS = {name: END + number for number, name in enumerate(_SPECIAL)}
NO_TIMESTAMPS = IDS["<|notimestamps|>"]
VOCABULARY = NO_TIMESTAMPS + 1 + STAMPS
assert VOCABULARY == 51865
_BANDS = 80


def make(shape: str, folder: Path) -> None:
    """Writes a checkpoint as transformers has it."""
    size, layers, heads = SHAPES[shape]
    config = WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=_BANDS,
        d_model=size,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=4 * size,
        decoder_ffn_dim=4 * size,
        decoder_start_token_id=START,
        eos_token_id=END,
        bos_token_id=END,
        pad_token_id=END,
    )
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(config).eval()
    decoder: Any = model.model.decoder
    with torch.no_grad():
        away = torch.full(
            [size], 0.5
        )  # each hidden state goes this way, and the weights of these tokens do not
        decoder.layer_norm.bias.copy_(away)
        decoder.embed_tokens.weight[[END, *range(NO_TIMESTAMPS + 1, VOCABULARY)]] -= away
    generation = {
        "is_multilingual": True,
        "lang_to_id": {f"<|{code}|>": IDS[f"<|{code}|>"] for code in _CODES},
        "task_to_id": {name: IDS[f"<|{name}|>"] for name in ("transcribe", "translate")},
        "no_timestamps_token_id": NO_TIMESTAMPS,
        "prev_sot_token_id": IDS["<|startofprev|>"],
        "decoder_start_token_id": START,
        "eos_token_id": END,
        "bos_token_id": END,
        "pad_token_id": END,
        "max_length": config.max_target_positions,
        "max_initial_timestamp_index": 50,
        "suppress_tokens": [],
        "begin_suppress_tokens": [],
        "alignment_heads": [[layers - 1, 0]],
    }
    model.generation_config = GenerationConfig.from_dict(generation)
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(generation))
    _write_tokenizer(folder)


def _write_tokenizer(folder: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: id for id, char in enumerate(alphabet)}
    vocabulary |= {f"\u0120w{id}": id for id in range(len(alphabet), END)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in _SPECIAL])
    tokenizer.add_tokens([AddedToken(f"<|{at * 0.02:.2f}|>") for at in range(STAMPS)])
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    features = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": _BANDS}
    (folder / "preprocessor_config.json").write_text(json.dumps(features))


def write_ggml(folder: Path, path: Path) -> None:
    """Writes what whisper.cpp reads of a checkpoint: matrices in float16, as its convolutions must be."""
    model = WhisperForConditionalGeneration.from_pretrained(folder)
    config: Any = model.config
    sizes = [
        *(VOCABULARY, config.max_source_positions, config.d_model, config.encoder_attention_heads),
        *(config.encoder_layers, config.max_target_positions, config.d_model, config.decoder_attention_heads),
        *(config.decoder_layers, _BANDS, 1),
    ]
    filters = mel_filters(_BANDS).T
    with path.open("wb") as file:
        file.write(struct.pack("12i", 0x67676D6C, *sizes))
        file.write(struct.pack("2i", *filters.shape) + np.ascontiguousarray(filters).tobytes())
        file.write(struct.pack("i", END))
        for id in range(END):
            token = f" w{id}".encode()
            file.write(struct.pack("i", len(token)) + token)
        for name, tensor in model.model.state_dict().items():
            _write_tensor(file, _ggml_name(name), tensor.numpy())


def _write_tensor(file: BinaryIO, name: str, values: np.ndarray) -> None:
    if name in ("encoder.conv1.bias", "encoder.conv2.bias"):
        values = values.reshape(-1, 1)
    half = values.ndim > 1 and "bias" not in name and "positional" not in name
    encoded = name.encode()
    file.write(struct.pack("3i", values.ndim, len(encoded), half))
    file.write(struct.pack(f"{values.ndim}i", *reversed(values.shape)) + encoded)
    file.write(np.ascontiguousarray(values, np.float16 if half else np.float32).tobytes())


def convert(folder: Path, to: Path, kind: str, packages: str) -> None:
    """Writes what faster-whisper reads of a checkpoint, by CTranslate2 from a folder of packages."""
    sys.path.append(packages)  # behind all others: the converter needs torch and transformers, which are here
    from ctranslate2.converters import TransformersConverter  # pyright: ignore[reportMissingImports]

    files = ["tokenizer.json", "preprocessor_config.json"]
    TransformersConverter(str(folder), copy_files=files).convert(str(to), quantization=kind)


_RENAMED = {
    "layers": "blocks",
    "self_attn.k_proj": "attn.key",
    "self_attn.q_proj": "attn.query",
    "self_attn.v_proj": "attn.value",
    "self_attn.out_proj": "attn.out",
    "self_attn_layer_norm": "attn_ln",
    "encoder_attn.k_proj": "cross_attn.key",
    "encoder_attn.q_proj": "cross_attn.query",
    "encoder_attn.v_proj": "cross_attn.value",
    "encoder_attn.out_proj": "cross_attn.out",
    "encoder_attn_layer_norm": "cross_attn_ln",
    "fc1": "mlp.0",
    "fc2": "mlp.2",
    "final_layer_norm": "mlp_ln",
    "encoder.layer_norm": "encoder.ln_post",
    "decoder.layer_norm": "decoder.ln",
    "embed_tokens": "token_embedding",
    "encoder.embed_positions.weight": "encoder.positional_embedding",
    "decoder.embed_positions.weight": "decoder.positional_embedding",
}


def _ggml_name(name: str) -> str:
    for ours, theirs in _RENAMED.items():
        name = name.replace(ours, theirs)
    return name


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
