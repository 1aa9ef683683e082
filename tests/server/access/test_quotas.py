"""Quotas for each minute fill steadily, may go into debt, and are told in OpenAI's headers."""

from typing import Any

import pytest
from fake_connection import FakeClock
from fake_frontend import FakeFrontend

from server.access.client_identity import Caller
from server.access.key_file import Key, ModelQuotas
from server.access.quotas import Account, Bucket
from server.errors import QuotaExceeded

DIGEST = "0" * 64


def account(clock: FakeClock, **limits: Any) -> Account:
    counters = FakeFrontend().metrics.key_counters("alice")
    return Account(Key(name="alice", sha256=DIGEST, **limits), counters, clock.time)


def test_a_bucket_fills_to_its_limit_in_a_minute() -> None:
    clock = FakeClock()
    bucket = Bucket(60, clock.time)
    bucket.take(90)
    assert bucket.level == -30 and bucket.seconds_until(1) == 31
    clock.now += 31
    assert bucket.level == 1
    clock.now += 1000
    assert bucket.level == 60


def test_requests_are_refused_beyond_their_quota() -> None:
    clock = FakeClock()
    one = account(clock, requests_per_minute=2)
    one.begin_request()
    one.begin_request()
    with pytest.raises(QuotaExceeded) as caught:
        one.begin_request()
    error = caught.value
    assert (error.status, error.type, error.code) == (429, "requests", "rate_limit_exceeded")
    assert error.retry_after == 30
    clock.now += 30
    one.begin_request()


def test_tokens_go_into_debt_and_hold_requests_up_until_it_is_paid() -> None:
    clock = FakeClock()
    one = account(clock, tokens_per_minute=600)
    one.begin_request()
    one.read(500)
    one.begin_request()
    one.wrote(200)
    with pytest.raises(QuotaExceeded, match="600 tokens per minute") as caught:
        one.begin_request()
    assert caught.value.type == "tokens" and caught.value.retry_after == 11
    clock.now += 11
    one.begin_request()


def test_a_refusal_for_tokens_takes_no_request() -> None:
    clock = FakeClock()
    one = account(clock, requests_per_minute=1, tokens_per_minute=60)
    one.read(60)
    with pytest.raises(QuotaExceeded):
        one.begin_request()
    clock.now += 1
    one.begin_request()


def test_headers_tell_what_is_left() -> None:
    clock = FakeClock()
    clock.now = 50.0  # at which fractions of seconds are exact enough
    one = account(clock, requests_per_minute=60, tokens_per_minute=6000)
    one.begin_request()
    one.read(7000)
    assert dict(one.headers()) == {
        b"x-ratelimit-limit-requests": b"60",
        b"x-ratelimit-remaining-requests": b"59",
        b"x-ratelimit-reset-requests": b"1s",
        b"x-ratelimit-limit-tokens": b"6000",
        b"x-ratelimit-remaining-tokens": b"0",
        b"x-ratelimit-reset-tokens": b"1m10s",
    }
    clock.now += 0.88
    assert dict(one.headers())[b"x-ratelimit-reset-requests"] == b"120ms"
    assert not account(clock).has_quotas and account(clock).headers() == []


def test_what_was_used_outlives_a_change_of_limits() -> None:
    clock = FakeClock()
    one = account(clock, requests_per_minute=10)
    for _ in range(10):
        one.begin_request()
    one.update(Key(name="alice", sha256=DIGEST, requests_per_minute=20))
    with pytest.raises(QuotaExceeded):
        one.begin_request()
    one.update(Key(name="alice", sha256=DIGEST))
    one.begin_request()


def test_a_model_has_quotas_of_its_own_within_those_of_the_key() -> None:
    clock = FakeClock()
    models = {"small": ModelQuotas(requests_per_minute=2), "large": ModelQuotas(tokens_per_minute=60)}
    key = Key(name="alice", sha256=DIGEST, requests_per_minute=4, models=models)
    whole = Account(key, FakeFrontend().metrics.key_counters("alice"), clock.time)
    caller = Caller(owner="alice", key=key, account=whole)
    assert caller.for_model(["other"]) is None
    small, large = (caller.for_model(["other", name]) for name in ("small", "large"))
    assert small is not None and large is not None and small.account is not None and large.account is not None
    small.account.begin_request()
    small.account.begin_request()
    with pytest.raises(QuotaExceeded, match="2 requests per minute of small"):
        small.account.begin_request()
    large.account.begin_request()
    large.account.wrote(60)
    with pytest.raises(QuotaExceeded, match="60 tokens per minute of large"):
        large.account.begin_request()
    told = dict(large.account.headers())
    assert told[b"x-ratelimit-remaining-requests"] == b"1" and told[b"x-ratelimit-limit-tokens"] == b"60"
    assert dict(small.account.headers())[b"x-ratelimit-limit-requests"] == b"2"
    whole.update(Key(name="alice", sha256=DIGEST, models={"large": ModelQuotas(tokens_per_minute=600)}))
    again = caller.for_model(["large"])
    assert again is not None and again.account is large.account
    assert dict(large.account.headers())[b"x-ratelimit-limit-tokens"] == b"600"
