"""Writes what `facet prove` compares with: transformers' answers to a few prompts, by published checkpoints.

Run it with the folder to write to, models/proofs, and short names of models whose packages are installed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from published import transformers_whisper
from torch import Tensor, nn

from models.checkpoint.hub import resolve
from models.media.whisper import RATE
from server.terminal.proving.sounds import sound

TEXTS: dict[str, list[str]] = {
    "generate": [
        "The capital of France is",
        "What is 3 plus 4?",
        "Once upon a time there was",
        "Größe, naïve 東京 1, 2, 3,",
    ],
    "embed": [
        "The capital of France is Paris.",
        "a short text",
        "Größe, naïve 東京 😀 def f(x): return x + 1",
    ],
}
PITCHES, HEARD = (90, 140, 220), {"whisper-tiny.en": [50257, 50362]}
"""The pitches of sounds, and the tokens with which a transcript of a model begins."""
LENGTH, SHOWN = 12, 8
TOLERANCES = {"demo": 2e-3, "minilm": 2e-3, "smollm2": 4e-2, "whisper-tiny.en": 2e-3}
"""How far a hidden state may be, in parts of its size: inputs of 4-bit matrices are rounded to 16 bits."""


def proof_of(name: str) -> dict[str, Any]:
    """What is stored of a model that reads texts."""
    place = resolve(name, None, None, lambda _: None)
    folder, named = (place.parent, {"gguf_file": place.name}) if place.is_file() else (place, {})
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, **named)
    kind = "embed" if name == "minilm" else "generate"
    auto: Any = transformers.AutoModel if kind == "embed" else transformers.AutoModelForCausalLM
    model: Any = auto.from_pretrained(folder, dtype=torch.float32, **named).eval()
    layers: nn.ModuleList = model.encoder.layer if kind == "embed" else model.model.layers
    noted = noting(layers)
    prompts: list[dict[str, Any]] = []
    for text in TEXTS[kind]:
        ids = tokenizer(text)["input_ids"]
        noted.clear()
        with torch.inference_mode():
            out = model(torch.tensor([ids]))
            shown = [rounded(each) for each in noted]
            if kind == "embed":
                vector = nn.functional.normalize(out.last_hidden_state[0].mean(0), dim=0)
                found: dict[str, Any] = {"vector": vector[:SHOWN].tolist()}
            else:
                found = greedy(ids, partial(logits_of, model))
        prompts.append({"text": text, "ids": ids, "layers": shown, **found})
    return stored(name, prompts)


def heard_proof_of(name: str) -> dict[str, Any]:
    """What is stored of a Whisper in the format of CTranslate2."""
    with tempfile.TemporaryDirectory() as cache:
        model, extractor, _ = transformers_whisper(resolve(name, None, None, lambda _: None), Path(cache))
    noted = noting([*model.model.encoder.layers, *model.model.decoder.layers])
    prompts: list[dict[str, Any]] = []
    for pitch in PITCHES:
        heard = extractor(sound(pitch), sampling_rate=RATE, return_tensors="pt").input_features
        noted.clear()
        with torch.inference_mode():
            model(heard, decoder_input_ids=torch.tensor([HEARD[name]]))
            shown = [rounded(each) for each in noted]
            found = greedy(HEARD[name], partial(logits_of, model, heard))
        prompts.append({"text": "", "pitch": pitch, "ids": HEARD[name], "layers": shown, **found})
    return stored(name, prompts)


def noting(layers: Iterable[nn.Module]) -> list[Tensor]:
    """Return the list to which each of these layers adds the last hidden state that it makes."""
    noted: list[Tensor] = []

    def note(_layer: nn.Module, _given: object, out: Any) -> None:
        noted.append((out[0] if isinstance(out, tuple) else out)[0, -1])

    for layer in layers:
        layer.register_forward_hook(note)
    return noted


def logits_of(model: Any, *given: Any) -> Tensor:
    """The logits of tokens, or of features and the tokens of a transcript."""
    *heard, tokens = given
    ids = torch.tensor([tokens])
    return (model(*heard, decoder_input_ids=ids) if heard else model(ids)).logits


def greedy(ids: list[int], logits: Callable[[list[int]], Tensor]) -> dict[str, Any]:
    """The likeliest tokens behind others, with their log-probabilities."""
    tokens, logprobs = list(ids), list[float]()
    for _ in range(LENGTH):
        row = logits(tokens)[0, -1].log_softmax(-1)
        tokens.append(int(row.argmax()))
        logprobs.append(float(row.max()))
    return {"tokens": tokens[len(ids) :], "logprobs": logprobs}


def stored(name: str, prompts: list[dict[str, Any]]) -> dict[str, Any]:
    versions = f"transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}"
    return {"made_with": f"{versions}, float32", "tolerance": TOLERANCES[name], "prompts": prompts}


def rounded(hidden: Tensor) -> list[float]:
    """The size of a hidden state, as the root of its mean square, and its first numbers."""
    return [float(f"{each:.6g}") for each in (float(hidden.square().mean().sqrt()), *hidden[:SHOWN].tolist())]


if __name__ == "__main__":
    for model_name in sys.argv[2:]:
        (Path(sys.argv[1]) / f"{model_name}.json").write_text(
            json.dumps((heard_proof_of if model_name in HEARD else proof_of)(model_name), ensure_ascii=False)
            + "\n"
        )
