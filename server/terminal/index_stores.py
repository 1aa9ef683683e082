"""Samples from vector databases: Qdrant, Chroma, PostgreSQL with pgvector, LanceDB and Weaviate.

Each is read by its own client, which has to be installed, at the address that the user has written.
"""

from __future__ import annotations

import json
from itertools import islice
from typing import Any
from urllib.parse import SplitResult, parse_qs, urlsplit, urlunsplit

from server.options.option_table import OptionError
from server.terminal.index_samples import READ, Reader, Sample, field_values, optional

EXAMPLES = (
    "qdrant+http://localhost:6333/COLLECTION",
    "chroma+http://localhost:8000/COLLECTION",
    "postgresql://user@localhost/DATABASE?table=TABLE",
    "lancedb:FOLDER/TABLE",
    "weaviate+http://localhost:8080/COLLECTION",
)


def store_of(name: str) -> Reader | None:
    """What reads samples from an address; None if this is none of a database."""
    return _READERS.get(name.partition(":")[0].partition("+")[0])


def _parts(url: str) -> tuple[SplitResult, str]:
    """The address of a server without our word before it, and the collection, its last part."""
    parts = urlsplit(url.partition("+")[2])
    path, _, collection = parts.path.rpartition("/")
    if not parts.hostname or not collection:
        raise OptionError(f"{url} should be like {next(one for one in EXAMPLES if one[:4] == url[:4])}")
    return parts._replace(path=path, query=""), collection


def _qdrant(url: str, text_field: str | None, vector_field: str | None) -> list[Sample]:
    parts, collection = _parts(url)
    client = optional("qdrant_client", "qdrant-client", "Qdrant").QdrantClient(url=urlunsplit(parts))
    points, _ = client.scroll(collection, limit=READ, with_vectors=True, with_payload=True)
    return points_of_qdrant(points, text_field, vector_field)


def points_of_qdrant(points: Any, text_field: str | None, vector_field: str | None) -> list[Sample]:
    """The samples of Qdrant's points, whose vector may be one of several with names."""
    rows: list[Sample] = []
    for point in points:
        named = point.vector if isinstance(point.vector, dict) else {"vector": point.vector}
        rows.append(field_values({**named, **(point.payload or {})}, text_field, vector_field, "Qdrant"))
    return rows


def _chroma(url: str, text_field: str | None, vector_field: str | None) -> list[Sample]:
    parts, collection = _parts(url)
    library = optional("chromadb", "chromadb", "Chroma")
    client = library.HttpClient(host=parts.hostname, port=parts.port or 8000, ssl=parts.scheme == "https")
    found = client.get_collection(collection).get(limit=READ, include=["embeddings", "documents"])
    return [
        (text or "", vector) for text, vector in zip(found["documents"], found["embeddings"], strict=True)
    ]


def _postgres(url: str, text_field: str | None, vector_field: str | None) -> list[Sample]:
    parts = urlsplit(url)
    table = parse_qs(parts.query).get("table", [""])[0]
    if not table:
        raise OptionError(f"{parts.scheme}://...: name the table, as in {EXAMPLES[2]}")
    psycopg = optional("psycopg", "psycopg[binary]", "PostgreSQL")
    with psycopg.connect(urlunsplit(parts._replace(query=""))) as connection:
        name = psycopg.sql.Identifier(*table.split("."))
        cursor = connection.execute(psycopg.sql.SQL("SELECT * FROM {} LIMIT %s").format(name), [READ])
        columns = [column.name for column in cursor.description]
        rows = [dict(zip(columns, row, strict=True)) for row in cursor.fetchall()]
    found = [field_values(row, text_field, vector_field, table) for row in rows]
    return [(text, json.loads(vector) if isinstance(vector, str) else vector) for text, vector in found]


def _lancedb(url: str, text_field: str | None, vector_field: str | None) -> list[Sample]:
    folder, _, table = url.partition(":")[2].rpartition("/")
    library = optional("lancedb", "lancedb", "LanceDB")
    rows = library.connect(folder or ".").open_table(table).search().limit(READ).to_list()
    return [field_values(row, text_field, vector_field, table) for row in rows]


def _weaviate(url: str, text_field: str | None, vector_field: str | None) -> list[Sample]:
    parts, collection = _parts(url)
    library = optional("weaviate", "weaviate-client", "Weaviate")
    with library.connect_to_local(host=parts.hostname, port=parts.port or 8080) as client:
        found = client.collections.get(collection).iterator(include_vector=True)
        rows = [{**one.vector, **one.properties} for one in islice(found, READ)]
    rows = [{"vector": row["default"], **row} if "default" in row else row for row in rows]
    return [field_values(row, text_field, vector_field, "Weaviate") for row in rows]


_READERS: dict[str, Reader] = {
    "qdrant": _qdrant,
    "chroma": _chroma,
    "postgresql": _postgres,
    "postgres": _postgres,
    "lancedb": _lancedb,
    "weaviate": _weaviate,
}
