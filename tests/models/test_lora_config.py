"""What adapters say of themselves is read, and what would compute something else is refused by name."""

from math import sqrt
from pathlib import Path

import pytest
from adapter_files import Q_PROJ, write_adapter

from models.lora_config import AdapterError, adapter_digest, check_rank, read_adapter


def test_an_adapter_says_its_ranks_scales_and_head(tmp_path: Path) -> None:
    shapes = {
        f"{Q_PROJ}.lora_A.weight": (2, 8),
        f"{Q_PROJ}.lora_B.weight": (8, 2),
        "score.weight": (3, 8),
    }
    fields = {
        "modules_to_save": ["score"],
        "rank_pattern": {"q_proj": 2},
        "alpha_pattern": {r"layers\.0\.self_attn\.q_proj": 6},
    }
    config = read_adapter(write_adapter(tmp_path / "a", shapes, fields))
    assert (config.base, config.most_rank, config.head, config.labels) == ("base", 2, "score", 3)
    assert config.scale(Q_PROJ, 2) == 3
    assert config.scale("model.layers.1.self_attn.q_proj", 4) == 2
    root = read_adapter(write_adapter(tmp_path / "b", None, {"use_rslora": True}))
    assert root.scale(Q_PROJ, 4) == 8 / sqrt(4)
    with pytest.raises(
        AdapterError, match=r"LoRA rank 4 is greater than max_lora_rank 2: .*--max-lora-rank 4"
    ):
        check_rank("x", root, 2)


def test_a_digest_follows_config_and_tensors_alone(tmp_path: Path) -> None:
    first, same = write_adapter(tmp_path / "a"), write_adapter(tmp_path / "b")
    others = [write_adapter(tmp_path / "c", seed=1), write_adapter(tmp_path / "d", None, {"lora_alpha": 9})]
    assert adapter_digest(first) == adapter_digest(same)
    assert len({adapter_digest(each) for each in (first, *others)}) == 3


REFUSED = [
    ({"peft_type": "LOHA"}, {}, "peft_type is 'LOHA'"),
    ({"init_lora_weights": "pissa_niter_4"}, {}, "path_initial_model_for_weight_conversion"),
    ({"layer_replication": [[0, 2]]}, {}, "layer_replication is set, so this repeats layers"),
    ({"target_parameters": ["experts"]}, {}, "target_parameters is set"),
    ({"trainable_token_indices": [1]}, {}, "trainable_token_indices is set"),
    ({"use_qalora": True}, {}, "use_qalora is set"),
    ({"use_bdlora": {"nblocks": 2}}, {}, "use_bdlora is set"),
    ({"use_dorra": True}, {}, "'use_dorra' is not known here; near it are use_dora"),
    ({"r": 0}, {}, r"Expected `int` >= 1 - at `\$.r`"),
    ({"alpha_pattern": {"(a+)+": 1.0}}, {}, "repeats too much"),
    ({}, {"model.embed_tokens.weight": (9, 8)}, "is a full embed_tokens of its own"),
    ({}, {"lm_head.weight": (9, 8)}, "is a full lm_head of its own"),
    ({}, {"model.norm.weight": (8,)}, "is not a tensor of LoRA"),
    ({}, {f"{Q_PROJ}.bias": (8,)}, "is not a tensor of LoRA"),
    ({}, {f"{Q_PROJ}.lora_magnitude_vector": (8,)}, "has no use_dora"),
    ({"modules_to_save": ["score"]}, {"score.bias": (8,)}, "without a matrix"),
]


@pytest.mark.parametrize(("fields", "shapes", "said"), REFUSED)
def test_what_would_compute_something_else_is_refused(
    tmp_path: Path, fields: dict[str, object], shapes: dict[str, tuple[int, ...]], said: str
) -> None:
    with pytest.raises(AdapterError, match=said):
        read_adapter(write_adapter(tmp_path, shapes, fields))


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    tensors = folder / "adapter_model.safetensors"
    whole = tensors.read_bytes()
    tensors.write_bytes(b"\xff" * 7 + whole[:20])
    with pytest.raises(AdapterError, match="no readable safetensors header"):
        read_adapter(folder)
    tensors.rename(folder / "adapter_model.bin")
    with pytest.raises(AdapterError, match="a pickle, which is not read"):
        read_adapter(folder)
    (folder / "adapter_model.bin").unlink()
    with pytest.raises(AdapterError, match="doesn't contain tensors"):
        read_adapter(folder)
    with pytest.raises(AdapterError, match=r"has no adapter_config\.json"):
        read_adapter(tmp_path)
