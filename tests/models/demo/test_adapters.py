"""The program that trains adapters of the demo model makes such as are served."""

from pathlib import Path

import pytest
from demo_training.tokenizer import Codec
from demo_training.train_adapters import KINDS, Training
from tokenizers import Tokenizer

from models.checkpoint.hub import DEMO
from models.lora_config import label_names, read_adapter


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["whisper", "kinds", "alike"])
def test_a_step_of_training_makes_an_adapter(name: str, tmp_path: Path) -> None:
    training = Training(name, Codec(Tokenizer.from_file(str(DEMO / "tokenizer.json"))), seed=1)
    training.run(1e-9, 1e-3)
    training.save(tmp_path, list(KINDS) if name == "kinds" else [])
    made = read_adapter(tmp_path)
    assert (made.base, made.dora, made.head) == (
        "demo",
        name == "whisper",
        "score" if name == "kinds" else "",
    )
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 300_000
    if made.head:
        assert label_names(tmp_path, made.labels) == label_names(DEMO / "adapters" / "kinds", made.labels)


def test_their_base_is_the_model_and_their_tensors_are_small() -> None:
    for name in ("shout", "kinds"):
        assert read_adapter(DEMO / "adapters" / name).base == "demo"
