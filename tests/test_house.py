"""The rules of the house that no linter keeps: sizes, import circles, the environment, documents, words.

What import-linter keeps (floors, rooms, torch) is in pyproject.toml.
"""

from __future__ import annotations

import ast
import gc
import re
import subprocess
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = ("server", "engine_core", "worker", "models")
SOURCES = sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").glob("*.md")])

MOST_LINES, MOST_LINES_OF_A_FUNCTION, MOST_FILES = 400, 50, 16

LONG_FUNCTIONS: set[str] = set()
"""Functions that may be longer, as file:function; five at most."""

READS_ENVIRONMENT = {"server/options/parse_server_options.py", "worker/host/machine.py"}

FRAGMENTS = re.compile(
    r"(Of|Those|That|As in|What it|For|In place of|One that|With|Without|Where|Which|Whose|To be|From|By|At|"
    r"Beside|Besides|Beyond|Until|Among|Between|On|Under|In)\b(?! (which|what) )"
)
"""Beginnings of half sentences, whose other half a reader would have to look for in the name."""

WHOLE_ALTHOUGH = re.compile(
    r"((In|On|At|By|From|With|Without|For|Until|Beyond|Under|Among|Between|Beside|Besides|Where) [^.:;]*, )"
)
"""A sentence may begin with an adverbial that a comma ends."""


@pytest.fixture(autouse=True, scope="module")
def _no_collection() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    """Trees of all files are no garbage, which Python would look for in them again and again."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# Sizes.


def test_a_file_can_be_read_in_one_sitting() -> None:
    lines = {name_of(path): len(path.read_text().splitlines()) for path in [*SOURCES, *TESTS]}
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}


def statements_in(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """All statements at any depth, without the expressions of which a tree mostly consists."""
    for node in body:
        yield node
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            if isinstance(inner := getattr(node, field, None), list):
                yield from statements_in(inner)


def test_a_function_fits_a_screen() -> None:
    long = {
        f"{name_of(path)}:{node.name}"
        for path in [*SOURCES, *TESTS]
        for node in statements_in(parsed(path).body)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (node.end_lineno or 0) - node.lineno >= MOST_LINES_OF_A_FUNCTION
    }
    assert long == LONG_FUNCTIONS
    assert len(LONG_FUNCTIONS) <= 5


def test_a_folder_can_be_taken_in_at_a_glance() -> None:
    folders: dict[str, int] = {}
    for path in SOURCES:
        if path.name != "__init__.py":
            folder = name_of(path.parent)
            folders[folder] = folders.get(folder, 0) + 1
    assert {folder: count for folder, count in folders.items() if count > MOST_FILES} == {}


# Imports.


def imports_of(path: Path) -> set[str]:
    """Every module of ours that a file imports: in functions and for types only, too."""
    modules = set[str]()
    for node in statements_in(parsed(path).body):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return modules


def import_graph() -> dict[str, set[str]]:
    names = {module_of(path): path for path in SOURCES}
    return {name: (imports_of(path) & names.keys()) - {name} for name, path in names.items()}


def module_of(path: Path) -> str:
    return name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other: the strongly connected components, by Tarjan."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in graph[module]:
            if other not in index:
                visit(other)
            if other in stack:
                low[module] = min(low[module], low[other])
        if low[module] == index[module]:
            circle = stack[stack.index(module) :]
            del stack[-len(circle) :]
            if len(circle) > 1:
                found.append(sorted(circle))

    for module in graph:
        if module not in index:
            visit(module)
    return found


def test_modules_import_each_other_in_no_circle() -> None:
    assert circles(import_graph()) == []


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}
    assert circles(graph) == [["b", "c"]]


# Documents.


def test_documents_name_files_that_exist() -> None:
    named = re.compile(r"`((?:server|engine_core|worker|models|tests|docs|deploy)/[\w/.-]+)`")
    missing = [
        (name_of(page), path)
        for page in PAGES
        for path in named.findall(page.read_text())
        if not (ROOT / path).exists()
    ]
    assert missing == []


def test_the_oldest_versions_are_tested_by_files_that_exist() -> None:
    # Without what an outer make was given: its flags print folders, and its ARGS would name other tests.
    bare = ["env", "--unset=MAKEFLAGS", "--unset=MAKELEVEL", "--unset=ARGS"]
    command = [*bare, "make", "--dry-run", "test-lowest"]
    recipe = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    named = re.findall(r"tests/[\w/.]+", recipe.stdout.splitlines()[-1])
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


# The environment.


def test_the_environment_is_read_in_two_files() -> None:
    readers = {name_of(path) for path in SOURCES if reads_environment(parsed(path))}
    assert readers == READS_ENVIRONMENT


def reads_environment(tree: ast.Module) -> bool:
    return any(
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id, node.attr) in {("os", "environ"), ("os", "getenv")}
        for node in ast.walk(tree)
    )


# Words.


def doc_strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The strings that describe modules, classes, functions, fields and constants, with their lines."""
    for node in statements_in(tree.body):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text.strip()
            case _:
                pass


def test_a_doc_string_is_understood_without_its_module() -> None:
    fragments = [
        f"{name_of(path)}:{line}: {text}"
        for path in [*SOURCES, *TESTS]
        for line, text in doc_strings(parsed(path))
        if is_fragment(text)
    ]
    assert fragments == []


def is_fragment(text: str) -> bool:
    return bool(FRAGMENTS.match(text)) and not WHOLE_ALTHOUGH.match(text)


def test_fragments_are_told_from_sentences() -> None:
    fragments = (
        "Of each layer.",
        "Those of the first.",
        "In place of worker.lay_out.",
        "For `models.ops.use`.",
    )
    sentences = "The first of them.", "In a step, rows are tokens.", "Forward of a model.", "Fortunate cases."
    assert all(map(is_fragment, fragments)) and not any(map(is_fragment, sentences))
