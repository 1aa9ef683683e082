"""Rope frequencies and the angles of positions, on one axis and on three, compared with Hugging Face's."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shape_files import read_shapes
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

from models.checkpoint.weights import load, open_weights
from models.layers.rotary import Rotary, plain_rope, read_rope

CPU = torch.device("cpu")

ROPES = read_shapes("ropes")


class TestRope:
    @pytest.mark.parametrize("length", [100, 400, 4000])
    @pytest.mark.parametrize("name", ROPES)
    def test_as_hugging_face(self, name: str, length: int) -> None:
        kind = name.partition(",")[0]
        config = LlamaConfig(
            hidden_size=128,
            num_attention_heads=4,
            max_position_embeddings=512,
            rope_parameters={"rope_type": kind, "rope_theta": 5000.0, **ROPES[name]},
        )
        expected, scale = ROPE_INIT_FUNCTIONS[kind](config, CPU, seq_len=length)
        rope = read_rope(config.to_dict(), 32, max_len=length)
        torch.testing.assert_close(torch.tensor(rope.frequencies), expected, atol=0, rtol=1e-6)
        assert rope.scale == pytest.approx(scale)

    def test_old_spelling(self) -> None:
        new = {"max_position_embeddings": 512, "rope_parameters": {"rope_theta": 5e3, "rope_type": "linear"}}
        new["rope_parameters"] |= {"factor": 2.0, "partial_rotary_factor": 0.5}
        old = {
            "max_position_embeddings": 512,
            "rope_theta": 5e3,
            "rope_scaling": {"type": "linear", "factor": 2.0},
            "partial_rotary_factor": 0.5,
        }
        assert read_rope(old, 16, 512) == read_rope(new, 16, 512)
        assert len(read_rope(old, 16, 512).frequencies) == 4

    def test_nothing_said_means_plain(self) -> None:
        assert read_rope({"rope_scaling": None}, 16, 512) == plain_rope(10000.0, 16)
        assert read_rope({}, 16, 512, default_theta=7.0) == plain_rope(7.0, 16)

    def test_layer_types_have_their_own(self) -> None:
        raw = {"rope_parameters": {"full": {"rope_theta": 7.0}, "sliding": {"rope_theta": 8.0}}}
        assert read_rope(raw, 16, 512, layer_type="full") == plain_rope(7.0, 16)
        assert read_rope(raw, 16, 512, layer_type="sliding") == plain_rope(8.0, 16)

    def test_where_phi_3_says_the_old_length(self) -> None:
        inside = {"rope_type": "longrope", **ROPES["longrope"]}
        outside = {"original_max_position_embeddings": 300, "max_position_embeddings": 512}
        at_300 = inside | {"original_max_position_embeddings": 300}
        assert read_rope(outside | {"rope_scaling": inside}, 32, 200) == read_rope(
            {"max_position_embeddings": 512, "rope_scaling": at_300}, 32, 200
        )

    @pytest.mark.parametrize(
        ("parameters", "message"),
        [
            ({"rope_type": "spiral"}, "names the rope type 'spiral'; there are default, linear"),
            ({"rope_type": "linear"}, "type 'linear' in config.json: .*missing required field `factor`"),
            ({"rope_type": "linear", "factor": "2"}, r"Expected `float`, got `str` - at `\$.factor`"),
            ({"type": "su", "short_factor": [1], "long_factor": [1]}, "needs 8 factors, not 1"),
            ([1], "must be an object, not"),
            ({"rope_type": "default", "mrope_section": [1, 2, 3]}, "must have the 8 pairs of dimensions"),
            ({"type": "mrope", "mrope_section": [4, 4]}, r"length 3, got 2 - at `\$.mrope_section`"),
        ],
    )
    def test_errors(self, parameters: object, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            read_rope({"rope_scaling": parameters}, 16, 512)

    @pytest.mark.parametrize(
        ("theirs", "part", "fields"),
        [
            (Qwen2VLRotaryEmbedding, 1.0, {"mrope_section": [4, 7, 5]}),
            (Qwen3_5TextRotaryEmbedding, 0.5, {"mrope_section": [4, 3, 1], "mrope_interleaved": True}),
            (Qwen3_5TextRotaryEmbedding, 1.0, {"mrope_section": [2, 9, 5], "mrope_interleaved": True}),
        ],
    )
    def test_three_axes(self, theirs: Any, part: float, fields: dict[str, object]) -> None:
        parameters = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": part, **fields}
        config = SimpleNamespace(head_dim=32, rope_parameters=parameters, max_position_embeddings=512)
        positions = torch.randint(0, 300, (3, 9))
        expected = theirs(config)(torch.zeros(1), positions[:, None])
        rotary = Rotary(read_rope({"rope_parameters": parameters}, 32, 512))
        load(rotary, open_weights(Path(), "dummy", device=CPU, dtype=torch.float32))
        for ours, other in zip(rotary(positions).chunk(2, dim=-1), expected, strict=True):
            torch.testing.assert_close(ours.repeat(1, 2), other[0], rtol=0, atol=1e-6)
        assert torch.equal(rotary(positions[:1].repeat(3, 1)), rotary(positions[0]))
