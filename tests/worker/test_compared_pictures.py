"""A worker gives vectors of texts and pictures of tiny models in one step, and tells how they compare."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from media_files import noise
from opened import open_runner
from pictured import Prompts
from tiny import BOS_ID, EOS_ID
from torch import Tensor
from torch.nn import functional as F
from towers import comparing_checkpoint

from models.config import read_config
from models.conversion.conversion_choice import resolve_conversion
from worker.protocol import NewSeq, Pooling, SeqStep, StepInput

TEXTS = [[BOS_ID, 5, 9, 200, EOS_ID], [BOS_ID, 17, EOS_ID]]


@pytest.mark.parametrize("architecture", ["CLIPModel", "SiglipModel", "Siglip2Model"])
def test_vectors_and_facts(architecture: str, tmp_path: Path) -> None:
    folder = comparing_checkpoint(architecture, tmp_path)
    runner = open_runner(folder, conversion=resolve_conversion(read_config(folder), folder))
    prompts, pictures = Prompts(folder), [noise(80, 61), noise(56, 90)]
    model = getattr(transformers, architecture).from_pretrained(folder).eval()
    scale, bias = (getattr(model, name, torch.zeros(1)) for name in ("logit_scale", "logit_bias"))
    told = runner.facts.cosine_scores
    assert told is not None
    assert (told.scale, told.bias) == pytest.approx((scale.exp().item(), bias.item()))
    assert told.activation == ("softmax" if architecture == "CLIPModel" else "sigmoid")
    assert (runner.facts.tasks, runner.facts.causal) == (("embed",), False)
    made = [prompts.make(TEXTS[0]), *(prompts.make(picture) for picture in pictures), prompts.make(TEXTS[1])]
    new = [
        NewSeq(slot, prompt.tokens, len(prompt.tokens), Pooling(task="embed"), prompt.media)
        for slot, prompt in enumerate(made)
    ]
    seqs = [SeqStep(each.slot, 0, each.prompt_len, [], samples=False, pools=True) for each in new]
    encode = [prompts.encode(number) for number in prompts.items]
    output = runner.launch(StepInput(number=1, new=new, seqs=seqs, encode=encode)).result()
    processor = getattr(
        transformers, f"{architecture.removesuffix('Model')}ImageProcessorPil"
    ).from_pretrained(folder)
    wanted = [text_vector(model, TEXTS[0])]
    with torch.inference_mode():
        features = model.get_image_features(**processor(pictures, return_tensors="pt")).pooler_output
    wanted += [*F.normalize(features, dim=-1), text_vector(model, TEXTS[1])]
    for slot, exact in enumerate(wanted):
        got = torch.from_numpy(np.frombuffer(output.pooled[slot].data, np.float32).copy())
        torch.testing.assert_close(got, exact, atol=1e-4, rtol=0)


@torch.inference_mode()
def text_vector(model: torch.nn.Module, text: list[int]) -> Tensor:
    config = model.config.text_config
    filled = "Siglip" in type(model).__name__
    padding = [config.pad_token_id] * (config.max_position_embeddings - len(text)) if filled else []
    return F.normalize(model.get_text_features(torch.tensor([text + padding])).pooler_output[0], dim=0)
