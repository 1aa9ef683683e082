"""A tiny random checkpoint of Moonshine, with a tokenizer of bytes."""

import json
from pathlib import Path
from typing import Any

START, END = 1, 2
_SPECIAL = ("<unk>", "<s>", "</s>")
VOCABULARY = 256 + len(_SPECIAL)


def make(folder: Path, **changes: Any) -> Any:
    """Writes the checkpoint, and returns transformers' model of it."""
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import MoonshineConfig, MoonshineForConditionalGeneration

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 72,  # with heads of 36, of which 32 turn
        "intermediate_size": 48,
        "encoder_num_hidden_layers": 2,
        "decoder_num_hidden_layers": 2,
        "encoder_num_attention_heads": 2,
        "decoder_num_attention_heads": 2,
        "pad_head_dim_to_multiple_of": 8,
        "max_position_embeddings": 194,
        "initializer_range": 0.2,
        "architectures": ["MoonshineForConditionalGeneration"],
    }
    torch.manual_seed(0)
    model = MoonshineForConditionalGeneration(MoonshineConfig(**{**sizes, **changes})).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "norm.bias", "fc1.bias")):
            torch.nn.init.normal_(parameter, mean=float(name.endswith("weight")), std=0.2)
    model.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: id for id, name in enumerate([*_SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in _SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    settings = {"feature_extractor_type": "Wav2Vec2FeatureExtractor", "do_normalize": False}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return model
