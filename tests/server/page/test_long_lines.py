"""What the page's scripts read of a text takes time by its length, whatever characters it has many of."""

import json
import shutil
import subprocess

import pytest

from server.page.routes import FOLDER

NODE = shutil.which("node")
pytestmark = [pytest.mark.skipif(NODE is None, reason="no node here"), pytest.mark.slow(5)]

MOST_MS = 700
"""Milliseconds for a text of 50 kB, of which some take 60: quadratic patterns need many seconds."""
BEGINNINGS = [
    "", "# a", "- a", "> ", "|a\n", "|a\n|-", "|-", "```", "```a", "~~~", "$", "$1", "$$", "[a](", "[a](b",
    "**",
    "__a", "http://a", "`a", "```js\n", "```js\n\"", "\\(",
]  # fmt: skip
SCRIPT = """
class Plain {
  constructor(name) { this.tagName = name.toUpperCase(); this.localName = name; this.childNodes = []; }
  get children() { return this.childNodes.filter((one) => typeof one !== "string"); }
  setAttribute() {}
  addEventListener() {}
  append(...more) { for (const one of more) this.childNodes.push(one); }
  replaceChildren() {}
}
const make = (name) => new Plain(name);
globalThis.document = { createElement: make, createElementNS: (_, name) => make(name) };
const { render } = await import(MODULE), slow = [];
for (const text of TEXTS) {
  const whole = text.begins + text.many.repeat(50_000 / text.many.length) + text.ends;
  const started = performance.now();
  render(document.createElement("div"), whole);
  const took = performance.now() - started;
  if (took > MOST) slow.push([text, Math.round(took)]);
}
console.log(JSON.stringify(slow));
"""


@pytest.mark.parametrize("many", [" ", "\t", "#", "*", "`", "|", "[", "-", "1", "a", "\\[\n", "$$ x\n"])
def test_fifty_kilobytes_of_a_character(many: str) -> None:
    texts = [
        {"begins": begins, "many": many, "ends": ends} for begins in BEGINNINGS for ends in ("x", "\rx`")
    ]
    script = SCRIPT.replace("MODULE", json.dumps((FOLDER / "text/markdown.js").as_uri()))
    script = script.replace("TEXTS", json.dumps(texts)).replace("MOST", str(MOST_MS))
    command = [str(NODE), "--no-warnings", "--input-type=module", "-e", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []
