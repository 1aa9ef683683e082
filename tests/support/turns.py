"""The turns of tests: what costs much and fails seldom runs in parts, one of them each day."""

from collections import defaultdict
from collections.abc import Iterable
from zlib import crc32

NAMES = ("slow", "turns")
"""The names of the marks that give a test its days. Of several marks the nearest to the test holds."""

TURN_OF_SLOW = 14
"""The days in which every test marked `slow` without a number has had its turn."""

PARTS = {
    "clients": 7,
    "e2e/test_logs.py": 14,
    "e2e/test_ranks.py": 14,
    "e2e/test_shared_experts.py": 14,
    "e2e/test_stalls.py": 14,
    "engine_core/features/cache_tiers": 3,
    "engine_core/features/faults": 3,
    "engine_core/grammar/test_draft_bounds.py": 3,
    "engine_core/joint_steps": 7,
    "engine_core/joint_steps/test_engines.py": 4,
    "engine_core/ranks": 7,
    "engine_core/ranks/test_ray_ranks.py": 14,
    "engine_core/ray_replicas": 14,
    "engine_core/scheduling/queue/test_owner_shares.py": 3,
    "engine_core/scheduling/test_bound_drafts.py": 3,
    "engine_core/scheduling/test_step_timing.py": 3,
    "engine_core/scheduling/test_random_traces.py": 14,
    "engine_core/scheduling/test_step_time_limit.py": 3,
    "engine_core/scheduling/test_first_token_forecast.py": 3,
    "engine_core/test_all_faults.py": 4,
    "engine_core/test_architectures.py": 14,
    "engine_core/test_bound_models.py": 7,
    "engine_core/test_cache_groups.py": 3,
    "engine_core/test_draft_heads.py": 14,
    "engine_core/test_draft_models.py": 7,
    "engine_core/test_engine_children.py": 4,
    "engine_core/test_failed_steps.py": 4,
    "engine_core/test_failed_steps_of_models.py": 7,
    "engine_core/test_killed_engines.py": 7,
    "engine_core/test_pictured_models.py": 7,
    "engine_core/test_prefixes_in_host_memory.py": 3,
    "engine_core/test_prefixes_on_disk.py": 3,
    "engine_core/test_engine_main.py": 5,
    "engine_core/test_same_bits.py": 14,
    "engine_core/test_sleep.py": 4,
    "engine_core/test_sources_of_text.py": 3,
    "engine_core/test_tasks.py": 2,
    "engine_core/test_thinking_budget.py": 3,
    "engine_core/test_whisper.py": 5,
    "gpu/test_parts.py": 28,
    "models/conversion/test_converted_classifiers.py": 7,
    "models/conversion/test_converted_embedders.py": 7,
    "models/demo": 7,
    "models/families": 8,
    "models/gguf": 8,
    "published": 10,
    "models/lora": 7,
    "models/parallel": 7,
    "models/quantization": 7,
    "models/towers": 4,
    "server/batches": 3,
    "server/offline": 6,
    "server/page": 5,
    "server/routes/conversations": 3,
    "server/terminal": 5,
    "worker/devices/test_pinned.py": 5,
    "worker/cache_tiers": 4,
    "worker/features/experts": 2,
    "worker/features/speculation": 7,
    "worker/host/test_memory.py": 7,
    "worker/kernels/cpu": 7,
    "worker/kernels/cpu/test_latent_attention.py": 8,
    "worker/kernels/cpu/test_recording.py": 8,
    "worker/kernels/cpu/test_sanitized.py": 56,
    "worker/kernels/cuda": 14,
    "worker/kernels/cuda/compiling": 28,
    "worker/kernels/cuda/compiling/test_machine_code.py": 56,
    "worker/kernels/cuda/steps": 28,
    "worker/kernels/cuda/steps/test_drafters.py": 56,
    "worker/kernels/cuda/steps/test_mixed_step.py": 56,
    "worker/kernels/cuda/steps/test_no_waits.py": 56,
    "worker/kernels/cuda/steps/test_ranks.py": 56,
    "worker/kernels/cuda/steps/test_step_graphs.py": 56,
    "worker/kernels/cuda/test_layers.py": 28,
    "worker/ranks": 14,
    "worker/sampling": 3,
    "worker/test_document_models.py": 14,
    "worker/test_gemma4_pictures.py": 3,
    "worker/test_heard_sounds.py": 3,
    "worker/test_minicpmv.py": 3,
    "worker/test_pictured_families.py": 5,
    "worker/test_qwen_pictures.py": 7,
    "worker/test_rank_process.py": 3,
    "worker/test_start_runner.py": 2,
}
"""The parts in which folders and files of `tests` run, by their paths. Of several paths the longest holds."""

Mark = tuple[str, tuple[int, ...]]
"""The name of a mark, and its arguments."""


def waiting_on(day: int, tests: Iterable[tuple[str, Mark | None]]) -> set[str]:
    """Return the names of the tests, given with their marks, that do not run on this day.

    Of the cases of a test marked `turns` one runs, or an nth part of those marked `turns(n)`; of the tests
    of a file that are marked `slow` a fourteenth, or an nth part of those marked `slow(n)`. Of the cases of
    a file in PARTS one part runs: all tests have the same cases on the same days, as they share what is made
    for a case.
    """
    waiting: set[str] = set()
    sharing: dict[tuple[str, int], list[str]] = defaultdict(list)
    cases: dict[tuple[str, int], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, mark in tests:
        file, _, test = name.partition("::")
        match mark:
            case ("slow", days):
                sharing[file, *(days or (TURN_OF_SLOW,))].append(name)
            case ("turns", days):
                sharing[name.partition("[")[0], *(days or (0,))].append(name)
            case _ if parts := parts_of(file):
                cases[file, parts][test.partition("[")[2] or test].append(name)
            case _:
                pass
    for (owner, days), names in sharing.items():
        # Files differ in whose turn is first. Tests of one file that have the same cases, or none, have them
        # on the same days, as they share what was made for a case or for the file.
        first, days = crc32(owner.partition("::")[0].encode()), days or len(names)
        waiting |= {name for place, name in enumerate(names, first) if (place - day) % days}
    for (file, parts), names_of in cases.items():
        for place, names in enumerate(names_of.values(), crc32(file.encode())):
            if (place - day) % parts:
                waiting.update(names)
    return waiting


def parts_of(file: str) -> int:
    """Return in how many parts the tests of a file, named from the root, run; 0 if all run every day."""
    path = file.removeprefix("tests/")
    found = [each for each in PARTS if path == each or path.startswith(f"{each}/")]
    return PARTS[max(found, key=len)] if found else 0
