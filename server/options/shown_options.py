"""What operators are shown of the options."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from server.options.option_parsing import flatten, options_of

_PASSWORD = re.compile(rb'(?<=://)[^/@\s"]*@')


def shown_options(config: msgspec.Struct) -> dict[str, Any]:
    """All options with their values but those that are secret, without passwords that stand in addresses."""
    values = flatten(config)
    known = {each.field: values[each.field] for each in options_of(type(config)) if not each.doc.is_secret}
    written = msgspec.json.encode(known, enc_hook=str)
    return msgspec.json.decode(_PASSWORD.sub(b"", written))
