"""Torch without its rules for the shapes of tensors that have no memory ("meta"). No torch is imported here.

To register them takes a quarter of the time of importing torch, and what a CPU serves needs none. Libraries
that do get them: the rules are imported before those.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from types import ModuleType

_RULES = "torch._meta_registrations"
_NEED_RULES = frozenset({"transformers", "torch._dynamo", "torch._inductor", "torch.onnx", "triton"})


def leave_out_rules() -> None:
    """Have the next import of torch leave its rules out, in a process that runs our own code alone."""
    if "torch" not in sys.modules:
        sys.modules[_RULES] = ModuleType(_RULES)
        sys.meta_path.insert(0, _ImportsRules())


class _ImportsRules(MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Import what was left out, if it is needed by the module that is about to be found elsewhere."""
        if fullname in _NEED_RULES:
            sys.meta_path.remove(self)
            del sys.modules[_RULES]
            import_module(_RULES)
