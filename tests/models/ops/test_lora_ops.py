"""The plain form of adapters."""

import torch

from models.ops.lora_ops import Adaptable, Block, LayerAdapter, hold_adapters


def test_all_of_an_adapter_lies_where_its_layer_does() -> None:
    """Files are read on the CPU."""
    layer = Adaptable(torch.empty(6, 4, device="meta"), 4, 6, scopes=1, pieces=1)
    numbers = torch.ones(6)
    adapter = LayerAdapter(torch.ones(2, 4), [Block(0, 0, torch.ones(6, 2))], numbers, numbers)
    [held] = hold_adapters([layer], 1, 2, 1).layers
    found = held.prepare(adapter)
    tensors = found.a, found.blocks[0].b, found.factor, found.shift
    assert {each.device.type for each in tensors} == {"meta"}
