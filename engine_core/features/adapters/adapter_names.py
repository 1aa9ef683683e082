"""The names of an engine's adapters."""

from __future__ import annotations

from engine_core.adapters.messages import Adapter


class AdapterNames:
    """Knows which adapter each name refers to, and to which it did before."""

    def __init__(self) -> None:
        self.adapters: dict[str, Adapter] = {}
        self._former: dict[str, str] = {}
        """Name -> the digest of the adapter that it referred to before."""

    def has(self, digest: str) -> bool:
        """Whether a name refers to this adapter."""
        return any(adapter.digest == digest for adapter in self.adapters.values())

    def replace(self, adapter: Adapter) -> str:
        """Have an adapter's name refer to it; returns the digest of the one before, if that was another."""
        before, self.adapters[adapter.name] = self.adapters.get(adapter.name, adapter), adapter
        if before.digest == adapter.digest:
            return ""
        self._former[adapter.name] = before.digest
        return before.digest

    def drop(self, name: str) -> Adapter | None:
        """Have a name refer to nothing; returns the adapter to which it referred."""
        self._former.pop(name, None)
        return self.adapters.pop(name, None)

    def drop_all(self, digest: str) -> list[Adapter]:
        """Have all names of an adapter refer to nothing; returns it under each of them."""
        found = [each for each in self.adapters.values() if each.digest == digest]
        for each in found:
            self.drop(each.name)
        return found

    def successor(self, digest: str) -> str:
        """The digest of what a name refers to that referred to this adapter before, or this one's."""
        found = (self.adapters[name].digest for name, former in self._former.items() if former == digest)
        return next(found, digest)
