"""`LLM.beam_search` finds what a program finds that asks for one token at a time, as vLLM does it."""

import asyncio

import pytest
import torch
from beam_rule import search

from facet import LLM, AsyncLLM, BadRequest, BeamSearchParams, BeamSearchSequence, SamplingParams
from server.requests.beam_search import BeamParams

PROMPTS = ["The capital of France is", "Once upon a time", "One and one is"]


async def search_in_a_server(expected: list[list[BeamSearchSequence]]) -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=12)
    async with AsyncLLM("demo", dtype="float32", kv_cache_memory_bytes="64m", cpu_threads="1") as engine:
        for prompt, sequences in zip(PROMPTS, expected, strict=True):
            [output] = [each async for each in engine.beam_search(prompt, "1", params)]
            assert output.finished and len(output.outputs) == 4
            for answer, sequence in zip(output.outputs, sequences, strict=True):
                assert [*output.prompt_token_ids, *answer.token_ids] == sequence.tokens
                assert answer.cumulative_logprob == pytest.approx(sequence.cum_logprob)
                assert answer.finish_reason == sequence.finish_reason


@pytest.mark.slow(3)
def test_a_search_finds_what_a_loop_of_requests_finds() -> None:
    with LLM("demo", dtype="float32", kv_cache_memory_bytes="64m", cpu_threads="1") as llm:
        stops = llm.facts.eos_token_ids

        def likely(tokens: list[int], count: int) -> list[tuple[int, float]]:
            params = SamplingParams(temperature=0, max_tokens=1, logprobs=count)
            (output,) = llm.generate(tokens, params, use_tqdm=False)
            assert output.outputs[0].logprobs is not None
            return [(token, each.logprob) for token, each in output.outputs[0].logprobs[0].items()]

        found = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=4, max_tokens=12), concurrency_limit=2)
        for prompt, output in zip(PROMPTS, found, strict=True):
            ids = llm.tokenizer.encode(prompt)
            expected = search(likely, ids, BeamParams(4), 12, stops)
            assert [each.tokens for each in output.sequences] == [
                [*ids, *tokens] for tokens, _, _ in expected
            ]
            assert [each.cum_logprob for each in output.sequences] == [total for _, total, _ in expected]
            assert [each.finish_reason for each in output.sequences] == [finish for _, _, finish in expected]
            best = output.sequences[0]
            assert best.text is not None and best.text.startswith(prompt)
            assert [next(iter(each)) for each in best.logprobs] == best.tokens[len(ids) :]
            assert all(len(each) == 8 for each in best.logprobs)
        assert "Paris" in (found[0].sequences[0].text or "")

        kinds = llm.apply_model(lambda model: (type(model).__name__, next(model.parameters()).dtype))
        assert kinds == [(type_name, torch.float32) for type_name, _ in kinds] and len(kinds) == 1
        asyncio.run(search_in_a_server([output.sequences for output in found]))

        begun = [min(llm.tokenizer.special_ids), *llm.tokenizer.encode(PROMPTS[0])]
        for hidden in (True, False):
            params = BeamSearchParams(1, 1, skip_special_tokens=hidden)
            [answer] = llm.beam_search(begun, params)[0].sequences
            assert answer.text == llm.tokenizer.decode(answer.tokens, hidden)
            assert (answer.text or "").startswith(PROMPTS[0]) == hidden

        (endless,) = llm.beam_search("Hi", BeamSearchParams(2, 30, ignore_eos=True))
        assert [len(each.logprobs) for each in endless.sequences] == [30, 30]
        with pytest.raises(BadRequest, match="width of a beam search must be from 1"):
            llm.beam_search("Hi", BeamSearchParams(0, 5))
        with pytest.raises(BadRequest, match="length_penalty must be from -10 to 10"):
            llm.beam_search("Hi", BeamSearchParams(2, 5, length_penalty=99.0))
        with pytest.raises(ValueError, match="concurrency_limit must be 1 or more"):
            llm.beam_search("Hi", BeamSearchParams(2, 5), concurrency_limit=0)
