"""Pictures that are pooled: what the engine gets of each endpoint's own form, and what is refused."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fake_api import make_app, make_client, post, refusal
from fake_frontend import BOS, FakeFrontend, vectors
from media_files import media_files
from media_frontend import PAD, PICTURE, SMALL, data_url, seeing
from msgspec.structs import replace

from models.pooling.config import PoolingConfig
from server.media.media_reader import MediaReader
from server.options.media_options import MediaOptions

EMBED = "/v1/embeddings"
SEEN = [PAD + 1, *[PAD] * 4, PAD + 2]
"""The tokens of a picture in a conversation."""


pytestmark = [pytest.mark.usefixtures("embedder"), pytest.mark.slow(2)]


@pytest.fixture
async def reader(frontend: FakeFrontend) -> AsyncIterator[MediaReader]:
    async with seeing(frontend) as reader:
        yield reader


def image(file: bytes = PICTURE) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(file)}}


def user(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(content)}]


def sent(frontend: FakeFrontend) -> list[tuple[list[int], list[tuple[bytes, int]]]]:
    """The tokens of each item of the last call, and the hashes and places of its media."""
    media = [[(item.hash, item.at) for item in each] for each in frontend.pooled_media]
    return list(zip(frontend.pooled_tokens(), media, strict=True))


async def test_conversations_with_pictures_are_embedded(
    client: httpx.AsyncClient, frontend: FakeFrontend, reader: MediaReader
) -> None:
    one, other = user("see ", image()), user("text only")
    await post(client, EMBED, messages=[one, other, user(image(SMALL), image())])
    (first, media), (text, none), (both, two) = sent(frontend)
    assert first == [*b"<user>see ", *SEEN, *b"|"] and [at for _, at in media] == [11]
    assert (text, none) == ([*b"<user>text only|"], [])
    assert two[1][0] == media[0][0] and [both[at - 1] for _, at in two] == [PAD + 1, PAD + 1]
    [item] = frontend.pooled_media[0]
    assert (item.length, item.runs, len(item.pixels)) == (4, ((0, 4),), 56 * 56 * 3)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/pooling", {"task": "embed", "messages": user(image())}),
        (EMBED, {"input": [data_url(PICTURE)], "modality": "image"}),
        (EMBED, {"input": data_url(SMALL), "modality": "image"}),
        ("/embeddings_image", {"input": [data_url(PICTURE)]}),
        ("/v2/embed", {"images": [data_url(PICTURE)], "input_type": "image"}),
        ("/v2/embed", {"inputs": [{"content": [image()]}]}),
    ],
)
async def test_every_form_gives_the_same_prompt(
    client: httpx.AsyncClient, frontend: FakeFrontend, reader: MediaReader, path: str, body: dict[str, Any]
) -> None:
    answer = await post(client, path, **body)
    [(tokens, [(_, at)])] = sent(frontend)
    assert at == 7 and tokens[6:8] == [PAD + 1, PAD]
    assert len(answer["embeddings"]["float"] if path == "/v2/embed" else answer["data"]) == 1


async def test_usage_counts_the_tokens_of_pictures(frontend: FakeFrontend, reader: MediaReader) -> None:
    async with make_client(make_app(frontend, enable_prompt_tokens_details=True)) as client:
        usage = (await post(client, EMBED, messages=user(image(), image())))["usage"]
    assert usage["prompt_tokens_details"]["multimodal_tokens"] == 8


async def test_prompts_are_cut_between_pictures_only(
    client: httpx.AsyncClient, frontend: FakeFrontend, reader: MediaReader
) -> None:
    await post(client, EMBED, messages=user(image(), "and more"), truncate_prompt_tokens=12)
    [(tokens, media)] = sent(frontend)
    assert len(tokens) == 12 and len(media) == 1
    error = await refusal(client, EMBED, messages=user(image()), truncate_prompt_tokens=9)
    assert error["message"] == "truncate_prompt_tokens=9 would cut a media item of 4 tokens in two."


async def test_queries_are_compared_with_pages(
    client: httpx.AsyncClient, frontend: FakeFrontend, reader: MediaReader
) -> None:
    page = {"content": [image()]}
    frontend.facts = replace(frontend.facts, score_type="bi-encoder")
    answer = await post(client, "/rerank", query="a", documents=[page, {"content": [image(SMALL)]}])
    (query, none), (first, [_]), (_, [_]) = sent(frontend)
    assert (query, none) == ([*b"<user>a|"], [])  # written as the pages are
    assert first == [*b"<user>", *SEEN, *b"|"]
    assert {one["document"]["text"] for one in answer["results"]} == {None}
    await post(client, "/score", text_1=page, text_2=["b"])
    assert [len(media) for _, media in sent(frontend)] == [1, 0]


PAIRS = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'image' %}<|image_pad|>{% else %}{{ c.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)


async def test_rerankers_read_a_query_together_with_a_page(
    client: httpx.AsyncClient, frontend: FakeFrontend, reader: MediaReader
) -> None:
    media = frontend.facts.media
    frontend.serve("classify", score_type="cross-encoder", pooling=PoolingConfig(num_labels=1))
    frontend.facts = replace(frontend.facts, media=media)
    frontend.answer_of = lambda item: vectors([0.5])
    error = await refusal(client, "/score", queries="a", documents=[{"content": [image()]}])
    assert "no template by which it scores pictures" in error["message"]
    frontend.facts = replace(frontend.facts, score_template=PAIRS)
    await post(client, "/score", queries="<|image_pad|>?", documents=[{"content": [image()]}])
    [(tokens, [(_, at)])] = sent(frontend)
    assert tokens == [*b"[query]<|image_pad|>?[document]", *[PAD] * 4] and at == len(tokens) - 4


CLIP = media_files(
    "CLIPModel",
    {
        "vision_config": {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14},
        "text_config": {},
    },
    {"image_processor_type": "CLIPImageProcessor", "size": 28, "crop_size": 28},
)


async def test_models_that_compare_have_a_vector_for_a_text_or_for_a_picture(
    client: httpx.AsyncClient, frontend: FakeFrontend
) -> None:
    async with seeing(frontend):
        given = CLIP, MediaOptions(), 1 << 30, frontend.tokenizer, frontend.metrics.of_media()
        alone = MediaReader(*given, frontend.helpers)
        frontend.media, before = alone, frontend.media
        frontend.facts = replace(frontend.facts, media=alone.facts)
        try:
            await post(client, EMBED, messages=[user(image()), user("a text")])
            assert [(tokens, [at for _, at in media]) for tokens, media in sent(frontend)] == [
                ([0], [0]),
                ([BOS, *b"a text"], []),
            ]
            error = await refusal(client, EMBED, messages=user(image(), "and this"))
            assert "a vector for a text or for a picture" in error["message"]
        finally:
            frontend.media = before
