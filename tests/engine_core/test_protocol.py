import msgspec
import pytest

from engine_core import protocol
from engine_core.protocol import (
    Abort,
    AddRequest,
    Outputs,
    Tokens,
)


def test_one_token_is_a_small_message() -> None:
    assert len(msgspec.msgpack.encode(Outputs(outputs=[Tokens(id=2**48, tokens=[1000])]))) < 80


def test_another_set_of_messages_is_another_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "Request", AddRequest | Abort)
    assert protocol._digest() != protocol.PROTOCOL  # pyright: ignore[reportPrivateUsage]
