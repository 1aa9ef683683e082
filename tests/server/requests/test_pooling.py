"""Pooling parameters, prompts, and tokens of texts: cut, lower-cased, with and without special tokens."""

from typing import Any

import msgspec
import pytest
import zoo
from fake_frontend import vectors
from pooling_facts import bert, facts, raw_bert
from tokenizers.processors import TemplateProcessing

from models.pooling.config import PoolingConfig
from models.pooling.representations import Expansion
from models.pooling.text_files import ChatForm, TextFacts
from server.errors import BadRequest
from server.model_facts import find_task, score_type
from server.requests.pooling import PooledText, PoolingParams, TextReader, Truncation, find_prompt, prompt_for
from server.requests.text_windows import join_windows, read_in_windows
from server.requests.vectors import as_array
from server.text.chat_template import ChatTemplate
from server.text.tokenizer import Tokenizer
from worker.protocol import Pooling

EMBED = Pooling(task="embed")


LONG = "the quick brown fox jumps over the lazy dog and the dog sleeps"


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("keep", [3, 5, 9, 200])
def test_a_cut_text_keeps_its_special_tokens(keep: int, left: bool) -> None:
    raw = raw_bert()
    raw.enable_truncation(keep, direction="left" if left else "right")
    expected = [raw.encode(text).ids for text in ("the fox", LONG, "dog")]
    assert bert().encode_many(["the fox", LONG, "dog"], keep=keep, left=left) == expected


@pytest.mark.parametrize("keeps", [False, True])
def test_a_text_that_is_cut_ends_as_the_conversation_around_it_does(keeps: bool) -> None:
    template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{% endfor %}<end>"
    tokenizer = Tokenizer(zoo.byte_level(), ChatTemplate({"default": template}, {}))
    known = facts(pooling=PoolingConfig(texts=TextFacts(chat=ChatForm(keeps_ending=keeps))))
    reader = TextReader(known, tokenizer, Truncation(14), "note")
    found = [tokenizer.decode(item.tokens) for item in reader.read(["a", "a text"], EMBED)]
    assert found == ["s:noteu:a<end>", "s:noteu:a <end>" if keeps else "s:noteu:a text"]


def test_even_special_tokens_give_way() -> None:
    assert [len(bert().encode_many([LONG], keep=keep)[0]) for keep in (1, 2, 3)] == [1, 2, 3]


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("keep", [4, 6, 7, 11, 16, 200])
def test_of_a_cut_pair_the_longer_text_gives_way(keep: int, left: bool) -> None:
    raw = raw_bert()
    raw.enable_truncation(keep, strategy="longest_first", direction="left" if left else "right")
    pairs = [("the fox", LONG), (LONG, "the dog"), (LONG, LONG), ("fox", "dog")]
    found = bert().encode_pairs(pairs, keep, left=left)
    for pair, (ids, second_at) in zip(pairs, found, strict=True):
        expected = raw.encode(*pair)
        assert ids == expected.ids
        assert second_at == expected.type_ids.index(1)


def test_pairs_of_a_tokenizer_that_does_not_tell_them_apart() -> None:
    raw = zoo.byte_level()
    raw.post_processor = TemplateProcessing(
        single="<s> $A",
        pair="<s> $A </s> $B",
        special_tokens=[(t, raw.token_to_id(t)) for t in ("<s>", "</s>")],
    )
    [(ids, second_at)] = zoo.ours(raw).encode_pairs([("a", "b")])
    assert (ids, second_at) == (raw.encode("a", "b").ids, 0)


def test_a_text_is_cut_where_its_tokens_end() -> None:
    tokenizer = bert()
    for tokens in (1, 3, 5):
        text = tokenizer.cut_text(LONG, tokens)
        assert LONG.startswith(text)
        assert len(tokenizer.encode(text, add_special_tokens=False)) == tokens
    assert tokenizer.cut_text("fox", 10) == "fox"


def test_prompts_and_lower_case() -> None:
    tokenizer = bert()
    texts = TextFacts(prompts={"query": "THE ", "document": ""}, lower_case=True)
    known = facts(pooling=PoolingConfig(texts=texts))
    prompt = find_prompt("query", known)
    first, second = TextReader(known, tokenizer, prompt=prompt).read(["FOX", [5, 6]], EMBED)
    assert first.tokens == tokenizer.encode("the fox")
    assert second.tokens == [5, 6]
    assert first.params == EMBED
    known = facts(pooling=PoolingConfig(texts=texts, include_prompt=False))
    first, second = TextReader(known, tokenizer, prompt=prompt).read(["FOX", [5, 6]], EMBED)
    assert first.params.skip == len(tokenizer.encode("THE ")) - 1  # [SEP] comes after the text only
    assert second.params.skip == 0
    prompt, alone = "THE dog THE ", len(tokenizer.encode("fox"))
    uncut = len(tokenizer.encode(prompt)) - 1
    for keep, skip in ((20, uncut), (alone + uncut - 1, uncut), (alone + 1, 2), (alone, 0), (alone - 1, 0)):
        reader = TextReader(known, tokenizer, Truncation(keep, left=True), prompt)
        assert reader.read(["FOX"], EMBED)[0].params.skip == skip


def test_which_prompt() -> None:
    prompts = {"query": "q: ", "passage": "p: "}
    known = facts(pooling=PoolingConfig(texts=TextFacts(prompts=prompts)), default_prompt_name="query")
    assert find_prompt(None, known) == "q: "
    assert find_prompt(None, known, "classify") == ""
    assert find_prompt("passage", known, "classify") == find_prompt("passage", known) == "p: "
    assert prompt_for("search_query", known) == "q: "
    assert {prompt_for(kind, known) for kind in ("search_document", "document", "passage")} == {"p: "}
    assert prompt_for("classification", known) == "q: "  # the default one, since it has none
    with pytest.raises(BadRequest, match=r"no prompt named 'x'\. Its prompts: 'query', 'passage'"):
        find_prompt("x", known)
    with pytest.raises(BadRequest, match="no prompt named 'poem'") as caught:
        prompt_for("poem", known)
    assert caught.value.param == "input_type"
    assert find_prompt(None, facts()) == prompt_for("query", facts()) == ""


def test_texts_that_cannot_be_pooled() -> None:
    reader = TextReader(facts(), bert())
    with pytest.raises(BadRequest, match=r"maximum context length is 20 tokens\. However, input 1 contains"):
        reader.read(["fox", LONG], EMBED)
    with pytest.raises(BadRequest, match=r"input 0 has no tokens"):
        reader.read([[]], EMBED)
    with pytest.raises(BadRequest, match="out-of-vocab"):
        reader.read([[1], [-1]], EMBED)
    with pytest.raises(
        BadRequest, match="input 0 contains 100000 characters"
    ):  # found without tokenizing all of it
        reader.read(["a" * 100_000], EMBED)
    cutting = TextReader(facts(), bert(), Truncation.from_request(-1, None, facts()))
    lengths = [len(item.tokens) for item in cutting.read(["fox", LONG, "dog " * 50_000, [3] * 50], EMBED)]
    assert lengths[1:] == [20, 20, 20] and lengths[0] < 20
    assert [
        i.tokens for i in TextReader(facts(), bert(), Truncation(2, left=True)).read([[1, 2, 3]], EMBED)
    ] == [[2, 3]]
    for asked, told in ((21, "cannot be greater than max_model_len = 20"), (0, "would keep no token")):
        with pytest.raises(BadRequest, match=told):
            Truncation.from_request(asked, None, facts())


def test_dimensions() -> None:
    def asked(dimensions: int, **config: Any) -> Pooling:
        return PoolingParams(task="embed", dimensions=dimensions).resolve(
            facts(pooling=PoolingConfig(**config))
        )

    assert asked(32) == Pooling(task="embed", dimensions=32)
    assert asked(8, matryoshka=True).dimensions == 8
    assert asked(8, matryoshka=True, matryoshka_dimensions=(8, 16)).dimensions == 8
    for dimensions in (0, -1, 33, 10**9):
        with pytest.raises(
            BadRequest, match=rf"only supports dimensions in range \[1, 32\], got {dimensions}\."
        ):
            asked(dimensions, matryoshka=True)
    with pytest.raises(BadRequest, match=r"Model 'm' only supports Matryoshka dimensions \[8, 16\], got 9\."):
        asked(9, matryoshka=True, matryoshka_dimensions=(8, 16))
    with pytest.raises(
        BadRequest,
        match=r"Model 'm' does not support Matryoshka embeddings; dimensions must be unset \(received "
        r"dimensions=8\)",
    ):
        asked(8)
    with pytest.raises(BadRequest, match=r"Task 'classify' only supports \['use_activation'\] parameters"):
        PoolingParams(task="classify", dimensions=8).resolve(facts(tasks=("classify",)))


def test_tasks_and_their_older_names() -> None:
    both = ("generate", "embed", "token_embed")
    assert find_task(None, both) == "embed"
    assert find_task(None, both, "token_embed") == "token_embed"
    assert find_task("encode", both) == "token_embed"
    assert (
        find_task("encode", ("token_classify",))
        == find_task("reward", ("token_classify",))
        == "token_classify"
    )
    assert find_task("reward", ("classify",)) == find_task("score", ("classify",)) == "classify"
    with pytest.raises(BadRequest, match=r"'classify'\. It does: generate \(POST /v1/completions"):
        find_task("classify", both)
    with pytest.raises(BadRequest, match="Unsupported task: 'sing'"):
        find_task("sing", both)
    with pytest.raises(BadRequest, match="'pooling'"):
        find_task(None, ("generate",))


def test_how_texts_are_compared() -> None:
    vectors, labels = ("embed", "token_embed"), ("classify", "token_classify")
    assert score_type(vectors, PoolingConfig()) == "bi-encoder"
    assert score_type(("token_embed",), PoolingConfig()) == "late-interaction"
    assert score_type(vectors, PoolingConfig(task="token_embed")) == "late-interaction"
    assert score_type(labels, PoolingConfig(num_labels=1)) == "cross-encoder"
    assert score_type((*vectors, *labels), PoolingConfig(num_labels=1)) == "cross-encoder"
    assert score_type(labels, PoolingConfig(num_labels=3)) is None
    assert score_type(("generate",), PoolingConfig()) is None


# Queries and documents of models that read them in different ways


def test_queries_are_filled_up_and_bounded() -> None:
    tokenizer = bert()
    expansion = Expansion(length=12, token=7, fixed=True, attends=False)
    texts = TextFacts(expansion=expansion, document_length=6)
    known = facts(tasks=("token_embed",), pooling=PoolingConfig(texts=texts))
    query = PoolingParams(task="token_embed", query=True).resolve(known)
    reader = TextReader(known, tokenizer, name="input")
    ids = tokenizer.encode("fox dog")
    missing = 12 - len(ids)
    [item] = reader.read(["fox dog"], query)
    assert item.tokens == [*ids, *[7] * missing]
    assert item.params.unseen == missing and item.params.query
    [item] = TextReader(known, tokenizer, Truncation(20)).read(["fox dog " * 9], query)
    assert len(item.tokens) == 12 and item.params.unseen == 0
    with pytest.raises(BadRequest, match="reads a query of up to 12 tokens"):
        reader.read(["fox dog " * 5], query)
    with pytest.raises(BadRequest, match="reads a document of up to 6 tokens"):
        reader.read(["fox dog " * 3], msgspec.structs.replace(query, query=False))
    seen = facts(
        tasks=("token_embed",),
        pooling=PoolingConfig(texts=TextFacts(expansion=msgspec.structs.replace(expansion, attends=True))),
    )
    [item] = TextReader(seen, tokenizer, name="input").read(["fox dog"], query)
    assert len(item.tokens) == 12 and item.params.unseen == 0


def test_only_the_first_window_of_a_text_leaves_an_instruction_out() -> None:
    known = facts(max_text_len=4, pooling=PoolingConfig(modes=("MEAN",), normalize=False))
    text = PooledText(list(range(10)), Pooling(task="embed", skip=3))
    [item] = read_in_windows([text], known)
    windows = [item, *item.windows]
    assert [(len(one.tokens), one.params.skip) for one in windows] == [(4, 3), (4, 0), (2, 0)]
    joined = join_windows(item, [vectors([7.0]), vectors([0.0]), vectors([14.0])], known)
    assert as_array(joined) == pytest.approx([5.0])  # by 1, 4 and 2 tokens
