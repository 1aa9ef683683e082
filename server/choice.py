"""One choice while it is generated."""

from __future__ import annotations

from engine_core.protocol import Tokens
from server.access.admission import Admission
from server.access.backlog import Work
from server.metrics import RequestRecord
from server.text.output import Delta, TextOutput


class Choice:
    """One of the n answers to a request while it is generated: its text, its times, and its work."""

    __slots__ = ("_account", "_admission", "_begun", "_record", "_text", "_work", "finished")

    def __init__(self, text: TextOutput, record: RequestRecord, admission: Admission, work: Work) -> None:
        self.finished = False
        self._text = text
        self._record = record
        self._admission = admission
        self._work = work
        self._account = admission.caller.account
        self._begun = False
        admission.add(work)

    def fail(self) -> None:
        """Note that the engine ended it with an error. Raises the error that ended it here, if one did."""
        self._record.finish("error", None)
        self.finished = True
        self._admission.check()

    def push(self, new: Tokens) -> Delta | None:
        if new.finish == "abort":
            self._admission.check()
        before = self._text.count
        delta = self._text.push(new)
        count = self._text.count - before
        if count and not self._begun:
            self._begun = True
            self._admission.begin(self._work)
        self._record.tokens(count, new.cached)
        if count and self._account is not None:
            self._account.wrote(count)
        if delta is not None and delta.finish_reason is not None:
            self.finished = True
            self._record.finish(delta.finish_reason, new.timing)
        return delta

    def close(self) -> None:
        self._admission.end(self._work, begun=self._begun)
        if not self.finished:
            self._record.finish("abort", None)
