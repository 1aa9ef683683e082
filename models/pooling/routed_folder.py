"""Models whose queries have static weights of tokens, and whose documents an encoder reads: `Router`.

No torch. Their folder has one in it for each module of each route. The document's modules are what an engine
loads; the queries' weights lie in a folder beside them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from models.config import ConfigError
from models.made_folder import link, made_once, write_json
from models.plain_files import lies_within
from models.pooling.sentence_files import TRANSFORMERS, Module, list_modules, read_file

ROUTERS = ("Router", "Asym")
QUERIES = "queries"
"""The folder with the weights of queries."""
_WEIGHTS = "model.safetensors"
_STATIC = "SparseStaticEmbedding"


class _Parameters(msgspec.Struct, frozen=True):
    default_route: str | None = None
    route_mappings: dict[str, str] | None = None


class _Routes(msgspec.Struct, frozen=True):
    """The fields of router_config.json."""

    types: dict[str, str]
    structure: dict[str, list[str]]
    parameters: _Parameters = _Parameters()


def query_weights(folder: Path) -> Path | None:
    """The file with the weights of queries' tokens, in a folder that was made here; None if there is none."""
    path = folder / QUERIES / _WEIGHTS
    return path if path.is_file() else None


def is_routed(folder: Path) -> bool:
    return any(module.kind in ROUTERS for module in list_modules(folder))


def make_folder(folder: Path, cache: Path) -> Path:
    """Make the folder within `cache`, or find the one made before."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return made_once(cache, files, Path(__file__).parent, lambda made: _fill(folder, made))


def _fill(folder: Path, made: Path) -> None:
    """Make a folder of the document's modules, and of the queries' weights."""
    path, routes = _read_routes(folder)
    query, chain = routes.structure["query"], routes.structure["document"]
    places = [folder / path / name for name in (*query, *chain)]
    _check_tokenizers(places[0], places[1])
    (made / QUERIES).symlink_to(places[0].absolute())
    modules = [{"idx": 0, "name": "0", "path": "", "type": routes.types[chain[0]]}]
    for index, name in enumerate(chain[1:], 1):
        modules.append({"idx": index, "name": str(index), "path": name, "type": routes.types[name]})
    link(made, [folder / path / name for name in chain[1:]])
    write_json(made / "modules.json", modules)
    settings = folder / "config_sentence_transformers.json"
    link(made, [*places[1].iterdir(), *([settings] if settings.is_file() else [])])


def _read_routes(folder: Path) -> tuple[str, _Routes]:
    """The folder of the router within the model's, and its routes."""
    router, *others = list_modules(folder)
    path = folder / router.path / "router_config.json"
    routes = read_file(path, _Routes)
    if outside := [name for name in routes.types if not lies_within(name)]:
        raise ConfigError(f"{path}: {outside[0]!r} is outside of the model's folder")
    kinds = {route: _kinds(routes, names) for route, names in routes.structure.items()}
    if (
        others
        or routes.parameters.route_mappings
        or set(kinds) != {"query", "document"}
        or kinds["query"] != [_STATIC]
        or kinds["document"][:1] not in ([kind] for kind in TRANSFORMERS)
    ):
        shown = "; ".join(f"{route}: {', '.join(own)}" for route, own in kinds.items())
        raise ConfigError(
            f"{path}: the routes {shown} are not served. A Router is, if it is the only module and has the "
            f"routes 'query', of a {_STATIC}, and 'document', of a Transformer and a SpladePooling"
        )
    if (routes.parameters.default_route or next(iter(routes.structure))) != "document":
        raise ConfigError(
            f"{path}: texts that nobody calls queries or documents are queries ('default_route'), and here "
            "they would be documents: set it to 'document'"
        )
    return router.path, routes


def _kinds(routes: _Routes, names: Iterable[str]) -> list[str]:
    return [Module(routes.types.get(name, "nothing")).kind for name in names]


def _check_tokenizers(query: Path, document: Path) -> None:
    for needed in (query / _WEIGHTS, query / "tokenizer.json"):
        if not needed.is_file():
            raise ConfigError(f"{needed} is missing, of which tokens of queries have weights")
    if (query / "tokenizer.json").read_bytes() != (document / "tokenizer.json").read_bytes():
        raise ConfigError(
            f"{query} has another tokenizer than {document}: queries and documents with different tokens are "
            "not served"
        )
