"""The parts of the page's scripts that need no page, run by node."""

import json
import shutil
import subprocess
from typing import Any

import pytest

from server.page.routes import FOLDER, page_files

NODE = shutil.which("node")
pytestmark = [pytest.mark.skipif(NODE is None, reason="no node here"), pytest.mark.slow(2)]


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
    found = evaluate(
        "tasks/vector_math.js", "cosine", "[cosine([1,0],[2,0]), cosine([1,0],[0,1]), cosine([0,0],[1,1])]"
    )
    assert found == [1, 0, 0]


def test_a_map_keeps_distances_of_points_in_a_plane() -> None:
    points = [[0, 0, 0], [3, 0, 0], [0, 4, 0], [3, 4, 0]]
    found = evaluate("tasks/vector_math.js", "pca", f"pca({points})")
    for i, a in enumerate(points):
        for j, b in enumerate(points):
            real = sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) ** 0.5
            shown = sum((x - y) ** 2 for x, y in zip(found[i], found[j], strict=True)) ** 0.5
            assert shown == pytest.approx(real, abs=1e-6)


def test_a_map_of_equal_texts_is_one_point() -> None:
    assert evaluate("tasks/vector_math.js", "pca", "pca([[1,2],[1,2],[1,2]])") == [[0, 0]] * 3


def test_labels_of_a_map_stay_within_it_and_apart() -> None:
    points = [[200, 50], [205, 52], [420, 51], [220, 53], [220, 53]]
    texts = ["a dog", "a puppy", "the far right", "x" * 40, "y" * 40]
    found = evaluate(
        "tasks/vector_math.js", "labelPlaces", f"labelPlaces({points}, {json.dumps(texts)}, 440)"
    )
    boxes = [(x, y, x + 5.6 * len(text)) for (x, y), text in zip(found, texts, strict=True)]
    assert all(left >= 0 and right <= 440 for left, _, right in boxes)
    for i, (left, y, right) in enumerate(boxes):
        for other_left, other_y, other_right in boxes[:i]:
            assert abs(y - other_y) >= 13 or right <= other_left or other_right <= left
    assert found[0] == [208, 54] and found[2][0] < 420  # the free one where it belongs, the last on the left


def test_quantiles_are_those_of_what_came_between_two_looks() -> None:
    before, now = "{bounds: [1, 2, 4], counts: [5, 0, 0, 0]}", "{bounds: [1, 2, 4], counts: [5, 4, 0, 0]}"
    found = evaluate(
        "live/quantile.js",
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
    program = evaluate("chat/code.js", "LANGUAGES", call)
    compile(program, "shown", "exec")
    assert 'extra_body={"top_k": 3}' in program
    curl = evaluate("chat/code.js", "LANGUAGES", f"LANGUAGES.curl('http://h', {json.dumps(body)})")
    shell = subprocess.run(
        ["sh", "-c", curl.replace("curl ", "printf '%s\\n' ", 1)], capture_output=True, text=True, timeout=60
    )
    sent = shell.stdout.split("\n-d\n", 1)[1]
    assert json.loads(sent) == body


def test_code_shows_no_data_of_pictures() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    text = {"type": "text", "text": "data:image/png;base64,iVBORw0KGgo="}
    body = {"messages": [{"role": "user", "content": [part, text]}]}
    shown = evaluate("chat/code.js", "withoutData", f"withoutData({json.dumps(body)})")
    part["image_url"] = {"url": "data:image/png;base64,..."}
    assert shown == body


def test_files_come_before_the_text_of_their_message() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:a"}}
    calls = (
        "'hi'",
        "'hi', [{url: 'data:a'}]",
        "' ', [{url: 'data:a'}]",
        "'hi', [], [{name: 'a', text: 'b'}]",
    )
    cut = "'', [], [{name: 'a', text: '```', share: 0.126}]"
    found = [f"contentOf({call})" for call in (*calls, cut)]
    assert evaluate("chat/attached.js", "contentOf", f"[{', '.join(found)}]") == [
        "hi",
        [part, {"type": "text", "text": "hi"}],
        [part],
        "a:\n```\nb\n```\n\nhi",
        "a (the first 12 %):\n````\n```\n````",
    ]


@pytest.mark.parametrize(
    ("size", "others", "fits"), [(6, 0, True), (7, 0, False), (3, 1, True), (4, 1, False)]
)
def test_pictures_are_as_large_together_as_the_server_takes(size: int, others: int, fits: bool) -> None:
    file = f"{{name: 'a.png', type: 'image/png', size: {size}}}"
    media = "{most: {image: 2}, max_bytes: 8}"
    call = f"refusal({file}, {[{'bytes': 4}] * others}, {media})"
    assert (evaluate("chat/attached.js", "refusal", call) == "") is fits


def test_all_scripts_are_still_scripts_without_their_comments() -> None:
    for name, (content, kind) in page_files().files.items():
        if kind == "text/javascript":
            command = [str(NODE), "--check", "--input-type=module", "-"]
            done = subprocess.run(command, input=content, capture_output=True, timeout=60)
            assert done.returncode == 0, (name, done.stderr)


def test_axes_end_at_round_numbers() -> None:
    ends = evaluate("live/charts.js", "nice", "[0, 0.3, 1.2, 3, 7, 10, 101, 2600].map(nice)")
    assert ends == [1, 1, 2, 5, 10, 10, 200, 5000]


def test_a_tree_is_kept_with_its_branches() -> None:
    made = """(() => {
      const tree = new Tree();
      const a = tree.add(tree.root, "user", "a");
      tree.add(a, "assistant", "b", {reasoning: "r", view: 1});
      tree.add(a, "assistant", "c");
      tree.turn(a.chosen, -1);
      const again = Tree.of(JSON.parse(JSON.stringify(tree.plain)));
      const [first, last] = again.path;
      return [first.content, last.content, last.reasoning, last.view ?? null, standing(last)];
    })()"""
    assert evaluate("chat/branches.js", "Tree, standing", made) == ["a", "b", "r", None, [1, 2]]


def test_colours_of_code_change_no_letter_of_it() -> None:
    """Elements need a page: each is its text here."""
    code = 'def f(x): return "a\\"b" # c\nif (x) { /* d */ } `e` 0x1F'
    made = f"coloured({json.dumps(code)}, 'python').map((one) => one.text ?? one).join('')"
    element = "{append() {}, setAttribute() {}, set textContent(t) { this.text = t; }}"
    stand_in = f"globalThis.document = {{createElement: () => ({element})}}"
    assert evaluate("text/highlight.js", "coloured", f"({stand_in}, {made})") == code


def test_what_is_not_loaded_is_not_asked_what_it_can_do() -> None:
    card = (
        "{id: 'a', max_model_len: null, tasks: ['token_embed', 'classify'], state: 'unloaded', media: null}"
    )
    assert evaluate("models.js", "abilities", f"[...abilities({card})]") == ["rank", "classify"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Once. " + "no " * 400, True),
        ("".join(f"{n}. It is so.\n" for n in range(200)), True),
        ("a" * 1199, False),
        ("no " * 399, False),
        (" ".join(map(str, range(900))), False),
        ("".join(f"{n}\n" for n in range(900)), False),
        (("x" * 250 + "y") * 5, False),
    ],
)
def test_what_repeats_itself_for_long_is_noticed(text: str, found: bool) -> None:
    assert evaluate("chat/repetition.js", "repeats", f"repeats({json.dumps(text)})") is found


def test_a_message_is_taken_out_with_the_results_of_its_calls() -> None:
    made = """(() => {
      const tree = new Tree(), a = tree.add(tree.root, "user", "a"), b = tree.add(a, "assistant", "b");
      const c = tree.add(tree.add(tree.add(b, "tool", "x"), "tool", "y"), "assistant", "c");
      const other = tree.add(a, "assistant", "d");
      tree.reveal(c);
      tree.remove(b);
      const after = [tree.path.map((one) => one.content), standing(c)];
      tree.remove(a);
      tree.remove(c);
      return [...after, tree.path.map((one) => one.content), other.parent === tree.root];
    })()"""
    found = [["a", "c"], [1, 2], ["d"], True]
    assert evaluate("chat/branches.js", "Tree, standing", made) == found
