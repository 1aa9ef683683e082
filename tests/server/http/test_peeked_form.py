"""A form that is read as far as one field comes whole to who reads it then."""

from pathlib import Path
from typing import Any

import pytest
from full_disk import full_disk
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect

from server.errors import ApiError, TooLarge
from server.http import multipart as module
from server.http.multipart import FormReader, peeked_form

FILE = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n%s\r\n' % (b"sound" * 100)
MODEL = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nsmall\r\n'
END = b"--x--\r\n"


class Client:
    """Sends a form in parts."""

    def __init__(self, whole: bytes, cuts: list[int]) -> None:
        ends = [*sorted({min(cut, len(whole)) for cut in cuts}), len(whole)]
        self.left = [whole[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    async def receive(self) -> Any:
        if not self.left:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": self.left.pop(0), "more_body": bool(self.left)}


async def read(client: Client, most: int = 1 << 20) -> tuple[str | None, bytes, bytes]:
    """The model that a form names, what was read to find it, and all that is received then."""
    reader = FormReader("multipart/form-data; boundary=x")
    unread, data, more = b"", b"", True
    async with peeked_form(reader, "model", client.receive, most, TooLarge("")) as (model, receive):
        unread = b"".join(client.left)
        while more:
            message = await receive()
            data += message["body"]
            more = message["more_body"]
        assert (await receive())["type"] == "http.disconnect"
    return model, unread, data


@settings(max_examples=50, deadline=None)
@given(
    st.permutations([FILE, MODEL]), st.lists(st.integers(0, 900), max_size=6), st.sampled_from([10, 1 << 20])
)
async def test_the_form_comes_whole(parts: list[bytes], cuts: list[int], in_memory: int) -> None:
    whole = b"".join(parts) + END
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "IN_MEMORY", in_memory)
        patched.setattr(module, "_PIECE", 100)
        model, _, data = await read(Client(whole, cuts))
    assert (model, data) == ("small", whole)


async def test_what_stands_behind_the_field_is_not_waited_for() -> None:
    whole = MODEL + FILE + END
    _, unread, data = await read(Client(whole, [len(MODEL) + 5]))
    assert unread == whole[len(MODEL) + 5 :] and data == whole


@pytest.mark.parametrize("whole", [FILE + END, b"", b"--x--\r\n"])
async def test_a_form_without_the_field_comes_whole(whole: bytes) -> None:
    assert await read(Client(whole, [])) == (None, b"", whole)


async def test_a_form_is_bounded() -> None:
    with pytest.raises(TooLarge):
        await read(Client(FILE + MODEL + END, [100]), most=200)


async def test_a_client_may_leave() -> None:
    client = Client(b"", [])
    client.left.clear()
    with pytest.raises(ClientDisconnect):
        await read(client)


async def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(module, "IN_MEMORY", 10)
    with pytest.raises(ApiError) as refused, full_disk(tmp_path):
        await read(Client(FILE + MODEL + END, []))
    assert refused.value.status == 507
