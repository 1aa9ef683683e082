"""A model that answers to a text, in a program: its answers are those of transformers' `generate`."""

from pathlib import Path

import pytest
import torch
from tiny_sources import END, LANGUAGE, START, make

from server.errors import BadRequest
from server.offline.llm import LLM
from server.requests.beam_search import BeamSearchParams
from server.requests.sampling_params import SamplingParams

TEXTS = ["the man looks at the sea", "a", "one two three four five six seven eight"]


def test_answers_begin_as_the_checkpoint_says_and_what_continues_prompts_is_refused(tmp_path: Path) -> None:
    model = make("MBart", tmp_path)
    greedy = SamplingParams(temperature=0, max_tokens=8)
    with LLM(str(tmp_path), num_gpu_blocks_override=16) as llm:
        outputs = llm.generate([*TEXTS, [5] * 64], greedy, use_tqdm=False)
        for output in outputs:
            assert output.prompt_token_ids, "the source counts as the prompt"
            with torch.inference_mode():
                theirs = model.generate(
                    torch.tensor([output.prompt_token_ids]),
                    max_new_tokens=9,
                    do_sample=False,
                    forced_bos_token_id=LANGUAGE,
                    decoder_start_token_id=START,
                    bad_words_ids=[[1]],
                    eos_token_id=END,
                )[0].tolist()
            assert theirs[:2] == [START, LANGUAGE]
            assert output.outputs[0].token_ids == theirs[2:]
        [longest] = llm.generate(TEXTS[0], SamplingParams(ignore_eos=True, max_tokens=None), use_tqdm=False)
        assert len(longest.outputs[0].token_ids) == 62, "the decoder's positions without its first tokens"
        cut = SamplingParams(temperature=0, max_tokens=8, truncate_prompt_tokens=-1)
        assert len(llm.generate([[6] * 90], cut, use_tqdm=False)[0].prompt_token_ids or ()) == 64
        for wrong, names in (
            (lambda: llm.generate([[5] * 65], greedy), "64 tokens at most"),
            (
                lambda: llm.generate("a", SamplingParams(prompt_logprobs=1)),
                "prompt_logprobs: this is an encoder",
            ),
            (lambda: llm.beam_search("a", BeamSearchParams(beam_width=2, max_tokens=2)), "use_beam_search"),
            (lambda: llm.chat([{"role": "user", "content": "a"}]), "has no chats"),
        ):
            with pytest.raises(BadRequest, match=names):
                wrong()


@pytest.mark.slow(3)
@pytest.mark.parametrize("family", ["Marian", "FlanT5"])
def test_two_ranks_give_the_same_bits(family: str, tmp_path: Path) -> None:
    make(family, tmp_path)
    found: list[object] = []
    for ranks in (1, 2):
        with LLM(str(tmp_path), num_gpu_blocks_override=16, tensor_parallel_size=ranks) as llm:
            outputs = llm.generate(
                TEXTS, SamplingParams(temperature=0, max_tokens=8, logprobs=0), use_tqdm=False
            )
        found.append([(each.outputs[0].token_ids, each.outputs[0].cumulative_logprob) for each in outputs])
    assert found[0] == found[1]


@pytest.mark.slow(3)
def test_texts_may_be_longer_than_those_of_training_where_distances_tell_positions(tmp_path: Path) -> None:
    model = make("T5", tmp_path)
    greedy = SamplingParams(temperature=0, max_tokens=8)
    with LLM(str(tmp_path), num_gpu_blocks_override=64, max_model_len=640) as llm:
        [output] = llm.generate([[*range(4, 300), *range(4, 300)]], greedy, use_tqdm=False)
    with torch.inference_mode():
        read = torch.tensor([output.prompt_token_ids])
        options = {"max_new_tokens": 9, "do_sample": False, "forced_bos_token_id": LANGUAGE}
        written = model.generate(read, use_cache=False, **options)  # whose cache has too few layers
    assert output.outputs[0].token_ids == written[0].tolist()[2:]
