"""Tiny random CLIPs, SigLIPs and SigLIP 2s give the vectors of transformers, alone and in any batch."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pooled import Params, load_pooled, packed
from tiny import BOS_ID, EOS_ID, PAD_ID
from torch import Tensor
from torch.nn import functional as F
from towers import comparing_checkpoint, item, normalised
from transformers.models.siglip2.image_processing_pil_siglip2 import (
    convert_image_to_patches,
    pad_along_first_dim,
)

from models.config import ConfigError, read_config
from models.context import MediaRows, use_context
from models.conversion.conversion_choice import resolve_conversion
from models.loader import LoadOptions, load_model
from models.media.files import PictureSettings
from models.media.registry import find_media, make_processor
from models.parallel.parallel import Parallel
from models.pooling.task_heads import PoolBatch
from models.towers.blocks import segments
from models.towers.tower import TowerInput, finish
from models.weight_slices import WeightsError

ARCHITECTURES = ["CLIPModel", "SiglipModel", "Siglip2Model"]
Prompt = Sequence[int] | TowerInput

_draw = random.Random(4)
TEXTS = [[BOS_ID, *_draw.choices(range(10, 300), k=length), EOS_ID] for length in (5, 1, 22, 9)]
PICTURES = [item(56, 56, seed) for seed in range(3)]
SHAPED = [item(56, 70), item(70, 70), item(98, 28)]


def mixed(architecture: str) -> list[Prompt]:
    """Texts and pictures in turns; those of SigLIP 2 have several shapes."""
    pictures = SHAPED if architecture == "Siglip2Model" else PICTURES
    return [TEXTS[0], pictures[0], pictures[1], TEXTS[1], TEXTS[2], pictures[2], TEXTS[3]]


def settings_of(folder: Path) -> PictureSettings:
    files = find_media(folder)
    assert files is not None
    return make_processor(files).settings


def vectors(model: Any, prompts: Sequence[Prompt], **asked: Any) -> list[Tensor]:
    """The vectors of texts and pictures, all of one step, as a worker computes them."""
    tokens = [[0] if isinstance(prompt, TowerInput) else list(prompt) for prompt in prompts]
    step = segments([len(ids) for ids in tokens], torch.device("cpu"))
    pictures = [prompt for prompt in prompts if isinstance(prompt, TowerInput)]
    starts = step.query_starts.tolist()
    places = [starts[row] for row, prompt in enumerate(prompts) if isinstance(prompt, TowerInput)]
    with torch.inference_mode(), use_context(step):
        if pictures:
            step.media = MediaRows(torch.tensor(places), torch.cat(finish(model.base.encode(pictures))))
        hidden = model(torch.tensor([token for ids in tokens for token in ids]), step.positions)
        params = [Params(**asked)] * len(prompts)
        rows = [part[-1:] for part in hidden.split(step.query_lens_host)]
        return model.pooler(PoolBatch(torch.cat(rows), packed(rows, params), params))


def as_patches(pixels: Tensor) -> dict[str, Tensor]:
    """What SigLIP 2 takes for a picture, with patches that are padding."""
    patches, _ = pad_along_first_dim(convert_image_to_patches(pixels[0].numpy(), 14), 30)
    rows, columns = pixels.shape[2] // 14, pixels.shape[3] // 14
    return {
        "pixel_values": torch.from_numpy(patches)[None],
        "pixel_attention_mask": (torch.arange(30) < rows * columns).int()[None],
        "spatial_shapes": torch.tensor([[rows, columns]]),
    }


@torch.inference_mode()
def expected(folder: Path, prompt: Prompt) -> Tensor:
    """The normalised features of transformers' class."""
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, name).from_pretrained(folder).eval()
    if isinstance(prompt, TowerInput):
        pixels = normalised(prompt, settings_of(folder))
        shaped = as_patches(pixels) if name == "Siglip2Model" else {"pixel_values": pixels}
        output = model.get_image_features(**shaped)
    else:
        length = model.config.text_config.max_position_embeddings
        padding = [PAD_ID] * (length - len(prompt)) if name.startswith("Siglip") else []
        output = model.get_text_features(torch.tensor([[*prompt, *padding]]))
    return F.normalize(output.pooler_output[0], dim=0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_vectors_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    folder = comparing_checkpoint(architecture, tmp_path)
    (model,) = load_pooled(folder)
    prompts = mixed(architecture)
    wanted = [expected(folder, prompt) for prompt in prompts]
    for got, exact in zip(vectors(model, prompts), wanted, strict=True):
        torch.testing.assert_close(got, exact, atol=1e-4, rtol=0)
        assert float(F.cosine_similarity(got, exact, dim=0)) > 0.99999
    between = torch.stack(wanted) @ torch.stack(wanted).t()
    assert between.fill_diagonal_(0).max() < 0.995  # they differ enough to be worth comparing


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [*zip(ARCHITECTURES, (torch.bfloat16, torch.float32, torch.bfloat16), strict=True)],
)
def test_the_same_bits_alone_and_in_any_batch(architecture: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = comparing_checkpoint(architecture, tmp_path)
    (model,) = load_pooled(folder, dtype=dtype)
    prompts = mixed(architecture)
    for prompt, got in zip(prompts, vectors(model, prompts), strict=True):
        assert torch.equal(vectors(model, [prompt])[0], got)
        near = 0.99999 if dtype == torch.float32 else 0.99
        assert float(F.cosine_similarity(got, expected(folder, prompt), dim=0)) > near


@pytest.mark.parametrize("end", [2, EOS_ID])
def test_a_text_of_clip_answers_at_its_first_end(end: int, tmp_path: Path) -> None:
    """Old files name the end 2, which means the highest token. Without an end, its last token answers."""
    folder = comparing_checkpoint("CLIPModel", tmp_path, eos_token_id=end)
    (model,) = load_pooled(folder)
    texts = [[5, 300, 7, 310, EOS_ID, 310], [5, EOS_ID, 7, 8, EOS_ID]]
    for text, got in zip(texts, vectors(model, texts), strict=True):
        torch.testing.assert_close(got, expected(folder, text), atol=1e-4, rtol=0)
    ends_at_9 = comparing_checkpoint("CLIPModel", tmp_path / "other", eos_token_id=9)
    torch.testing.assert_close(
        vectors(model, [[5, 6, 9]])[0], expected(ends_at_9, [5, 6, 9]), atol=1e-4, rtol=0
    )


def test_siglip_pads_with_the_token_of_its_tokenizer(tmp_path: Path) -> None:
    folder = comparing_checkpoint("SiglipModel", tmp_path, pad_token_id=77)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["added_tokens_decoder"] = {str(PAD_ID): {"content": settings["pad_token"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (model,) = load_pooled(folder)
    torch.testing.assert_close(vectors(model, [TEXTS[0]])[0], expected(folder, TEXTS[0]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_ranks_hold_all_and_later_stages_hand_on(architecture: str, tmp_path: Path) -> None:
    folder = comparing_checkpoint(architecture, tmp_path)
    config = read_config(folder)
    options = LoadOptions(config, folder, dtype=torch.float32, conversion=resolve_conversion(config, folder))
    first, last = (
        load_model(replace(options, parallel=Parallel(stage=stage, stages=2))) for stage in range(2)
    )
    (whole,) = load_pooled(folder)
    one, other = load_pooled(folder, 2)
    prompts = mixed(architecture)
    wanted = torch.stack(vectors(whole, prompts))
    assert torch.equal(torch.stack(vectors(other, prompts)), wanted)
    assert torch.equal(torch.stack(vectors(one, prompts)), wanted)
    stream = torch.randn(3, config.output_size)
    assert first.stream_size == config.output_size == stream.shape[1]
    assert torch.equal(last.forward(torch.zeros(3).long(), torch.arange(3), stream), stream)
    assert not list(last.parameters())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_only_vectors_of_whole_texts_are_given(architecture: str, tmp_path: Path) -> None:
    (model,) = load_pooled(comparing_checkpoint(architecture, tmp_path))
    assert model.pooler.tasks == {"embed"}
    assert not model.causal
    short = vectors(model, [TEXTS[0], PICTURES[0]], dimensions=8, use_activation=False)
    assert [len(each) for each in short] == [8, 8]


def test_published_files_leave_fields_out(tmp_path: Path) -> None:
    for name, sizes in {"CLIPModel": (49_408, 512, 77, 512), "SiglipModel": (32_000, 768, 64, 768)}.items():
        whole = {"architectures": [name], "text_config": {}, "vision_config": {}}
        (tmp_path / "config.json").write_text(json.dumps(whole))
        config = read_config(tmp_path)
        config.require()
        assert (config.vocab_size, config.hidden_size, config.max_len, config.output_size) == sizes


def test_what_cannot_be_served_is_refused(tmp_path: Path) -> None:
    folder = comparing_checkpoint("SiglipModel", tmp_path, projection_size=16)
    with pytest.raises(ConfigError, match="texts would have 16 numbers, and those of pictures 32"):
        load_pooled(folder)
    folder = comparing_checkpoint("CLIPModel", tmp_path / "clip")
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises((ConfigError, WeightsError), match=r"has no preprocessor_config\.json"):
        load_pooled(folder)
