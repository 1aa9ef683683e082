"""The pages for people: links lead somewhere, what they name exists, and the site is built."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from server.options.foreign_options import VLLM_FLAGS
from server.options.parse_server_options import OPTIONS, read
from server.run.commands import TERMINAL

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md"), *(ROOT / "deploy").glob("*.md")]
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
FLAGS = {option.flag for option in [*OPTIONS, *VLLM_FLAGS]}
FOREIGN = {
    "deploying.md": {
        *("--read-only", "--tmpfs", "--cap-drop", "--security-opt", "--gpus", "--shm-size", "--ipc"),
        *("--build", "--build-arg", "--profile", "--set"),
    },
    "sizing.md": set[str](),
    "getting-started.md": {"--no-deps", "--suggest"},
    "troubleshooting.md": {"--config"},
    "howto-rag.md": set[str](),
    "howto-proxy.md": set[str](),
    "howto-machines.md": set[str](),
    "times.md": set[str](),
    "metrics.md": {"--kv-cache-metrics"},
}
"""Pages whose flags are all ours, with those that belong to other programs."""


SERVE = re.compile(r"^(?:\S+\$ )?(?:\S*/)?(?:facet )?serve (?P<options>\S.*)$", re.MULTILINE)
COMMAND = re.compile(r"^(?:\w+=\S+ )?(?:\S*/)?facet (?P<name>[a-z-]+)", re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as GitHub and mkdocs write them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


@pytest.mark.parametrize("name", FOREIGN)
def test_every_flag_of_a_page_is_an_option(name: str) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", (DOCS / name).read_text()))
    assert named <= FLAGS | FOREIGN[name]


def lines_of_commands(page: Path) -> str:
    """The blocks of a page that are no program, each command in one line, without what is said beside it."""
    blocks = [block for block in FENCE.findall(page.read_text()) if not re.match("```[a-z]", block)]
    return re.sub(r"[ \t]+#.*", "", re.sub(r"\\\n\s*", "", "\n".join(blocks)))


def test_commands_that_serve_have_options_that_are_read() -> None:
    found = 0
    for page in PAGES:
        for match in SERVE.finditer(lines_of_commands(page)):
            if "[" in match["options"] or "keys.toml" in match["options"]:
                continue  # it stands for others, or names a file that is read
            given = read(shlex.split(match["options"]), {"FACET_CLUSTER_KEY": "0" * 64})
            given.read_models() if given.has_several else given.config()
            found += 1
    assert found >= 12


def test_commands_of_the_program_exist() -> None:
    found = {match["name"] for page in PAGES for match in COMMAND.finditer(lines_of_commands(page))}
    assert {"serve", "chat", "bench"} <= found <= {"serve", "bench", "keys", *TERMINAL}


def test_flags_in_the_tables_of_other_servers_exist_here() -> None:
    text = (DOCS / "migrating.md").read_text()
    rows = [row.split("|")[2] for row in text.splitlines() if row.startswith("| ") and "---" not in row]
    named = {flag for cell in rows for flag in re.findall(r"--[a-z][a-z-]+", cell)}
    assert len(named) > 20 and named <= FLAGS


def test_every_message_is_one_that_the_server_writes() -> None:
    files = [path for floor in ("server", "engine_core", "worker") for path in (ROOT / floor).rglob("*.py")]
    sources = "".join(path.read_text() for path in files)
    messages = re.findall(r"^### `(.*)`$", (DOCS / "troubleshooting.md").read_text(), flags=re.MULTILINE)
    assert len(messages) > 10
    assert [message for message in messages if message not in sources] == []


def test_the_site_has_every_page() -> None:
    sections = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    listed = {page for section in sections for pages in section.values() for page in pages}
    pages = {page.relative_to(DOCS) for page in DOCS.rglob("*.md")}
    assert listed == {str(page) for page in pages if page.parts[0] != "decisions"}


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    mkdocs = shutil.which("mkdocs", path=f"{Path(sys.executable).parent}:{ROOT / '.venv-docs' / 'bin'}")
    if mkdocs is None:
        pytest.skip("mkdocs is not installed")
    command = [mkdocs, "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site" / "getting-started" / "index.html").exists()


def test_each_decision_has_a_number_of_its_own() -> None:
    names = sorted(path.name for path in (DOCS / "decisions").glob("*.md"))
    numbers = [name.partition("-")[0] for name in names]
    assert numbers == [f"{number:04}" for number in range(1, len(names) + 1)]
    for name, number in zip(names, numbers, strict=True):
        assert (DOCS / "decisions" / name).read_text().startswith(f"# {number}"), name
