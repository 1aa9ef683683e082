import msgspec
import pytest
from model_facts import READY

from engine_core import protocol
from engine_core.engine_stats import Stats
from engine_core.protocol import (
    Abort,
    AddRequest,
    Answer,
    Dead,
    Drain,
    Failed,
    Hello,
    Outputs,
    Progress,
    Request,
    ResetPrefixCache,
    Timing,
    Tokens,
)
from worker.protocol import Sampling, TokenLogprobs

ADD = AddRequest(
    id=2**60,
    tokens=[0, 151_000],
    params=Sampling(max_tokens=5, logit_bias={3: -1.5}, bad_words=((1, 2),), stop_token_ids=(7,), seed=2**63),
    priority=-3,
    salt="tenant",
)
STATS = Stats(1, 2, 0.5, 3, 2, 1, 9, 40, busy=1.5)
TOKENS = Tokens(
    id=1,
    tokens=[5, 6],
    logprobs=[TokenLogprobs(ids=[5, 9], values=[-0.5, -1.0], rank=1)],
    prompt_logprobs=[],
    cached=16,
    finish="stop",
    timing=Timing(queued=0.1, prefill=0.2, decode=0.3, preemptions=0),
)


@pytest.mark.parametrize("message", [ADD, Abort(ids=[1, 2]), Drain(seconds=1.5), ResetPrefixCache()])
def test_requests_survive_the_wire(message: Request) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Request) == message


@pytest.mark.parametrize(
    "message",
    [
        Hello(engine=0, protocol=protocol.PROTOCOL),
        Outputs(outputs=[TOKENS, Failed(id=2, code=500, message="why")], stats=STATS),
        STATS,
        Progress(phase="weights", fraction=0.5, folder="/models/demo"),
        READY,
        Dead(reason="why"),
    ],
)
def test_answers_survive_the_wire(message: Answer) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Answer) == message


def test_one_token_is_a_small_message() -> None:
    assert len(msgspec.msgpack.encode(Outputs(outputs=[Tokens(id=2**48, tokens=[1000])]))) < 80


def test_another_set_of_messages_is_another_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "Request", AddRequest | Abort)
    assert protocol._digest() != protocol.PROTOCOL  # pyright: ignore[reportPrivateUsage]
