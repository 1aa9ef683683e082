"""How fast llama.cpp generates without a server, by its Python package; runs with that package's Python.

    VENV/bin/python tests/bench/llama_batches.py FILE

Reads lines "SEQUENCES READ WRITTEN THREADS" and answers each with tokens per second: that many prompts are
read in batches of up to 2,048 tokens, and then a token of each sequence is computed in each step. Nothing is
sampled.
"""

from __future__ import annotations

import ctypes
import random
import sys
import time

import llama_cpp


class Model:
    def __init__(self, file: str) -> None:
        llama_cpp.llama_backend_init()
        self._quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        self._model = llama_cpp.llama_model_load_from_file(
            file.encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise SystemExit(f"llama.cpp does not read {file}")
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._tokens = llama_cpp.llama_vocab_n_tokens(vocabulary)

    def speed(self, sequences: int, read: int, written: int, threads: int) -> float:
        """Tokens written per second of all the work."""
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = sequences * (read + written)
        params.n_seq_max = sequences
        params.n_batch = params.n_ubatch = 2048
        params.n_threads = params.n_threads_batch = threads
        context = llama_cpp.llama_init_from_model(self._model, params)
        batch = llama_cpp.llama_batch_init(max(2048, sequences), 0, 1)
        made = random.Random(sequences)
        self._fill(batch, [(0, 0, True)], made)
        llama_cpp.llama_decode(context, batch)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        started = time.perf_counter()
        prompts = [(at, number, at == read - 1) for number in range(sequences) for at in range(read)]
        steps = [
            [(at, number, True) for number in range(sequences)] for at in range(read, read + written - 1)
        ]
        for work in [*(prompts[i : i + 2048] for i in range(0, len(prompts), 2048)), *steps]:
            self._fill(batch, work, made)
            if llama_cpp.llama_decode(context, batch):
                raise SystemExit("llama.cpp failed")
            llama_cpp.llama_synchronize(context)
        seconds = time.perf_counter() - started
        llama_cpp.llama_batch_free(batch)
        llama_cpp.llama_free(context)
        return sequences * written / seconds

    def _fill(
        self, batch: llama_cpp.llama_batch, work: list[tuple[int, int, bool]], made: random.Random
    ) -> None:
        """Put tokens at (position, sequence, whether logits are wanted) into a batch."""
        batch.n_tokens = len(work)
        for i, (position, sequence, is_asked) in enumerate(work):
            batch.token[i] = made.randrange(self._tokens)
            batch.pos[i], batch.n_seq_id[i], batch.logits[i] = position, 1, is_asked
            batch.seq_id[i][0] = sequence


if __name__ == "__main__":
    model = Model(sys.argv[1])
    print("ready", flush=True)
    for line in sys.stdin:
        print(model.speed(*map(int, line.split())), flush=True)
