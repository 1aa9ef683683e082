"""The ranks over which caches are cut by tokens, as they follow from options."""

from pathlib import Path

import pytest
from tiny import tiny_checkpoint

from engine_core.config import EngineConfig, ProcessConfig
from engine_core.ranks.layout import backend_of, check_layout, rank_places
from models.config import read_config


def asked(tensor: int = 1, pipeline: int = 1, **more: object) -> EngineConfig:
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    return EngineConfig(model="", **sizes, **more)  # pyright: ignore[reportArgumentType]


def test_more_ranks_cut_contexts() -> None:
    """Ranks that cut contexts lie side by side in a stage."""
    config = asked(2, 2, decode_context_parallel_size=2, prefill_context_parallel_size=2)
    assert [place.context_size for place in rank_places(ProcessConfig(engine=config))] == [4] * 8
    assert [(place.tensor_rank, place.stage) for place in rank_places(ProcessConfig(engine=config))][3:5] == [
        (3, 0),
        (0, 1),
    ]
    assert backend_of(ProcessConfig(engine=asked(prefill_context_parallel_size=2))) == "mp"


@pytest.mark.parametrize(
    ("config", "heads", "reason"),
    [
        (
            asked(2, decode_context_parallel_size=4),
            4,
            "-size 4: the workers of .* 2 cut .* divides their number",
        ),
        (
            asked(6, decode_context_parallel_size=3),
            3,
            "2 workers have the same key/value head of 3, and 3 cannot",
        ),
        (
            asked(2, prefill_context_parallel_size=4),
            2,
            "2 times --prefill-context-parallel-size 4 makes 8 workers",
        ),
        (
            asked(2, decode_context_parallel_size=2, enable_dbo=True),
            2,
            "--enable-dbo .* leave one of them out",
        ),
    ],
)
def test_contexts_that_cannot_be_cut(config: EngineConfig, heads: int, reason: str, tmp_path: Path) -> None:
    shape = {"num_attention_heads": 12, "num_key_value_heads": heads, "hidden_size": 48, "head_dim": 4}
    model = read_config(tiny_checkpoint("LlamaForCausalLM", tmp_path, **shape))
    with pytest.raises(ValueError, match=reason):
        check_layout(config, model)
