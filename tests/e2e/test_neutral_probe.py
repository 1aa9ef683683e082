"""The probe of the suite canitoolcall passes against a server of tiny models, a family's template each.

A logits processor has each model write what its template writes for the answer that a scenario asks for, so
that these tokens pass its sampling, with the grammars that hold calls, and all that reads its output.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import canitoolcall.probe as suite
import pytest
from family_templates import TEMPLATES
from live import LiveServer, serving
from probed_families import REQUIRED, check_report, written_for
from tiny import tiny_checkpoint
from tokenizers import AddedToken, Tokenizer

pytestmark = pytest.mark.turns(8)

SUPPORT = Path(__file__).parents[1] / "support"
CONTEXT = 4096
FLAGS = (
    *("--logits-processors", "operator_plugins:Scripted"),
    *("--tool-strict-level", "parameter"),
    *("--kv-cache-memory-bytes", "16M", "--dtype", "float32"),
)


def write_model(family: str, plain: Path, folder: Path) -> Path:
    """A checkpoint with the weights of `plain`, and the template and the markers of a family."""
    template = TEMPLATES[family]
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).symlink_to(plain / name)
    tokenizer = Tokenizer.from_file(str(plain / "tokenizer.json"))
    markers = [marker for marker in template.family.markers if marker not in template.no_tokens]
    tokenizer.add_special_tokens([AddedToken(marker, normalized=False) for marker in markers])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((plain / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template.source}))
    generation = {"eos_token_id": [tokenizer.token_to_id(stop) for stop in stops_of(family)]}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def stops_of(family: str) -> list[str]:
    """The tokens that end a turn: of gpt-oss not the one behind a call, or it would write one call only."""
    template = TEMPLATES[family]
    reference = template.family.reference_for(template.model)
    stops = reference.stop_tokens if reference else ()
    return [stop for stop in stops if stop in template.family.markers and stop != "<|call|>"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    sizes = {"vocab_size": 352, "max_position_embeddings": CONTEXT}
    plain = tiny_checkpoint("LlamaForCausalLM", folder / "plain", **sizes)
    return {family: write_model(family, plain, folder / family) for family in TEMPLATES}


@pytest.fixture(scope="module")
def server(models: dict[str, Path]) -> Iterator[LiveServer]:
    with serving(*map(str, models.values()), *FLAGS, env={"PYTHONPATH": str(SUPPORT)}) as server:
        yield server


@pytest.mark.parametrize("family", TEMPLATES)
def test_the_probe_passes(family: str, server: LiveServer, models: dict[str, Path]) -> None:
    tokenizer = Tokenizer.from_file(str(models[family] / "tokenizer.json"))
    encode = partial(tokenizer.encode, add_special_tokens=False)

    def scripted(scenario: suite.Scenario) -> suite.Scenario:
        text = written_for(scenario, family) + stops_of(family)[-1]
        arguments = {"script": encode(text).ids}
        return replace(scenario, extra_body={**scenario.extra_body, "vllm_xargs": arguments})

    scenarios = [*map(scripted, (*suite.BUILTIN_SCENARIOS, REQUIRED))]
    report = suite.probe(f"{server.url}/v1", family, scenarios=scenarios)
    check_report(report, family)
