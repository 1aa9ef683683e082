"""Another server on the same card, with models of the same shape: one client measures both in turns."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from results import Result
from serving import CLIENTS, Measured, need_modules, ours, peer, put_load, serving
from workbench import Part, Workbench

_ROUNDS = 2


def measure_beside(bench: Workbench, name: str) -> Iterator[Result]:
    """Serve a model by both, in turns, and put the same loads on each."""
    need_modules()
    if bench.peer is None:
        yield Result(f"{name} beside the peer", "no --peer was given", skipped=True)
        return
    sides = (ours(bench), peer(bench.peer))
    ready: dict[str, list[float]] = {side.name: [] for side in sides}
    found: dict[tuple[str, int], list[Measured]] = {}
    with TemporaryDirectory(dir=bench.folder) as place:
        folder = bench.shape(name).write(Path(place) / "model")
        for turn in range(bench.size(_ROUNDS, 1)):
            for side in sides:
                with serving(side, folder) as server:
                    ready[side.name].append(server.ready_s)
                    put_load(bench, server.url, 1, seed=turn)
                    for clients in CLIENTS:
                        point = put_load(bench, server.url, clients, seed=100 * turn + clients)
                        found.setdefault((side.name, clients), []).append(point)
                yield from _told(name, side.name, ready, found)
    yield from _compared(name, ready, found)


def _told(
    name: str, side: str, ready: dict[str, list[float]], found: dict[tuple[str, int], list[Measured]]
) -> Iterator[Result]:
    """What the last turn of a side has brought."""
    yield Result(f"{name} by {side}, ready", "", ready[side][-1], "s")
    for clients in CLIENTS:
        point = found[side, clients][-1]
        text = f"first token after {point.first_token:.1f} ms"
        text += f", {point.failed} failed" if point.failed else ""
        ours_failed = point.failed if side == "facet" else 0
        yield Result(f"{name} by {side}, {clients} clients", text, point.tokens, "tok/s", wrong=ours_failed)


def _compared(
    name: str, ready: dict[str, list[float]], found: dict[tuple[str, int], list[Measured]]
) -> Iterator[Result]:
    """The best of ours beside the best of the peer's."""
    for clients in CLIENTS:
        one, other = (found[side, clients] for side in ("facet", "peer"))
        rates = [max(point.tokens for point in points) for points in (one, other)]
        waits = [min(point.first_token for point in points) for points in (one, other)]
        if min(rates) and min(waits):
            what = f"{name}, {clients} clients"
            yield Result(f"{what}, beside the peer", "", rates[0] / rates[1], "times its tokens")
            yield Result(f"{what}, first token beside the peer", "", waits[0] / waits[1], "times its time")
    ratio = min(ready["facet"]) / min(ready["peer"])
    yield Result(f"{name}, ready beside the peer", "", ratio, "times its time")


PARTS = tuple(
    Part(f"{name} beside the peer", partial(measure_beside, name=name), 440) for name in ("0.6B", "8B")
)
