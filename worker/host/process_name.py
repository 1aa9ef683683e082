"""The name under which `top` and `ps -o comm` show a process."""

from __future__ import annotations

import ctypes

_PR_SET_NAME = 15
_LONGEST = 15
"""Bytes of a name that Linux keeps."""


def set_process_name(name: str) -> None:
    """Name this process `facet: NAME`; call it in the main thread. Where the system has no such names,
    nothing happens.

    The command line stays: scripts find processes by it.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:  # only Linux has it
        prctl(_PR_SET_NAME, shown_name(name).encode(), 0, 0, 0)


def shown_name(name: str) -> str:
    """The name, which loses its space and then its end if it is too long."""
    whole = f"facet: {name}"
    return whole if len(whole) <= _LONGEST else f"facet:{name}"[:_LONGEST]
