"""Conversations with media: their token ids, where the items are among them, and what users quote."""

from typing import Any

import msgspec
import pytest
import tokenizers
from fake_frontend import EOS, VOCAB_SIZE, byte_tokenizer
from media_files import media_files, noise
from model_facts import READY, changed
from pydantic import ValidationError
from tokenizers import models, normalizers

from models.media.item import Layout
from models.media.registry import make_processor
from server.errors import BadRequest
from server.media.media_parts import MediaPart
from server.media.prompt import Laid, MediaNeeded, Placed, cut_prompt
from server.model_facts import Facts, MediaFacts
from server.reading.other_apis import count_tokens
from server.reading.prompts import read_chat
from server.reading.reading_context import ReadingContext, ReadingOptions
from server.schemas.chat import ChatRequest
from server.text.chat_template import ChatTemplate
from server.text.tokenizer import Tokenizer

IMAGE = VOCAB_SIZE
FACTS = Facts(
    model_names=("m",),
    root="m",
    created=0,
    ready=changed(READY, vocab_size=VOCAB_SIZE + 1),
    max_model_len=1000,
    eos_token_ids=(),
    media=MediaFacts("<image>", "<image>", ("<image>",), False, {"image": 3}),
)
PARTS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' or 'image_url' in c %}<image>{% else %}{{ c.text }}{% endif %}"
    "{% endfor %}{% endif %}|{% endfor %}"
)
TEXTS = "{% for m in messages %}{{ m.content }}|{% endfor %}"


def image(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **more}


def laid(url: str, count: int, **layout: Any) -> tuple[MediaPart, Laid]:
    return MediaPart("image", url), Laid(url.encode(), Layout([IMAGE] * count, [(0, count)], **layout))


MEDIA = dict([laid("a", 3), laid("b", 2)])


def context(template: str = PARTS, **changes: Any) -> ReadingContext:
    tokenizer = byte_tokenizer("<image>", template=template)
    return ReadingContext(FACTS, tokenizer, ReadingOptions(), **{"media": MEDIA, **changes})


def chat(*content: Any, **fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": list(content)}], **fields})


def text(value: str) -> list[int]:
    return list(value.encode())


@pytest.mark.parametrize(("template", "between"), [(PARTS, ""), (TEXTS, "\n")])
def test_items_stand_where_their_parts_do(template: str, between: str) -> None:
    body = chat("x", image("a"), "y", image("b"), image("a"))
    prompt = read_chat(body, context(template)).prompt
    middle = text(between)
    start = text(f"x{between}")
    assert prompt.ids == [
        *start,
        *[IMAGE] * 3,
        *text(f"{between}y{between}"),
        *[IMAGE] * 2,
        *middle,
        *[IMAGE] * 3,
        *text("|"),
    ]
    assert [(one.hash, one.length, one.runs) for one in prompt.media] == [
        (b"a", 3, [(0, 3)]),
        (b"b", 2, [(0, 2)]),
        (b"a", 3, [(0, 3)]),
    ]
    assert all(prompt.tokens[one.at : one.at + one.length] == [IMAGE] * one.length for one in prompt.media)
    assert count_tokens(as_asked(body), context(template)) == len(prompt.ids)


class as_asked:
    def __init__(self, chat: ChatRequest) -> None:
        self.chat = chat


def test_text_around_an_item_is_tokenized_with_its_neighbours() -> None:
    media = dict([laid("a", 1, before="(", after=")")])
    assert read_chat(chat("x", image("a")), context(media=media)).prompt.ids == [
        *text("x("),
        IMAGE,
        *text(")|"),
    ]


def test_an_items_number_in_the_prompt_may_be_written_before_it() -> None:
    media = dict([laid("a", 1, before="<{ordinal}>"), laid("b", 2, before="<{ordinal}>")])
    body = chat(image("a"), image("b"), image("a"), "<{ordinal}>")
    read = read_chat(body, context(media=media)).prompt
    one = [IMAGE]
    assert read.ids == [*text("<0>"), *one, *text("<1>"), *one * 2, *text("<2>"), *one, *text("<{ordinal}>|")]


def test_what_users_quote_is_text() -> None:
    quoted = chat("say <image>!", image("a"), "<image>", tools=None)
    prompt = read_chat(quoted, context()).prompt
    assert prompt.ids == [*text("say <image>!"), *[IMAGE] * 3, *text("<image>|")]
    alone = read_chat(chat("<image>"), context())
    assert (alone.prompt.ids, alone.prompt.media, alone.end) == (text("<image>|"), [], "<image>|")
    special = byte_tokenizer("<image>", template=PARTS, special_in_messages=True)
    kept = read_chat(chat("<image><eos>"), ReadingContext(FACTS, special, ReadingOptions()))
    assert kept.prompt.ids == [*text("<image>"), EOS, *text("|")]


def test_no_space_is_written_where_a_quotation_is_divided() -> None:
    vocabulary = {name: id for id, name in enumerate(["\n", *"▁<image>b|"])}
    model = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])  # pyright: ignore[reportAttributeAccessIssue]
    model.add_special_tokens([tokenizers.AddedToken("<image>", normalized=False)])
    tokenizer = Tokenizer.__new__(Tokenizer)
    tokenizer.chat = ChatTemplate({"default": TEXTS}, {})
    tokenizer._model, tokenizer._prefix = model, []  # pyright: ignore[reportPrivateUsage]
    tokenizer.longest_token, tokenizer.added_tokens = 7, {"<image>": model.token_to_id("<image>")}  # pyright: ignore[reportAttributeAccessIssue]
    of_quoted = read_chat(chat("a<image>b"), ReadingContext(FACTS, tokenizer, ReadingOptions())).prompt
    assert [model.id_to_token(id) for id in of_quoted.tokens] == list("▁a<image>b|")


def test_items_that_are_not_prepared_are_asked_for() -> None:
    with pytest.raises(MediaNeeded) as needed:
        read_chat(chat(image("a"), image("c", detail="low"), cache_salt="s"), context())
    assert needed.value.parts == [MediaPart("image", "a"), MediaPart("image", "c", low_detail=True)]
    assert needed.value.salt == "s"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([image("a")] * 4, "At most 3 image(s) may be provided in one prompt, and these messages have 4."),
        (
            [{"type": "video_url", "video_url": "data:"}],
            "parts with videos are not supported by this model, only text and images are",
        ),
        ([{"type": "image_url"}], "needs a URL in `image_url`, or the `uuid` of an earlier one"),
        ([image("a", uuid=5)], "The `uuid` of a content part is a string"),
        ([{"type": "image_url", "image_url": {"url": "a", "detail": "tiny"}}], "one of auto, low, high"),
        (
            ["two", image("a")],
            "places for 0; it may leave out those of some roles, or in some places. messages[0] (user): 1",
        ),
    ],
)
def test_what_is_refused(content: list[Any], message: str) -> None:
    template = "{{ messages[0].content[0].text }}" if content[0] == "two" else PARTS
    with pytest.raises((BadRequest, ValidationError)) as refused:
        read_chat(chat(*content), context(template))
    assert message in getattr(refused.value, "message", str(refused.value))


def test_a_model_for_text_takes_text_only() -> None:
    without = ReadingContext(
        msgspec.structs.replace(FACTS, media=None), context().tokenizer, ReadingOptions()
    )
    with pytest.raises(BadRequest, match="images are not supported by this model, only text is"):
        read_chat(chat(image("a")), without)


def test_no_item_is_cut() -> None:
    body = chat("xx", image("a"), "yy", image("b"))
    whole = read_chat(body, context()).prompt
    cut = read_chat(chat("xx", image("a"), "yy", image("b"), truncate_prompt_tokens=5), context()).prompt
    assert cut.ids == whole.tokens[-5:] and cut.media == [Placed(b"b", 2, 2, [(0, 2)])]
    with pytest.raises(BadRequest, match="=7 would cut a media item of 3 tokens in two"):
        read_chat(chat("xx", image("a"), "yy", image("b"), truncate_prompt_tokens=7), context())
    ids, media = cut_prompt(whole.tokens, whole.media, 6, left=False)
    assert ids == whole.tokens[:6] and [one.at for one in media] == [2]


def test_tokens_that_the_model_does_not_have_are_not_sent() -> None:
    small = msgspec.structs.replace(FACTS, ready=changed(READY, vocab_size=VOCAB_SIZE))
    found = read_chat(chat(image("b")), ReadingContext(small, context().tokenizer, ReadingOptions(), MEDIA))
    assert found.prompt.ids == [0, 0, *text("|")]


def test_a_final_message_is_continued_and_repeated() -> None:
    messages = [
        {"role": "user", "content": [image("a"), {"type": "text", "text": "what"}]},
        {"role": "assistant", "content": "it is <image>"},
    ]
    body = ChatRequest.model_validate({"messages": messages, "continue_final_message": True, "echo": True})
    found = read_chat(body, context())
    assert found.prompt.ids == [*[IMAGE] * 3, *text("what|it is <image>")]
    assert found.last.content == "it is <image>"


def test_layouts_with_texts_give_the_tokens_of_their_whole_text() -> None:
    settings = {"size": {"longest_edge": 60}, "max_image_size": {"longest_edge": 28}}
    config = {"image_token_id": IMAGE, "vision_config": {"image_size": 28, "patch_size": 14}}
    processor = make_processor(media_files("Idefics3ForConditionalGeneration", config, settings))
    fake = "<fake_token_around_image>"
    tokenizer = byte_tokenizer("<image>", fake, "<global-img>", "<row_1_col_1>", template=PARTS)
    layout = processor.layout(processor.prepare(noise(60, 30)))
    placed = Laid(b"a", layout.spelled(lambda text: tokenizer.encode(text, False)))
    facts = msgspec.structs.replace(FACTS, ready=changed(READY, vocab_size=VOCAB_SIZE + 9))
    media = {MediaPart("image", "a"): placed}
    body = chat("x", image("a"), "y", image("a"))
    prompt = read_chat(body, ReadingContext(facts, tokenizer, ReadingOptions(), media=media)).prompt
    rows = [f"{fake}<row_{row}_col_{column}><image>" for row in (1, 2) for column in (1, 2, 3)]
    rows[3] = f"\n{rows[3]}"
    whole = f"{''.join(rows)}\n\n{fake}<global-img><image>{fake}"
    assert prompt.ids == tokenizer.encode(f"x{whole}y{whole}|", False)
    found = [one.at + first for one in prompt.media for first, _ in one.runs]
    assert found == [place for place, token in enumerate(prompt.ids) if token == IMAGE]


def test_a_conversation_with_minicpmv_is_the_text_of_its_authors() -> None:
    config = {"version": 2.6, "query_num": 2, "vision_config": {}}
    processor = make_processor(media_files("MiniCPMV", config, {"scale_resolution": 56}))
    place, marks = processor.placeholder, ("<image>", "</image>")
    own = ("<unk>", *marks, "<slice>", "</slice>", "<image_id>", "</image_id>")
    tokenizer = byte_tokenizer(*own, template=TEXTS)
    items = {"a": processor.prepare(noise(40, 40)), "b": processor.prepare(noise(60, 100))}
    media = {
        MediaPart("image", name): Laid(
            name.encode(), processor.layout(item).spelled(lambda text: tokenizer.encode(text, False))
        )
        for name, item in items.items()
    }
    ready = changed(READY, vocab_size=VOCAB_SIZE + 9)
    facts = msgspec.structs.replace(
        FACTS, ready=ready, media=MediaFacts(place, place, marks, False, {"image": 3})
    )
    body = chat("x", image("a"), f"say {place}!", image("b"))
    prompt = read_chat(body, ReadingContext(facts, tokenizer, ReadingOptions(), media=media)).prompt
    whole, one = "<image><unk><unk></image>", "<slice><unk><unk></slice>"
    assert prompt.ids == [
        *tokenizer.encode(f"x\n<image_id>0</image_id>{whole}\n", False),
        *text(f"say {place}!\n"),
        *tokenizer.encode(f"<image_id>1</image_id>{whole}{one}\n{one}|", False),
    ]
    unknown = tokenizer.encode("<unk>", False)[0]
    found = [one.at + first + n for one in prompt.media for first, count in one.runs for n in range(count)]
    assert found == [at for at, token in enumerate(prompt.ids) if token == unknown]
