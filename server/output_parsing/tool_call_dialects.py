"""The table of dialects: how each family of models writes calls, and the markers of its reasoning.

Another family is another entry here; a new way to write calls is a new file in `formats/`.
"""

from __future__ import annotations

from dataclasses import replace

from server.output_parsing.dialect import Dialect, ThinkingMarkers
from server.output_parsing.formats.json_calls import (
    Channels,
    EitherFormat,
    JsonObject,
    NamedJson,
    numbered,
    with_call_id,
)
from server.output_parsing.formats.nested_values import CALL, BareKeys, Elements
from server.output_parsing.formats.python_calls import PythonCalls
from server.output_parsing.formats.tagged import Tagged

AUTO, NONE, IDENTITY = "auto", "none", "identity"
"""Names that stand for what the chat template says, and for no reading at all (`identity`: of reasoning)."""

_ARRAY = JsonObject(array=True)
_FUNCTION_TAGS = Tagged(
    name_opens="<function=",
    name_ends=(">",),
    key_opens="<parameter=",
    key_ends=">",
    value_ends="</parameter>",
    ends=("</function>",),
    trims=True,
)
_INVOKE_TAGS = Tagged(
    name_opens='<invoke name="',
    name_ends=('">',),
    key_opens='<parameter name="',
    key_ends='">',
    value_ends="</parameter>",
    ends=("</invoke>",),
    again=('<invoke name="',),
    closes=("</minimax:tool_call>",),
)


def _dsml_tags(mark: str, closes: tuple[str, ...]) -> Tagged:
    """The tags of DeepSeek, each with this mark before its name."""
    return Tagged(
        name_opens=f'<{mark}invoke name="',
        name_ends=('">',),
        empty_ends=('"/>',),
        key_opens=f'<{mark}parameter name="',
        key_ends="",
        says_type={'" string="true">': "string", '" string="false">': ""},
        value_ends=f"</{mark}parameter>",
        ends=(f"</{mark}invoke>",),
        again=(f'<{mark}invoke name="',),
        closes=tuple(f"</{mark}{close}>" for close in closes),
    )


_STEP_CALL = '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="'
_K3_TYPES = ("string", "number", "boolean", "null", "object", "array")
_GLM_TAGS = Tagged(
    name_opens="",
    name_ends=("\n", "<arg_key>", "</tool_call>"),
    key_opens="<arg_key>",
    key_ends="</arg_key>",
    value_opens="<arg_value>",
    value_ends="</arg_value>",
    ends=("</tool_call>",),
)
_DEEPSEEK_CALL = "<｜tool▁call▁begin｜>"
_DEEPSEEK_FUNCTION = _DEEPSEEK_CALL + "function<｜tool▁sep｜>"
_MINIMAX = "]<]minimax[>["

DIALECTS = (
    Dialect("hermes", ("<tool_call>",), JsonObject(closes=("</tool_call>",))),
    Dialect(
        "qwen3_coder",
        ("<tool_call>",),
        replace(_FUNCTION_TAGS, closes=("</tool_call>",)),
        opens_bare=("<function=",),
    ),
    Dialect("seed_oss", ("<seed:tool_call>",), replace(_FUNCTION_TAGS, closes=("</seed:tool_call>",))),
    Dialect(
        "llama3_json",
        ("{", "<|python_tag|>"),
        JsonObject(again=(";",), keys=("name", "parameters")),
        only_first=("{",),
        keeps_space=True,
    ),
    Dialect("pythonic", ("[",), PythonCalls(), only_first=("[",)),
    Dialect(
        "llama4_pythonic",
        ("<|python_start|>", "["),
        PythonCalls(closes=("<|python_end|>",)),
        only_first=("[",),
    ),
    Dialect("olmo3", ("<function_calls>",), PythonCalls(in_list=False, closes=("</function_calls>",))),
    Dialect("lfm2", ("<|tool_call_start|>",), PythonCalls(closes=("<|tool_call_end|>",))),
    Dialect(
        "mistral",
        ("[TOOL_CALLS]",),
        EitherFormat(
            "[",
            _ARRAY,
            NamedJson(name_ends=("[ARGS]",), again=("[TOOL_CALLS]",), split=with_call_id),
            other_by="[ARGS]",
        ),
    ),
    Dialect(
        "deepseek_v3",
        ("<｜tool▁calls▁begin｜>",),
        NamedJson(
            begins=_DEEPSEEK_FUNCTION,
            name_ends=("\n```json\n",),
            ends=("```<｜tool▁call▁end｜>", "<｜tool▁call▁end｜>"),
            again=(_DEEPSEEK_FUNCTION,),
            closes=("<｜tool▁calls▁end｜>",),
        ),
    ),
    Dialect(
        "deepseek_v31",
        ("<｜tool▁calls▁begin｜>",),
        NamedJson(
            begins=_DEEPSEEK_CALL,
            name_ends=("<｜tool▁sep｜>",),
            ends=("<｜tool▁call▁end｜>",),
            again=(_DEEPSEEK_CALL,),
            closes=("<｜tool▁calls▁end｜>",),
        ),
    ),
    Dialect(
        "deepseek_v32",
        ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"),
        _dsml_tags("｜DSML｜", ("function_calls", "tool_calls")),
    ),
    Dialect("deepseek_v41", ("<｜DSML｜ calls>",), _dsml_tags("｜DSML｜ ", ("calls",))),
    Dialect("glm45", ("<tool_call>",), _GLM_TAGS),
    Dialect(
        "kimi_k2",
        ("<|tool_calls_section_begin|>",),
        NamedJson(
            begins="<|tool_call_begin|>",
            name_ends=("<|tool_call_argument_begin|>",),
            ends=("<|tool_call_end|>",),
            again=("<|tool_call_begin|>",),
            closes=("<|tool_calls_section_end|>",),
            split=numbered,
            name_form=("functions.", ":"),
        ),
        keeps_space=True,
    ),
    Dialect(
        "kimi_k3",
        ("<|open|>tools<|sep|>",),
        Tagged(
            name_opens='<|open|>call tool="',
            name_ends=('" index="',),
            number_ends='"<|sep|>',
            key_opens='<|open|>argument key="',
            key_ends="",
            says_type={f'" type="{each}"<|sep|>': each for each in _K3_TYPES},
            value_ends="<|close|>argument<|sep|>",
            ends=("<|close|>call<|sep|>",),
            again=('<|open|>call tool="',),
            closes=("<|close|>tools<|sep|>",),
            escapes=True,
        ),
        before_first="<|close|>response<|sep|>",
        hides=(
            '<|open|>message role="assistant"<|sep|>',
            "<|close|>message<|sep|>",
            "<|open|>response<|sep|>",
            "<|close|>response<|sep|>",
        ),
    ),
    Dialect("minimax_m2", ("<minimax:tool_call>",), _INVOKE_TAGS),
    Dialect(
        "minimax_m3",
        (_MINIMAX + "<tool_call>",),
        Elements(
            mark=_MINIMAX,
            name_opens=_MINIMAX + '<invoke name="',
            name_ends='">',
            ends=_MINIMAX + "</invoke>",
            closes=_MINIMAX + "</tool_call>",
        ),
    ),
    Dialect(
        "openai",
        (
            "<|channel|>commentary to=",
            "<|channel|>analysis to=",
            "<|start|>assistant<|channel|>commentary to=",
            "<|start|>assistant<|channel|>analysis to=",
            "<|start|>assistant to=",
            " to=functions.",
        ),
        Channels(
            channel="<|channel|>commentary",
            header_ends="<|message|>",
            constrains=(" <|constrain|>json", "<|constrain|>json", " json"),
            ends=("<|call|>", "<|end|>"),
        ),
        only_first=(" to=functions.",),
        between="<|call|><|start|>assistant",
    ),
    Dialect(
        "gemma4", ("<|tool_call>",), BareKeys('<|"|>', ("<tool_call|>",)), (CALL,), (CALL,), keeps_space=True
    ),
    Dialect("functiongemma", ("<start_function_call>",), BareKeys("<escape>", ("<end_function_call>",))),
    Dialect("granite", ("<|tool_call|>", "<tool_call>"), _ARRAY),
    Dialect("granite-20b-fc", ("<function_call>",), JsonObject(again=("<function_call>",))),
    Dialect(
        "phi4_mini_json", ("functools[", "<|tool_call|>"), JsonObject(array=True, closes=("<|/tool_call|>",))
    ),
    Dialect(
        "internlm",
        ("<|action_start|><|plugin|>",),
        JsonObject(closes=("<|action_end|>",), keys=("name", "parameters")),
    ),
    Dialect("jamba", ("<tool_calls>",), JsonObject(array=True, closes=("</tool_calls>",))),
    Dialect(
        "cohere_command3",
        ("<|START_ACTION|>",),
        JsonObject(
            array=True,
            closes=("<|END_ACTION|>",),
            keys=("tool_name", "parameters"),
            numbered_by="tool_call_id",
        ),
    ),
    Dialect("longcat", ("<longcat_tool_call>",), JsonObject(closes=("</longcat_tool_call>",))),
    Dialect(
        "apertus",
        ("<|tools_prefix|>",),
        JsonObject(array=True, name_is_key=True, closes=("<|tools_suffix|>",)),
    ),
    Dialect(
        "hy_v3",
        ("<tool_calls>",),
        replace(
            _GLM_TAGS,
            name_opens="<tool_call>",
            name_ends=("<tool_sep>",),
            again=("<tool_call>",),
            closes=("</tool_calls>",),
        ),
    ),
    Dialect(
        "step3",
        ("<｜tool_calls_begin｜>",),
        Tagged(
            name_opens=_STEP_CALL,
            name_ends=('">',),
            key_opens='<steptml:parameter name="',
            key_ends='">',
            value_ends="</steptml:parameter>",
            ends=("</steptml:invoke><｜tool_call_end｜>", "</steptml:invoke>"),
            again=(_STEP_CALL,),
            closes=("<｜tool_calls_end｜>",),
        ),
    ),
    Dialect(
        "dots",
        ("<dots_function_call>",),
        replace(_INVOKE_TAGS, closes=("</dots_function_call>",), trims=True),
    ),
    Dialect("minimax", ("<tool_calls>",), JsonObject(again=("\n",), closes=("</tool_calls>",))),
    Dialect(
        "gigachat3",
        ("<|function_call|>", "function call<|role_sep|>\n"),
        JsonObject(),
        hides=("<|message_sep|>",),
    ),
    Dialect("xlam", ("[",), _ARRAY, only_first=("[",)),
    Dialect(
        "minicpm5",
        ('<function name="',),
        Tagged(
            name_opens="",
            name_ends=('">',),
            key_opens='<param name="',
            key_ends='">',
            value_ends="</param>",
            ends=("</function>",),
            quotes=("<![CDATA[", "]]></param>"),
        ),
    ),
    Dialect("nemotron_nano_v2", ("<TOOLCALL>",), JsonObject(array=True, closes=("</TOOLCALL>",))),
)

DIALECTS_BY_NAME = {each.name: each for each in DIALECTS}
ALIASES = {
    "cohere_command4": "cohere_command3",
    "qwen3_xml": "qwen3_coder",
    "granite4": "hermes",
    "glm47": "glm45",
    "hunyuan_a13b": "jamba",
    "llama4_json": "llama3_json",
    "poolside_v1": "glm45",
    "deepseek_v4": "deepseek_v32",
    "ernie45": "hermes",
    "mimo": "qwen3_coder",
    "step3p5": "qwen3_coder",
}
"""Other names, which the peers have, of the same dialects."""

_THINK = ThinkingMarkers("think", ("<think>",), ("</think>",))
THINKING = (
    _THINK,
    replace(
        _THINK, name="ernie45", hides=("<response>", "\n</response>", "</response>"), told_by=("<response>",)
    ),
    replace(_THINK, name="hunyuan_a13b", hides=("<answer>", "\n</answer>", "</answer>")),
    ThinkingMarkers("seed_oss", ("<seed:think>",), ("</seed:think>",)),
    ThinkingMarkers("mistral", ("[THINK]",), ("[/THINK]",), always_closes=True),
    ThinkingMarkers(
        "kimi_k3",
        ("<|open|>think<|sep|>",),
        ("<|close|>think<|sep|>", "<|open|>response<|sep|>"),
        then="<|open|>response<|sep|>",
        told_by=("<|end_of_msg|>",),  # its template puts the others together of parts
    ),
    ThinkingMarkers("kimi_vl", ("◁think▷",), ("◁/think▷",)),
    ThinkingMarkers("gemma4", ("<|channel>thought\n",), ("<channel|>",)),
    ThinkingMarkers(
        "cohere_command3",
        ("<|START_THINKING|>",),
        ("<|END_THINKING|>",),
        hides=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    ThinkingMarkers(
        "cohere_command4",
        ("<|START_THINKING|>",),
        ("<|END_THINKING|>",),
        hides=("<|START_TEXT|>", "<|END_TEXT|>"),
        answers="<|START_TEXT|>",
        told_by=("<|START_TEXT|>",),
    ),
    ThinkingMarkers("minimax_m3", ("<mm:think>",), ("</mm:think>",)),
    ThinkingMarkers(
        "openai_gptoss",
        ("<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>analysis<|message|>"),
        ("<|end|>",),
        hides=(
            *(
                f"{start}<|channel|>{channel}<|message|>"
                for start in ("", "<|start|>assistant")
                for channel in ("final", "final <|constrain|>json", "commentary")
            ),
            "<|end|>",
            "<|return|>",
        ),
        then="<|start|>assistant",
        answers="<|channel|>final<|message|>",
        told_by=("<|constrain|>",),
    ),
    ThinkingMarkers(
        "granite",
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
    ),
)

_LIKE_THINK = (
    "deepseek_r1 deepseek_v3 deepseek_v4 deepseek_v41 glm45 glm47 holo2 hy_v3 kimi_k2 mimo minimax_m2 "
    "nemotron_v3 olmo3 poolside_v1 qwen3 step3 step3p5"
)
THINKING_BY_NAME = {
    **{each.name: each for each in THINKING},
    **dict.fromkeys(_LIKE_THINK.split(), _THINK),
    "minimax_m2_append_think": replace(_THINK, name="minimax_m2_append_think", in_text=True),
}
"""The markers under the peers' names, many of which stand for the same."""


def dialect_named(name: str) -> Dialect | None:
    """The dialect of a name; None for "none". Raises ValueError, which says which names there are."""
    if name == NONE:
        return None
    if (found := DIALECTS_BY_NAME.get(ALIASES.get(name, name))) is None:
        known = ", ".join(sorted({AUTO, NONE, *DIALECTS_BY_NAME, *ALIASES}))
        raise ValueError(f"--tool-call-parser: there is no parser named {name!r}. There are {known}")
    return found


def thinking_named(name: str) -> ThinkingMarkers | None:
    """The markers of reasoning of a name; None for "none". Raises ValueError, which says which there are."""
    if name in (NONE, IDENTITY, ""):
        return None
    if (found := THINKING_BY_NAME.get(name)) is None:
        known = ", ".join(sorted({AUTO, NONE, IDENTITY, *THINKING_BY_NAME}))
        raise ValueError(f"--reasoning-parser: there is no parser named {name!r}. There are {known}")
    return found
