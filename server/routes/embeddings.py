"""POST /v1/embeddings and /v2/embed: a vector for each text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from fastapi import APIRouter, Request, Response

from server.api.cohere import ApiVersion, BilledUnits, CohereEmbedded, CohereEmbeddings, CohereRequest, Meta
from server.api.pooling_bodies import ByteRange, Embedding, EmbeddingRequest, Encoding
from server.errors import BadRequest
from server.http.endpoint import Endpoint
from server.http.sse import encode, json_response
from server.reading.readings import COHERE, EMBEDDINGS
from server.requests.vectors import as_base64_json, as_bits, as_bytes, as_json
from server.routes.generation import frontend_of, respond
from server.routes.pooling_call import EMBEDS, FEW_VECTORS, PoolingCall, maybe_in_thread
from server.routes.read import read
from worker.protocol import Vectors

router = APIRouter(route_class=Endpoint, tags=["pool"])

MOST_IN_A_HEADER = 256
"""The most vectors whose places a header `metadata` can list without being too long for clients."""


@router.post("/v1/embeddings", dependencies=EMBEDS)
async def create_embeddings(body: EmbeddingRequest, request: Request) -> Response:
    """A vector for each text, or for each conversation."""
    call = PoolingCall(request, body.terms(frontend_of(request).facts), "embd-")

    async def work() -> Response:
        items = await read(request, body, EMBEDDINGS)
        check_encoding(body, call, len(items))
        vectors = await call.run(items)
        if body.encoding_format in ("bytes", "bytes_only"):
            return await bytes_response(call, body, vectors)
        return call.answer(Embedding(index=i, embedding=written(one, body)) for i, one in enumerate(vectors))

    return await respond(request, work())


@router.post("/v2/embed", dependencies=EMBEDS)
async def embed_for_cohere(body: CohereRequest, request: Request) -> Response:
    """Embed texts like Cohere's API: vectors in each of the types asked for."""
    call = PoolingCall(request, body.terms(frontend_of(request).facts))

    async def work() -> Response:
        found = await read(request, body, COHERE)
        vectors = await call.run(found.items)
        return await maybe_in_thread(
            lambda: json_response(_for_cohere(call, body, vectors, found.texts)), len(vectors) > FEW_VECTORS
        )

    return await respond(request, work())


def written(vectors: Vectors, form: Encoding) -> msgspec.Raw:
    if form.encoding_format == "base64":
        return msgspec.Raw(as_base64_json(vectors, form.embed_dtype, form.endianness))
    return msgspec.Raw(as_json(vectors))


def check_encoding(form: Encoding, call: PoolingCall, number: int) -> None:
    if form.encoding_format in ("bytes", "bytes_only") and call.diagnoses:
        raise BadRequest(
            "An answer of bytes has no place for `cache_diagnosis`. Use float or base64.", "include"
        )
    if form.encoding_format == "bytes" and number > MOST_IN_A_HEADER:
        raise BadRequest(
            f"The encoding format bytes takes at most {MOST_IN_A_HEADER} texts, got {number}: more would not "
            "fit the header `metadata`. Use bytes_only or base64.",
            "encoding_format",
        )


async def bytes_response(call: PoolingCall, form: Encoding, vectors: Sequence[Vectors]) -> Response:
    """The bare numbers, one vector after the other, with a header that tells them apart if asked for."""
    return await maybe_in_thread(lambda: _bytes_response(call, form, vectors), len(vectors) > FEW_VECTORS)


def _bytes_response(call: PoolingCall, form: Encoding, vectors: Sequence[Vectors]) -> Response:
    parts = [as_bytes(one, form.embed_dtype, form.endianness) for one in vectors]
    headers = {}
    if form.encoding_format == "bytes":
        metadata = {
            "id": call.id,
            "created": call.created,
            "model": call.model,
            "data": list(_ranges(form, vectors, parts)),
            "usage": call.usage(),
        }
        headers["metadata"] = encode(metadata).decode("ascii", "backslashreplace")
    return Response(b"".join(parts), media_type="application/octet-stream", headers=headers)


def _ranges(form: Encoding, vectors: Sequence[Vectors], parts: Sequence[bytes]) -> Iterator[ByteRange]:
    start = 0
    for index, (one, part) in enumerate(zip(vectors, parts, strict=True)):
        yield ByteRange(
            index=index,
            embed_dtype=form.embed_dtype,
            endianness=form.endianness,
            start=start,
            end=start + len(part),
            shape=one.shape,
        )
        start += len(part)


def _for_cohere(
    call: PoolingCall, body: CohereRequest, vectors: Sequence[Vectors], texts: Sequence[bytes]
) -> CohereEmbedded:
    types = body.types
    if ("binary" in types or "ubinary" in types) and vectors[0].shape[-1] % 8:
        raise BadRequest(
            f"Binary vectors need a number of dimensions that eight divides, not {vectors[0].shape[-1]}.",
            "embedding_types",
        )
    embeddings = CohereEmbeddings()
    if "float" in types:
        embeddings.float = [msgspec.Raw(as_json(one)) for one in vectors]
    if "binary" in types:
        embeddings.binary = [as_bits(one, signed=True) for one in vectors]
    if "ubinary" in types:
        embeddings.ubinary = [as_bits(one, signed=False) for one in vectors]
    if "base64" in types:
        embeddings.base64 = [msgspec.Raw(as_base64_json(one)) for one in vectors]
    return CohereEmbedded(
        id=call.id,
        embeddings=embeddings,
        texts=[msgspec.Raw(text) for text in texts],
        meta=Meta(ApiVersion(), BilledUnits(input_tokens=call.tokens)),
    )
