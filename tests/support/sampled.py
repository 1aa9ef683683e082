"""Rows of a step as the sampler gets them: their tokens in the tables, and the plan of the step."""

from collections.abc import Collection, Sequence

import numpy as np
import torch

from worker.devices.cpu import Cpu
from worker.protocol import NewSeq, Sampling
from worker.sampling.sampler import SamplingPlan, plan_sampling
from worker.tables.slots import SampleRows, Slots
from worker.tables.staging import Staging

MAX_LEN = 64


def plan_rows(
    rows: Sequence[tuple[Sampling, list[int], int]],
    vocab_size: int,
    *,
    first_slot: int = 0,
    bound: Collection[int] = (),
) -> tuple[Slots, SamplingPlan]:
    """Plan rows of these options, tokens and numbers of prompt tokens, in slots from `first_slot` on."""
    device = Cpu(1)
    slots = Slots(device.target, first_slot + len(rows), MAX_LEN, block_size=16)
    for slot, (params, tokens, prompt_len) in enumerate(rows, first_slot):
        slots.admit(NewSeq(slot=slot, tokens=tokens, prompt_len=prompt_len, params=params))
        slots.tokens[slot, : len(tokens)] = torch.tensor(tokens)
    packet = Staging(device.staging_buffer, steps_ahead=0, words=64).open()
    lengths = np.array([len(tokens) for _, tokens, _ in rows])
    outputs = lengths - [prompt_len for _, _, prompt_len in rows]
    numbers = np.arange(first_slot, first_slot + len(rows))
    plan = plan_sampling(packet, slots, SampleRows(numbers, lengths, outputs, bound), vocab_size)
    packet.send()
    return slots, plan
