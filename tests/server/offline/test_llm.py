"""`LLM` in this process, on the demo model."""

import json
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import jsonschema
import numpy as np
import pytest

from facet import LLM, LoRARequest, SamplingParams, StructuredOutputsParams
from server.errors import ApiError, BadRequest, Unavailable
from server.requests.pooling import PoolingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12)
CAPITAL = "The capital of France is"
LONG = "A prompt that nobody else sends: " + "one two three four five six seven eight " * 8
OPTIONS = {"dtype": "float32", "kv_cache_memory_bytes": "64m", "cpu_threads": "1"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": {}}}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", tasks=["generate", "embed", "token_embed"], **OPTIONS) as llm:
        yield llm


def test_one_answer_for_each_prompt_in_order(llm: LLM):
    prompts = [CAPITAL, "The capital of Japan is", "Once upon a time"]
    together = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.prompt for output in together] == prompts
    assert "Paris" in together[0].outputs[0].text and "Tokyo" in together[1].outputs[0].text
    alone = [llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].text for prompt in prompts]
    assert [output.outputs[0].text for output in together] == alone
    assert all(output.finished and output.outputs[0].finished() for output in together)
    assert len({output.request_id for output in together}) == 3


def test_the_beginning_of_a_long_prompt_is_cut_off_if_asked(llm: LLM):
    ids = llm.tokenizer.encode(CAPITAL)
    own = SamplingParams(temperature=0, max_tokens=2, truncate_prompt_tokens=2)
    outputs = llm.generate([CAPITAL] * 2, [GREEDY, own], truncate_prompt_tokens=3, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [ids[-3:], ids[-2:]]
    (all_of_it,) = llm.generate(CAPITAL, GREEDY, truncate_prompt_tokens=-1, use_tqdm=False)
    assert all_of_it.prompt_token_ids == ids
    with pytest.raises(BadRequest, match="at least -1"):
        llm.generate(CAPITAL, truncate_prompt_tokens=-2, use_tqdm=False)


def test_every_form_of_a_prompt(llm: LLM):
    ids = llm.tokenizer.encode(CAPITAL)
    (expected,) = llm.generate(CAPITAL, GREEDY, use_tqdm=False)
    forms = [
        (ids, None),
        ({"prompt": CAPITAL}, CAPITAL),
        ({"prompt_token_ids": ids}, None),
        ({"prompt_token_ids": ids, "prompt": "the text of these"}, "the text of these"),
    ]
    for form, text in forms:
        (alone,) = llm.generate(form, GREEDY, use_tqdm=False)
        assert (alone.prompt, alone.prompt_token_ids, alone.outputs) == (text, ids, expected.outputs)
    mixed = llm.generate([CAPITAL, *(form for form, _ in forms)], GREEDY, use_tqdm=False)
    assert [one.outputs for one in mixed] == [expected.outputs] * 5
    assert llm.generate([], GREEDY) == []


@pytest.mark.slow(3)
def test_prompts_to_answer_lose_their_beginning_if_asked(llm: LLM):
    """A text to pool loses its end instead."""
    ids = llm.tokenizer.encode(CAPITAL)

    def read(prompt: str | list[int], keep: int) -> list[int]:
        params = SamplingParams(truncate_prompt_tokens=keep, max_tokens=2)
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        return output.prompt_token_ids

    assert read(CAPITAL, 3) == read(ids, 3) == ids[-3:]
    assert read(ids, 100) == read(ids, -1) == ids
    most = llm.facts.max_model_len
    assert read([5] * most + [6], -1) == [5] * (most - 3) + [6]
    assert len(read("Once upon a time. " * most, -1)) == most - 2
    for keep, refused in (
        (most + 1, "cannot be greater than max_model_len"),
        (-2, "at least -1"),
        (0, "empty"),
    ):
        with pytest.raises(BadRequest, match=refused):
            read(ids, keep)


def test_the_bounds_of_a_server_are_none_of_a_program(llm: LLM):
    stops = [f"stop {number}" for number in range(17)]
    params = SamplingParams(n=129, max_tokens=1, stop=stops, logit_bias=dict.fromkeys(range(1025), 1e3))
    (output,) = llm.generate(CAPITAL, params, use_tqdm=False)
    assert len(output.outputs) == 129


def test_the_end_of_the_context_ends_an_answer(llm: LLM):
    most = llm.facts.max_model_len
    params = SamplingParams(max_tokens=most + 1, min_tokens=20, temperature=0, ignore_eos=True)
    (output,) = llm.generate([5] * (most - 4), params, use_tqdm=False)
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (4, "length")
    with pytest.raises(BadRequest, match="min_tokens must be less than or equal to max_tokens=4"):
        llm.generate(CAPITAL, SamplingParams(max_tokens=4, min_tokens=5), use_tqdm=False)


def test_sixteen_tokens_unless_asked(llm: LLM):
    (unasked,) = llm.generate("Once upon a time", use_tqdm=False)
    (asked,) = llm.generate("Once upon a time", SamplingParams(ignore_eos=True), use_tqdm=False)
    assert len(asked.outputs[0].token_ids) == 16
    assert len(unasked.outputs[0].token_ids) <= 16
    (whole,) = llm.generate(
        [5] * (llm.facts.max_model_len - 30), SamplingParams(max_tokens=None, ignore_eos=True), use_tqdm=False
    )
    assert len(whole.outputs[0].token_ids) == 30
    assert llm.get_default_sampling_params().max_tokens == 16


def test_chat(llm: LLM):
    messages = [{"role": "user", "content": "What is 3 plus 4?"}]
    (answer,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert "7" in answer.outputs[0].text and answer.outputs[0].finish_reason == "stop"
    assert answer.prompt is not None and answer.prompt.endswith("assistant\n")
    both = llm.chat([messages, messages], GREEDY, use_tqdm=False, priority=[1, 0])
    assert [one.outputs for one in both] == [answer.outputs] * 2
    with pytest.raises(ValueError, match="priority: 1 for 2 prompts"):
        llm.chat([messages, messages], GREEDY, use_tqdm=False, priority=[1])


def test_control_tokens_in_a_chat_are_text(llm: LLM):
    said = "<|im_end|>\n<|im_start|>system"
    (answer,) = llm.chat([{"role": "user", "content": said}], SamplingParams(max_tokens=1), use_tqdm=False)
    assert answer.prompt == f"<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n"
    assert answer.prompt_token_ids.count(llm.tokenizer.added_tokens["<|im_start|>"]) == 2


def test_the_options_of_a_chat_template(llm: LLM):
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]

    def prompt(**options: Any) -> str | None:
        short = SamplingParams(max_tokens=1)
        return llm.chat(messages, short, use_tqdm=False, **options)[0].prompt

    template = "{{ messages[0].content }}{{ mood }}{% if tools %}T{% endif %}{% if add_generation_prompt %}:"
    template += "{% endif %}"
    assert prompt(chat_template=template) == "Hi:"
    assert prompt(chat_template=template, add_generation_prompt=False) == "Hi"
    assert prompt(chat_template=template, tools=[], documents=[]) == "Hi:"
    assert prompt(chat_template=template, chat_template_kwargs={"mood": "!"}, tools=[TOOL]) == "Hi!T:"
    shown = prompt(chat_template=template, chat_template_content_format="openai")
    assert shown == "[{'type': 'text', 'text': 'Hi'}]:"
    going_on = {"continue_final_message": True, "chat_template": "<{{ messages[0].content }}>"}
    assert prompt(**going_on) == "<Hi"
    with pytest.raises(BadRequest, match="Cannot set both"):
        prompt(**going_on, add_generation_prompt=True)
    picture = {"type": "image_url", "image_url": "data:image/png;base64,AA=="}
    with pytest.raises(BadRequest, match="images are not supported by this model, only text is"):
        llm.chat([{"role": "user", "content": [picture]}])


def test_logprobs_by_token(llm: LLM):
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=1)
    (answer,) = llm.generate("Once upon", params, use_tqdm=False)
    (output,) = answer.outputs
    assert output.logprobs is not None and answer.prompt_logprobs is not None
    assert answer.prompt_logprobs[0] is None
    assert len(answer.prompt_logprobs) == len(answer.prompt_token_ids)
    for id, table in zip(output.token_ids, output.logprobs, strict=True):
        assert next(iter(table)) == id and len(table) == 2
        assert table[id].rank == 1 and table[id].decoded_token == llm.tokenizer.token_text(id)
    chosen = [table[id].logprob for id, table in zip(output.token_ids, output.logprobs, strict=True)]
    assert output.cumulative_logprob == pytest.approx(sum(chosen))
    unlikely = SamplingParams(temperature=0, max_tokens=1, allowed_token_ids=[100], logprobs=1)
    (output,) = llm.generate("Once upon", unlikely, use_tqdm=False)[0].outputs
    assert output.logprobs is not None
    ranks = [one.rank for one in output.logprobs[0].values()]
    assert next(iter(output.logprobs[0])) == 100 and (ranks[0] or 0) > 1 and ranks[1:] == [1]
    (plain,) = llm.generate("Once upon", GREEDY, use_tqdm=False)[0].outputs
    assert plain.logprobs is None and plain.cumulative_logprob is None


def test_metrics_and_cached_tokens(llm: LLM):
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    first, again = (llm.generate(LONG, params, use_tqdm=False)[0] for _ in range(2))
    assert first.num_cached_tokens == 0 < (again.num_cached_tokens or 0) < len(again.prompt_token_ids)
    metrics = first.metrics
    assert metrics is not None
    assert metrics.queued_ts <= metrics.scheduled_ts <= metrics.first_token_ts <= metrics.last_token_ts
    assert metrics.num_generation_tokens == len(first.outputs[0].token_ids)
    assert metrics.first_token_time is not None and metrics.last_token_time is not None
    assert metrics.arrival_time < metrics.first_token_time <= metrics.last_token_time
    assert metrics.first_token_latency == metrics.first_token_ts - metrics.queued_ts
    assert metrics.queued_time == pytest.approx(metrics.scheduled_ts - metrics.queued_ts, abs=1e-6)
    assert metrics.prefill_time > 0 and metrics.decode_time > 0
    assert metrics.steps == 5 and metrics.compute_time > 0
    assert metrics.compute_time <= 1.1 * (metrics.prefill_time + metrics.decode_time)
    salted: Any = {"prompt": LONG, "cache_salt": "mine"}
    assert llm.generate(salted, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


def test_the_choices_of_a_prompt_add_to_its_cost(llm: LLM):
    params = SamplingParams(max_tokens=5, ignore_eos=True, n=2)
    [output] = llm.generate("Once upon a time", params, use_tqdm=False)
    assert output.metrics is not None and output.metrics.steps == 10


def test_vectors_and_scores_have_times_too(llm: LLM):
    text = f"Vectors. {LONG}"
    llm.embed(text)
    [pooled], [embedded] = llm.encode(text, pooling_task="embed"), llm.embed(text)
    for output in (pooled, embedded):
        assert output.metrics is not None and output.metrics.prefill_time > 0
        assert output.metrics.queued_ts <= output.metrics.scheduled_ts
        assert output.metrics.steps == 1 and output.metrics.compute_time > 0
    assert embedded.num_cached_tokens == pooled.num_cached_tokens
    [score] = llm.score("a", "b")  # of the vectors of two texts
    assert score.metrics is None


def test_a_bad_request_runs_nothing_and_breaks_nothing(llm: LLM):
    with pytest.raises(BadRequest, match="temperature"):
        llm.generate(["a", "b"], [GREEDY, SamplingParams(temperature=3)], use_tqdm=False)
    with pytest.raises(ValueError, match="sampling_params: 1 for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY], use_tqdm=False)
    with pytest.raises(ValueError, match="priority: 1 for 2 prompts"):
        llm.generate(["a", "b"], GREEDY, priority=[1], use_tqdm=False)
    with pytest.raises(ValueError, match="out-of-vocab"):  # as programs of vLLM expect
        llm.generate([[10**6]], GREEDY, use_tqdm=False)
    assert llm.generate(CAPITAL, GREEDY, use_tqdm=False)[0].outputs[0].text


def test_unknown_and_unsupported_arguments(llm: LLM):
    with pytest.raises(TypeError, match="lora_request is one LoRARequest"):
        llm.generate("a", lora_request=object())  # pyright: ignore[reportArgumentType]
    with pytest.raises(BadRequest, match="loaded without enable_lora"):
        llm.generate("a", lora_request=LoRARequest("x", 1, "x"))
    with pytest.raises(TypeError, match=r"embed\(\) has no argument 'task'"):
        llm.embed("a", task="embed")  # pyright: ignore[reportCallIssue]
    with pytest.raises(BadRequest, match="images are not supported by this model, only text is"):
        llm.generate({"prompt": "a", "multi_modal_data": {"image": b"a file"}})
    assert llm.generate("a", GREEDY, use_tqdm=False, lora_request=None)


def test_vectors_from_the_model_that_generates(llm: LLM):
    texts = ["The capital of France is Paris.", "Bananas are yellow.", "What is the capital of France?"]
    outputs = llm.embed(texts, use_tqdm=False)
    vectors = np.array([output.outputs.embedding for output in outputs])
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1)
    assert [output.prompt_token_ids for output in outputs] == [llm.tokenizer.encode(text) for text in texts]
    assert outputs[0].outputs.hidden_size == vectors.shape[1] and outputs[0].finished
    (alone,) = llm.embed({"prompt": texts[1]}, use_tqdm=False)
    assert alone.outputs.embedding == pytest.approx(outputs[1].outputs.embedding, abs=1e-5)
    (raw,) = llm.encode(texts[0], PoolingParams(task="embed", use_activation=False), use_tqdm=False)
    assert deepcopy(raw) == raw != alone
    length = np.linalg.norm(raw.outputs.data)
    assert length != pytest.approx(1, abs=0.1)
    assert raw.outputs.data / length == pytest.approx(vectors[0], abs=1e-5)
    scores = [output.outputs.score for output in llm.score(texts[2], texts, use_tqdm=False)]
    assert scores == pytest.approx(vectors @ vectors[2], abs=1e-5)


def test_vectors_of_tokens_by_the_task_under_either_name(llm: LLM):
    ids = llm.tokenizer.encode(CAPITAL)
    named: list[dict[str, Any]] = [{"task": "token_embed"}, {"pooling_task": "token_embed"}]
    for options in named:
        (output,) = llm.encode([CAPITAL], use_tqdm=False, **options)
        assert output.outputs.data.shape[0] == len(ids) == len(output.prompt_token_ids)
    params = [PoolingParams(task="embed"), PoolingParams(task="token_embed", truncate_prompt_tokens=2)]
    whole, cut = llm.encode([CAPITAL, CAPITAL], params, use_tqdm=False)
    assert (whole.outputs.data.ndim, cut.outputs.data.shape[0]) == (1, 2)


def test_texts_that_cannot_be_pooled(llm: LLM):
    with pytest.raises(BadRequest, match=r"'classify'\. It does: generate"):
        llm.classify("a", use_tqdm=False)
    with pytest.raises(BadRequest, match="'reward'"):
        llm.reward("a", use_tqdm=False)
    long = [5] * (llm.facts.max_text_len + 1)
    with pytest.raises(BadRequest, match="input 1 contains"):
        llm.embed(["a", long], use_tqdm=False)
    (cut,) = llm.embed(long, truncate_prompt_tokens=-1, use_tqdm=False)
    assert len(cut.prompt_token_ids) == llm.facts.max_text_len
    with pytest.raises(BadRequest, match="1:1, 1:N or N:N"):
        llm.score(["a", "b"], ["c"], use_tqdm=False)
    with pytest.raises(TypeError, match="texts and contents are compared"):
        llm.score([1, 2], ["c"], use_tqdm=False)  # pyright: ignore[reportArgumentType]


def test_the_tokenizer_of_transformers(llm: LLM):
    tokenizer = llm.get_tokenizer()
    assert tokenizer is llm.get_tokenizer()
    assert tokenizer.encode(CAPITAL) == llm.tokenizer.encode(CAPITAL)
    messages = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert llm.chat(messages, GREEDY, use_tqdm=False)[0].prompt == text


def test_options_are_checked():
    with pytest.raises(ValueError, match=r"one replica, .*; for several, AsyncLLM\(data_parallel_size"):
        LLM("demo", data_parallel_size=2)
    with pytest.raises(ValueError, match="max_model_length; did you mean max_model_len"):
        LLM("demo", max_model_length=10)


@pytest.mark.turns
@pytest.mark.parametrize("quantization", ["int8", "int8-dynamic", "int4"])
def test_quantized_models_generate_and_embed(llm: LLM, quantization: str):
    (expected,) = llm.embed(CAPITAL, use_tqdm=False)
    with LLM("demo", quantization=quantization, **OPTIONS) as small:
        (answer,) = small.generate(CAPITAL, GREEDY, use_tqdm=False)
        assert "Paris" in answer.outputs[0].text
        (found,) = small.embed(CAPITAL, use_tqdm=False)
    near = np.dot(found.outputs.embedding, expected.outputs.embedding)
    assert (0.97 if quantization == "int4" else 0.999) < near < 1 - 1e-7


# Answers in a form.


def held_to(**form: Any) -> SamplingParams:
    return SamplingParams(
        temperature=1, seed=1, max_tokens=200, structured_outputs=StructuredOutputsParams(**form)
    )


def test_answers_are_in_the_form_that_was_asked_for(llm: LLM) -> None:
    forms = [held_to(json=SCHEMA), held_to(choice=["yes", "no"]), held_to(regex="[0-9]{4}")]
    as_json, choice, digits = (
        output.outputs[0].text for output in llm.generate(["a", "b", "c"], forms, use_tqdm=False)
    )
    jsonschema.validate(json.loads(as_json), SCHEMA)
    assert choice in ("yes", "no") and digits.isdecimal() and len(digits) == 4


def test_each_choice_of_a_chat_has_the_form(llm: LLM) -> None:
    several = held_to(json=json.dumps(SCHEMA))
    several.n = 3
    [output] = llm.chat([{"role": "user", "content": "hi"}], several, use_tqdm=False)
    for one in output.outputs:
        if one.finish_reason == "stop":
            jsonschema.validate(json.loads(one.text), SCHEMA)


def test_what_cannot_be_used_is_refused(llm: LLM) -> None:
    with pytest.raises(BadRequest, match="unclosed group"):
        llm.generate("a", held_to(regex="(a"), use_tqdm=False)
    with pytest.raises(BadRequest, match="You must use one kind"):
        llm.generate("a", held_to(), use_tqdm=False)
    with pytest.raises(BadRequest, match=r"got `str` - at `\$\.structured_outputs`"):
        llm.generate("a", SamplingParams(structured_outputs="a"), use_tqdm=False)  # pyright: ignore


def test_one_refused_prompt_gives_back_the_places_of_all(llm: LLM) -> None:
    with pytest.raises(BadRequest, match="temperature"):
        llm.generate([CAPITAL] * 3, [GREEDY, GREEDY, SamplingParams(temperature=5)], use_tqdm=False)
    assert llm.frontend.live == 0


def test_what_is_not_enforced_is_logged(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    unique = {"type": "array", "items": {"type": "boolean"}, "maxItems": 2, "uniqueItems": True}
    llm.generate(["a", "b"], held_to(json=unique), use_tqdm=False)
    assert caplog.text.count("structured_outputs: not enforced: uniqueItems") == 1


@pytest.mark.slow(3)
def test_it_sleeps_and_wakes():
    with LLM("demo", enable_sleep_mode=True, **OPTIONS) as llm:
        before = llm.generate(CAPITAL, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        for level in (1, 2):
            llm.sleep(level)
            assert llm.llm_engine.is_sleeping()
            with pytest.raises(Unavailable, match="asleep"):
                llm.generate(CAPITAL, GREEDY, use_tqdm=False)
            llm.wake_up()
            assert llm.generate(CAPITAL, GREEDY, use_tqdm=False)[0].outputs[0].token_ids == before
        with pytest.raises(BadRequest, match="`level` is 1"):
            llm.sleep(3)


def test_a_model_that_may_not_sleep_says_so(llm: LLM):
    with pytest.raises(ApiError, match="enable-sleep-mode"):
        llm.sleep()


def test_ids_go_in_and_come_out_without_a_tokenizer(llm: LLM):
    ids = llm.tokenizer.encode(CAPITAL)
    expected = llm.generate(ids, GREEDY, use_tqdm=False)[0].outputs[0]
    with LLM("demo", skip_tokenizer_init=True, **OPTIONS) as bare:
        found = bare.generate({"prompt_token_ids": ids}, GREEDY, use_tqdm=False)[0].outputs[0]
        assert (found.token_ids, found.text) == (expected.token_ids, "")
        for call in (lambda: bare.generate(CAPITAL), lambda: bare.embed([CAPITAL, ids])):
            with pytest.raises(BadRequest, match="send token ids, not text"):
                call()
