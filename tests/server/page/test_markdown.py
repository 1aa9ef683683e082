"""How the page shows what a model writes: Markdown, mathematics, and nothing that could do harm."""

import json
from collections.abc import Iterator

import pytest
from chromium import Tab
from fake_frontend import FakeFrontend
from page_driver import IDLE, module, opened, say

PLACE = "document.createElement('div')"
LINK = 'target="_blank" rel="noopener noreferrer nofollow"'


@pytest.fixture(scope="module")
def page(one_browser: Tab) -> Iterator[Tab]:
    with opened(one_browser, FakeFrontend()):
        yield one_browser


def html(page: Tab, source: str) -> str:
    shown = f"(place => (m.render(place, {json.dumps(source)}), place.innerHTML))({PLACE})"
    return module(page, "text/markdown.js", shown)


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("a *b* **c** ~~e~~ `f`", "<p>a <em>b</em> <strong>c</strong> <del>e</del> <code>f</code></p>"),
        ("***d***", "<p><em><strong>d</strong></em></p>"),
        ("2 * 3 * 4 and snake_case_name", "<p>2 * 3 * 4 and snake_case_name</p>"),
        ("**a *b***", "<p><strong>a <em>b</em></strong></p>"),
        (r"\*not\* ``a`b``", "<p>*not* <code>a`b</code></p>"),
        ("# One\ntext\n## Two", "<h3>One</h3><p>text</p><h4>Two</h4>"),
        ("a\nb  \nc", "<p>a\nb  <br>c</p>"),
        ("- a\n- b\n  - c\n\ntext", "<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul><p>text</p>"),
        ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
        ("- a\n\n- b", "<ul><li><p>a</p></li><li><p>b</p></li></ul>"),
        ("1. a\n\n   more\n2. b", "<ol><li>a<p>more</p></li><li>b</li></ol>"),
        ("> a\n> - b", "<blockquote><p>a</p><ul><li>b</li></ul></blockquote>"),
        ("---", "<hr>"),
        ("[a](http://b.example 'c')", f'<p><a href="http://b.example" {LINK}>a</a></p>'),
        ("see <http://b.example>.", f'<p>see <a href="http://b.example" {LINK}>http://b.example</a>.</p>'),
        ("It costs $5 and $10.", "<p>It costs $5 and $10.</p>"),
    ],
)  # fmt: skip
def test_markdown(page: Tab, source: str, shown: str) -> None:
    assert html(page, source) == shown


def test_tables_and_code(page: Tab) -> None:
    table = html(page, "| a | b |\n|:--|--:|\n| `x|y` | 2 |\n| only |")
    assert '<tr><td><code>x|y</code></td><td class="right">2</td></tr>' in table
    assert '<tr><td>only</td><td class="right"></td></tr>' in table
    code = html(page, "```python\nif x:  # <b>\n```\nafter")
    assert '<span class="h-k">if</span> x:  <span class="h-c"># &lt;b&gt;</span></code>' in code
    assert "Copy" in code and code.endswith("<p>after</p>")
    assert "<code>half</code>" in html(page, "```\nhalf")  # its end has not come yet


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("x_1^2", "<msubsup><mi>x</mi><mn>1</mn><mn>2</mn></msubsup>"),
        ("x^23", "<msup><mi>x</mi><mn>2</mn></msup><mn>3</mn>"),
        (r"\frac{a}{\sqrt[3]{b}}", "<mfrac><mi>a</mi><mroot><mi>b</mi><mn>3</mn></mroot></mfrac>"),
        (
            r"\mathbb{R} \to \alpha'",
            '<mi mathvariant="normal">\u211d</mi><mo>→</mo><msup><mi>\u03b1</mi><mo>\u2032</mo></msup>',
        ),
        (r"\unheard{x}", '<mtext class="unknown">\\unheard</mtext><mi>x</mi>'),
        ("}{", "<mrow></mrow>"),
    ],
)
def test_mathematics(page: Tab, source: str, shown: str) -> None:
    assert html(page, f"${source}$") == f"<p><math>{shown}</math></p>"


def test_mathematics_with_lines_of_its_own(page: Tab) -> None:
    sum_ = html(page, "$$\n\\sum_{i=1}^n i\n$$")
    assert '<math display="block"><munderover><mo>∑</mo>' in sum_
    cases = html(page, "\\[f(x) = \\begin{cases} 1 & x > 0 \\\\ 0 & \\text{else} \\end{cases}\\]")
    assert (
        cases.count("<mtr>") == 2 and '<mo stretchy="true">{</mo>' in cases and "<mtext>else</mtext>" in cases
    )
    assert "<code>" in html(page, f"$${'{' * 200}x$$")  # nobody needs that, and no stack has room for it


def test_a_growing_text_keeps_the_blocks_that_are_complete(page: Tab) -> None:
    same = """((place) => {
      m.render(place, "# a\\n\\nb");
      const first = place.firstChild;
      m.render(place, "# a\\n\\nb c");
      return place.firstChild === first && place.textContent === "ab c" && place.children.length === 2;
    })(document.createElement('div'))"""
    assert module(page, "text/markdown.js", same)


HOSTILE = [
    "<script>harm()</script> <img src=x onerror=harm()>",
    "[a](javascript:harm()) [b](JaVaScRiPt:harm()) [c](data:text/html,<script>harm()</script>)",
    "<javascript:harm()> <https://\"onclick=harm()>",
    "![a](https://other.example/a.png) ![b](x\" onerror=\"harm()) ![c](data:image/svg+xml;base64,AAAA)",
    "[a](vbscript:harm()) [b]( javascript:harm()) [c](&#106;avascript:harm()) [d](\\javascript:harm())",
    "```html\n<img src=x onerror=harm()>\n```",
    "| <svg onload=harm()> |\n|---|\n| <iframe src='javascript:harm()'> |",
    r"$\text{<img src=x onerror=harm()>}$ $\href{javascript:harm()}{x}$",
]  # fmt: skip


@pytest.mark.parametrize("source", HOSTILE)
def test_what_a_model_writes_does_no_harm(page: Tab, source: str) -> None:
    """Neither as a browser reads elements, nor as it would read them if they were in the page."""
    script = f"""((place) => {{
      m.render(place, {json.dumps(source)});
      const bad = ({{name, value}}) => name.startsWith("on") || /script:|^data:/i.test(value);
      return [...place.querySelectorAll("*")].filter((one) => [...one.attributes].some(bad)
        || ["SCRIPT", "IFRAME", "OBJECT", "EMBED", "IMG"].includes(one.tagName)).map((one) => one.outerHTML);
    }})({PLACE})"""
    assert module(page, "text/markdown.js", script) == []


@pytest.mark.parametrize(
    "source",
    ["*" * 3000, "[" * 3000, "`a" * 2000, "> " * 2000, "$a" * 2000, "**a *b " * 1000, "|" * 3000 + "\n|-|"],
)
def test_odd_texts_take_no_time(page: Tab, source: str) -> None:
    """The page must not hang: it answers within the seconds that a tab waits."""
    assert html(page, source)


def test_an_answer_full_of_traps_runs_nothing_and_asks_nobody(tab: Tab, model: FakeFrontend) -> None:
    model.reply = "\n\n".join(HOSTILE)
    with opened(tab, model):
        tab.run("window.harm = () => { document.body.dataset.harmed = 'yes'; }")
        say(tab, "hi")
        tab.wait(f"{IDLE} && document.querySelectorAll('#messages table').length === 1")
        tab.run("[...document.querySelectorAll('#messages a')].forEach((one) => { one.target = ''; })")
        targets = tab.run("[...document.querySelectorAll('#messages a')].map((one) => one.href)")
        assert targets == ['https://"onclick=harm()/', "https://other.example/a.png"]
        assert tab.run("document.body.dataset.harmed") is None
        asked = tab.run("performance.getEntriesByType('resource').map((one) => one.name)")
        assert all("other.example" not in address for address in asked)


REFUSED = (
    "document.body.innerHTML = '<b>x</b>'",
    "document.createElement('div').insertAdjacentHTML('beforeend', 'x')",
    "document.body.setAttribute('onclick', 'harm()')",
)


def test_the_browser_itself_refuses_html_and_scripts_in_the_page(tab: Tab, model: FakeFrontend) -> None:
    """The second wall, if the first one had a hole."""
    with opened(tab, model):
        for script in REFUSED:
            tried = f"(() => {{ try {{ {script}; }} catch (error) {{ return error.name; }} }})()"
            assert tab.run(tried) in ("TypeError", "EvalError"), script
        tab.run("""new Promise((done) => {
          const made = new Image();
          made.onload = made.onerror = () => done();
          made.src = "https://other.example/a.png";
        })""")
        assert any("Content Security Policy" in one for one in tab.complaints)
        tab.complaints.clear()
