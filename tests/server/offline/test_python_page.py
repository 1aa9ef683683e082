"""The examples of docs/python.md run, and print what their comments say."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest

import facet

PAGE = (Path(__file__).parents[3] / "docs" / "python.md").read_text("utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
PRINTED = re.compile(r"print\(.*\)  # (.+)$", re.MULTILINE)


@pytest.mark.slow
def test_the_examples_run_one_after_the_other(capsys: pytest.CaptureFixture[str]):
    names: dict[str, object] = {"__name__": "__main__"}
    compared = 0
    for block in BLOCKS:
        exec(compile(block, "docs/python.md", "exec"), names)
        printed = capsys.readouterr().out.splitlines()
        for expected in PRINTED.findall(block):
            if not expected.startswith("all "):
                assert expected in printed, block
                compared += 1
    assert compared >= 8


def test_the_page_names_what_there_is():
    for name in re.findall(r"from facet import (.+)", PAGE):
        assert all(hasattr(facet, one) for one in name.split(", "))
    tables = {
        "RequestOutput": facet.RequestOutput,
        "CompletionOutput": facet.CompletionOutput,
        "PoolingRequestOutput": facet.PoolingRequestOutput,
    }
    for name, kind in tables.items():
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |"))
        assert re.findall(r"`(\w+)`", row)[1:] == list(kind.__dataclass_fields__), name
    row = next(line for line in PAGE.splitlines() if line.startswith("| `metrics` |"))
    assert all(hasattr(facet.RequestMetrics, one) for one in re.findall(r"`(\w+)`", row)[1:])


def test_the_version_is_that_of_the_package():
    assert facet.__version__ == version("facet-serve")
