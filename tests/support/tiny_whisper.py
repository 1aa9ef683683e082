"""A tiny random checkpoint of Whisper, with a tokenizer of bytes and all tokens of its prompts."""

import json
from pathlib import Path
from typing import Any

LANGUAGES = ("en", "zh", "de", "es", "ja", "fr", "yue")
STAMPS = 1501
END = 256
_SPECIAL = [
    "<|endoftext|>",
    "<|startoftranscript|>",
    *(f"<|{code}|>" for code in LANGUAGES),
    "<|translate|>",
    "<|transcribe|>",
    "<|startoflm|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|notimestamps|>",
]
IDS = {name: END + number for number, name in enumerate(_SPECIAL)}
FIRST_STAMP = END + len(_SPECIAL)
VOCABULARY = FIRST_STAMP + STAMPS
CONTEXT = 64


def generation_config(*, multilingual: bool = True) -> dict[str, Any]:
    own = {
        "lang_to_id": {f"<|{code}|>": IDS[f"<|{code}|>"] for code in LANGUAGES},
        "task_to_id": {name: IDS[f"<|{name}|>"] for name in ("transcribe", "translate")},
    }
    return {
        "is_multilingual": multilingual,
        "no_timestamps_token_id": IDS["<|notimestamps|>"],
        "prev_sot_token_id": IDS["<|startofprev|>"],
        "decoder_start_token_id": IDS["<|startoftranscript|>"],
        "eos_token_id": END,
        "bos_token_id": END,
        "pad_token_id": END,
        "max_length": CONTEXT,
        "max_initial_timestamp_index": 50,
        "suppress_tokens": [1, 2, IDS["<|startofprev|>"], IDS["<|nospeech|>"]],
        "begin_suppress_tokens": [32, END],
        "alignment_heads": [[0, 1], [1, 0], [1, 3]],
        **(own if multilingual else {}),
    }


def make(folder: Path, *, bands: int = 80, seed: int = 0, multilingual: bool = True) -> Any:
    """Writes the checkpoint, and returns transformers' model of it."""
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=bands,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_target_positions=CONTEXT,
        decoder_start_token_id=IDS["<|startoftranscript|>"],
        eos_token_id=END,
        bos_token_id=END,
        pad_token_id=END,
        init_std=0.4,
    )
    torch.manual_seed(seed)
    model = WhisperForConditionalGeneration(config).eval()
    given = generation_config(multilingual=multilingual)
    model.generation_config = GenerationConfig.from_dict(given)
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(given))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: id for id, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in _SPECIAL])
    tokenizer.add_tokens([AddedToken(f"<|{at * 0.02:.2f}|>") for at in range(STAMPS)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"})
    )
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": bands})
    )
    return model
