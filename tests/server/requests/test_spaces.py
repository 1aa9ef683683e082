"""The names of spaces, and what is said where a client requires another."""

import pytest
from model_facts import changed
from pooling_facts import facts as plain_facts

from models.config import ConfigError
from models.pooling.config import PoolingConfig, VectorFacts
from models.pooling.sentence_files import Dense
from models.pooling.text_files import TextFacts
from server.errors import BadRequest, SpaceMismatch
from server.model_facts import Facts
from server.requests.spaces import check_space, checked_name, find_space, prompt_part, usual_space
from worker.protocol import Pooling

DIGEST = "3fa1c29b" + "0" * 56


def facts(**given: object) -> Facts:
    vectors = {
        "embed": VectorFacts(DIGEST, "mean", True, 384),
        "token_embed": VectorFacts(DIGEST, "tokens", True, 384),
    }
    return plain_facts(**{"vectors": vectors, "reading_digest": "9b2c11d7" + "0" * 56, **given})


def test_a_name_says_how_vectors_are_made() -> None:
    space = usual_space(facts())
    assert space is not None
    head, _, rest = str(space).partition(".")
    assert len(head) == 16
    assert rest == (
        "weights-3fa1c29b.tokenizer-9b2c11d7.steps-none.pooling-mean.prompt-none.normalized-yes."
        "dimensions-384.values-float"
    )


def test_a_mismatch_says_what_differs() -> None:
    asked = str(usual_space(facts()))
    shorter = find_space(facts(), Pooling(task="embed", dimensions=128, use_activation=False))
    with pytest.raises(SpaceMismatch) as error:
        check_space(asked, shorter)
    assert (error.value.status, error.value.code) == (409, "space_mismatch")
    for said in ("normalized is no here and yes there", "dimensions is 128 here and 384 there", str(shorter)):
        assert said in error.value.message
    assert "weights is" not in error.value.message


@pytest.mark.parametrize(
    ("kept", "fits"),
    [
        (range(9), True),
        ([0], True),
        ([0, 7], True),
        ([0, 5, 7], False),
        ([0, *range(1, 5), *range(6, 9)], True),
    ],
)
def test_what_is_not_named_may_be_anything(kept: list[int], fits: bool) -> None:
    """A query is read with another prompt than documents: its client leaves that part out."""
    documents = usual_space(facts())
    queries = find_space(facts(), Pooling(task="embed"), prompt_part("query: "))
    parts = str(documents).split(".")
    asked = ".".join(parts[i] for i in kept)
    check_space(asked, documents)
    if fits and 5 not in kept:
        check_space(asked, queries)
    else:
        with pytest.raises(SpaceMismatch, match="prompt is"):
            check_space(asked, queries)


@pytest.mark.parametrize("asked", ["", ".dimensions-3", "abc.colour-red", "a" * 5000 + ".x" * 50])
def test_what_is_no_name(asked: str) -> None:
    with pytest.raises(BadRequest, match="require_space"):
        check_space(asked, usual_space(facts()))


def test_another_model_is_told_even_by_its_head_alone() -> None:
    with pytest.raises(SpaceMismatch, match="the model, or how it is served, is"):
        check_space("0123456789abcdef", usual_space(facts()))
    with pytest.raises(BadRequest, match="this one makes none"):
        check_space("0123456789abcdef", find_space(facts(), Pooling(task="classify")))


def test_an_operators_name_stands_for_the_model() -> None:
    plain = usual_space(facts())
    named = usual_space(facts(space_name="docs"))
    assert str(named) == "docs.pooling-mean.prompt-none.normalized-yes.dimensions-384.values-float"
    other = usual_space(facts(space_name="docs", reading_digest="other"))
    check_space(str(named), other)  # the operator says that they compare
    check_space(str(plain), named)  # an index that knows the digest
    with pytest.raises(SpaceMismatch, match="tokenizer is"):
        check_space(str(plain), other)


def test_a_name_with_a_digest_is_checked() -> None:
    space = usual_space(facts())
    assert space is not None
    assert checked_name(f"docs={space.digest}", facts()) == checked_name("docs", facts()) == "docs"
    assert checked_name(None, facts()) is None
    with pytest.raises(ConfigError, match=r"from the space 12ab, but from [0-9a-f]{16}\.weights"):
        checked_name("docs=12ab", facts())
    with pytest.raises(ConfigError, match="is not 1 to 64 characters"):
        checked_name("my docs", facts())


def test_modules_and_prompts_count() -> None:
    dense = Dense(in_features=4, out_features=4, folder="2_Dense")
    moved = Dense(in_features=4, out_features=4, folder="3_Dense")
    found = {
        name: str(usual_space(changed(facts(), pooling=pooling)))
        for name, pooling in {
            "plain": PoolingConfig(),
            "dense": PoolingConfig(steps=(dense,)),
            "moved": PoolingConfig(steps=(moved,)),
            "twice": PoolingConfig(steps=(dense, moved)),
            "without": PoolingConfig(include_prompt=False),
            "prompts": PoolingConfig(texts=TextFacts(prompts={"query": "q: "})),
        }.items()
    }
    assert found.pop("moved") == found["dense"]
    assert found.pop("prompts") == found["plain"]
    assert len(set(found.values())) == len(found)
