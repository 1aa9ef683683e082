"""CLIP and SigLIP at a real server: vectors of texts and pictures, and classes by texts, as transformers'."""

import base64
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from live import serving
from media_files import noise, saved
from tiny import EOS
from towers import comparing_checkpoint

PICTURES = [noise(80, 60), noise(300, 100)]
TEXTS = [f"a b c{EOS}", f"hello there{EOS}"]


def url(picture: Any) -> str:
    return "data:image/png;base64," + base64.b64encode(saved(picture)).decode()


def part(picture: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(picture)}}


def inputs(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    """What transformers' model gets for the texts and pictures."""
    processors = import_module(f"transformers.models.{kind.lower()}.image_processing_pil_{kind.lower()}")
    processor = getattr(processors, f"{kind}ImageProcessorPil").from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    padded = {"padding": "max_length", "max_length": 24} if kind == "Siglip" else {"padding": True}
    texts = tokenizer(TEXTS, return_tensors="pt", **padded)
    mask = {} if kind == "Siglip" else {"attention_mask": texts["attention_mask"]}
    pixels = processor(PICTURES, return_tensors="pt")["pixel_values"]
    return {"input_ids": texts["input_ids"], "pixel_values": pixels, **mask}


@pytest.mark.turns(6)
@pytest.mark.parametrize("architecture", ["CLIPModel", "SiglipModel"])
def test_texts_and_pictures_are_compared_as_by_transformers(architecture: str, tmp_path: Path) -> None:
    kind = architecture.removesuffix("Model")
    folder = comparing_checkpoint(architecture, tmp_path)
    model = getattr(transformers, architecture).from_pretrained(folder).eval()
    with torch.inference_mode():
        right = model(**inputs(folder, kind))
    scores = right.logits_per_image
    probs = scores.sigmoid() if kind == "Siglip" else scores.softmax(-1)
    with serving(str(folder), "--dtype", "float32") as server:

        def ask(path: str, **body: Any) -> Any:
            response = server.post(path, body)
            assert response.status_code == 200, response.text
            return response.json()

        def vectors(**body: Any) -> Any:
            return np.array([one["embedding"] for one in ask("/v1/embeddings", **body)["data"]])

        pictures = vectors(input=[url(one) for one in PICTURES], modality="image")
        np.testing.assert_allclose(pictures, right.image_embeds.numpy(), atol=1e-4)
        np.testing.assert_allclose(vectors(input=TEXTS), right.text_embeds.numpy(), atol=1e-4)
        talk = [[{"role": "user", "content": [part(one)]}] for one in PICTURES]
        together = vectors(messages=[*talk, [{"role": "user", "content": TEXTS[1]}]])
        np.testing.assert_array_equal(together[:2], pictures)
        found = ask("/classify", messages=talk, labels=TEXTS)["data"]
        np.testing.assert_allclose([one["probs"] for one in found], probs.numpy(), atol=1e-4)
        assert [one["label"] for one in found] == [TEXTS[int(row.argmax())] for row in probs]
        ranked = ask("/rerank", query=TEXTS[0], documents=[{"content": [part(one)]} for one in PICTURES])
        cosines = (pictures @ vectors(input=TEXTS)[0]).tolist()
        assert [one["index"] for one in ranked["results"]] == np.argsort(cosines)[::-1].tolist()
        refused = server.post("/classify", {"messages": talk})
        assert refused.status_code == 400 and "give `labels`" in refused.text
