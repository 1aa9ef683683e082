"""Shows by torch's profiler which kernels take the time of a decoding step and of a prompt."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

from dummy import GREEDY, opened
from results import Result
from torch.profiler import ProfilerActivity, profile
from workbench import Workbench

_TIMES, _SHOWN = 3, 8
"""How often a step is taken, and how many kernels are shown of it."""


def measure_kernels(bench: Workbench) -> Iterator[Result]:
    """The kernels of steps of 1 and 32 rows and of a prompt, those first that take longest."""
    rows, length, prompt = 32, bench.tokens(512), 1024
    longest = bench.size(prompt + 192, 300)
    with opened(bench, bench.shape("0.6B"), rows=bench.rows(rows), longest=longest) as dummy:
        dummy.make_graphs()
        for count in (1, rows):
            decode = partial(dummy.decode, bench.rows(count), length, bench.size(10, 3), GREEDY)
            decode()
            work = dummy.replay_of(bench.rows(count)) or decode
            yield from _kernels_of(bench, f"kernels, {count} x 512", work)
        yield from _kernels_of(
            bench, f"kernels, prompt of {prompt}", lambda: dummy.prompt(bench.tokens(prompt))
        )


def _kernels_of(bench: Workbench, case: str, work: Callable[[], object]) -> Iterator[Result]:
    activity = ProfilerActivity.CUDA if bench.on_card else ProfilerActivity.CPU
    work()
    bench.finish()
    with profile(activities=[activity]) as profiled:
        for _ in range(_TIMES):
            work()
        bench.finish()
    events = [event for event in profiled.events() or [] if event.device_type.name == activity.name]
    if not events:
        yield Result(case, "the profiler saw none", wrong=1)
        return
    took, times = Counter[str](), Counter(event.name for event in events)
    for event in events:
        took[event.name] += event.time_range.elapsed_us()
    ranges = [event.time_range for event in events]
    span = (max(each.end for each in ranges) - min(each.start for each in ranges)) / _TIMES
    whole = sum(took.values())
    yield Result(case, f"{len(events) / _TIMES:.0f} in {span:,.0f} us", whole / _TIMES, "us")
    for name, each in took.most_common(_SHOWN):
        told = f"{times[name] / _TIMES:.0f} x {each / times[name]:.2f} us, {each / whole:.0%}"
        yield Result(f"{case}: {name[:60]}", told, each / _TIMES, "us")
