"""Classes that a program registers, here and in the processes that it starts."""

import subprocess
import sys
from collections import Counter, OrderedDict
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from models import plugins
from models.checkpoint.files import open_source, weight_files
from models.fingerprint import digest_weights
from models.plugins import Registrations, load, register_model, registered, use_registrations
from models.weight_slices import WeightsError
from server.options.option_parsing import OptionError
from server.options.parse_server_options import parse

MODULE = "class Thing:\n    def logits(self):\n        return None\n"


@pytest.fixture(autouse=True)
def _nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_classes", {})


def test_a_class_or_its_name_by_place_or_by_keyword() -> None:
    register_model("A", "collections:Counter")
    register_model("B", OrderedDict)
    register_model(model_arch="C", model_cls="collections:deque")
    register_model(model_arch="D", model_cls=Counter)
    assert [load(name, one).__name__ for name, one in registered().items()] == [
        "Counter",
        "OrderedDict",
        "deque",
        "Counter",
    ]


@pytest.mark.parametrize("path", ["collections", "collections:", ":deque"])
def test_a_path_that_names_no_class(path: str) -> None:
    with pytest.raises(ValueError, match="'module:Class'"):
        register_model("A", path)


def test_something_that_is_neither_a_class_nor_a_name() -> None:
    with pytest.raises(TypeError, match="a class or 'module:Class', not 3"):
        register_model("A", 3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="not a class"):
        load("A", "os:getcwd")


def test_nothing_is_sent_if_nothing_is_registered() -> None:
    assert plugins.registrations() == Registrations()


def test_another_process_imports_the_class_from_where_this_one_found_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "module_of_a_script.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    register_model("ThingModel", load("ThingModel", "module_of_a_script:Thing"))
    sent = msgspec.json.encode(plugins.registrations()).decode()
    code = (
        "import sys, msgspec\n"
        "from models.plugins import Registrations, load, registered, use_registrations\n"
        "use_registrations(msgspec.json.decode(sys.argv[1], type=Registrations))\n"
        "print(load('ThingModel', registered()['ThingModel']).__name__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, sent], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "Thing\n", done.stderr


def test_a_class_that_no_other_process_can_import() -> None:
    class Local: ...

    Main = type("Main", (), {"__module__": "__main__"})
    register_model("LocalModel", Local)
    register_model("MainModel", Main)
    assert load("LocalModel", registered()["LocalModel"]) is Local, "here it can be used"
    use_registrations(plugins.registrations())
    for name in ("LocalModel", "MainModel"):
        with pytest.raises(ValueError, match=f"{name} is .* other processes cannot import: define it at"):
            load(name, registered()[name])


def test_a_module_that_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match="class no_such_module:A, which cannot be imported: No module"):
        load("A", "no_such_module:A")


LOADER = """
from safetensors.torch import load_file

class Backwards:
    def __init__(self, load_config):
        assert load_config.load_format == "backwards"

    def load_weights(self, model, model_config):
        tensors = load_file(model_config.model + "/turned")
        model.load_weights((name[::-1], tensor) for name, tensor in tensors.items())
"""


def test_a_loader_reads_a_checkpoint_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"a.thgiew": torch.arange(6.0).view(2, 3)}, tmp_path / "turned")
    (tmp_path / "module_of_a_loader.py").write_text(LOADER)
    monkeypatch.syspath_prepend(tmp_path)
    plugins.register_model_loader("backwards")(load("Backwards", "module_of_a_loader:Backwards"))
    assert "--load-format backwards" not in registered()
    assert plugins.registrations().classes == {"--load-format backwards": "module_of_a_loader:Backwards"}
    stored = open_source(tmp_path, "backwards").tensors["weight.a"]
    assert (stored.shape, stored.dtype) == ((2, 3), "float32")
    assert {path.name for path in weight_files(tmp_path, "backwards")} >= {"turned"}
    assert len(digest_weights(tmp_path, "backwards", 0)) == 64
    assert parse(["m", "--load-format", "backwards"], {}).engine.worker.load_format == "backwards"
    (tmp_path / "turned").unlink()
    with pytest.raises(WeightsError, match=r"--load-format backwards: its loader failed for .*turned"):
        open_source(tmp_path, "backwards")
    with pytest.raises(OptionError, match="'forwards' is not one of auto, safetensors"):
        parse(["m", "--load-format", "forwards"], {})


def test_installed_plug_ins_are_called_if_the_operator_names_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "module_of_a_plugin.py").write_text(
        "from models.plugins import register_model\n"
        "def add(): register_model('Added', 'somewhere:Else')\n"
        "def fail(): raise RuntimeError('no')\n"
    )
    info = tmp_path / "plugged-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nadd = module_of_a_plugin:add\nfail = module_of_a_plugin:fail\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    parse(["m"], {})
    assert "Added" not in registered()
    assert parse(["m"], {"VLLM_PLUGINS": "add, fail,gone"}).engine.model == "m"
    assert registered()["Added"] == "somewhere:Else"
    assert "fail cannot be used: RuntimeError: no" in caplog.text
    assert "no installed distribution has a plug-in named gone" in caplog.text
