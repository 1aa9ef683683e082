"""The names of an engine's adapters."""

from __future__ import annotations

from engine_core.adapters.messages import Adapter


class AdapterNames:
    """Knows which adapter each name refers to, and to which it did before."""

    def __init__(self) -> None:
        self.adapters: dict[str, Adapter] = {}
        self._former: dict[str, str] = {}
        """Name -> the digest of the adapter that it referred to before."""
        self._ordered: dict[str, int] = {}
        """Name -> the time of the last order for it."""

    def has(self, digest: str) -> bool:
        """Whether a name refers to this adapter."""
        return any(adapter.digest == digest for adapter in self.adapters.values())

    def order(self, adapter: Adapter) -> bool:
        """Have the name of an adapter that is ordered refer to it, if it refers to none yet. Returns whether
        no later order has come for the name."""
        if adapter.ordered < self._ordered.get(adapter.name, 0):
            if adapter.name in self.adapters:
                self._former[adapter.name] = adapter.digest  # servers may not have heard of the later one
            return False
        self._ordered[adapter.name] = adapter.ordered
        self.adapters.setdefault(adapter.name, adapter)
        return True

    def replace(self, adapter: Adapter) -> str:
        """Have an adapter's name refer to it; returns the digest of the one before, if that was another."""
        before, self.adapters[adapter.name] = self.adapters.get(adapter.name, adapter), adapter
        if before.digest == adapter.digest:
            return ""
        self._former[adapter.name] = before.digest
        return before.digest

    def drop(self, name: str, ordered: int = 0) -> Adapter | None:
        """Have a name refer to nothing, unless a later order has come; returns what it referred to."""
        if 0 < ordered < self._ordered.get(name, 0):
            return None
        self._ordered[name] = ordered or self._ordered.get(name, 0)
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
