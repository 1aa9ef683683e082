"""Code as an operator writes it for the plug points of a server; it is imported by name."""

import logging
from typing import Any

import torch

from facet import BatchUpdate, LogitsProcessor, MoveDirectionality


class OneToken(LogitsProcessor):
    """Leaves nothing but the token that a request names as `target_token`, from its second token on.

    `crash` makes it raise, and a target that is no number is refused.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.targets: dict[int, tuple[int, list[int]]] = {}
        self.crashes: set[int] = set()

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        target = sampling_params.extra_args.get("target_token", 0)
        if not isinstance(target, int):
            raise ValueError(f"target_token should be a token id, got {target!r}")

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.targets.pop(index, None)
            self.crashes.discard(index)
        for index, params, _, output in batch_update.added:
            self.targets.pop(index, None)
            self.crashes.discard(index)
            if "target_token" in params.extra_args:
                self.targets[index] = params.extra_args["target_token"], output
            if params.extra_args.get("crash"):
                self.crashes.add(index)
        for source, to, direction in batch_update.moved:
            assert direction is MoveDirectionality.UNIDIRECTIONAL
            self.targets.pop(to, None)
            self.crashes.discard(to)
            if source in self.targets:
                self.targets[to] = self.targets.pop(source)
            if source in self.crashes:
                self.crashes.discard(source)
                self.crashes.add(to)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if self.crashes:
            raise RuntimeError("the operator's bug")
        for row, (target, output) in self.targets.items():
            if output:
                kept = logits[row, target].item()
                logits[row] = -torch.inf
                logits[row, target] = kept
        return logits


class Scripted(LogitsProcessor):
    """Leaves nothing but the next token of those that a request gives as `script`.

    A token that a grammar forbids there is an error that names it.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.scripts: dict[int, tuple[list[int], list[int]]] = {}

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.scripts.pop(index, None)
        for index, params, _, output in batch_update.added:
            self.scripts[index] = params.extra_args.get("script", []), output
        for source, to, _ in batch_update.moved:
            self.scripts[to] = self.scripts.pop(source)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, (script, output) in self.scripts.items():
            if script:
                token = script[len(output)]
                kept = logits[row, token].item()
                if kept == -torch.inf:
                    raise RuntimeError(
                        f"token {token} is forbidden behind {len(output)} tokens, {output[-24:]}"
                    )
                logits[row] = -torch.inf
                logits[row, token] = kept
        return logits


class Extension:
    """Methods that are called in every worker."""

    def describe(self, greeting: str, *, loud: bool = False) -> dict[str, Any]:
        worker: Any = self
        count = sum(parameter.numel() for parameter in worker.model_runner.model.parameters())
        said = greeting.upper() if loud else greeting
        return {"rank": worker.rank, "said": said, "device": str(worker.device), "weights": count > 0}

    def fail(self) -> None:
        raise ValueError("no such thing")

    def return_an_object(self) -> object:
        return object()


class NamingMiddleware:
    """Adds a header to each answer."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def named(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-operator", b"class")]
            await send(message)

        await self.app(scope, receive, named)


async def judging(request: Any, call_next: Any) -> Any:
    """Breaks where a request asks for it, and adds a header elsewhere."""
    if "x-break" in request.headers:
        raise RuntimeError("the operator's bug")
    response = await call_next(request)
    response.headers["x-function"] = "passed"
    return response


NOTHING = 7


class TellingLogger:
    """A stat logger that says in the log which engine it is for."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self._name = f"engine {engine_index} of {vllm_config.engine.model}"

    def log_engine_initialized(self) -> None:
        logging.getLogger(__name__).warning("the operator's logger knows %s", self._name)

    def record(self, scheduler_stats: Any, iteration_stats: Any, engine_idx: int = 0) -> None:
        pass

    def log(self) -> None:
        pass
