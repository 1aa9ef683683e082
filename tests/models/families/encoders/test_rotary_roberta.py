"""RoBERTa with rotary positions as jina-embeddings-v3 was published: stacked factors beside each matrix."""

from pathlib import Path

import torch
import transformers
from adapted import enter
from drive import load_ranks
from encoded import TEXTS, assert_near, hf_hidden, run
from peft_adapters import make_adapter
from published_tasks import TASKS, merge, publish
from tiny import tiny_checkpoint

from models.lora.task_folder import has_tasks, make_folder, task_adapters


def test_a_published_checkpoint_is_read_without_its_adapters(tmp_path: Path) -> None:
    saved = tiny_checkpoint("JinaEmbeddingsV3Model", tmp_path / "saved")
    published = publish(saved, tmp_path / "published")
    expected = [hf_hidden(saved, text) for text in TEXTS]
    for ranks in (1, 2):
        assert_near(run(load_ranks(published, ranks), TEXTS), expected)


def test_adapters_of_peft_find_their_layers_in_both_layouts(tmp_path: Path) -> None:
    saved = tiny_checkpoint("JinaEmbeddingsV3Model", tmp_path / "saved")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2", "word_embeddings"]
    model = transformers.AutoModel.from_pretrained(saved, dtype=torch.float32)
    made = make_adapter(saved, tmp_path / "adapter", model=model, task_type=None, target_modules=targets)
    with torch.inference_mode():
        expected = [made.model(torch.tensor([list(text)])).last_hidden_state[0] for text in TEXTS]
    expected[1] = hf_hidden(saved, TEXTS[1])
    for folder in (saved, publish(saved, tmp_path / "published")):
        ranks = load_ranks(folder)
        enter(ranks, folder, {3: made.folder})
        found = run(ranks, TEXTS, adapters=[0 if index == 1 else 3 for index in range(len(TEXTS))])
        for rows, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(rows, wanted, atol=1e-4, rtol=0)


def test_the_tasks_of_a_published_checkpoint_are_the_sums_of_its_matrices(tmp_path: Path) -> None:
    saved = tiny_checkpoint("JinaEmbeddingsV3Model", tmp_path / "saved")
    published = publish(saved, tmp_path / "published")
    assert has_tasks(published) and not has_tasks(saved)
    (tmp_path / "cache").mkdir()
    folder = make_folder(published, tmp_path / "cache")
    found = task_adapters(folder)
    assert tuple(found) == TASKS
    ranks = load_ranks(folder)
    enter(ranks, folder, dict(enumerate(found.values(), 1)))
    together = run(ranks, TEXTS, adapters=[0, 1, 2, 3, 4, 5])
    sums = [saved, *(merge(published, saved, tmp_path / task, task) for task in TASKS)]
    for text, rows, folder in zip(TEXTS, together, sums, strict=True):
        expected = hf_hidden(folder, text)
        torch.testing.assert_close(rows, expected, atol=1e-4, rtol=0)
        assert float((expected - hf_hidden(saved, text)).abs().max()) > 0.1 or folder == saved
