"""What a fake hybrid keeps of its sequences: all tokens mixed up, in one number."""

from collections.abc import Mapping, Sequence

from worker.protocol import SeqStep

ROOT = 1469598103


def mix(entry: int | None, token: int) -> int:
    if entry is None:
        raise ValueError("a cache entry was read before it was written")
    return (entry ^ (token + 1)) * 16777619 & 0xFFFFFFFF


class FakeStates:
    def __init__(self, places: int) -> None:
        self.of_slots: dict[int, int] = {}
        self._places = places
        self._remembered: dict[int, int] = {}
        self.behind: dict[tuple[int, int], int] = {}
        """The states of slots behind so many of their tokens, of the last step, guesses included."""

    def follow(self, seqs: Sequence[SeqStep], tokens: Mapping[int, Sequence[int]]) -> None:
        """Mix the tokens of each row into its state; all rows of a step do that at the same time."""
        kept = [place for seq in seqs for _, place in seq.kept]
        read = [seq.source for seq in seqs if seq.source >= 0]
        if len(set(kept)) < len(kept) or set(kept) & set(read):
            raise ValueError("a place is written twice in a step, or read as well")
        if not set(kept + read) <= set(range(self._places)):
            raise ValueError("a state is kept where there is no place")
        before = [
            self._remembered[seq.source] if seq.source >= 0 else self.of_slots.get(seq.slot, 0)
            for seq in seqs
        ]
        for seq, state in zip(seqs, before, strict=True):
            state = state if seq.start else ROOT
            known = tokens[seq.slot][seq.start : seq.start + seq.count]
            for end, token in enumerate([*known, *seq.guesses], seq.start + 1):
                self.behind[seq.slot, end] = state = mix(state, token)
        self.land(seqs, {})

    def block(self, place: int) -> list[int | None]:
        """The state in a place, as a disk keeps it."""
        return [self._remembered[place]]

    def put(self, place: int, entries: list[int | None]) -> None:
        [state] = entries
        self._remembered[place] = state or 0

    def land(self, seqs: Sequence[SeqStep], held: Mapping[int, Sequence[int]]) -> None:
        """Go on by as many guesses as hold."""
        for seq in seqs:
            count = seq.count + len(held.get(seq.slot, ()))
            self._remembered |= {
                place: self.behind[seq.slot, seq.start + kept] for kept, place in seq.kept if kept <= count
            }
            self.of_slots[seq.slot] = self.behind[seq.slot, seq.start + count]
