"""Stop strings are found wherever a text is cut, and hold back no more than they must."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from untimed import untimed

from server.text.detokenizer import StopStrings

CUTS = st.lists(st.integers(1, 3), max_size=60)


def first_to_end(text: str, stops: list[str]) -> tuple[int, str] | None:
    """The definition that is tested: the shortest beginning of the text that ends in a stop string."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return end, stop
    return None


@untimed()
@given(
    text=st.text("abc", max_size=20),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4),
    cuts=CUTS,
    include=st.booleans(),
)
def test_stop_strings_do_not_depend_on_the_pieces(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    matcher = StopStrings(stops, include=include)
    shown, found, at = "", None, 0
    for cut in [*cuts, len(text)]:
        piece = text[at : at + cut]
        at += len(piece)
        new, found = matcher.push(piece)
        shown += new
        if found:
            break
        assert at - len(shown) <= max(map(len, stops)) - 1
    expected = first_to_end(text[:at] if found is None else text, stops)
    if expected is None:
        assert found is None
        assert shown + matcher.flush() == text[:at]
    else:
        end, stop = expected
        assert found == stop
        assert shown == text[: end if include else end - len(stop)]


def test_text_that_cannot_become_a_stop_string_is_not_held_back() -> None:
    matcher = StopStrings(["\n\nHuman:"], include=False)
    assert matcher.push("Hello there.\n") == ("Hello there.", None)
    assert matcher.push("More\n\nHum") == ("\nMore", None)
    assert matcher.push("bug") == ("\n\nHumbug", None)
