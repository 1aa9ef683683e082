"""Triton's interpreter, in which kernels for CUDA run on a CPU, line by line in numpy.

It must be chosen before Triton is imported, so tests import this module before any kernel. On a machine with
a CUDA device, the same tests run compiled kernels there.
"""

from __future__ import annotations

import os
import sys
from dataclasses import fields, replace
from importlib.util import find_spec
from inspect import getmembers
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from models.context import ForwardContext

if find_spec("triton") is None:  # it is made for Linux, and comes with the extra `dev`
    pytest.skip("Triton is not installed", allow_module_level=True)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _interpret() -> None:
    # A library that other tests use may have imported Triton to compile. What it holds of it stays as it is.
    for name in [each for each in sys.modules if each.split(".")[0] == "triton"]:
        if not name.startswith("triton._C"):  # a module in C cannot be loaded twice
            del sys.modules[name]
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language as tl
    from triton import knobs
    from triton.runtime import interpreter

    del os.environ["TRITON_INTERPRET"]  # it is meant for no other process
    knobs.runtime.interpret = True
    create_dot = interpreter.InterpreterBuilder.create_dot

    def widened(operand: Any) -> Any:
        """The same numbers in float32: numpy has no bfloat16, and would multiply the bits as integers."""
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        bits = operand.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(self, widened(a), widened(b), *rest)

    convert = interpreter.InterpreterBuilder.create_fp_to_fp
    small = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}

    def converted(self: Any, source: Any, kind: Any, rounding: Any) -> Any:
        """Round to 8 bits as cards do: the interpreter halves what rounds up to a power of two."""
        if kind.scalar not in small or source.dtype.scalar != tl.float32:
            return convert(self, source, kind, rounding)
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).to(small[kind.scalar])
        return interpreter.TensorHandle(rounded.view(torch.uint8).numpy(), kind.scalar)

    # Their types are too narrow.
    setattr(interpreter.InterpreterBuilder, "create_dot", dot)  # noqa: B010
    setattr(interpreter.InterpreterBuilder, "create_fp_to_fp", converted)  # noqa: B010
    _find_members_once(interpreter)
    _take_shortcuts(interpreter)


def _find_members_once(interpreter: Any) -> None:
    """Half of the interpreter's time goes into listing Triton's modules for each function that is called."""
    names: dict[Any, list[str]] = {}

    def patch(owner: Any, builder: Any, scope: Any) -> None:
        if owner not in names:
            names[owner] = [name for name, member in getmembers(owner) if is_builtin(member)]
        for name in names[owner]:
            member = getattr(owner, name)
            if not is_builtin(member):
                break  # the function that calls this one has patched all
            interpreter._patch_attr(owner, name, member, builder, scope)

    from triton.language.core import is_builtin

    interpreter._patch_builtin = patch


def _take_shortcuts(interpreter: Any) -> None:
    """Much of the rest goes into tables made for each operation, and into patching what is patched."""
    function = interpreter.InterpretedFunction
    find, call = interpreter._get_np_dtype, function.__call__
    types: dict[str, Any] = {}
    patched: set[str] = set()

    def found_once(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in types:
            types[name] = find(kind)
        return types[name]

    def called(self: Any, *arguments: Any, **options: Any) -> Any:
        """The kernel's launch patches what our modules know; what only Triton's do is never put back."""
        module = self.fn.__module__
        if module in patched or not module.startswith("triton."):
            return self.rewrite()(*arguments, **options)
        patched.add(module)
        return call(self, *arguments, **options)

    interpreter._get_np_dtype = found_once
    function.__call__ = called


if DEVICE.type == "cpu":
    _interpret()


def on_device(step: ForwardContext) -> ForwardContext:
    """The same step with its tensors on the device."""
    values = {field.name: getattr(step, field.name) for field in fields(step)}
    tensors = {name: value.to(DEVICE) for name, value in values.items() if isinstance(value, Tensor)}
    return replace(step, **tensors)


def assert_near(out: Tensor, expected: Tensor) -> None:
    """Compare results with others or float64; the interpreter cuts bfloat16 off instead of rounding it."""
    assert expected.dtype in (out.dtype, torch.float64)
    tolerance = 2e-5 if out.dtype == torch.float32 else 2**-5
    torch.testing.assert_close(out.double().cpu(), expected.double().cpu(), atol=tolerance, rtol=tolerance)
