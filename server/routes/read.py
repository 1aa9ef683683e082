"""Reads the texts of a request's body, unless the helper has done so before the endpoint was called."""

from __future__ import annotations

import json
from typing import TypeVar

from fastapi import Request

from server.api.fields import Body
from server.api.json_body import LONG
from server.http.endpoint import READ
from server.reading.readings import Reading
from server.routes.generation import frontend_of

R = TypeVar("R")


async def read(request: Request, body: Body, reading: Reading[R]) -> R:
    done = request.scope.get(READ)
    if done is not None:
        return done
    frontend = frontend_of(request)
    reader = frontend.reader
    if reading.work is not None and reading.work(body, reader) > LONG:
        # The body is short, but what is to be written of it is not.
        raw = json.dumps(body.model_dump(exclude_unset=True)).encode()
        return (await frontend.helper.read(reading, raw, reader.facts)).result
    return reading.read(body, reader)
