import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sizes import MODEL

from models import plugins, registry
from models.composites import COMPOSITES
from models.plugins import register_model


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EntryPoint]]:
    """The entry points of other distributions: none, until a test adds some."""
    entries: list[EntryPoint] = []
    monkeypatch.setattr(registry, "entry_points", lambda group: [e for e in entries if e.group == group])
    monkeypatch.setattr(plugins, "_classes", {})
    registry._plugins.cache_clear()  # pyright: ignore[reportPrivateUsage]
    yield entries
    registry._plugins.cache_clear()  # pyright: ignore[reportPrivateUsage]


def resolve(architecture: str, *arguments: str, named: str = "", trust: bool = False, **raw: object) -> type:
    """Resolve `architecture`; `named` is the one in config.json, if that is another."""
    config = msgspec.structs.replace(
        MODEL, architecture=architecture, architectures=(named or architecture,), raw=raw
    )
    return registry.resolve(config, *arguments, trust_remote_code=trust)


def refusal(architecture: str, *arguments: str, **options: Any) -> str:
    with pytest.raises(registry.UnknownArchitecture) as caught:
        resolve(architecture, *arguments, **options)
    return str(caught.value)


TEXTS = [(name, kind) for name, composite in COMPOSITES.items() for kind in composite.texts]
PLAIN = [(name, None) for name in registry.ARCHITECTURES if name not in COMPOSITES]


def test_every_path_leads_to_a_model() -> None:
    for architecture, kind in (*PLAIN, *TEXTS):
        model = resolve(architecture, model_type=kind)
        methods = ["forward", "attention_layers"]
        if architecture.endswith(("ForCausalLM", "LMHeadModel")):
            methods.append("logits")
        assert [method for method in methods if not callable(getattr(model, method))] == [], architecture


def test_registered_models_come_first() -> None:
    register_model("LlamaForCausalLM", "collections:OrderedDict")
    register_model("BrandNewForCausalLM", "collections:Counter")
    assert resolve("LlamaForCausalLM").__name__ == "OrderedDict"
    assert resolve("BrandNewForCausalLM", "facet").__name__ == "Counter"
    assert "BrandNewForCausalLM" in registry.supported()


def test_plugins_of_our_group_are_found(installed: list[EntryPoint]) -> None:
    installed += [
        EntryPoint("PluggedForCausalLM", "collections:deque", "facet.models"),
        EntryPoint("OtherForCausalLM", "collections:deque", "other.models"),
    ]
    assert resolve("PluggedForCausalLM").__name__ == "deque"
    assert "PluggedForCausalLM" in registry.supported()
    assert "OtherForCausalLM" not in registry.supported()


class Writer:
    def logits(self) -> None: ...


class Reader: ...


def test_a_class_of_others_is_asked_whether_it_generates(installed: list[EntryPoint]) -> None:
    register_model("WriterModel", Writer)
    register_model("ReaderModel", Reader)
    installed.append(EntryPoint("CounterModel", "collections:Counter", "facet.models"))
    assert registry.generates("WriterModel") and not registry.generates("ReaderModel")
    assert not registry.generates("BertModel") and not registry.generates("UnknownModel")
    assert not registry.generates("CounterModel")


def test_an_installed_distribution_is_found_by_its_entry_point(tmp_path: Path) -> None:
    info = tmp_path / "plugged-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[facet.models]\nPluggedModel = plugged:Plugged\n")
    (tmp_path / "plugged.py").write_text("class Plugged:\n    def logits(self): ...\n")
    code = "from models import registry; print(registry.generates('PluggedModel'))"
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.stdout == "True\n", done.stderr


def test_what_only_transformers_knows_runs_on_the_fallback() -> None:
    fallback = import_module("models.families.transformers_fallback").TransformersForCausalLM
    assert resolve("Jais2ForCausalLM") is fallback
    assert resolve("LlamaForCausalLM", "transformers") is fallback


CODE = {"AutoModelForCausalLM": "modeling_home.HomeForCausalLM"}


def test_code_of_the_checkpoint_runs_on_the_fallback_if_trusted() -> None:
    fallback = import_module("models.families.transformers_fallback").TransformersForCausalLM
    assert resolve("HomeForCausalLM", trust=True, auto_map=CODE) is fallback
    assert "if you trust it, say --trust-remote-code." in refusal("HomeForCausalLM", auto_map=CODE)
    assert "if you trust it, say --trust-remote-code instead of --model-impl facet." in refusal(
        "HomeForCausalLM", "facet", auto_map=CODE
    )


def test_an_unknown_name_is_answered_with_the_next_step() -> None:
    assert refusal("DeepseekVLV2ForCausalLM", model_type="deepseek_vl_v2") == (
        "No class of our own serves the architecture 'DeepseekVLV2ForCausalLM', and transformers has no "
        "causal language model of that name. docs/models.md lists what is served."
    )


def test_the_class_of_a_family_is_named_only_for_a_model_that_it_fits() -> None:
    message = refusal("LLaMAForCausalLM", model_type="llama")
    assert """say --hf-overrides '{"architectures": ["LlamaForCausalLM"]}'.""" in message
    assert "--hf-overrides" not in refusal("Lama3ForCausalLM", model_type="lama3")
    assert "--hf-overrides" not in refusal("LlamaForPuzzles", model_type="llama")


def test_a_class_that_is_to_be_made_of_another_is_named_too() -> None:
    message = refusal("ViTForCausalLM", named="ViTForImageClassification")
    assert "'ViTForCausalLM' (of which ViTForImageClassification would be made)" in message


def test_no_other_class_is_named_for_a_model_that_would_lose_its_head() -> None:
    message = refusal("FooForCausalLM", named="FooForSequenceClassification", model_type="llama")
    assert "--hf-overrides" not in message


def test_our_own_classes_only() -> None:
    message = refusal("Jais2ForCausalLM", "facet")
    assert message.endswith("transformers has a model of that name: leave --model-impl out.")
    assert "transformers" not in refusal("FooForCausalLM", "facet")


def test_through_transformers_only() -> None:
    message = refusal("BertModel", "transformers")
    assert message.startswith("transformers has no causal language model named 'BertModel'")
    assert message.endswith("There is a class of our own for it: leave --model-impl out.")


@pytest.mark.parametrize(
    ("architecture", "model_impl", "trust", "served"),
    [
        ("LlamaForCausalLM", "facet", False, True),
        ("Jais2ForCausalLM", "facet", False, False),
        ("Jais2ForCausalLM", "auto", False, True),
        ("BertModel", "transformers", False, False),
        ("HomeForCausalLM", "auto", False, False),
        ("HomeForCausalLM", "auto", True, True),
    ],
)
def test_whether_an_architecture_is_served(
    architecture: str, model_impl: str, trust: bool, served: bool
) -> None:
    config = msgspec.structs.replace(MODEL, architecture=architecture, raw={"auto_map": CODE})
    assert registry.is_served(config, model_impl, trust) is served


def test_an_unknown_implementation() -> None:
    with pytest.raises(ValueError, match="must be one of auto, facet, transformers"):
        resolve("LlamaForCausalLM", "vllm")


def test_supported_is_in_alphabetical_order() -> None:
    names = registry.supported()
    assert names == sorted(names, key=str.lower)
    assert set(registry.ARCHITECTURES) <= set(names)


def test_resolving_loads_no_other_family() -> None:
    for module in ("models.families.decoders.bloom_falcon_mpt", "models.families.decoders.gpt"):
        sys.modules.pop(module, None)
    resolve("GPT2LMHeadModel")
    assert "models.families.decoders.bloom_falcon_mpt" not in sys.modules
