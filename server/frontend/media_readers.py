"""Opens what reads media and recordings, for models that take some."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from engine_core.client.client import EngineClient
from server.access.admission import Admissions
from server.helpers.job_queue import Helpers
from server.metrics.server_metrics import Metrics
from server.model_facts import Facts
from server.options.server_flags import ServerConfig
from server.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from server.frontend.transcriber import Transcriber
    from server.media.media_reader import MediaReader


class TakesInputs(Protocol):
    """A frontend, as far as it is needed here."""

    config: ServerConfig
    folder: Path
    metrics: Metrics
    admissions: Admissions
    helpers: Helpers
    media: MediaReader | None
    transcriber: Transcriber | None


def open_inputs(frontend: TakesInputs, facts: Facts, tokenizer: Tokenizer, client: EngineClient) -> Facts:
    """Gets a frontend ready for media, unless the operator wants none, and for recordings. Returns the facts
    with what is known of media then."""
    worker = facts.ready.worker
    if worker.source_kind == "audio" and frontend.transcriber is None:
        from server.frontend.transcriber import Transcriber  # what only these models need

        frontend.transcriber = Transcriber(
            frontend.config, frontend.folder, client, frontend.metrics, frontend.admissions, frontend.helpers
        )
    if not worker.most_embeddings:
        return facts
    from server.media.media_reader import open_reader

    reader = frontend.media or open_reader(
        frontend.config, frontend.folder, tokenizer, frontend.metrics, worker, frontend.helpers
    )
    frontend.media = reader
    return replace(facts, media=None if reader is None else reader.facts)
