"""How requests are written, and how answers are read, whatever packets they come in."""

from collections.abc import Iterator
from itertools import count

import msgspec
import pytest
from scripted_server import DONE, event, text, usage

from server.bench.answers import StreamedAnswer, WholeAnswer
from server.bench.endpoints import LoadRequest, request_body
from server.bench.serve_options import LoadOptions

IDS = LoadRequest([[101, 102, 103]], max_tokens=7)


def written(work: LoadRequest, **options: object) -> dict:
    return msgspec.json.decode(request_body(work, "m", LoadOptions(**options)))  # pyright: ignore[reportArgumentType]


def test_a_completion_is_asked_for_with_exact_tokens() -> None:
    assert written(IDS, ignore_eos=True, temperature=0.0, extra_body={"seed": 3}) == {
        "model": "m",
        "prompt": [101, 102, 103],
        "max_tokens": 7,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "temperature": 0.0,
        "seed": 3,
    }


def test_a_chat_gets_words_for_ids_and_messages_as_they_are() -> None:
    asked = written(IDS, endpoint="chat")
    assert [message["role"] for message in asked["messages"]] == ["user"]
    assert len(asked["messages"][0]["content"].split()) == 3
    messages: list[dict[str, object]] = [{"role": "system", "content": "Be brief."}]
    assert written(LoadRequest([], 5, messages), endpoint="chat")["messages"] == messages


def test_embeddings_are_asked_for_as_they_are_cheapest() -> None:
    asked = written(LoadRequest([[1, 2], [3]]), endpoint="embeddings", extra_body={"dimensions": 8})
    assert asked == {"model": "m", "input": [[1, 2], [3]], "encoding_format": "base64", "dimensions": 8}


def ticking() -> Iterator[float]:
    return map(float, count())


def read(packets: list[bytes]) -> tuple[StreamedAnswer, tuple[str | None, str]]:
    answer = StreamedAnswer(ticking().__next__)
    for packet in packets:
        answer.receive(packet)
    return answer, answer.finish(200)


STREAM = text("a") + text("b") + usage(11, 5) + DONE


@pytest.mark.parametrize("size", [1, 2, 7, 40, len(STREAM)])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_events_are_found_however_packets_cut_them(size: int, newline: bytes) -> None:
    stream = STREAM.replace(b"\n", newline)
    answer, ending = read([stream[i : i + size] for i in range(0, len(stream), size)])
    assert ending == (None, "")
    assert len(answer.times) == 2
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (11, 5)


def test_a_chunk_has_the_time_of_the_packet_that_ended_it() -> None:
    first, second = text("a"), text("b")
    answer, _ = read([first[:5], first[5:] + second[:5], second[5:], b": keep-alive\n\n", usage(1, 2) + DONE])
    assert answer.times == [1.0, 2.0]


def test_the_role_of_a_chat_is_not_its_first_token() -> None:
    def delta(**fields: object) -> bytes:
        return event({"choices": [{"index": 0, "delta": fields}]})

    answer, _ = read(
        [
            delta(role="assistant", content=""),
            delta(reasoning="well"),
            delta(content="yes"),
            delta(tool_calls=[{"index": 0}]),
            delta(),
            usage(1, 3) + DONE,
        ]
    )
    assert answer.times == [1.0, 2.0, 3.0]


def test_a_token_that_shows_no_text_yet_counts_but_the_end_does_not() -> None:
    def chunk(finish: str | None = None, **delta: object) -> bytes:
        return event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})

    packets = [
        chunk(role="assistant", content=""),
        chunk(content=""),
        chunk(content="é"),
        chunk("stop", content=""),
    ]
    answer, _ = read([*packets, usage(1, 3) + DONE])
    assert answer.times == [1.0, 2.0]


@pytest.mark.parametrize(
    ("packets", "kind", "detail"),
    [
        ([text("a"), usage(1, 1)], "the stream broke off", ""),
        ([text("a"), DONE], "the stream had no usage", ""),
        ([text("a"), event({"error": {"message": "out of luck"}})], "error in the stream", "out of luck"),
        ([b"data: {oops\n\n", usage(1, 1), DONE], "error in the stream", "not a chunk"),
    ],
)
def test_a_stream_that_did_not_end_well_has_failed(packets: list[bytes], kind: str, detail: str) -> None:
    _, (told, why) = read(packets)
    assert told == kind
    assert why.startswith(detail)


@pytest.mark.parametrize("kind", [StreamedAnswer, WholeAnswer])
def test_a_refusal_is_told_in_the_servers_words(kind: type[StreamedAnswer | WholeAnswer]) -> None:
    answer = kind()
    answer.receive(b'{"error": {"message": "too long", "code": 400}}')
    assert answer.finish(400) == ("HTTP 400", "too long")


def test_a_whole_answer_must_tell_its_usage() -> None:
    good, silent, foreign = WholeAnswer(), WholeAnswer(), WholeAnswer()
    good.receive(b'{"data": [{"embedding": "AAAA"}], "usage": {"prompt_')
    good.receive(b'tokens": 9}}')
    assert good.finish(200) == (None, "")
    assert good.usage is not None
    assert good.usage.prompt_tokens == 9
    silent.receive(b'{"data": []}')
    assert silent.finish(200) == ("the answer had no usage", "")
    foreign.receive(b"<html>")
    assert foreign.finish(200) == ("not an answer", "<html>")
