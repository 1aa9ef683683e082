"""Tiny random checkpoints of models that answer to a text, with a tokenizer of bytes."""

import json
from pathlib import Path
from typing import Any

from shape_files import read_shapes

VOCABULARY = 300
START, END, LANGUAGE = 2, 3, 7
_SIZES, _T5_SIZES = (read_shapes("small")[name] for name in ("bart", "t5"))
_GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
_T5 = {"T5": {}, "FlanT5": _GATED, "MT5": _GATED, "UMT5": _GATED}
FAMILIES = ("Bart", "MBart", "Marian", "Pegasus", *_T5)


def make(family: str, folder: Path, seed: int = 0) -> Any:
    """Writes the checkpoint, and returns transformers' model of it."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    name = family.removeprefix("Flan")
    kind = "MarianMTModel" if family == "Marian" else f"{name}ForConditionalGeneration"
    sizes = _SIZES if family not in _T5 else {**_T5_SIZES, **_T5[family]}
    torch.manual_seed(seed)
    model = getattr(transformers, kind)(getattr(transformers, f"{name}Config")(**sizes)).eval()
    if family in _T5:
        _draw(model, has_head=bool(_T5[family]))
    for name, tensor in model.named_parameters():  # the first values of biases and norms would hide mistakes
        if tensor.ndim == 1:
            torch.nn.init.normal_(tensor, std=0.3, mean=float(name.endswith("norm.weight")))
    if hasattr(model, "final_logits_bias") and family != "Bart":
        model.final_logits_bias.normal_()
    model.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {char: id for id, char in enumerate([*"0123", *alphabet])}
    tokenizer = Tokenizer(models.BPE(ids, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    given = {"decoder_start_token_id": START, "forced_bos_token_id": LANGUAGE, "bad_words_ids": [[1], [5, 6]]}
    (folder / "generation_config.json").write_text(json.dumps({**given, "eos_token_id": END}))
    return model


def _draw(model: Any, *, has_head: bool) -> None:
    """Numbers by which distances, layers and the head all count."""
    import torch

    for name, tensor in model.named_parameters():
        torch.nn.init.normal_(tensor, std=1.0 if "bias" in name or "shared" in name else 0.2)
    if has_head:
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight) / 2)
