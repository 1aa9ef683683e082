from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import EntryPoint

import pytest

from models import registry


@pytest.fixture(autouse=True)
def plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EntryPoint]]:
    """What other distributions have installed: nothing, until a test adds to it."""
    installed: list[EntryPoint] = []
    monkeypatch.setattr(registry, "entry_points", lambda group: [e for e in installed if e.group == group])
    monkeypatch.setattr(registry, "_registered", {})
    registry._plugins.cache_clear()
    yield installed
    registry._plugins.cache_clear()


@pytest.mark.parametrize("architecture", registry.ARCHITECTURES)
def test_every_path_leads_to_a_model(architecture: str) -> None:
    model = registry.resolve(architecture)
    methods = ["forward", "attention_layers"]
    if architecture.endswith(("ForCausalLM", "LMHeadModel")):
        methods.append("logits")
    assert all(callable(getattr(model, method)) for method in methods)


def test_registered_models_come_first() -> None:
    registry.register_model("LlamaForCausalLM", "collections:OrderedDict")
    registry.register_model("BrandNewForCausalLM", "collections:Counter")
    assert registry.resolve("LlamaForCausalLM").__name__ == "OrderedDict"
    assert registry.resolve("BrandNewForCausalLM", "facet").__name__ == "Counter"
    assert "BrandNewForCausalLM" in registry.supported()


def test_plugins_of_our_group_are_found(plugins: list[EntryPoint]) -> None:
    plugins += [
        EntryPoint("PluggedForCausalLM", "collections:deque", "facet.models"),
        EntryPoint("OtherForCausalLM", "collections:deque", "other.models"),
    ]
    assert registry.resolve("PluggedForCausalLM").__name__ == "deque"
    assert "PluggedForCausalLM" in registry.supported()
    assert "OtherForCausalLM" not in registry.supported()


@pytest.mark.parametrize("path", ["collections", "collections:", ":deque"])
def test_a_path_that_names_no_class(path: str) -> None:
    with pytest.raises(ValueError, match="'module:Class'"):
        registry.register_model("BrandNewForCausalLM", path)


def test_what_only_transformers_knows_runs_on_the_fallback() -> None:
    fallback = import_module("models.families.transformers_fallback").TransformersForCausalLM
    assert registry.resolve("StableLmForCausalLM") is fallback
    assert registry.resolve("LlamaForCausalLM", "transformers") is fallback


def test_code_of_the_checkpoint_runs_on_the_fallback_if_trusted() -> None:
    fallback = import_module("models.families.transformers_fallback").TransformersForCausalLM
    assert registry.resolve("HomeMadeForCausalLM", trust_remote_code=True) is fallback
    with pytest.raises(registry.UnknownArchitecture, match="--trust-remote-code"):
        registry.resolve("HomeMadeForCausalLM")


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(registry.UnknownArchitecture) as caught:
        registry.resolve("Lama3ForCausalLM")
    assert "'Lama3ForCausalLM'" in str(caught.value)
    assert """--hf-overrides '{"architectures": ["LlamaForCausalLM"]}'""" in str(caught.value)


def test_a_name_like_no_other_is_answered_with_all() -> None:
    with pytest.raises(registry.UnknownArchitecture, match=r"Those served are .*LlamaForCausalLM"):
        registry.resolve("zzz")


def test_our_own_classes_only() -> None:
    with pytest.raises(registry.UnknownArchitecture, match="--model-impl transformers"):
        registry.resolve("StableLmForCausalLM", "facet")


def test_an_unknown_implementation() -> None:
    with pytest.raises(ValueError, match="must be one of auto, facet, transformers"):
        registry.resolve("LlamaForCausalLM", "vllm")


def test_supported_is_in_alphabetical_order() -> None:
    names = registry.supported()
    assert names == sorted(names, key=str.lower)
    assert set(registry.ARCHITECTURES) <= set(names)


def test_resolving_loads_no_other_family() -> None:
    for module in ("models.families.decoders.opt", "models.families.decoders.gpt2"):
        sys.modules.pop(module, None)
    registry.resolve("GPT2LMHeadModel")
    assert "models.families.decoders.opt" not in sys.modules
