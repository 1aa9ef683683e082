"""Media in a scheduler: what a step encodes and forgets, and where rows end."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable

import pytest
from fake_media import picture, seen_tokens
from fake_worker import Landed, facts, reference, vectors_of
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from scheduler_bench import Bench, add, config, pool

from engine_core.features.media import media_items as media
from engine_core.prompt_media import Media
from engine_core.protocol import AddRequest, Failed
from worker.buffers import Buffer
from worker.protocol import Pooling, Sampling, StepBounds, StepInput

CAT, DOG, OWL = b"cat", b"dog", b"owl"


def asks(id: int, *hashes: bytes, length: int = 4, text: int = 1, **changes: object) -> AddRequest:
    """A request with pictures, a token of text before each of them, and some at the end."""
    items = tuple(picture(each, 1 + at * (length + 1), length) for at, each in enumerate(hashes))
    tokens = [7] * (len(hashes) * (length + 1)) + [9] * text
    return add(id, tokens, media=items, **changes)  # pyright: ignore[reportArgumentType]


def bench(
    most: int = 64,
    *,
    kept: int = 0,
    whole: bool = False,
    depth: int = 0,
    size: int = 64,
    layers: int = 0,
    **options: object,
) -> Bench:
    limits = facts(most_embeddings=most, kept_embeddings=kept, whole_media=whole, max_num_batched_tokens=size)
    limits = replace(limits, media_width=1, tower_layers=layers)
    return Bench(config(**options), limits, depth=depth)


def right(made: Bench, *requests: AddRequest) -> bool:
    return all(
        made.text(each.id) == reference(seen_tokens(each), each.params.max_tokens)
        for each in requests
        if isinstance(each.params, Sampling)
    )


def steps(made: Bench) -> list[StepInput]:
    """Run all; returns the steps."""
    seen: list[StepInput] = []
    launch = made.worker.launch

    def noted(step: StepInput, following: Callable[[], StepBounds] | None = None) -> Landed:
        seen.append(step)
        return launch(step, following)

    made.worker.launch = noted
    made.run()
    return seen


def test_an_item_is_encoded_once_for_all_choices_and_for_later_requests() -> None:
    made = bench()
    choices = [asks(id, CAT, CAT, seed=id) for id in range(4)]
    made.add_all(choices)
    first, *others = steps(made)
    assert [(each.number, each.embeddings) for each in first.encode] == [(1, 4)]
    assert not any(step.encode or step.forget for step in others)
    assert {place.number for new in first.new for place in new.media} == {1}
    made.serve(asks(9, DOG, CAT))
    stats = made.scheduler.stats(made.now)
    assert (stats.media_encoded, stats.media_reused, stats.media_embeddings) == (2, 7, 8)
    made.media.forget_prefixes()  # another encoder may come
    made.serve(asks(10, CAT))
    assert (made.media.encoded, made.media.embeddings) == (3, 4)
    assert right(made, *choices)


def test_items_lie_in_the_prompt_of_their_sequence_under_numbers() -> None:
    made = bench()
    made.add(asks(1, CAT, DOG, CAT))
    [new] = steps(made)[0].new
    assert [(place.number, place.at, place.length) for place in new.media] == [
        (1, 1, 4), (2, 6, 4), (1, 11, 4),
    ]  # fmt: skip


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_room_for_one_item_is_enough_and_what_was_read_longest_ago_goes(depth: int) -> None:
    made = bench(most=4, depth=depth)
    requests = [asks(1, CAT, DOG), asks(2, OWL)]
    made.add_all(requests)
    seen = steps(made)
    assert [[each.number for each in step.encode] for step in seen[:3]] == [[1], [2], [3]]
    assert [step.forget for step in seen[:3]] == [[], [1], [2]]
    assert [row.count for row in seen[0].seqs] == [6, 1], "rows end where the next item begins"
    assert right(made, *requests)
    roomy = bench(most=8)
    for id, hash in enumerate((CAT, DOG, CAT, OWL, CAT)):
        roomy.serve(asks(id, hash, salt=str(id)))
    assert roomy.media.encoded == 3


def test_pages_that_are_kept_are_not_encoded_again_whatever_query_comes() -> None:
    pages = [b"%d" % page for page in range(8)]
    for kept, encoded in ((28, 8), (24, 16)):  # with room for all pages, and for all but one
        made = bench(most=4, kept=kept)
        for query in (1, 2):
            requests = [asks(10 * query + at, page, text=query) for at, page in enumerate(pages)]
            made.add_all(requests)
            made.run()
            assert right(made, *requests)
        assert made.media.encoded == encoded
        assert made.scheduler.stats(made.now).media_embeddings == 4 + kept
    made.add(asks(1, CAT, length=5))
    [failed] = made.outputs[0, 1]
    assert isinstance(failed, Failed) and "must have from 1 to 4" in failed.message, "no item may be larger"


def test_a_step_encodes_no_more_than_its_budget_but_one_item_at_least() -> None:
    made = bench(max_num_encoder_input_tokens=6)
    made.add(asks(1, CAT, DOG, OWL))
    assert [len(step.encode) for step in steps(made)][:3] == [1, 1, 1]
    made = bench(max_num_encoder_input_tokens=8)
    made.add(asks(1, CAT, DOG, OWL))
    assert [len(step.encode) for step in steps(made)][:2] == [2, 1]


def test_what_a_cached_prefix_covers_is_not_encoded_again() -> None:
    made = bench(most=5)
    made.serve(asks(1, CAT, length=5, text=10))
    made.serve(asks(2, DOG, length=5, text=10))  # forgets the cat
    again = asks(3, CAT, length=5, text=11)
    made.serve(again)
    assert made.cached(3) == 16 and made.media.encoded == 2
    inside = replace(asks(4, CAT, length=5, text=0), tokens=[7] * 6 + [3])
    made.serve(inside)
    assert made.cached(4) == 4 and made.media.encoded == 3
    assert right(made, again, inside)


@pytest.mark.parametrize("options", [{"whole": True}, {"disable_chunked_mm_input": True}])
def test_an_item_that_may_not_be_cut_waits_for_a_step_that_has_room(options: dict[str, bool]) -> None:
    made = bench(size=6, long_prefill_token_threshold=2, **options)
    made.add_all([add(8, [1], 20), add(9, [2], 20)])
    made.steps(3)
    request = asks(1, CAT, DOG, length=5)
    made.add(request)
    made.add_all([add(id, [3], 20) for id in (10, 11)])
    made.run()  # the worker without tensors checks that none is cut
    assert right(made, request)
    made.add(asks(2, CAT, length=7))
    [failed] = made.outputs[0, 2]
    assert isinstance(failed, Failed) and failed.code == 400
    assert "an item takes 7 tokens" in failed.message and "--max-num-batched-tokens (now 6)" in failed.message


def test_while_somebody_reads_a_stream_one_item_is_encoded_in_a_step() -> None:
    made = bench(max_token_gap_ms=1.0)
    made.add(add(1, [1], 40, streams=True))
    made.steps(3)
    made.add(asks(2, CAT, DOG, OWL, length=9))
    assert max(len(step.encode) for step in steps(made)) == 1


@pytest.mark.parametrize("whole", [True, False])
def test_while_somebody_reads_a_stream_layers_of_a_tower_are_divided_among_steps(whole: bool) -> None:
    made = bench(max_token_gap_ms=1.0, layers=5, whole=whole)
    made.add(add(1, [1], 60, streams=True))
    made.steps(3)
    requests = [asks(2, CAT, DOG, length=9), asks(3, OWL, length=9), asks(4, CAT, length=9)]
    made.add_all(requests)
    seen = steps(made)
    layers = Counter[int]()
    for step in seen:
        layers.update(step.partly)
        assert len(step.encode) <= 1 and len(step.partly) <= 1
        assert step.seqs, "the stream goes on"
    assert max(layers.values()) == 5 and len(seen) > 12
    assert max(layers for step in seen for layers in step.partly.values()) < 5
    assert made.media.encoded == 3 and right(made, *requests)


def test_an_item_that_nobody_waits_for_any_more_gives_way() -> None:
    made = bench(max_token_gap_ms=1.0, layers=50, most=9)
    made.add(add(1, [1], 100, streams=True))
    made.steps(3)
    made.add(asks(2, CAT, length=9))
    made.steps(4)
    made.abort((0, 2))
    made.add(other := asks(3, DOG, length=9))
    assert [1] in [step.forget for step in steps(made)[:2]]
    assert right(made, other) and made.media.encoded == 2


def test_embeddings_that_clients_bring_take_no_time_of_a_tower() -> None:
    made = bench(max_num_encoder_input_tokens=4)
    request = asks(2, CAT, DOG, OWL, length=9)
    shape = (9, 1, 4)
    pixels = [bytes(media.pixels.data)[:1] * 36 for media in request.media]
    brought = tuple(
        replace(media, kind="encoded", shape=shape, pixels=Buffer(data))
        for media, data in zip(request.media, pixels, strict=True)
    )
    made.add(replace(request, media=brought))
    assert max(len(step.encode) for step in steps(made)) == 3
    assert made.media.encoded == 0 and made.media.embeddings == 27
    made.add(replace(request, id=3, media=(replace(brought[0], shape=(18, 1, 2)),)))
    [failed] = made.outputs[0, 3]
    assert isinstance(failed, Failed) and "must be 1 numbers each" in failed.message


def test_the_bytes_of_live_requests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "_LEAST_BYTES", 6)
    made = bench(mm_processor_cache_gb=0)
    made.add_all([asks(1, CAT, DOG), asks(2, CAT, CAT)])
    assert made.scheduler.stats(made.now).media_bytes == 6
    made.add_all([asks(3, CAT, OWL), asks(4, DOG)])
    [failed] = made.outputs[0, 3]
    assert isinstance(failed, Failed) and (failed.code, "too many media" in failed.message) == (503, True)
    made.add(replace(asks(5, OWL), tokens=[7] * 6 + [1], prompt_len=6))  # an engine that ended had begun it
    assert made.scheduler.stats(made.now).media_bytes == 9
    made.run()
    assert made.scheduler.stats(made.now).media_bytes == 0
    large = asks(6)
    made.add(replace(large, media=(picture(b"large", 0, 1, pixels=bytes(60)),)))
    assert (0, 6) in made.scheduler.live, "one alone is always taken"


def test_bytes_are_freed_when_their_requests_end() -> None:
    made = bench(depth=2)
    alive: list[weakref.ref[memoryview]] = []
    for id in range(4):
        pixels = memoryview(bytes([id] * 3))
        alive.append(weakref.ref(pixels))
        made.add(replace(asks(id), media=(picture(b"%d" % id, 0, 1, pixels=pixels),)))
        del pixels
    gc.disable()  # nothing here waits for the search for garbage
    try:
        made.abort((0, 2))
        made.run()
        assert not any(each() is not None for each in alive)
    finally:
        gc.enable()


SMALL = st.integers(-2, 14)
ITEMS = st.builds(
    Media,
    hash=st.sampled_from([CAT, DOG]),
    kind=st.just("image"),
    at=SMALL,
    length=SMALL,
    runs=st.lists(st.tuples(SMALL, SMALL), max_size=3).map(tuple) | SMALL.map(lambda count: ((0, count),)),
    shape=st.just((1, 2, 3)) | st.tuples(SMALL, st.integers(-(2**63), 2**63), SMALL),
    grid=st.just((1, 1, 1)) | st.tuples(SMALL, SMALL, SMALL),
    pixels=st.binary(max_size=9).map(Buffer) | st.just(Buffer(bytes(6))),
)


@settings(deadline=None, max_examples=300)
@given(st.lists(ITEMS, max_size=3))
def test_whatever_media_a_request_has_no_step_fails(items: list[Media]) -> None:
    made, beside = bench(most=6), asks(2, OWL)
    asked = add(1, [3] * 12, 3, media=tuple(items))
    made.add_all([asked, beside])
    made.run()
    assert right(made, beside)
    last = made.outputs[0, 1][-1]
    assert last.code == 400 if isinstance(last, Failed) else right(made, asked)


def test_equal_items_share_their_bytes_and_different_ones_may_not_have_one_hash() -> None:
    made = bench()
    made.add_all([asks(1, CAT), asks(2, CAT)])
    one, two = (made.scheduler.live[0, id].request.media[0] for id in (1, 2))
    assert one.pixels is two.pixels
    twice = replace(asks(4, DOG, DOG), media=(picture(DOG, 1, 4), picture(DOG, 6, 3)))
    made.add_all([asks(3, CAT, length=5), twice])
    made.run()
    made.add(asks(5, CAT, length=5))  # its embeddings are still held
    for id in (3, 4, 5):
        [failed] = made.outputs[0, id]
        assert isinstance(failed, Failed) and (failed.code, "same hash" in failed.message) == (400, True)


def test_a_prompt_with_another_picture_does_not_match() -> None:
    made = bench()
    made.serve(asks(1, CAT, length=8, text=4))
    for id, (request, cached) in enumerate(
        ((asks(0, CAT, length=8, text=4), 12), (asks(0, DOG, length=8, text=4), 0), (add(0, [7] * 9), 0)), 2
    ):
        made.serve(replace(request, id=id))
        assert made.cached(id) == cached


def test_texts_computed_whole_have_all_their_items_in_one_step() -> None:
    limits = facts(causal=False, most_embeddings=8, tasks=("embed",), max_model_len=32)
    made = Bench(config(max_num_encoder_input_tokens=1), limits)
    texts = [as_text(asks(0, CAT, DOG)), as_text(asks(1, OWL))]
    made.add_all(texts)
    made.run()
    for text in texts:
        assert isinstance(text.params, Pooling)
        assert made.pooled(text.id).vectors == vectors_of(seen_tokens(text), text.params)
    assert made.media.encoded == 3
    made.add(as_text(asks(7, CAT, DOG, OWL)))
    [failed] = made.outputs[0, 7]
    assert isinstance(failed, Failed) and "12 embeddings" in failed.message


def as_text(request: AddRequest) -> AddRequest:
    """The same prompt, to be pooled."""
    return pool(request.id, request.tokens, media=request.media)
