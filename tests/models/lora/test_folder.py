"""The folder in which an adapter and its base look like one checkpoint."""

import json
from pathlib import Path

import pytest
from adapter_files import write_adapter

from engine_core.config import EngineConfig
from engine_core.resolve_checkpoint import find_checkpoint
from models.config import ConfigError
from models.lora_config import merged_adapter


def test_an_adapter_stands_for_its_base_with_the_sum_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (base / "chat_template.jinja").write_text("of the base")
    adapter = write_adapter(
        tmp_path / "a",
        {"score.weight": (3, 8)},
        {"base_model_name_or_path": str(base), "task_type": "SEQ_CLS"},
    )
    (adapter / "chat_template.jinja").write_text("of the adapter")
    found = find_checkpoint(EngineConfig(model=str(adapter)), lambda done: None)
    config = json.loads((found / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert config["id2label"] == {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}
    assert (found / "chat_template.jinja").read_text() == "of the adapter"
    assert merged_adapter(found) is not None
    write_adapter(tmp_path / "b", None, {"base_model_name_or_path": str(adapter)})
    with pytest.raises(ConfigError, match="is an adapter of an adapter"):
        find_checkpoint(EngineConfig(model=str(tmp_path / "b")), lambda done: None)
