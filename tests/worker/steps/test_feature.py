"""The core calls the hooks that features override, in the order of features, and no others."""

from worker.protocol import NewSeq, Sampling
from worker.steps.feature import Feature, Hooks


class Noting(Feature):
    """Notes the slots that it is told of."""

    def __init__(self, name: str, told: list[tuple[str, int]]) -> None:
        self._name, self._told = name, told

    def admit(self, new: NewSeq) -> None:
        self._told.append((self._name, new.slot))


def test_a_feature_that_does_nothing_costs_no_call() -> None:
    feature = Feature()
    kept = vars(Hooks([feature]))
    assert kept.pop("features") == (feature,)
    assert set(kept.values()) == {()}
    assert kept.keys() == {name for name in vars(Feature) if not name.startswith("_")}, (
        "there is no other hook"
    )


def test_hooks_are_called_in_the_order_of_features() -> None:
    told: list[tuple[str, int]] = []
    one, other = Noting("one", told), Noting("other", told)
    hooks = Hooks([one, Feature(), other])
    for admit in hooks.admit:
        admit(NewSeq(2, [5], 1, Sampling(max_tokens=1)))
    assert told == [("one", 2), ("other", 2)]
