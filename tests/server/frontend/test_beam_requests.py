"""A beam search is rounds of requests for one token: what each says, what is counted, and what ends it."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from fake_client import FakeClient, Submitted
from reading import generate, started

from engine_core.engine_stats import Timing
from engine_core.protocol import Grammar
from server.access.client_identity import Caller
from server.access.key_file import Key
from server.access.quotas import Account
from server.errors import BadRequest, DeadlineExceeded, Internal
from server.frontend.frontend import Frontend
from server.frontend.text_output import ALL_TOKENS
from server.requests.beam_search import BeamParams
from server.requests.sampling_params import SamplingParams
from worker.protocol import TokenLogprobs

GetReady = Callable[..., Awaitable[Frontend]]
TWO = BeamParams(2, length_penalty=0.0)
ASKED = SamplingParams(n=2, max_tokens=2, temperature=0.0)


def tell(request: Submitted, *likely: tuple[int, float], **fields: object) -> None:
    """Answer a request for one token with four tokens that may follow."""
    ids, values = zip(*likely, (100, -50.0), (101, -60.0), (102, -70.0), strict=True)
    entry = TokenLogprobs([ids[0], *ids[:4]], [values[0], *values[:4]], 1)
    request.say([ids[0]], logprobs=[entry], finish="length", **fields)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_each_round_goes_on_behind_the_answers_that_are_followed(
    client: FakeClient, frontend: Frontend
) -> None:
    task = await started(
        generate(frontend, [5, 6], ASKED, interval=ALL_TOKENS, beams=TWO, salt="s", wait=9.0, budget=60.0)
    )
    [first] = client.submitted
    assert (first.tokens, first.params.max_tokens, first.params.logprobs) == ([5, 6], 1, 4)
    assert "prompt_len" not in first.options and first.options.get("wait") == 9.0
    timing = Timing(queued=1.0, prefill=2.0, decode=0.0, preemptions=0, steps=1, compute=0.5)
    tell(first, (11, -1.0), (12, -2.0), cached=1, timing=timing)
    await settle()
    _, second, third = client.submitted
    assert [one.tokens for one in (second, third)] == [[5, 6, 11], [5, 6, 12]]
    for one in (second, third):
        assert one.params.max_tokens == 2 and one.options.get("prompt_len") == 2
        assert one.options.get("salt") == "s" and "wait" not in one.options
        assert 0 < one.options.get("budget", 0.0) < 60.0
    tell(second, (13, -5.0), timing=timing)
    tell(third, (14, -1.0), (15, -2.0), timing=timing)
    best, other = await task
    assert [best.token_ids, other.token_ids] == [[12, 14], [12, 15]]
    assert (best.index, best.finish_reason, best.cached_tokens) == (0, "length", 1)
    assert best.timing is not None and other.timing is None
    told = best.timing
    assert (told.queued, told.prefill, told.steps, told.compute) == (1.0, 2.0, 2, 1.5)


async def test_a_stop_token_ends_an_answer(client: FakeClient, frontend: Frontend) -> None:
    task = await started(generate(frontend, [5], ASKED, interval=ALL_TOKENS, beams=TWO))
    tell(client.submitted[0], (7, -0.1), (12, -2.0))
    await settle()
    [_, only, _] = client.submitted
    tell(only, (13, -5.0))
    tell(client.submitted[2], (13, -5.0))
    best, other = await task
    assert (best.token_ids, best.finish_reason) == ([7], "stop")
    assert (other.token_ids, other.finish_reason) == ([12, 13], "length")


async def test_a_search_has_a_place_and_tokens_for_each_answer_that_it_follows(
    client: FakeClient, frontend: Frontend
) -> None:
    key = Key(name="k", sha256="0" * 64, tokens_per_minute=100)
    account = Account(key, frontend.metrics.key_counters("k"), clock=lambda: 0.0)
    admission = frontend.admissions.admit(Caller(owner="k", key=key, account=account), 2)
    task = await started(generate(frontend, [5], ASKED, interval=ALL_TOKENS, beams=TWO, admission=admission))
    assert frontend.live == 2 and not admission.begun
    tell(client.submitted[0], (11, -1.0), (12, -2.0))
    await settle()
    assert admission.begun and left(account) == b"98"
    for one in client.submitted[1:]:
        tell(one, (13, -1.0))
    await task
    assert (frontend.live, left(account), frontend.admissions.waiting_tokens) == (0, b"96", 0)


def left(account: Account) -> bytes:
    """What is left of the tokens of a key."""
    return dict(account.headers())[b"x-ratelimit-remaining-tokens"]


async def test_a_request_that_fails_ends_the_search(client: FakeClient, frontend: Frontend) -> None:
    task = await started(generate(frontend, [5], ASKED, interval=ALL_TOKENS, beams=TWO))
    tell(client.submitted[0], (11, -1.0), (12, -2.0))
    await settle()
    client.submitted[1].fail(500, "broken")
    tell(client.submitted[2], (13, -1.0))
    with pytest.raises(Internal):
        await task
    assert frontend.live == 0


async def test_who_leaves_ends_the_requests_of_the_round(client: FakeClient, frontend: Frontend) -> None:
    task = await started(generate(frontend, [5], ASKED, interval=ALL_TOKENS, beams=TWO))
    tell(client.submitted[0], (11, -1.0), (12, -2.0))
    await settle()
    task.cancel()
    await asyncio.wait([task])
    assert {2, 3} <= set(client.aborted) and frontend.live == 0


async def test_an_aborted_search_ends_all_its_answers(client: FakeClient, frontend: Frontend) -> None:
    task = await started(generate(frontend, [5], ASKED, interval=ALL_TOKENS, beams=TWO))
    client.submitted[0].say([], finish="abort")
    assert [delta.finish_reason for delta in await task] == ["abort", "abort"]


async def test_a_search_that_takes_longer_than_it_may_is_refused_its_next_round(
    client: FakeClient, frontend: Frontend
) -> None:
    task = await started(generate(frontend, [5], ASKED, interval=ALL_TOKENS, beams=TWO, budget=1e-9))
    tell(client.submitted[0], (11, -1.0), (12, -2.0))
    with pytest.raises(DeadlineExceeded):
        await task
    assert frontend.live == 0


@pytest.mark.parametrize("penalty", [10.5, -11.0, float("nan")])
async def test_a_penalty_out_of_range_is_refused(frontend: Frontend, penalty: float) -> None:
    with pytest.raises(BadRequest, match="length_penalty must be from -10 to 10"):
        generate(frontend, [5], ASKED, beams=BeamParams(2, penalty))


async def test_a_search_is_held_to_no_grammar(frontend: Frontend) -> None:
    with pytest.raises(BadRequest, match="takes no grammar"):
        generate(frontend, [5], ASKED, beams=TWO, grammar=Grammar("lark", 'start: "a"'))


async def test_a_search_tells_no_logprobs_of_its_prompt(frontend: Frontend) -> None:
    asked = SamplingParams(n=2, prompt_logprobs=0)  # as a completion with `echo` and `logprobs` has
    with pytest.raises(BadRequest, match="leave `prompt_logprobs`, `echo` or `logprobs` out"):
        generate(frontend, [5], asked, beams=TWO)
