import json
import random
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLParserLimits
from real_schemas import real_schemas
from spelled import allowed_by, byte_spelling, demo_spelling, demo_tokenizer, matcher_of, walk
from zoo import KINDS, ours

from engine_core.grammar.compiler import GrammarCompiler
from engine_core.grammar.llguidance_matcher import GrammarMatcher, bound_of
from engine_core.grammar.matcher import GrammarError, ThinkingMatcher, TokenMatcher
from engine_core.protocol import Grammar, Spelling, Thinking

END = 258
BYTES = byte_spelling(b"ab", b"<think>", b"<end>", special=2, ends=(END,))
SIZE = 270


def matcher(grammar: Grammar, spelling: Spelling = BYTES, size: int = SIZE) -> GrammarMatcher:
    return matcher_of(grammar, spelling, size)


def take(matcher: TokenMatcher, text: bytes) -> None:
    for byte in text:
        matcher.take(byte)


def test_a_matcher_allows_what_the_grammar_does_and_is_complete_at_its_end() -> None:
    one = matcher(Grammar("regex", "ab[01]"))
    assert allowed_by(one.bound(), SIZE) == [256]  # as the vocabulary would write it
    one.take(256)
    assert allowed_by(one.bound(), SIZE) == [ord("0"), ord("1")]
    assert not one.complete
    one.take(ord("1"))
    assert one.complete and not one.binds


def test_an_end_token_is_allowed_where_the_text_may_end_and_completes_it() -> None:
    one = matcher(Grammar("regex", "a+"))
    assert END not in allowed_by(one.bound(), SIZE)
    one.take(ord("a"))
    assert allowed_by(one.bound(), SIZE) == [ord("a"), END]
    one.take(END)
    assert one.complete


def test_a_model_without_an_end_token_has_none_allowed() -> None:
    one = matcher(Grammar("regex", "a+"), byte_spelling(), 256)
    one.take(ord("a"))
    assert allowed_by(one.bound(), 256) == [ord("a")]


def test_tokens_that_the_tokenizer_does_not_have_are_never_allowed() -> None:
    allowed = allowed_by(matcher(Grammar("regex", "(?s:.*)")).bound(), SIZE)
    assert max(allowed) == END and 257 not in allowed  # the rest is no text, or padding of the model


def test_a_grammar_that_wakes_sleeps_until_its_tokens_have_come() -> None:
    one = matcher(Grammar("regex", "[xy]", wakes=((ord("="), ord(">")), (257,))))
    assert one.bound() is None and one.binds
    take(one, b"a = > 7 =")
    assert one.bound() is None
    take(one, b">")
    assert allowed_by(one.bound(), SIZE) == [ord("x"), ord("y")]
    take(one, b"x")
    assert one.complete


def test_a_grammar_that_begins_again_is_never_complete() -> None:
    one = matcher(Grammar("regex", "[xy]", wakes=((257,),), again=True))
    for _ in range(3):
        take(one, b"text")
        one.take(257)
        assert allowed_by(one.bound(), SIZE) == [ord("x"), ord("y")]
        take(one, b"y")
        assert one.bound() is None and not one.complete and one.binds


def test_a_token_of_thinking_does_not_wake_it() -> None:
    one = matcher(Grammar("regex", "[xy]", wakes=((257,),)))
    one.take(257, wakes=False)
    assert one.bound() is None
    one.take(257)
    assert one.bound() is not None


def test_a_token_that_is_not_allowed_ends_the_answer() -> None:
    one = matcher(Grammar("regex", "abc"))
    with pytest.raises(GrammarError, match="does not allow output token 1"):
        one.take(ord("z"))


def test_a_text_that_becomes_too_complex_says_at_which_token(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = LLParserLimits(max_items_in_row=50, verbose_errors=False)
    monkeypatch.setattr("engine_core.grammar.llguidance_matcher.LIMITS", limits)
    optional = {f"p{number}": {"type": "integer"} for number in range(200)}
    one = matcher(Grammar("json", json.dumps({"type": "object", "properties": optional})))
    with pytest.raises(GrammarError, match=r"too complex at output token [0-9]+: make it simpler"):
        for byte in b'{"p1": 1, "p2": 2, "p3"':
            one.bound()
            one.take(byte)


def test_special_tokens_of_a_grammar_are_tokens_and_not_their_text() -> None:
    one = matcher(Grammar("lark", 'start: <[257]> "ab" /c+/'))
    assert allowed_by(one.bound(), SIZE) == [257]
    one.take(257)
    assert allowed_by(one.bound(), SIZE) == [256]


def test_a_marker_that_is_due_waits_for_the_end_of_a_character() -> None:
    """The grammar of a form holds the reasoning too, which has whole characters only."""
    grammar = Grammar("lark", 'start: /(?s:.*)/ <[257]> "ab"')
    thinking = ThinkingMatcher(Thinking(2, (257,), open=True), 0, matcher(grammar))
    begun, *rest = "🙂".encode()
    for byte in (ord("a"), begun):
        thinking.take(byte)
    for byte in rest:
        allowed = allowed_by(thinking.bound(), SIZE)
        assert byte in allowed and 257 not in allowed
        thinking.take(byte)
    assert allowed_by(thinking.bound(), SIZE) == thinking.forced() == [257]
    thinking.take(257)
    assert allowed_by(thinking.bound(), SIZE) == [256]


@pytest.mark.parametrize("seed", range(6))
def test_what_is_drawn_from_a_real_vocabulary_is_the_json_that_was_asked_for(seed: int) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["a<|im_end|>b", "Zoë"]}, "n": {"type": "integer"}},
        "required": ["name", "n"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_pattern": "[ ]{0,1}"},
    }
    size = len(demo_spelling().tokens)
    one = matcher(Grammar("json", json.dumps(schema)), demo_spelling(), size)
    tokens = walk(one, size, random.Random(seed), 400)
    if one.complete:
        answer = json.loads(demo_tokenizer().decode(tokens))
        assert set(answer) == {"name", "n"} and answer["name"] in ("a<|im_end|>b", "Zoë")
    else:
        assert "n" in demo_tokenizer().decode(tokens)  # a long number


@pytest.mark.parametrize("size", [1000, 1024, 31])
def test_a_bound_says_nothing_of_tokens_beyond_the_vocabulary(size: int) -> None:
    flags = np.ones(2048, np.uint8)
    flags[3:20] = 0
    bound = bound_of(np.packbits(flags, bitorder="little").tobytes(), size)
    assert bound.form == "bits" and len(bound.data) == 4 * -(-size // 32)
    assert allowed_by(bound, size) == [0, 1, 2, *range(20, size)]


def test_a_bound_that_allows_nothing_is_refused() -> None:
    with pytest.raises(GrammarError, match="allows no token"):
        bound_of(bytes(8), 40)
    with pytest.raises(GrammarError, match="allows no token"):
        bound_of(b"\0\0\0\0\0\xff\0\0", 40)


SLOW = Grammar("lark", f'start: "x" s\ns: {" | ".join(["s s"] * 120)} | "a"')
"""It takes some 20 ms behind its third character, and more behind each that follows."""


def hurried(grammar: Grammar) -> GrammarMatcher:
    """A matcher for which the engine does not wait at all."""
    compiler = GrammarCompiler(BYTES, SIZE, "", lambda: None, patience=0)
    job = compiler.compile(grammar)
    assert job.wait(60)
    return compiler.matcher(job.outcome(), grammar)


def test_a_matcher_that_is_late_goes_on_when_it_is_settled() -> None:
    one = hurried(SLOW)
    for byte in b"xaa":
        one.take(byte)
        assert one.late and not one.complete
        assert one.settle(60) and not one.late
    assert allowed_by(one.bound(), SIZE) == [ord("a"), END]


def test_tokens_that_come_while_it_is_late_are_taken_behind() -> None:
    one = hurried(Grammar("regex", "[xy]", wakes=((257,),), again=True))
    for token in (257, ord("x"), 9, 257, ord("y"), 257):
        one.take(token)
    assert one.late and one.settle(60)
    assert allowed_by(one.bound(), SIZE) == [ord("x"), ord("y")]


def test_what_takes_longer_than_it_may_ends_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    one = hurried(SLOW)
    one.take(ord("x"))
    assert one.settle(60)
    monkeypatch.setattr("engine_core.grammar.llguidance_matcher.TOKEN_SECONDS", 0.0)
    one.take(ord("a"))
    with pytest.raises(GrammarError, match="longer to follow than it may, at output token 2: make"):
        while not one.settle():
            pass


def test_an_answer_has_a_budget_for_all_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine_core.grammar.llguidance_matcher.ANSWER_SECONDS", 0.0)
    monkeypatch.setattr("engine_core.grammar.llguidance_matcher.SECONDS_EACH", 0.001)
    one = matcher(SLOW)
    with pytest.raises(GrammarError, match="longer to follow"):
        take(one, b"x" + b"a" * 8)


def test_others_run_while_a_token_is_followed() -> None:
    """Were the interpreter's lock held, this thread could not look meanwhile."""
    one = hurried(SLOW)
    for byte in b"xaaa":
        one.take(byte)
        looks = 0
        while not one.settle():
            looks += 1
    assert looks > 10


def test_real_schemas_are_followed_within_the_limits() -> None:
    """No limit of llguidance refuses one: with 5,000 items, one of 900 optional fields was refused."""
    spelling = demo_spelling()
    compiler = GrammarCompiler(spelling, size := len(spelling.tokens), "", lambda: None, patience=60)
    for name, schema in real_schemas().items():
        grammar = Grammar("json", json.dumps(schema))
        job = compiler.compile(grammar, name)
        assert job.wait(60)
        assert walk(compiler.matcher(job.outcome(), grammar), size, random.Random(name), 24), name
    compiler.stop()


def test_texts_without_a_choice_are_written_where_the_tokenizer_begins_a_text_with_a_space(
    tmp_path: Path,
) -> None:
    raw, path = KINDS["sentencepiece"](), tmp_path / "tokenizer.json"
    raw.save(str(path))
    tokenizer = ours(raw)
    assert tokenizer.eos_id is not None
    tokenizer.path, size = str(path), tokenizer.largest_id + 1
    spelling = tokenizer.spelling([tokenizer.eos_id])
    for text in ("x: the quick fox", "fox\n é", '{"x":'):
        one = matcher(Grammar("json", json.dumps({"const": text})), spelling, size)
        assert json.loads(tokenizer.decode(walk(one, size, random.Random(1), 50))) == text
