"""Options of work that waits: files, batches, and responses that are computed later or kept."""

from __future__ import annotations

from typing import Annotated

import msgspec

from server.options.connection_options import HTTP
from worker.options import OptionDoc


class BatchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of files, batches and kept responses: their folder, and how long they are kept."""

    batch_dir: Annotated[str | None, OptionDoc(HTTP)] = None
    """Folder of files, batches, and responses that are kept or computed later, which this server alone uses
    (docs/batches.md). What is in it survives restarts. Default: a temporary one that ends with the server."""
    batch_gib: Annotated[float | None, OptionDoc(HTTP, least=0.001)] = None
    """Most GiB of files, batches and responses. Default: 10 with --batch-dir, and 1 without."""

    response_store: Annotated[float | None, OptionDoc(HTTP, least=1, most=31_536_000)] = None
    """Seconds for which responses of /v1/responses are kept, unless a request has `store: false`: so long
    they can be continued by `previous_response_id`. With --batch-dir they survive restarts."""

    @property
    def most_bytes(self) -> int:
        usual = 1 if self.batch_dir is None else 10
        return int((usual if self.batch_gib is None else self.batch_gib) * (1 << 30))
