"""Makes a folder in which a Whisper of CTranslate2's format looks like any other checkpoint. No torch.

config.json is made of the sizes of the weights, generation_config.json of the names of tokens and of what
faster-whisper keeps in its config.json. The weights are a link to model.bin, whose names `tensors.py`
translates.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec

from models.ctranslate2.file import WEIGHTS, ModelFile, read_file, specification_of
from models.made_folder import link, made_once, write_json
from models.plain_files import FileError, read_object, typed

_MARK = "made_of_ctranslate2.txt"
"""A file that says that a folder was made here, and of which one."""
_WHISPER = "WhisperSpec"
_GELU = 3
"""The number of the activation that Whisper has."""
_MULTILINGUAL = 51_865
"""The tokens of the smallest vocabulary that has languages."""
_LANGUAGE = re.compile(r"<\|[a-z]{2,3}\|>")
_BESIDE = ("tokenizer_config.json", "preprocessor_config.json", "special_tokens_map.json")
"""Files beside the weights that are used as they are."""


class _Settings(msgspec.Struct, frozen=True):
    """The fields of the config.json beside the weights."""

    alignment_heads: list[tuple[int, int]] = []
    lang_ids: list[int] = []
    suppress_ids: list[int] = []
    suppress_ids_begin: list[int] = []


class _Added(msgspec.Struct, frozen=True):
    id: int
    content: str


class _Tokenizer(msgspec.Struct, frozen=True):
    added_tokens: list[_Added] = []


def is_ctranslate2(folder: Path) -> bool:
    """Whether a folder holds a Whisper of CTranslate2's format. Raises FileError for other kinds."""
    specification = specification_of(folder / WEIGHTS)
    if specification not in (None, _WHISPER):
        raise FileError(
            f"{folder / WEIGHTS} is a {specification} of CTranslate2, of which only Whisper is read: use "
            "the model's files for transformers"
        )
    return specification is not None


def made_weights(folder: Path) -> list[Path]:
    """The model.bin of a folder that `make_folder` has made; else none."""
    return [folder / WEIGHTS] if (folder / _MARK).is_file() else []


def make_folder(folder: Path, cache: Path) -> Path:
    """Make the folder for a checkpoint within `cache`, or find the one made before. Raises FileError."""
    tokens, settings = folder / "tokenizer.json", folder / "config.json"
    if not tokens.is_file():
        raise FileError(
            f"{folder} has no tokenizer.json: take the one of the Whisper that it was converted from"
        )
    beside = [folder / name for name in _BESIDE if (folder / name).is_file()]
    files = [folder / WEIGHTS, tokens, *([settings] if settings.is_file() else []), *beside]

    def fill(made: Path) -> None:
        file = read_file(folder / WEIGHTS)
        config = _config(file)
        generation = _generation(tokens, settings, config)
        shared = {
            name: generation[name]
            for name in ("decoder_start_token_id", "eos_token_id", "bos_token_id", "pad_token_id")
        }
        write_json(made / "config.json", {**config, **shared})
        write_json(made / "generation_config.json", generation)
        link(made, [folder / WEIGHTS, tokens, *beside])
        if not (made / "preprocessor_config.json").exists():
            kind = {
                "feature_extractor_type": "WhisperFeatureExtractor",
                "feature_size": config["num_mel_bins"],
            }
            write_json(made / "preprocessor_config.json", kind)
        if not (made / "tokenizer_config.json").exists():
            write_json(
                made / "tokenizer_config.json",
                {"tokenizer_class": "WhisperTokenizerFast", "eos_token": "<|endoftext|>"},
            )
        (made / _MARK).write_text(os.path.abspath(folder))

    return made_once(cache, files, Path(__file__).parent, fill)


def _config(file: ModelFile) -> dict[str, object]:
    """The config.json that the sizes of a model's weights mean. Raises FileError."""
    vocabulary, size = file.shape("decoder/embeddings/weight", 2)
    if file.number("decoder/activation") != _GELU:
        raise FileError(f"{file.path}: its activation is not Whisper's gelu")
    heads = file.number("decoder/num_heads")
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "dtype": "float16",
        "vocab_size": vocabulary,
        "d_model": size,
        "num_mel_bins": file.shape("encoder/conv1/weight", 3)[1],
        "max_source_positions": file.shape("encoder/position_encodings/encodings", 2)[0],
        "max_target_positions": file.shape("decoder/position_encodings/encodings", 2)[0],
        "encoder_layers": file.layers("encoder"),
        "decoder_layers": file.layers("decoder"),
        "num_hidden_layers": file.layers("encoder"),
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "encoder_ffn_dim": file.shape("encoder/layer_0/ffn/linear_0/weight", 2)[0],
        "decoder_ffn_dim": file.shape("decoder/layer_0/ffn/linear_0/weight", 2)[0],
        "activation_function": "gelu",
        "tie_word_embeddings": True,
    }


def _generation(tokens: Path, settings: Path, config: dict[str, object]) -> dict[str, object]:
    """The generation_config.json that a vocabulary and faster-whisper's settings mean. Raises FileError."""
    given = typed(read_object(settings), _Settings, str(settings)) if settings.is_file() else _Settings()
    added = typed(read_object(tokens), _Tokenizer, str(tokens)).added_tokens
    ids = {each.content: each.id for each in added}
    try:
        end = ids["<|endoftext|>"]
        made: dict[str, object] = {
            "decoder_start_token_id": ids["<|startoftranscript|>"],
            "eos_token_id": end,
            "bos_token_id": end,
            "pad_token_id": end,
            "prev_sot_token_id": ids.get("<|startofprev|>"),
            "no_timestamps_token_id": ids["<|notimestamps|>"],
            "max_initial_timestamp_index": 50,
            "max_length": config["max_target_positions"],
            "suppress_tokens": given.suppress_ids,
            "begin_suppress_tokens": given.suppress_ids_begin,
            "is_multilingual": False,
        }
        if given.alignment_heads:
            made["alignment_heads"] = given.alignment_heads
        if int(str(config["vocab_size"])) >= _MULTILINGUAL:
            made["is_multilingual"] = True
            made["lang_to_id"] = {name: id for name, id in ids.items() if _LANGUAGE.fullmatch(name)}
            made["task_to_id"] = {task: ids[f"<|{task}|>"] for task in ("transcribe", "translate")}
        return made
    except KeyError as error:
        raise FileError(f"{tokens} has no token {error}: it is not the tokenizer of a Whisper") from None
