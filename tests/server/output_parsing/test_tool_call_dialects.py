"""Each dialect: calls as its models write them are read back, however the answer is cut into pieces."""

import json
import random

import pytest
from answers import TOOLS, read

from server.output_parsing.answer_format import with_marks
from server.output_parsing.answer_reader import AnswerReader
from server.output_parsing.tool_call_dialects import DIALECTS, DIALECTS_BY_NAME, THINKING
from server.output_parsing.unread_text import CallBegun
from server.text.detokenizer import FIRST_MARK

CITY = 'A "b" \\ c\n<é>{}]'
CALL = {"city": CITY, "days": 3, "flags": {"a": [1, True, None], "b": "x}"}}
AS_JSON = json.dumps(CALL, ensure_ascii=False)
OBJECT = '{"name": "get_weather", "arguments": ' + AS_JSON + "}"
STOP = '{"name": "stop", "arguments": {}}'
PYTHON = f"get_weather(city={CITY!r}, days=3, flags={CALL['flags']!r})"
FLAGS = json.dumps(CALL["flags"])


def tags(name: str, key: str, newline: str = "\n") -> str:
    values = ((k, v if k == "city" else json.dumps(v)) for k, v in CALL.items())
    return name + "".join(f"{key % k}{newline}{v}{newline}</parameter>\n" for k, v in values)


QWEN = tags("<function=get_weather>\n", "<parameter=%s>") + "</function>"
INVOKE = tags('<invoke name="get_weather">\n', '<parameter name="%s">', "") + "</invoke>"
DSML = (
    '<｜DSML｜invoke name="get_weather">\n'
    f'<｜DSML｜parameter name="city" string="true">{CITY}</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
    f'<｜DSML｜parameter name="flags" string="false">{FLAGS}</｜DSML｜parameter>\n</｜DSML｜invoke>'
)
DSML_41 = DSML.replace("｜DSML｜", "｜DSML｜ ")
K3 = "".join(
    f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'
    for key, kind, value in (("city", "string", CITY), ("days", "number", "3"), ("flags", "object", FLAGS))
)
GLM = "".join(
    f"<arg_key>{k}</arg_key>\n<arg_value>{CALL[k] if k == 'city' else json.dumps(CALL[k])}</arg_value>\n"
    for k in CALL
)


STEP = '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="'
STEPS = '">' + "".join(
    f'<steptml:parameter name="{k}">{CALL[k] if k == "city" else json.dumps(CALL[k])}</steptml:parameter>'
    for k in CALL
)
M = "]<]minimax[>["
GEMMA_QUOTE = '<|"|>'


def bare(quote: str) -> str:
    return (
        f"call:get_weather{{city:{quote}{CITY}{quote},days:3,flags:{{a:[1,true,null],b:{quote}x}}{quote}}}}}"
    )


# What a model of each dialect writes for both calls.
WRITTEN = {
    "hermes": f"<tool_call>\n{OBJECT}\n</tool_call>\n<tool_call>\n{STOP}\n</tool_call>",
    "qwen3_coder": f"<tool_call>\n{QWEN}\n</tool_call>\n<tool_call>\n<function=stop>\n</function>\n</tool_call>",
    "seed_oss": f"<seed:tool_call>\n{QWEN}\n</seed:tool_call><seed:tool_call><function=stop></function></seed:tool_call>",
    "llama3_json": '{"name": "get_weather", "parameters": '
    + AS_JSON
    + '}; {"name": "stop", "parameters": {}}',
    "pythonic": f"[{PYTHON}, stop()]",
    "llama4_pythonic": f"<|python_start|>[{PYTHON}, stop()]<|python_end|>",
    "olmo3": f"<function_calls>\n{PYTHON}\nstop()\n</function_calls>",
    "lfm2": f"<|tool_call_start|>[{PYTHON}, stop()]<|tool_call_end|>",
    "mistral": f"[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{AS_JSON}[TOOL_CALLS]stop{{}}",
    "deepseek_v3": (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{AS_JSON}\n```"
        "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>stop\n```json\n{}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>"
    ),
    "deepseek_v31": (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{AS_JSON}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>stop<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek_v32": (
        f'<｜DSML｜function_calls>\n{DSML}\n<｜DSML｜invoke name="stop">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
    ),
    "deepseek_v41": f'<｜DSML｜ calls>\n{DSML_41}\n<｜DSML｜ invoke name="stop"/>\n</｜DSML｜ calls>',
    "glm45": f"<tool_call>get_weather\n{GLM}</tool_call>\n<tool_call>stop</tool_call>",
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{AS_JSON}<|tool_call_end|><|tool_call_begin|>functions.stop:1<|tool_call_argument_begin|>{{}}"
        "<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "kimi_k3": (
        f'<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>{K3}<|close|>call<|sep|>'
        '<|open|>call tool="stop" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
    ),
    "minicpm5": (
        f'<function name="get_weather"><param name="city"><![CDATA[{CITY}]]></param><param name="days">3</param>'
        f'<param name="flags">{FLAGS}</param></function>\n<function name="stop"></function>'
    ),
    "minimax_m2": f'<minimax:tool_call>\n{INVOKE}\n<invoke name="stop">\n</invoke>\n</minimax:tool_call>',
    "minimax_m3": (
        f'{M}<tool_call>\n{M}<invoke name="get_weather">{M}<city>{CITY}{M}</city>\n{M}<days>3{M}</days>'
        f"{M}<flags>\n{M}<a>{M}<item>1{M}</item>{M}<item>true{M}</item>\n{M}<item>null{M}</item>{M}</a>"
        f'{M}<b>x}}{M}</b>{M}</flags>{M}</invoke>\n{M}<invoke name="stop">{M}</invoke>\n{M}</tool_call>'
    ),
    "openai": (
        f"<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{AS_JSON}"
        "<|call|><|start|>assistant to=functions.stop<|channel|>commentary json<|message|>{}<|call|>"
    ),
    "gemma4": f"<|tool_call>{bare(GEMMA_QUOTE)}<tool_call|><|tool_call>call:stop{{}}<tool_call|>",
    "functiongemma": (
        f"<start_function_call>{bare('<escape>')}<end_function_call>"
        "<start_function_call>call:stop{}<end_function_call>"
    ),
    "granite": f"<|tool_call|>[{OBJECT}, {STOP}]",
    "granite-20b-fc": f"<function_call> {OBJECT}\n<function_call> {STOP}",
    "phi4_mini_json": f"functools[{OBJECT},{STOP}]",
    "internlm": (
        f"<|action_start|><|plugin|>\n{OBJECT}<|action_end|><|action_start|><|plugin|>{STOP}<|action_end|>"
    ),
    "jamba": f"<tool_calls>[{OBJECT}, {STOP}]</tool_calls>",
    "cohere_command3": (
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "get_weather", "parameters": ' + AS_JSON + "}, "
        '{"tool_call_id": "1", "tool_name": "stop", "parameters": {}}]<|END_ACTION|>'
    ),
    "longcat": f"<longcat_tool_call>{OBJECT}</longcat_tool_call><longcat_tool_call>{STOP}</longcat_tool_call>",
    "apertus": '<|tools_prefix|>[{"get_weather": ' + AS_JSON + '}, {"stop": {}}]<|tools_suffix|>',
    "hy_v3": (
        f"<tool_calls>\n<tool_call>get_weather<tool_sep>\n{GLM}</tool_call>\n"
        "<tool_call>stop<tool_sep>\n</tool_call>\n</tool_calls>"
    ),
    "step3": (
        f"<｜tool_calls_begin｜>\n{STEP}get_weather{STEPS}</steptml:invoke><｜tool_call_end｜>\n"
        f'{STEP}stop"></steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>'
    ),
    "dots": f'<dots_function_call>\n{INVOKE}\n<invoke name="stop">\n</invoke>\n</dots_function_call>',
    "minimax": f"<tool_calls>\n{OBJECT}\n{STOP}\n</tool_calls>",
    "gigachat3": f"<|function_call|>{OBJECT}<|function_call|>{STOP}",
    "xlam": f"[{OBJECT}, {STOP}]",
    "nemotron_nano_v2": f"<TOOLCALL>[{OBJECT}, {STOP}]</TOOLCALL>",
}


def reader_of(name: str, *, holds_calls: bool = True) -> AnswerReader:
    return AnswerReader(DIALECTS_BY_NAME[name], THINKING[0], tools=TOOLS, holds_calls=holds_calls)


@pytest.mark.parametrize("name", [each.name for each in DIALECTS])
def test_calls_are_read_back_however_they_are_cut(name: str) -> None:
    before = "" if WRITTEN[name].startswith(DIALECTS_BY_NAME[name].only_first or "none") else "I look.\n\n"
    written = "<think>\nWhere?\n</think>\n\n" + before + WRITTEN[name]
    for seed in range(25):
        answer = read(reader_of(name), written, random.Random(seed) if seed else None)
        assert [call for call, _ in answer.calls] == ["get_weather", "stop"]
        assert [json.loads(arguments) for _, arguments in answer.calls] == [CALL, {}]
        assert (answer.reasoning, answer.text, answer.ended) == ("Where?", before.strip(), 2)


def test_a_marker_that_another_begins_with_is_read_the_same_however_it_is_cut() -> None:
    between = "</steptml:invoke><｜tool_call_end｜>"
    written = WRITTEN["step3"].replace(between + "\n" + STEP, between + " and " + STEP)
    whole = read(reader_of("step3"), written)
    assert whole.calls and between not in whole.text
    for seed in range(10):
        assert read(reader_of("step3"), written, random.Random(seed)) == whole


def test_an_id_that_the_model_writes_twice_is_the_first_calls() -> None:
    call = '<tool_call>{"id": "%s", "name": "stop", "arguments": {}}</tool_call>'
    reader = reader_of("hermes")
    parts = [*reader.push(call % "a" + call % "b" + call % "a"), *reader.finish()]
    assert [part.id for part in parts if isinstance(part, CallBegun)] == ["a", "b", ""]


@pytest.mark.parametrize("name", [each.name for each in DIALECTS])
def test_a_name_that_no_tool_has_stays_text(name: str) -> None:
    written = WRITTEN[name].replace("get_weather", "got_weather").replace("stop", "stopped")
    for seed in range(5):
        answer = read(reader_of(name), "<think>x</think>" + written, random.Random(seed))
        assert answer.calls == []
        assert answer.text == written


@pytest.mark.turns(2)
@pytest.mark.parametrize("name", [each.name for each in DIALECTS])
def test_what_breaks_off_is_no_call_and_what_has_passed_of_it_is_never_whole(name: str) -> None:
    dialect, whole = DIALECTS_BY_NAME[name], WRITTEN[name]
    complete = read(reader_of(name), whole).calls
    for end in range(len(whole)):
        held = read(reader_of(name), whole[:end], random.Random(end))
        assert held.calls == complete[: len(held.calls)] and held.ended == len(held.calls)
        if held.calls or not whole.startswith(dialect.only_first or "none"):
            opener = max((each for each in dialect.opens if whole.startswith(each)), key=len)
            assert held.text == (whole[:end] if end < len(opener) else "")
        streamed = read(reader_of(name, holds_calls=False), whole[:end], random.Random(end))
        begun = streamed.calls[streamed.ended :]
        assert streamed.calls[: streamed.ended] == complete[: streamed.ended]
        for (call, arguments), (expected, full) in zip(begun, complete[streamed.ended :], strict=False):
            assert call == expected and full.startswith(arguments) and arguments != full


@pytest.mark.parametrize("name", [each.name for each in DIALECTS])
def test_where_markers_are_special_tokens_text_that_looks_like_them_is_text(name: str) -> None:
    dialect = DIALECTS_BY_NAME[name]
    tokens = [opener for opener in dialect.opens if len(opener) > 1]
    marks = {token: chr(FIRST_MARK + number) for number, token in enumerate(tokens)}
    if not marks or dialect.opens[0] in dialect.only_first:
        return
    written = {mark: token for token, mark in marks.items()}
    for text, called in ((WRITTEN[name], False), (_marked(WRITTEN[name], marks), True)):
        reader = AnswerReader(with_marks(dialect, marks), None, tools=TOOLS, written=written)
        answer = read(reader, "So: " + text, random.Random(1))
        assert bool(answer.calls) == called
        if not called:
            assert answer.text == "So: " + WRITTEN[name]


def _marked(text: str, marks: dict[str, str]) -> str:
    for token, mark in marks.items():
        text = text.replace(token, mark)
    return text
