"""Options of work that waits: files, batches, and responses that are computed later or kept."""

from __future__ import annotations

from typing import Annotated

import msgspec

from server.options.connection_options import HTTP
from worker.options import Doc


class BatchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where work that waits is kept, and for how long."""

    batch_dir: Annotated[str | None, Doc(HTTP)] = None
    """Folder of files, batches and background responses, which this server alone uses: brings /v1/files,
    /v1/batches and `background` of /v1/responses (docs/batches.md). What is in it survives restarts."""
    batch_gib: Annotated[float | None, Doc(HTTP, least=0.001)] = None
    """Most GiB that --batch-dir holds. Default: 10."""

    response_store: Annotated[float | None, Doc(HTTP, least=1, most=31_536_000)] = None
    """Seconds for which --batch-dir keeps responses of /v1/responses, unless a request has `store: false`: so
    long they can be continued by `previous_response_id`."""

    @property
    def most_bytes(self) -> int:
        return int((10 if self.batch_gib is None else self.batch_gib) * (1 << 30))

    def check(self) -> None:
        """Raises ValueError if an option has no meaning without another one."""
        if self.batch_dir is None and self.batch_gib is not None:
            raise ValueError("--batch-gib says how large --batch-dir may get: give that, too")
        if self.batch_dir is None and self.response_store is not None:
            raise ValueError("--response-store keeps responses in --batch-dir: give that, too")
