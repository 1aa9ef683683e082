"""What quantization costs in quality: a model quantized and as it is, on the same texts; tables in Markdown.

    python tests/bench/quality.py FOLDER [QUANTIZED...]
    python tests/bench/quality.py FOLDER --all

QUANTIZED are folders of the same model, quantized by any method; `--all` makes such of every method, each
number rounded to the nearest, among them GGUF files. Everything is compared with the unquantized model in
float32, and caches of 8 bits with the unquantized model in bfloat16 and its cache. Of a model that generates:
the relative error of its logits and the largest, the divergence (KL) of the next token's distribution in
nats, and how often the most probable token is the same, at every position of the texts. Of a model that
embeds: one minus the cosine of the vectors, in the mean and at worst.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from facet import LLM
from models import ops
from models.gguf.folder import make_folder
from worker.kernels.cpu.operations import open_kernels
from worker.kernels.cpu.quantization import SCHEMES

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import gguf_pairs
from drive import Driver, load_ranks
from packed import Recipe, write_near
from packed_floats import write_floats, write_mxfp4

_TEXTS = Path(__file__).with_name("known_texts.txt")
"""Questions and answers that the demo model has learned."""
_LENGTH, _COUNT = 256, 16
"""The length in tokens of the pieces whose logits are compared."""
_LINES = 64
"""The texts that are embedded."""
_HEAD = "| | logits, relative | largest | KL, nats | same token |\n|---|---:|---:|---:|---:|"

MODES: tuple[tuple[torch.dtype, str | None], ...] = (
    (torch.bfloat16, None),
    *((dtype, name) for dtype in (torch.bfloat16, torch.float32) for name in SCHEMES),
)


CACHES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
"""The types of caches of 8 bits; those of floats have no scales, as on CUDA."""

FORMS: Mapping[str, Recipe] = {
    "GPTQ, 8 bits": Recipe(method="gptq", bits=8, group=32),
    "GPTQ, 4 bits": Recipe(method="gptq", group=32),
    "GPTQ, 4 bits, groups of 64": Recipe(method="gptq", group=64),
    "AWQ": Recipe(method="awq", group=32, symmetric=False, version=2),
    "W4A16": Recipe(method="pack-quantized", group=32),
    "W8A8": Recipe(method="int-quantized", bits=8),
}
"""Checkpoints that `--all` makes, beside those of fp8 and mxfp4."""

GGUF_FILES: Mapping[str, gguf_pairs.Recipe] = {
    "Q8_0": gguf_pairs.Recipe("Q8_0"),
    "Q4_0": gguf_pairs.Recipe("Q4_0", {"token_embd": "Q6_K"}),
    "Q4_K_M": gguf_pairs.Recipe("Q4_K", {"token_embd": "Q6_K", "attn_v": "Q6_K", "ffn_down": "Q8_0"}),
}
"""GGUF files that `--all` makes. Rows of 704 numbers fill no blocks of Q6_K: llama.cpp takes Q8_0, too."""


def write_all(folder: Path, made: Path) -> dict[str, Path]:
    """Quantize a checkpoint by every method; returns the folders by a title of each."""
    found = {title: write_near(folder, made / title, recipe) for title, recipe in FORMS.items()}
    for name in ("DeepSeek's blocks", "rows"):
        place = made / name
        place.mkdir()
        found[f"fp8, {name}"] = write_floats(folder, place, name)[0]
    for name, recipe in GGUF_FILES.items():
        shutil.copytree(folder, made / name / "plain")
        file = gguf_pairs.convert(made / name, recipe).file
        found[name] = make_folder(file, made / name)
    return found | {"mxfp4": write_mxfp4(folder, made / "mxfp4")[0]}


def compare_logits(folder: Path, text: str, tokens: Tokenizer, others: Mapping[str, Path]) -> list[str]:
    pieces = _cut(tokens.encode(text).ids)
    exact = _logits(folder, torch.float32, None, pieces)
    lines = [_HEAD]
    rows = [(_title(dtype, name), folder, dtype, name, None) for dtype, name in MODES]
    rows += [
        (f"bfloat16, {title}, inputs of {bits} bits", place, torch.bfloat16, None, bits)
        for title, place in others.items()
        for bits in (16, 8)
    ]
    for title, place, dtype, name, bits in rows:
        lines.append(_row(title, _logits(place, dtype, name, pieces, bits), exact))
    return lines


def compare_caches(folder: Path, text: str, tokens: Tokenizer) -> list[str]:
    pieces = _cut(tokens.encode(text).ids)
    exact = _logits(folder, torch.bfloat16, None, pieces).float()
    found = {each: _logits(folder, torch.bfloat16, None, pieces, cached=each).float() for each in CACHES}
    return [_HEAD, *(_row(f"cache in {str(each)[6:]}", logits, exact) for each, logits in found.items())]


def _cut(ids: Sequence[int]) -> list[Sequence[int]]:
    return [ids[i * _LENGTH : (i + 1) * _LENGTH] for i in range(min(_COUNT, len(ids) // _LENGTH))]


def _row(title: str, found: Tensor, exact: Tensor) -> str:
    off = found - exact
    expected, log_probs = exact.log_softmax(-1), found.log_softmax(-1)
    divergence = (expected.exp() * (expected - log_probs)).sum(-1).mean()
    agreement = (found.argmax(-1) == exact.argmax(-1)).float().mean()
    return (
        f"| {title} | {off.norm() / exact.norm():.1e} | {off.abs().max():.2f} "
        f"| {divergence:.1e} | {agreement:.1%} |"
    )


def compare_vectors(folder: Path, texts: Sequence[str]) -> list[str]:
    exact = _vectors(folder, torch.float32, None, texts)
    lines = ["| | 1 - cosine, mean | at worst |", "|---|---:|---:|"]
    for dtype, name in MODES:
        apart = 1 - torch.cosine_similarity(_vectors(folder, dtype, name, texts), exact)
        lines.append(f"| {_title(dtype, name)} | {apart.mean():.1e} | {apart.max():.1e} |")
    return lines


def _logits(
    folder: Path,
    dtype: torch.dtype,
    name: str | None,
    pieces: Sequence[Sequence[int]],
    input_bits: int | None = None,
    cached: torch.dtype | None = None,
) -> Tensor:
    """[tokens, vocabulary]"""
    ops.use(open_kernels(1, name, input_bits))
    ranks = load_ranks(folder, dtype=dtype)
    driver = Driver(ranks, dtype=cached or dtype, sequences=len(pieces), max_len=_LENGTH, block_size=32)
    return torch.cat([driver.step({i: piece})[i] for i, piece in enumerate(pieces)])


def _vectors(folder: Path, dtype: torch.dtype, name: str | None, texts: Sequence[str]) -> Tensor:
    """[texts, width] float64: in float32 the cosine of near vectors is not exact enough."""
    llm = LLM(str(folder), dtype=str(dtype).removeprefix("torch."), quantization=name)
    outputs = llm.embed(list(texts), use_tqdm=False)
    return torch.tensor([output.outputs.embedding for output in outputs], dtype=torch.float64)


def _title(dtype: torch.dtype, name: str | None) -> str:
    return f"{str(dtype).removeprefix('torch.')}, {name or 'not quantized'}"


def main(folder: Path, others: Mapping[str, Path]) -> None:
    texts = _TEXTS.read_text()
    facts = LLM(str(folder)).facts
    if "generate" in facts.tasks:
        tokens = Tokenizer.from_file(str(folder / "tokenizer.json"))
        print(*compare_logits(folder, texts, tokens, others), "", sep="\n")
        print(*compare_caches(folder, texts, tokens), "", sep="\n")
    if "embed" in facts.tasks:
        lines = [line for line in texts.splitlines() if len(line) > 20]
        print(*compare_vectors(folder, lines[:_LINES]), sep="\n")


if __name__ == "__main__":
    first, *rest = sys.argv[1:]
    with tempfile.TemporaryDirectory() as made:
        if rest == ["--all"]:
            main(Path(first), write_all(Path(first), Path(made)))
        else:
            main(Path(first), {Path(place).name: Path(place) for place in rest})
