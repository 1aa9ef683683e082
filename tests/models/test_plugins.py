"""Classes that a program registers, here and in the processes that it starts."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter, OrderedDict
from pathlib import Path

import msgspec
import pytest

from models import plugins
from models.plugins import Registrations, load, register_model, registered, use_registrations

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
