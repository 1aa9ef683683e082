"""A feature of a test's own: it touches no file of the core, and the core calls it."""

from fake_worker import facts
from scheduler_bench import Bench, add, config

from engine_core.protocol import AddRequest, Failed
from engine_core.scheduling.feature import Feature, Hooks
from engine_core.scheduling.planned_step import PlannedStep
from engine_core.scheduling.sequence import Sequence
from worker.protocol import StepOutput


class Quota(Feature):
    """Counts the tokens of requests with a salt, and takes none of them beyond so many."""

    def __init__(self, salt: str, most: int) -> None:
        self.salt, self.most, self.spent = salt, most, 0

    def refuse(self, add: AddRequest) -> str | None:
        return "this salt has had its tokens" if add.salt == self.salt and self.spent >= self.most else None

    def land_step(self, planned: PlannedStep, output: StepOutput, seconds: float) -> None:
        rows = zip(planned.seqs, planned.step.seqs, strict=True)
        self.spent += sum(row.count for seq, row in rows if seq.request.salt == self.salt)


def test_a_feature_is_added_without_the_core() -> None:
    bench, quota = Bench(config(), facts()), Quota("few", 8)
    hooks = bench.scheduler.hooks
    hooks.install((*hooks.features, quota))
    bench.serve(add(1, [1, 2, 3], max_tokens=4))
    assert quota.spent == 0
    bench.serve(add(2, [1, 2, 3], max_tokens=6, salt="few"))
    assert quota.spent == 3 + 5, "the last token is not computed"
    bench.add(add(3, [1, 2, 3], salt="few"))
    [failed] = bench.outputs[0, 3]
    assert isinstance(failed, Failed) and (failed.code, failed.message) == (
        400,
        "this salt has had its tokens",
    )
    bench.serve(add(4, [1, 2, 3]))
    assert bench.text(4) == bench.text(1)


def test_only_hooks_that_do_something_are_called() -> None:
    class Leaver(Feature):
        def leave(self, seq: Sequence) -> None: ...

    hooks = Hooks()
    hooks.install((Quota("a", 1), Leaver()))
    assert (len(hooks.leave), len(hooks.land_step), hooks.poll) == (1, 1, ())
    arrival = hooks.at_arrival(add(1, [1]))
    assert (len(arrival.refuse), arrival.enter) == (1, ())


def test_a_feature_that_rests_hears_of_requests_that_ask_for_it() -> None:
    class Salted(Quota):
        asked_by = ("salt",)

    hooks, salted = Hooks(), Salted("few", 0)
    hooks.install([salted])
    plain, asks = add(1, [1]), add(2, [1], salt="few")
    assert len(hooks.at_arrival(plain).refuse) == 1
    hooks.rest(salted)
    assert (len(hooks.at_arrival(plain).refuse), len(hooks.at_arrival(asks).refuse)) == (0, 1)
    hooks.wake(salted)
    assert len(hooks.at_arrival(plain).refuse) == 1
