"""One key of the file of keys: whose it is, and what its owner may do."""

from __future__ import annotations

import re
import time
from datetime import datetime
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from server.errors import Forbidden

Right = Literal["generate", "embed", "token_embed", "classify", "token_classify", "score"]
"""The uses of a key: a task of the model, or the comparison of texts, by whatever task."""
RIGHTS: tuple[Right, ...] = get_args(Right)

Name = Annotated[str, Meta(pattern=r"^[A-Za-z][A-Za-z0-9._@-]{0,63}$")]
"""A letter, then letters, digits and . _ @ -; so no name is an address, and none has a slash in it."""
Limit = Annotated[int, Meta(ge=1, le=1 << 40)]

_FORMS = {
    "name": "it must be a letter, then up to 63 letters, digits and . _ @ -",
    "sha256": "it must be 64 hexadecimal digits in small letters",
}
_WHERE = re.compile(r" - at `\$\.?([A-Za-z0-9_]*)[^`]*`")


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An entry of the file. Only the digest of the key itself is known."""

    name: Name
    """The name of its owner in logs, in metrics, and among those who share the server."""
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    weight: Annotated[float, Meta(ge=0.001, le=1000)] = 1.0
    """Its part of the server, in proportion to those of others."""
    max_running: Limit | None = None
    """The answers and texts that an engine computes for it at a time; others wait."""
    max_queued: Annotated[int, Meta(ge=0, le=1 << 40)] | None = None
    """The answers and texts that may wait."""
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    """Tokens of prompts and of answers together."""
    priority: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] = 0
    """The lowest priority that it may ask for. Lower ones run earlier."""
    tasks: list[Right] | None = None
    """The tasks that it may be used for; None is all."""
    admin: bool = False
    """Whether it may read metrics and the description of the API, and abort requests of others."""
    expires: datetime | None = None
    """The moment from which it is not valid."""
    share_prefixes: bool = False
    """Whether it finds cached prefixes of other keys that share theirs, and they find its own."""

    def has_expired(self) -> bool:
        return self.expires is not None and self.expires.timestamp() <= time.time()

    def require(self, *rights: Right) -> None:
        """Raises Forbidden unless it may be used for one of these."""
        if self.tasks is not None and not any(right in self.tasks for right in rights):
            raise Forbidden(
                f"The API key of {self.name} may not be used for this: it is for "
                f"{', '.join(self.tasks) or 'nothing'}, and this is {' or '.join(rights)}."
            )

    def salted(self, salt: str) -> str:
        """The salt of its entries in the prefix cache: no other key's, whatever salts requests bring."""
        return salt if self.share_prefixes else f"{self.name}/{salt}"


def explain(error: msgspec.ValidationError) -> tuple[str, str]:
    """The field of a key that is wrong, and what is wrong with it."""
    text, where = str(error), _WHERE.search(str(error))
    field = where[1] if where else ""
    if "regex" in text:
        return field, _FORMS[field]
    return field, _WHERE.sub("", text).replace("`", "")
