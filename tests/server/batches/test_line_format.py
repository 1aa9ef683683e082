"""Lines of batch files."""

from codecs import BOM_UTF8

import pytest

from server.batches.line_format import LineFault, read_line

LINE = b'{"custom_id": "a", "url": "/v1/completions", "body": {"model": "m"}}'


def test_a_byte_order_mark_before_a_line_is_passed_over() -> None:
    assert read_line(BOM_UTF8 + LINE) == read_line(LINE)
    with pytest.raises(LineFault, match="is not JSON"):
        read_line(BOM_UTF8 * 2 + LINE)
