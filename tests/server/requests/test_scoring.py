"""Scores of each kind: the items that the engine is asked to pool, and the scores from its answers."""

from typing import Any

import msgspec
import pytest
import zoo
from fake_frontend import vectors
from pooling_facts import bert, facts

from models.pooling.config import PoolingConfig
from models.pooling.text_files import TextFacts
from server.errors import BadRequest, Internal, Unavailable
from server.model_facts import Facts
from server.requests.checkpoint_facts import QWEN3_RERANKER
from server.requests.pooling import PooledText, Truncation
from server.requests.scoring import (
    QUERIES_AT_ONCE,
    Pairs,
    ScoreOptions,
    Scorer,
    compare_all,
    read_pairs,
    texts_and_pairs,
)
from server.text.chat_template import ChatTemplate
from server.text.tokenizer import Tokenizer

CROSS = facts(
    tasks=("classify",), max_text_len=400, score_type="cross-encoder", pooling=PoolingConfig(num_labels=1)
)
LATE = facts(tasks=("token_embed",), score_type="late-interaction")
BI = facts(score_type="bi-encoder")


def begin(
    queries: list[str], documents: list[str], known: Any, tokenizer: Tokenizer, **options: Any
) -> Scorer:
    pairs = Pairs(queries, documents)
    return compare_all(read_pairs(pairs, ScoreOptions(**options), known, tokenizer), known)


def finish(scorer: Scorer, answers: list[Any]) -> list[float]:
    with pytest.raises(StopIteration) as end:
        scorer.send([vectors(one) for one in answers])
    return end.value.value


def test_texts_read_together() -> None:
    tokenizer = bert()
    scorer = begin(["fox"], ["dog", "the dog"], CROSS, tokenizer, use_activation=False)
    items = next(scorer)
    pairs = tokenizer.encode_pairs([("fox", "dog"), ("fox", "the dog")])
    assert [(item.tokens, item.params.second_at) for item in items] == pairs
    assert {(item.params.task, item.params.use_activation) for item in items} == {("classify", False)}
    assert finish(scorer, [[0.5], [0.25]]) == [0.5, 0.25]


def test_a_default_prompt_stands_before_the_query() -> None:
    tokenizer = bert()
    pooling = PoolingConfig(num_labels=1, texts=TextFacts(prompts={"web": "the dog "}))
    known = msgspec.structs.replace(CROSS, pooling=pooling, default_prompt_name="web")
    [item] = next(begin(["fox"], ["dog"], known, tokenizer))
    assert [item.tokens] == [ids for ids, _ in tokenizer.encode_pairs([("the dog fox", "dog")])]


def test_a_limit_for_each_side() -> None:
    tokenizer = bert()
    scorer = begin(
        ["fox dog fox"], ["dog fox dog"], CROSS, tokenizer, max_tokens_per_query=3, max_tokens_per_doc=2
    )
    [item] = next(scorer)
    query, document = tokenizer.cut_text("fox dog fox", 3), tokenizer.cut_text("dog fox dog", 2)
    assert [item.tokens] == [ids for ids, _ in tokenizer.encode_pairs([(query, document)])]
    assert len(item.tokens) == 3 + 3 + 2
    with pytest.raises(BadRequest, match="max_tokens_per_doc must be non-negative and less than"):
        begin(["a"], ["b"], CROSS, tokenizer, max_tokens_per_doc=400)


def with_template(source: str | None) -> Tokenizer:
    return Tokenizer(zoo.byte_level(), ChatTemplate({"default": source} if source else {}, {}))


def text_of(item: PooledText, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(item.tokens)


def of_a_template() -> Facts:
    """The facts of a model that reads pairs which its chat template writes."""
    return facts(
        tasks=("classify",),
        max_text_len=400,
        score_type="cross-encoder",
        score_template="default",
        pooling=PoolingConfig(num_labels=1),
    )


def test_a_score_template() -> None:
    template = "{{ instruction }}|{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}query"
    tokenizer = with_template(template)
    assert not tokenizer.chat.writes_pairs  # the word in a template's text is no role
    tokenizer = with_template(template + "{% if messages[0].role in ('query', 'document') %}!{% endif %}")
    assert tokenizer.chat.writes_pairs
    known = of_a_template()
    [item] = next(begin(["a"], ["b"], known, tokenizer))
    assert text_of(item, tokenizer) == "|query=a;document=b;query!"
    [item] = next(begin(["a"], ["b"], known, tokenizer, instruction="judge"))
    assert text_of(item, tokenizer) == "judge|system=judge;query=a;document=b;query"
    texts = TextFacts(prompts={"usual": "as usual"})
    known = msgspec.structs.replace(
        known, pooling=PoolingConfig(num_labels=1, texts=texts), default_prompt_name="usual"
    )
    [item] = next(begin(["a"], ["b"], known, tokenizer))
    assert text_of(item, tokenizer).startswith("as usual|system=as usual;query=a")
    with pytest.raises(BadRequest, match="reads no `instruction`"):
        begin(["a"], ["b"], CROSS, bert(), instruction="judge")


def test_a_pair_among_texts_is_written_as_one_that_is_compared() -> None:
    tokenizer = with_template("{{ messages[0].content }}={{ messages[1].content }}")
    known = facts(
        tasks=("classify",), score_template="default", max_text_len=9, pooling=PoolingConfig(num_labels=1)
    )
    items = texts_and_pairs(["one", ("a", "b")], ScoreOptions(use_activation=False), known, tokenizer)
    assert [text_of(item, tokenizer) for item in items] == ["one", "a=b"]
    assert {item.params.use_activation for item in items} == {False}
    with pytest.raises(BadRequest, match="pair 1"):
        texts_and_pairs(["one", ("a" * 9, "b")], ScoreOptions(), known, tokenizer)


def test_the_template_of_qwen3_reranker() -> None:
    tokenizer = with_template(None)
    known = facts(
        tasks=("classify",),
        max_text_len=4000,
        score_type="cross-encoder",
        score_template=QWEN3_RERANKER,
        pooling=PoolingConfig(num_labels=1),
    )
    [item] = next(begin(["what?"], ["that"], known, tokenizer))
    assert text_of(item, tokenizer) == (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
        'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
        "<Query>: what?\n<Document>: that<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


@pytest.mark.parametrize(
    ("left", "expected"), [(False, "Q=what? D=a lon!yes?"), (True, "? D=a long answer!yes?")]
)
def test_a_pair_that_is_cut_ends_as_the_template_does(left: bool, expected: str) -> None:
    tokenizer = with_template("Q={{ messages[0].content }} D={{ messages[1].content }}!yes?")
    known = of_a_template()
    [short, cut] = next(
        begin(["what?"], ["a", "a long answer"], known, tokenizer, truncation=Truncation(19, left=left))
    )
    assert text_of(short, tokenizer) == "Q=what? D=a!yes?"
    assert text_of(cut, tokenizer) == expected


def test_a_vector_for_each_text() -> None:
    tokenizer = bert()
    known = facts(
        score_type="bi-encoder",
        pooling=PoolingConfig(texts=TextFacts(prompts={"query": "the ", "passage": "lazy "})),
    )
    scorer = begin(["fox"], ["dog", "fox"], known, tokenizer)
    items = next(scorer)
    assert [item.tokens for item in items] == [
        tokenizer.encode(t) for t in ("the fox", "lazy dog", "lazy fox")
    ]
    assert finish(scorer, [[2, 0], [0, 3], [1, 1]]) == pytest.approx([0, 0.5**0.5])
    scorer = begin(["fox", "dog"], ["dog", "fox"], BI, tokenizer)
    next(scorer)
    assert finish(scorer, [[1, 0], [0, 1], [1, 0], [1, 0]]) == [1, 0]


def test_vectors_are_cut_before_they_are_compared() -> None:
    known = msgspec.structs.replace(BI, pooling=PoolingConfig(matryoshka=True))
    items = next(begin(["a"], ["b"], known, bert(), dimensions=1))
    assert [item.params.dimensions for item in items] == [1, 1]


@pytest.mark.parametrize(
    ("similarity", "scores"),
    [("dot", [0, 2]), ("euclidean", [-(13**0.5), -(2**0.5)]), ("manhattan", [-5, -2])],
)
def test_vectors_are_compared_as_the_checkpoint_says(similarity: Any, scores: list[float]) -> None:
    known = facts(score_type="bi-encoder", pooling=PoolingConfig(texts=TextFacts(similarity=similarity)))
    scorer = begin(["fox"], ["dog", "fox"], known, bert())
    next(scorer)
    assert finish(scorer, [[2, 0], [0, 3], [1, 1]]) == pytest.approx(scores)


def test_a_mean_over_the_tokens_of_the_query() -> None:
    known = facts(
        tasks=("token_embed",),
        score_type="late-interaction",
        pooling=PoolingConfig(texts=TextFacts(similarity="meanmaxsim")),
    )
    scorer = begin(["fox", "fox dog fox"], ["dog", "the"], known, bert())
    next(scorer)
    scorer.send([vectors([7, 3]), vectors([7, 5])])  # the score of each against itself, and its vectors
    assert finish(scorer, [[1.5], [2.5]]) == [1.5 / 3, 2.5 / 5]


def test_a_query_is_kept_and_documents_come_to_it() -> None:
    scorer = begin(["fox"], ["dog", "the"], LATE, bert())
    [query] = next(scorer)
    documents = scorer.send([vectors([])])
    assert query.params.task == "token_embed" and query.params.late_query
    assert [one.params.late_document for one in documents] == [query.params.late_query] * 2
    assert finish(scorer, [[1.5], [2.5]]) == [1.5, 2.5]


def test_a_query_that_was_lost_is_sent_again_once() -> None:
    scorer = begin(["fox"], ["dog"], LATE, bert())
    [first] = next(scorer)
    scorer.send([vectors([])])
    [second] = scorer.throw(Unavailable("gone"))
    assert second.params.late_query not in ("", first.params.late_query)
    assert second.tokens == first.tokens
    [document] = scorer.send([vectors([])])
    assert document.params.late_document == second.params.late_query
    with pytest.raises(Unavailable, match="again"):
        scorer.throw(Unavailable("gone again"))


def test_other_failures_are_final() -> None:
    scorer = begin(["fox"], ["dog"], LATE, bert())
    next(scorer)
    scorer.send([vectors([])])
    with pytest.raises(Internal):
        scorer.throw(Internal("broken"))


def test_only_so_many_queries_are_kept_at_once() -> None:
    count = QUERIES_AT_ONCE + 6
    scorer = begin(["fox"] * count, ["dog"] * count, LATE, bert())
    assert len(next(scorer)) == QUERIES_AT_ONCE
    assert len(scorer.send([vectors([])] * QUERIES_AT_ONCE)) == QUERIES_AT_ONCE
    queries = scorer.send([vectors([i]) for i in range(QUERIES_AT_ONCE)])
    documents = scorer.send([vectors([])] * 6)
    assert [one.params.late_document for one in documents] == [one.params.late_query for one in queries]
    assert finish(scorer, [[i] for i in range(QUERIES_AT_ONCE, count)]) == [float(i) for i in range(count)]


def test_models_that_cannot_compare() -> None:
    many = facts(tasks=("classify",), pooling=PoolingConfig(num_labels=3))
    with pytest.raises(BadRequest, match=r"3 labels\. Use POST /classify"):
        begin(["a"], ["b"], many, bert())
    with pytest.raises(BadRequest, match=r"'score'\. It does: generate"):
        begin(["a"], ["b"], facts(tasks=("generate",)), bert())


def test_pairs_are_cut_too() -> None:
    [item] = next(begin(["fox " * 300], ["dog " * 300], CROSS, bert(), truncation=Truncation(9)))
    assert len(item.tokens) == 9
    for count, unit in ((300, "input tokens"), (30_000, "characters")):
        with pytest.raises(BadRequest, match=f"pair 0 contains [0-9]+ {unit}"):
            next(begin(["fox " * count], ["dog " * count], CROSS, bert()))
