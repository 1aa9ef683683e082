import pytest
from fake_media import picture
from fake_worker import facts
from msgspec.structs import replace
from scheduler_bench import config

from engine_core.features.installed import make_scheduler
from engine_core.prompt_media import Media
from engine_core.protocol import AddRequest
from engine_core.scheduling.request_checks import refusal
from worker.protocol import Pooling, Sampling
from worker.worker_facts import WorkerFacts

CONFIG = config()
LIMITS = facts(block_size=4, num_blocks=8, max_model_len=64)


def refused(tokens: list[int], **params: object) -> str | None:
    sampling = Sampling(**{"max_tokens": 4, **params})  # pyright: ignore[reportArgumentType]
    return refusal(AddRequest(id=1, tokens=tokens, params=sampling), LIMITS, vocab_size=50)


def test_what_can_run_is_not_refused() -> None:
    assert refused([0, 49]) is None
    assert refused([1] * 29, max_tokens=4) is None
    extremes = {
        "temperature": 0.0,
        "top_p": 1e-9,
        "top_k": 2**31 - 1,
        "min_p": 1.0,
        "min_tokens": 4,
        "logprobs": -1,
        "prompt_logprobs": -1,
        "logit_bias": {0: -100.0, 49: 100.0},
        "stop_token_ids": (0, 49),
        "allowed_token_ids": (0,),
        "bad_words": ((1, 2),),
    }
    assert refused([1], **extremes) is None


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([], "the prompt is empty"),
        ([1] * 64, "has 64 tokens, and the model's 64"),
        ([-1], "outside of the vocabulary, which is 0 to 49"),
        ([1, 50], "outside of the vocabulary, which is 0 to 49"),
        ([1] * 30, "need 9 blocks of the KV cache, and it has 8"),
    ],
)
def test_prompts_that_cannot_run(tokens: list[int], words: str) -> None:
    reason = refused(tokens)
    assert reason is not None and words in reason


@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": {50: 1.0}},
        {"stop_token_ids": (50,)},
        {"allowed_token_ids": (-1,)},
        {"bad_words": ((1, 50),)},
    ],
)
def test_params_that_would_hurt_a_step_are_named(params: dict[str, object]) -> None:
    reason = refused([1, 2], **params)
    (name,) = params
    assert reason is not None and (name in reason)


def refused_pooling(tokens: list[int], task: str = "token_embed", **params: object) -> str | None:
    pooling = Pooling(task=task, **params)  # pyright: ignore[reportArgumentType]
    return refusal(AddRequest(id=1, tokens=tokens, params=pooling), LIMITS, vocab_size=50)


def test_what_can_be_pooled_is_not_refused() -> None:
    assert refused_pooling([1] * 32) is None  # all 8 blocks: no token follows
    assert refused_pooling([1, 2], dimensions=2, second_at=2, skip=2, use_activation=False) is None
    assert refused_pooling([1, 2], late_query="q") is None
    assert refused_pooling([1, 2], late_document="q") is None
    whole = facts(max_model_len=64, tasks=("embed",), causal=False)
    assert (
        refusal(AddRequest(id=1, tokens=[1] * 64, params=Pooling(task="embed")), whole, vocab_size=50) is None
    )


@pytest.mark.parametrize(
    ("tokens", "params", "words"),
    [
        ([], {}, "the prompt is empty"),
        ([1] * 65, {}, "65 tokens, and at most 64 fit"),
        ([50], {}, "outside of the vocabulary, which is 0 to 49"),
        ([1] * 33, {}, "need 9 blocks of the KV cache, and it has 8"),
        ([1], {"task": "classify"}, "no task classify; it has generate, embed, token_embed"),
        ([1], {"outputs": ("sparse_embed",)}, "no vectors of the task sparse_embed"),
    ],
)
def test_what_cannot_be_pooled_says_why(tokens: list[int], params: dict[str, object], words: str) -> None:
    reason = refused_pooling(tokens, **params)  # pyright: ignore[reportArgumentType]
    assert reason is not None and words in reason


def test_a_pooling_model_does_not_generate() -> None:
    classifier = facts(tasks=("classify",))
    text = AddRequest(id=1, tokens=[1], params=Sampling(max_tokens=1))
    assert "does not generate; its tasks are classify" in str(refusal(text, classifier, vocab_size=50))


@pytest.mark.parametrize(
    ("tokens", "prompt_len", "words"),
    [
        (5, 5, "5 of 5 tokens cannot be the prompt"),
        (5, -1, "-1 of 5 tokens cannot be the prompt"),
        (8, 4, "4 of 8 tokens cannot be the prompt"),
    ],
)
def test_answers_that_cannot_go_on(tokens: int, prompt_len: int, words: str) -> None:
    goes_on = AddRequest(id=1, tokens=[1] * tokens, params=Sampling(max_tokens=4), prompt_len=prompt_len)
    assert words in (refusal(goes_on, LIMITS, vocab_size=50) or "")


def test_an_answer_that_goes_on_needs_as_much_as_the_whole() -> None:
    goes_on = AddRequest(id=1, tokens=[1] * 32, params=Sampling(max_tokens=5), prompt_len=28)
    assert refusal(goes_on, LIMITS, vocab_size=50) is None
    text = AddRequest(id=1, tokens=[1] * 8, params=Pooling(task="embed"), prompt_len=4)
    assert "prompt_len must be 0" in (refusal(text, LIMITS, vocab_size=50) or "")


PICTURES = facts(block_size=4, num_blocks=8, max_model_len=64, most_embeddings=6)


def media_refusal(*media: Media, facts: WorkerFacts = PICTURES, **more: int) -> str:
    request = AddRequest(id=1, tokens=[1] * 12, params=Sampling(max_tokens=8), media=media, **more)  # pyright: ignore[reportArgumentType]
    hooks = make_scheduler(CONFIG, facts, vocab_size=50).hooks.at_arrival(request)
    reasons = [refuse(request) for refuse in hooks.refuse]
    return next(filter(None, [refusal(request, facts, vocab_size=50), *reasons]), "")


ITEM = picture(b"a", 2, 4)


def test_media_that_fit_are_taken() -> None:
    assert not media_refusal()
    assert not media_refusal(ITEM, picture(b"b", 6, 6), prompt_len=0)
    assert not media_refusal(picture(b"a", 0, 12, ((0, 1), (1, 2), (9, 3))))
    assert not media_refusal(facts=LIMITS)


@pytest.mark.parametrize(
    ("media", "words"),
    [
        ([picture(b"a", 9, 4)], "within the prompt's 12 tokens"),
        ([picture(b"a", -1, 4)], "within the prompt's 12 tokens"),
        ([picture(b"a", 2, 0)], "within the prompt's 12 tokens"),
        ([ITEM, picture(b"b", 5, 2)], "must not overlap"),
        ([picture(b"b", 6, 2), ITEM], "in order"),
        ([picture(b"a", 2, 4, ((2, 3),))], "within its 4 tokens, in order"),
        ([picture(b"a", 2, 4, ((2, 1), (1, 1)))], "within its 4 tokens, in order"),
        ([picture(b"a", 2, 4, ((0, 2), (1, 1)))], "within its 4 tokens, in order"),
        ([picture(b"a", 2, 4, ((-1, 1),))], "within its 4 tokens, in order"),
        ([picture(b"a", 2, 4, ((1, 0),))], "within its 4 tokens, in order"),
        ([replace(ITEM, runs=())], "has 0 embeddings, and must have from 1 to 6"),
        ([picture(b"a", 2, 7)], "has 7 embeddings, and must have from 1 to 6"),
        ([replace(ITEM, shape=(1, 2, 3))], "and 3 bytes do not fit"),
        ([replace(ITEM, shape=(-1, -1, 3))], "do not fit"),
        ([replace(ITEM, grid=(1, 0, 1))], "do not fit"),
        ([replace(ITEM, grid=(1, 2, 2))], "do not fit"),
        ([replace(ITEM, interval=float("nan"))], "cannot lie nan apart"),
        ([replace(ITEM, interval=1e9)], "cannot lie 1000000000.0 apart"),
    ],
)
def test_media_that_contradict_their_prompt_are_refused(media: list[Media], words: str) -> None:
    assert words in media_refusal(*media)


def test_media_are_refused_where_nothing_sees_them() -> None:
    assert "served for text only" in media_refusal(ITEM, facts=LIMITS)
    assert "within the prompt's 5 tokens" in media_refusal(ITEM, prompt_len=5)
