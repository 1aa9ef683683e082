"""Has grammars proved by a process of its own before an engine sees them.

What a client asks of the form of an answer is compiled there first, without a vocabulary, within bounds of
time and memory. Whatever crashes, never ends or takes all memory harms nobody there.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping

import msgspec

from server.errors import BadRequest, Overloaded, Unavailable
from server.grammars.building import Built
from server.grammars.grammar_limits import too_complex
from server.offload.answering_process import AnsweringProcess, CannotStart, Ended
from server.offload.refused import Refusal, Refused, refused
from server.proving.prover_process import Proof, ProverSetup, Question

MODULE = "server.proving.prover_process"

LONGEST = 1 << 20
"""The most bytes of what is asked. What is read there has smaller limits, each with its own words."""
MOST_KEPT, MOST_BYTES_KEPT = 1024, 16 << 20
MOST_WAITING = 64
"""The most grammars that are proved or wait for it."""

_NO_TEXT = "What is asked of the answer contains half of a surrogate pair, which is no character."
_BUSY = "The server is reading as many grammars as it can. Try again later."
_TOO_SLOW = "What is asked of the answer takes more than {:g} seconds to compile."
_TOO_LARGE = "What is asked of the answer takes more memory to compile than it may."

_log = logging.getLogger(__name__)


class ProverLimits(msgspec.Struct, frozen=True):
    """What proving one grammar may take. The process is killed that takes more."""

    seconds: float = 2.0
    memory: int = 512 << 20
    """Bytes of address space beyond those that the process has when it waits."""


class Prover:
    """The verdicts on what was asked lately, and the process that finds new ones."""

    def __init__(
        self,
        tokens: Callable[[], Mapping[str, int]],
        limits: ProverLimits = ProverLimits(),
        log_level: str = "info",
    ) -> None:
        """`tokens` gives the ids of special tokens, and is asked when a process is started."""

        def setup(descriptor: int) -> bytes:
            return msgspec.msgpack.encode(
                ProverSetup(descriptor, dict(tokens()), limits.memory, log_level),
            )

        self._limits = limits
        self._process = AnsweringProcess("prover", MODULE, setup)
        self._free = asyncio.Lock()
        self._proving: dict[bytes, asyncio.Task[Proof]] = {}
        self._kept: OrderedDict[bytes, tuple[Proof, int]] = OrderedDict()
        """Verdicts by digest, the one used last at the end, and the bytes of each."""
        self._kept_bytes = 0

    @property
    def pid(self) -> int | None:
        return self._process.pid

    async def prove(self, asked: Question) -> Built:
        """The grammar of what is asked. Raises the error with which the request ends."""
        try:
            data = msgspec.msgpack.encode(asked)
        except UnicodeEncodeError:
            raise BadRequest(_NO_TEXT, asked.field) from None
        if len(data) > LONGEST:
            raise too_complex(f"What is asked of the answer may take {LONGEST} bytes at most.", asked.field)
        digest = hashlib.sha256(data).digest()
        proof = self._known(digest)
        if proof is None:
            proof = await self._proof(digest, data, asked.field)
        if isinstance(proof, Refused):
            raise Refusal(proof)
        return proof

    def kill(self) -> None:
        """Ends the process."""
        self._process.kill()

    def _known(self, digest: bytes) -> Proof | None:
        if (kept := self._kept.get(digest)) is None:
            return None
        self._kept.move_to_end(digest)
        return kept[0]

    async def _proof(self, digest: bytes, data: bytes, field: str) -> Proof:
        """Prove what is new. Whoever asks the same meanwhile waits for the same verdict."""
        task = self._proving.get(digest)
        if task is None:
            if len(self._proving) >= MOST_WAITING:
                raise Overloaded(_BUSY, retry_after=1)
            task = self._proving[digest] = asyncio.create_task(self._find(digest, data, field))
            task.add_done_callback(lambda _: self._proving.pop(digest, None))
        return await asyncio.shield(task)  # it is found, and kept, though this client may leave

    async def _find(self, digest: bytes, data: bytes, field: str) -> Proof:
        async with self._free:
            proof = await self._ask(data, field)
        self._keep(digest, proof)
        return proof

    async def _ask(self, data: bytes, field: str) -> Proof:
        seconds = self._limits.seconds
        try:
            return msgspec.msgpack.decode(await self._process.ask([data], seconds), type=Proof)
        except CannotStart:
            raise Unavailable("The process that reads grammars cannot be started.", retry_after=5) from None
        except TimeoutError:
            _log.warning("a grammar of %d bytes took more than %g s to prove", len(data), seconds)
            error = too_complex(_TOO_SLOW.format(seconds), field)
        except Ended as ended:
            _log.warning("proving a grammar of %d bytes: %s", len(data), ended)
            error = too_complex(_TOO_LARGE, field)
        return refused(error)

    def _keep(self, digest: bytes, proof: Proof) -> None:
        size = len(proof.text if isinstance(proof, Built) else proof.message)
        self._kept[digest] = proof, size
        self._kept_bytes += size
        while len(self._kept) > MOST_KEPT or self._kept_bytes > MOST_BYTES_KEPT:
            _, (_, dropped) = self._kept.popitem(last=False)
            self._kept_bytes -= dropped
