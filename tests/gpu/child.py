"""The process of one section: it runs the section's parts, and tells `guard.py` what comes of them.

    python tests/gpu/child.py SECTION FIRST CONTEXT --events DESCRIPTOR

After a part that fails it ends, and another process goes on with the next part: the device may be lost, and
tracebacks hold memory.
"""

import argparse
import gc
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE), str(ROOT / "tests" / "support")]
sys.path.append(str(ROOT / "tests" / "bench"))

from results import Result  # noqa: E402

Tell = Callable[..., None]


def run(section: str, first: int, context: dict[str, Any], tell: Tell) -> None:
    """Run the parts of a section from one of them on, as far as one process goes."""
    try:
        from workbench import NoDevice, Part, Workbench
    except ImportError as error:
        tell(nothing=f"this Python cannot compute: {error}")
        return
    try:
        bench = Workbench.open(context, tell)
    except NoDevice as error:
        tell(nothing=str(error))
        return
    parts: Sequence[Part] = import_module(f"parts.{section}").PARTS
    for number, part in enumerate(parts):
        if number < first:
            continue
        if part.fresh and number > first:
            tell(restart=number)
            return
        tell(part=number, of=len(parts), name=part.name, seconds=part.seconds)
        if not _run_part(part, bench, tell) and number + 1 < len(parts):
            tell(restart=number + 1)
            return
        gc.collect()
        bench.give_memory_back()
    tell(end=True)


def _run_part(part: Any, bench: Any, tell: Tell) -> bool:
    """Run one part -> whether this process may go on."""
    try:
        for result in part.work(bench):
            tell(result=asdict(result))
    except ModuleNotFoundError as error:
        if _is_ours(error):
            return _tell_failure(part.name, error, tell)
        tell(result=asdict(Result(part.name, f"there is no {error.name} here", skipped=True)))
    except Exception as error:
        return _tell_failure(part.name, error, tell)
    return True


def _tell_failure(name: str, error: Exception, tell: Tell) -> bool:
    traceback.print_exc()
    where = traceback.extract_tb(error.__traceback__)[-1]
    said = " ".join(str(error).split())[:500]
    place = f"{Path(where.filename).name}:{where.lineno}"
    tell(result=asdict(Result(name, f"{type(error).__name__} at {place}: {said}", wrong=1)))
    return False


def _is_ours(error: ModuleNotFoundError) -> bool:
    """Whether the missing module belongs to this repository, so that its name is wrong."""
    top = (error.name or "").split(".")[0]
    return (ROOT / top).exists() or top in {path.stem for path in HERE.iterdir()}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("section")
    parser.add_argument("first", type=int)
    parser.add_argument("context", type=Path)
    parser.add_argument("--events", type=int, required=True)
    given = parser.parse_args(arguments)
    os.set_inheritable(given.events, False)

    def tell(**event: Any) -> None:
        os.write(given.events, json.dumps(event).encode() + b"\n")

    print(f"== {given.section}, from part {given.first}", flush=True)
    run(given.section, given.first, json.loads(given.context.read_text()), tell)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
