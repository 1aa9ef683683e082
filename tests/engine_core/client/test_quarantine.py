"""Requests that made engines fail: which are taken for the same, and how long they are refused."""

import pytest
from fake_media import picture
from msgspec.structs import replace

from engine_core.client import quarantine
from engine_core.client.quarantine import SECONDS, Quarantine
from engine_core.protocol import AddRequest
from worker.protocol import Sampling


def test_only_for_some_minutes_and_only_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine, "MOST", 2)
    now = 0.0
    refused = Quarantine(lambda: now)
    adds = [AddRequest(n, [n], Sampling(max_tokens=4)) for n in range(3)]
    for add in adds:
        now += 1
        refused.put(add)
    assert [refused.holds(add) for add in adds] == [False, True, True]
    now = 2 + SECONDS + 0.5
    assert [refused.holds(add) for add in adds] == [False, False, True]
    assert len(refused.digests) == 1


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"tokens": [1, 2, 9], "prompt_len": 2}, True),
        ({"priority": 3, "salt": "other", "streams": True}, True),
        ({"tokens": [1, 3]}, False),
        ({"params": Sampling(max_tokens=4, seed=9)}, True),
        ({"params": Sampling(max_tokens=4, temperature=0.5)}, False),
    ],
)
def test_what_is_the_same_request(changes: dict[str, object], same: bool) -> None:
    refused = Quarantine()
    add = AddRequest(1, [1, 2], Sampling(max_tokens=4, seed=5))
    refused.put(add)
    assert refused.holds(replace(add, id=2, **changes)) == same


def test_a_request_is_told_from_one_with_another_picture() -> None:
    refused = Quarantine()
    add = AddRequest(id=1, tokens=[1] * 6, params=Sampling(max_tokens=2), media=(picture(b"one", 1, 4),))
    refused.put(add)
    assert refused.holds(replace(add, id=2))
    assert not refused.holds(replace(add, media=(picture(b"two", 1, 4),)))
    assert not refused.holds(replace(add, media=(picture(b"one", 2, 4),)))
