"""How much of three traces a hybrid finds in its cache, beside a dense model with the same cache.

`python tests/bench/traces.py` runs tiny random checkpoints: what is found does not depend on weights. A long
conversation with tools, many questions on one document, and conversations that are edited and branch.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from tiny import TURN_END_ID, VOCAB_SIZE, tiny_checkpoint  # pyright: ignore[reportMissingImports]

from server.offline.llm import LLM
from server.offline.request_outputs import RequestOutput
from server.requests.sampling import SamplingParams

LONGEST = 32768
ANSWER = 40
SLOTS = 32


class Server:
    """A model, and what its cache gave so far."""

    def __init__(self, architecture: str, folder: Path, **options: int) -> None:
        checkpoint = tiny_checkpoint(architecture, folder / architecture, max_position_embeddings=LONGEST)
        sizes = {"max_num_seqs": SLOTS, "num_gpu_blocks_override": 6000, "max_model_len": LONGEST}
        self.llm = LLM(str(checkpoint), **sizes, **options)
        self.cached = self.prompts = 0

    def answer(self, *prompts: list[int]) -> list[list[int]]:
        """Answer prompts that come at the same time."""
        params = SamplingParams(temperature=0, max_tokens=ANSWER, min_tokens=ANSWER)
        outputs: list[RequestOutput] = self.llm.generate(
            [{"prompt_token_ids": tokens} for tokens in prompts], params, use_tqdm=False
        )
        self.cached += sum(output.num_cached_tokens or 0 for output in outputs)
        self.prompts += sum(map(len, prompts))
        return [list(output.outputs[0].token_ids) for output in outputs]


def text(rnd: random.Random, least: int, most: int) -> list[int]:
    """One turn of a conversation."""
    return [rnd.randrange(5, VOCAB_SIZE) for _ in range(rnd.randint(least, most))] + [TURN_END_ID]


def agent(server: Server, rnd: random.Random) -> None:
    """Thirty turns of one conversation, each with the result of a tool."""
    history = text(rnd, 1500, 1500)
    for _ in range(30):
        history += text(rnd, 20, 80) + text(rnd, 100, 600)
        [answer] = server.answer(history)
        history = history + answer + [TURN_END_ID]


def document(server: Server, rnd: random.Random) -> None:
    """Two hundred questions on one document of 6,000 tokens, eight at a time after the first ones."""
    shared = [rnd.randrange(5, VOCAB_SIZE) for _ in range(6000)]
    questions = [shared + text(rnd, 20, 400) for _ in range(200)]
    for question in questions[:8]:
        server.answer(question)
    for start in range(8, 200, 8):
        server.answer(*questions[start : start + 8])


def edits(server: Server, rnd: random.Random) -> None:
    """Conversations under one system prompt, whose users go back to an earlier turn and ask otherwise."""
    system = text(rnd, 800, 800)
    for _ in range(6):
        turns: list[list[int]] = []
        for _ in range(12):
            if len(turns) > 2 and rnd.random() < 0.4:
                del turns[rnd.randrange(1, len(turns)) :]
            question = text(rnd, 30, 200)
            [answer] = server.answer(system + [token for turn in turns for token in turn] + question)
            turns.append(question + answer + [TURN_END_ID])


def shares() -> Iterator[tuple[str, float, float, float]]:
    """The name of each trace, and how much of its prompts a dense model and a hybrid found; their ratio."""
    for trace in (agent, document, edits):
        found: list[float] = []
        for architecture, options in (
            ("Qwen3ForCausalLM", {}),
            ("Qwen3_5ForCausalLM", {"state_snapshots": 64}),
        ):
            with tempfile.TemporaryDirectory() as folder:
                server = Server(architecture, Path(folder), **options)
                trace(server, random.Random(0))
                found.append(server.cached / server.prompts)
        yield trace.__name__, *found, found[1] / found[0]


def main() -> None:
    for name, dense, hybrid, ratio in shares():
        print(f"{name:9} cached of all prompt tokens: dense {dense:.3f}, hybrid {hybrid:.3f}: {ratio:.3f}")


if __name__ == "__main__":
    main()
