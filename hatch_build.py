"""Puts the C kernels into the wheel where there is a C compiler. Without one the wheel has all but them.

An editable install has none either: there they are compiled at first use, and again after each change.
"""

from __future__ import annotations

import sys
import sysconfig
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelsHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        sys.path.insert(0, self.root)
        from worker.kernels.cpu import library

        try:
            built = library.build_all(library.BUILT)
        except (library.BuildError, OSError) as error:
            self.app.display_warning(f"the wheel has no compiled kernels: {error}")
            return
        # By name: earlier ones, of other sources, may lie beside them.
        build_data["artifacts"] += [f"worker/kernels/built/{path.name}" for path in built]
        # They depend on the system, but not on Python.
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data |= {"pure_python": False, "tag": f"py3-none-{platform}"}
