"""Steps for a worker as a scheduler may plan them: any mix of prompts, chunks and single tokens."""

import random
from dataclasses import dataclass, field

from tiny import VOCAB_SIZE

from worker.protocol import NewSeq, Sampling, SeqStep, StepInput
from worker.runner import Runner


@dataclass
class Life:
    """A sequence as the scheduler sees it."""

    slot: int
    tokens: list[int]
    prompt_len: int
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    entered: int = 0
    """The number of blocks that the worker knows of."""
    new: bool = True

    @property
    def missing(self) -> int:
        return len(self.tokens) - self.computed


class RandomScheduler:
    """Begins sequences, some with another's first blocks, and aborts and preempts some, at random."""

    def __init__(self, runner: Runner, *, slots: int, block_size: int, seed: int) -> None:
        self.runner = runner
        self.slots = slots
        self.block_size = block_size
        self.random = random.Random(seed)
        self.holders = [0] * runner.facts.num_blocks
        self.live: list[Life] = []

    def turn(self) -> None:
        if len(self.live) < self.slots and self.random.random() < 0.5:
            self.begin()
        if self.random.random() < 0.04:
            self.give_up(self.random.choice(self.live))
        if self.random.random() < 0.04 and self.live:
            old = self.random.choice(self.live)
            self.give_up(old)
            self.live.append(Life(self.free_slot(), old.tokens, old.prompt_len))
        decoding = [each for each in self.live if each.missing == 1 and not each.new]
        pool = decoding if decoding and self.random.random() < 0.8 else self.live
        if pool:
            self.step(self.random.sample(pool, self.random.randint(1, len(pool))))

    def begin(self) -> None:
        length = self.random.choice([1, 2, 15, 16, 17, 40, 270, 530])
        life = Life(self.free_slot(), [self.random.randrange(5, VOCAB_SIZE) for _ in range(length)], length)
        if self.live and self.random.random() < 0.3:
            other = self.random.choice(self.live)
            shared = min(other.computed, other.prompt_len) // self.block_size
            life.tokens[:0] = other.tokens[: shared * self.block_size]
            life.prompt_len, life.computed = len(life.tokens), shared * self.block_size
            life.blocks = other.blocks[:shared]
            for block in life.blocks:
                self.holders[block] += 1
        self.live.append(life)

    def free_slot(self) -> int:
        return self.random.choice(sorted(set(range(self.slots)) - {each.slot for each in self.live}))

    def give_up(self, life: Life) -> None:
        self.live.remove(life)
        for block in life.blocks:
            self.holders[block] -= 1

    def step(self, chosen: list[Life]) -> None:
        new = [self.arrival(each) for each in chosen if each.new]
        seqs = [self.share(each) for each in chosen]
        answer = self.runner.launch(StepInput(number=1, new=new, seqs=seqs)).result()
        for each, seq, token in zip(chosen, seqs, answer.tokens, strict=True):
            if seq.samples:
                each.tokens.append(token)

    def arrival(self, life: Life) -> NewSeq:
        life.new = False
        params = Sampling(max_tokens=1000, temperature=0)
        return NewSeq(slot=life.slot, tokens=list(life.tokens), prompt_len=life.prompt_len, params=params)

    def share(self, life: Life) -> SeqStep:
        start, count = life.computed, self.random.randint(1, life.missing)
        life.computed += count
        while len(life.blocks) * self.block_size < life.computed:
            block = self.random.choice([at for at, holders in enumerate(self.holders) if not holders])
            self.holders[block] += 1
            life.blocks.append(block)
        gained, life.entered = life.blocks[life.entered :], len(life.blocks)
        return SeqStep(slot=life.slot, start=start, count=count, blocks=gained, samples=life.missing == 0)
