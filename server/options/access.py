"""Options on who may use a server, and how it is shared."""

from __future__ import annotations

from typing import Annotated

import msgspec

from worker.options import Doc

ACCESS = "Access and fairness"


class AccessOptions(msgspec.Struct, frozen=True, kw_only=True):
    api_key: Annotated[
        list[str],
        Doc(
            ACCESS,
            "Keys, one of which every request must bring, but for /live, /health, /ready and /ping. Other "
            "users of the machine see the command line: better put one into the variable FACET_API_KEY.",
        ),
    ] = []
    api_key_file: Annotated[
        str | None,
        Doc(
            ACCESS,
            "File of keys with names, shares, quotas and rights (docs/access.md), which `facet keys add` "
            "writes. It is read again when it changes.",
        ),
    ] = None
    fair_between: Annotated[
        str,
        Doc(
            ACCESS,
            "Who shares the server fairly if there are no keys: client addresses (IPv6: networks of 64 bits; "
            "behind a proxy of this machine, what its X-Forwarded-For says), or none: then all are one.",
            ("addresses", "none"),
        ),
    ] = "addresses"
    max_queue_wait: Annotated[
        float,
        Doc(
            ACCESS,
            "Seconds in which the engine must begin with a request, or it is refused with 503; 0 is any "
            "number. Of a request for many texts, the first counts.",
            least=0,
        ),
    ] = 0.0
    request_timeout: Annotated[
        float,
        Doc(
            ACCESS,
            "Seconds after which a request is ended with 504; 0 is never. The header X-Request-Timeout, or "
            "`timeout` in the body, may make it less.",
            least=0,
        ),
    ] = 0.0

    @property
    def is_guarded(self) -> bool:
        """Whether requests need a key."""
        return bool(self.api_key) or self.api_key_file is not None
