"""Rules for the secret that all machines of a cluster share. Keys are made of it in keys.py."""

from __future__ import annotations

LEAST_CHARACTERS = 16

_REMEDY = "make one with `openssl rand -hex 32` and set it as FACET_CLUSTER_KEY on every machine"


def needed(what: str) -> ValueError:
    """The error when `what`, an option by which machines join each other, is given without a secret."""
    return ValueError(f"{what} needs a secret that all machines share; {_REMEDY}")


def check_length(secret: str) -> None:
    if len(secret) < LEAST_CHARACTERS:
        raise ValueError(
            f"the cluster key has {len(secret)} characters, and {LEAST_CHARACTERS} at least are needed; "
            + _REMEDY
        )
