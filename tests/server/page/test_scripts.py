"""The parts of the page's scripts that need no page, run by node."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest

from server.page.files import FOLDER

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="no node here")


def evaluate(module: str, names: str, expression: str) -> Any:
    program = (
        f"import {{ {names} }} from {json.dumps((FOLDER / module).as_uri())};"
        f"console.log(JSON.stringify({expression}));"
    )
    command = [str(NODE), "--no-warnings", "--input-type=module", "-e", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_cosines() -> None:
    found = evaluate("math.js", "cosine", "[cosine([1,0],[2,0]), cosine([1,0],[0,1]), cosine([0,0],[1,1])]")
    assert found == [1, 0, 0]


def test_a_map_keeps_distances_of_points_in_a_plane() -> None:
    points = [[0, 0, 0], [3, 0, 0], [0, 4, 0], [3, 4, 0]]
    found = evaluate("math.js", "pca", f"pca({points})")
    for i, a in enumerate(points):
        for j, b in enumerate(points):
            real = sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) ** 0.5
            shown = sum((x - y) ** 2 for x, y in zip(found[i], found[j], strict=True)) ** 0.5
            assert shown == pytest.approx(real, abs=1e-6)


def test_a_map_of_equal_texts_is_one_point() -> None:
    assert evaluate("math.js", "pca", "pca([[1,2],[1,2],[1,2]])") == [[0, 0]] * 3


def test_quantiles_are_those_of_what_came_between_two_looks() -> None:
    before, now = "{bounds: [1, 2, 4], counts: [5, 0, 0, 0]}", "{bounds: [1, 2, 4], counts: [5, 4, 0, 0]}"
    found = evaluate(
        "math.js",
        "quantile",
        f"[quantile({before}, {now}, 0.5), quantile(null, {now}, 0.5), quantile({now}, {now}, 0.5), "
        "quantile(null, null, 0.5), quantile(null, {bounds: [1], counts: [0, 2]}, 0.5)]",
    )
    assert found == [1.5, 0.9, None, None, 1]


def test_code_is_code_whatever_is_in_the_message() -> None:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": 'it\'s "$HOME"\n'}],
        "top_k": 3,
        "stop": None,
    }
    call = f"LANGUAGES.Python('http://h', {json.dumps(body)})"
    program = evaluate("code.js", "LANGUAGES", call)
    compile(program, "shown", "exec")
    assert 'extra_body={"top_k": 3}' in program
    curl = evaluate("code.js", "LANGUAGES", f"LANGUAGES.curl('http://h', {json.dumps(body)})")
    shell = subprocess.run(
        ["sh", "-c", curl.replace("curl ", "printf '%s\\n' ", 1)], capture_output=True, text=True, timeout=60
    )
    sent = shell.stdout.split("\n-d\n", 1)[1]
    assert json.loads(sent) == body
