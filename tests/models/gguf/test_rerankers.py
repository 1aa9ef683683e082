"""Rerankers in GGUF files give the scores that transformers computes from the plain checkpoints they mean."""

from pathlib import Path

import pytest
import torch
import transformers
from gguf_pairs import Recipe, write_pair
from gguf_writer import Blob, write_gguf
from pooled import PROMPTS, Params, load_pooled, pool

from models.gguf.config import raw_config
from models.gguf.file import read_gguf
from models.gguf.folder import make_folder
from models.plain_files import FileError

ARCH = "RobertaForSequenceClassification"


@pytest.mark.parametrize("recipe", [Recipe("Q8_0"), Recipe("F16", fields={"bert.pooling_type": 4})], ids=str)
@pytest.mark.parametrize("ranks", [1, 2])
def test_scores(recipe: Recipe, ranks: int, tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_labels": 1}
    pair = write_pair(tmp_path, ARCH, recipe, **shape)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(pair.plain, dtype=torch.float32)
    with torch.inference_mode():
        expected = [theirs.eval()(torch.tensor([prompt])).logits[0].sigmoid() for prompt in PROMPTS]
    models = load_pooled(make_folder(pair.file, tmp_path), ranks)
    assert type(models[0]).__name__ == "BertForSequenceClassification"
    found = pool(models, PROMPTS, Params("classify"))
    for ours, score in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, score, atol=1e-5, rtol=1e-5)


def test_labels_have_their_names(tmp_path: Path) -> None:
    recipe = Recipe("F32", fields={"bert.classifier.output_labels": ["bad", "good"]})
    found = raw_config(read_gguf(write_pair(tmp_path, ARCH, recipe).file))
    assert (found["num_labels"], found["id2label"]) == (2, {"0": "bad", "1": "good"})


def test_a_classifier_without_the_layer_before_it_is_refused(tmp_path: Path) -> None:
    pair = write_pair(tmp_path, ARCH, Recipe("F32"))
    file = read_gguf(pair.file)
    blobs = [
        Blob(one.name, one.shape, 0, pair.file.read_bytes()[one.offset : one.offset + one.nbytes])
        for one in file.tensors.values()
        if not one.name.startswith("cls.weight")
    ]
    fields = {name: value for name, value in file.metadata.items() if name.startswith(("bert.", "general."))}
    with pytest.raises(FileError, match=r"the classifier is not whole .* use the model's own checkpoint"):
        raw_config(read_gguf(write_gguf(tmp_path / "cut.gguf", fields, blobs)))
