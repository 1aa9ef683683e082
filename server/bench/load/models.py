"""Asks a server which models it serves."""

from __future__ import annotations

import msgspec

from server.bench.errors import BenchError
from server.bench.load.http import Client, TransportError

_REMEDIES = {401: "give its key as --api-key", 404: "give the address of its API as --base-url, without /v1"}


class Model(msgspec.Struct):
    """A model that a server lists."""

    id: str
    max_model_len: int | None = None
    """Tokens of its longest sequence; None if the server does not tell."""


class _Models(msgspec.Struct):
    data: list[Model]


async def first_model(client: Client, url: str) -> Model:
    try:
        status, body = await client.get("/v1/models")
    except TransportError as error:
        raise BenchError(f"{url}: {error}; start the server, or name it with --base-url") from None
    if status != 200:
        remedy = _REMEDIES.get(status, "wait, or name one with --model")
        raise BenchError(f"{url} answers {status} when asked for its models; {remedy}")
    try:
        return msgspec.json.decode(body, type=_Models).data[0]
    except (msgspec.DecodeError, IndexError):
        raise BenchError(f"{url} does not list its models; name one with --model") from None
