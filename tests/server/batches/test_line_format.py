"""Lines of batch files."""

import json
from codecs import BOM_UTF8

import pytest

from server.batches.line_format import LineFault, read_line

LINE = b'{"custom_id": "a", "url": "/v1/completions", "body": {"model": "m"}}'


def test_a_byte_order_mark_before_a_line_is_passed_over() -> None:
    assert read_line(BOM_UTF8 + LINE) == read_line(LINE)
    with pytest.raises(LineFault, match="is not JSON"):
        read_line(BOM_UTF8 * 2 + LINE)


def test_half_a_surrogate_pair_in_what_a_tool_has_answered_does_not_break_a_line() -> None:
    messages = b'"m", "messages": [{"role": "tool", "content": "\\ud83d\\u00e9"}]'
    line = read_line(LINE.replace(b'"m"', messages))
    assert json.loads(bytes(line.body))["messages"][0]["content"] == "\ufffdé"
    for wrong in (LINE.replace(b'"m"', messages + b', "top_p": NaN'), LINE.replace(b'"a"', b'"\\ud83d"')):
        with pytest.raises(LineFault, match="is not JSON"):
            read_line(wrong)
