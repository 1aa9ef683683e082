"""A hook of mkdocs: links to files outside docs/ become text, since the site has no such files."""

from __future__ import annotations

import re

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]*\)")


def on_page_markdown(markdown: str, **_: object) -> str:
    return _OUTSIDE.sub(r"\1", markdown)
