"""Lark grammars as regular expressions: the same texts are in both, and what cannot be said so is refused."""

import re

import pytest
from llguidance import LLMatcher, LLTokenizer

from server.grammars.lark_to_regex import COMMON, NotRegular, regex_of

PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
"""What coding agents send for a tool that applies patches, in its form."""
SUMS = r"""
start: expr
expr: term (SP ADD SP term)* -> add
| term
term: factor (SP MUL SP factor)* -> mul
| factor
factor: INT
SP: " "
ADD: "+"
MUL: "*"
%import common.INT
"""

PATCHES = (
    '*** Begin Patch\n*** Add File: a/b.py\n+x = "1"\n+\n*** End Patch',
    "*** Begin Patch\n*** Update File: a\n*** Move to: b\n@@ def f\n-1\n+2\n 3\n*** End Patch\n",
    "*** Begin Patch\n*** Delete File: \\\n*** End Patch\n",
)
NO_PATCHES = (
    "*** Begin Patch\n*** End Patch",
    PATCHES[0] + "x",
    "*** Begin Patch\n*** Add File: \n+a\n*** End Patch",
)


@pytest.mark.parametrize(
    ("grammar", "inside", "outside"),
    [
        (PATCH, PATCHES, NO_PATCHES),
        (SUMS, ("1", "12 + 3 * 4"), ("1 +", "", "a", "1+2")),
        (
            'start: A | b\nA.2: "x"i\n?b: "y"~2..3 "z"{2} ["w"]',
            ("x", "X", "yyzz", "yyyzzw"),
            ("xx", "yzz", "yyz"),
        ),
        ('start: "a" "b"\n%ignore / +/\n', ("ab", " a  b "), ("a", "a\tb")),
        ('start: "\\x41\\u00e9\\n\\"." /a\\/b/i', ('Aé\n".A/B',), ("Aé",)),
        ('start: "a".."f"+ // and so on\n  | "0"\n', ("abf", "0"), ("g", "a0")),
        ("%import common (DIGIT, WS)\n%import common.LETTER -> L\nstart: L DIGIT WS", ("a1 ",), ("1a ",)),
        ('!start: x\nx: y*\ny: "a" |', ("", "aa"), ("b",)),
    ],
)
def test_the_same_texts(grammar: str, inside: tuple[str, ...], outside: tuple[str, ...]) -> None:
    found = re.compile(regex_of(grammar))
    assert all(found.fullmatch(text) for text in inside)
    assert not any(found.fullmatch(text) for text in outside)


@pytest.mark.parametrize(
    "grammar", [PATCH, SUMS, *(f"start: {name}\n%import common.{name}" for name in COMMON)]
)
def test_the_grammar_engine_knows_the_expression(grammar: str) -> None:
    text = LLMatcher.grammar_from_regex(regex_of(grammar))
    assert not LLMatcher(LLTokenizer("byte"), text, log_level=0).is_error()


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ('start: a\na: "(" a ")" | "x"', "leads back to itself"),
        ("start: a", "not defined"),
        ("", "begin with a rule"),
        ('a: "x"', "start is not defined"),
        ("start: %json {}", "not understood"),
        ("start: <tool>", "not understood"),
        ('start: "x"\n%import other.A', "not understood"),
        ('start: "x" A\n%import common.NOTHING', "not known"),
        ('start: ("x"', "missing"),
        ('start: "x"~', "missing"),
        ('start: "x" )', "not understood"),
        ('start: "\\Uffffffff"', "not a character"),
        ("start: " + "(" * 100 + '"x"' + ")" * 100, "too deep"),
        ('start: "' + "x" * 70_000 + '"', "too long"),
        ("start: r0\n" + "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(40)) + 'r40: "x"', "too long"),
    ],
)
def test_what_is_not_regular(grammar: str, why: str) -> None:
    with pytest.raises(NotRegular, match=why):
        regex_of(grammar)
