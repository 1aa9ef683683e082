"""The chat templates of nine families of models, restated as far as the assistant's turns go.

The suite canitoolcall has answers that the families' own templates have written; a test compares them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from canitoolcall.fixtures import Family
from fake_frontend import byte_tokenizer
from recorded_calls import FAMILIES

from server.text.tokenizer import Tokenizer

_GEMMA_VALUES = (
    '{% macro value(v) %}{% if v is string %}<|"|>{{ v }}<|"|>'
    '{% elif v is mapping %}{{ "{" + pairs(v) + "}" }}'
    "{% elif v is iterable %}[{% for each in v %}{{ value(each) }}{{ ',' if not loop.last }}{% endfor %}]"
    "{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
    "{% macro pairs(v) %}{% for key, each in v | dictsort %}{{ key }}:{{ value(each) }}"
    "{{ ',' if not loop.last }}{% endfor %}{% endmacro %}"
)


@dataclass(frozen=True)
class FamilyTemplate:
    """What one family's template writes."""

    model: str
    """A model of the suite that writes so."""
    head: str
    """What stands before the assistant's turn, in a prompt too."""
    turn: str
    """The turn of `content`, `reasoning` and the functions `calls`, and its end."""
    opens: str = ""
    """What a prompt has behind the head."""
    macros: str = ""
    no_tokens: tuple[str, ...] = ()
    """Markers of the family that are no tokens of the model."""
    takes_text: bool = False
    """Whether it takes arguments as JSON text, and refuses objects."""
    renders: str = ""
    """How the suite's names of what the template has written begin."""

    @property
    def family(self) -> Family:
        return next(each for each in FAMILIES.values() if each.reference_for(self.model))

    @property
    def source(self) -> str:
        """The template. It writes turns of others alike in all families, for no answer depends on them."""
        return (
            self.macros + "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
            "{% set content, reasoning = m.content or '', m.reasoning_content or '' %}"
            "{% set calls = (m.tool_calls or []) | map(attribute='function') | list %}"
            "{% if m.role == 'assistant' %}" + self.head + self.turn + "{% else %}"
            "{{ m.role }}: {{ content }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}" + self.head + self.opens + "{% endif %}"
        )


TEMPLATES = {
    "qwen3-hermes": FamilyTemplate(
        "Qwen/Qwen3-0.6B",
        "<|im_start|>assistant\n",
        "{{ '<think>\n' + reasoning + '\n</think>\n\n' if reasoning }}{{ content }}"
        "{% for f in calls %}{{ '\n' if content or not loop.first }}"
        '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>'
        "{% endfor %}<|im_end|>\n",
    ),
    "qwen3-xml": FamilyTemplate(
        "Qwen/Qwen3.8-27B",
        "<|im_start|>assistant\n",
        "<think>\n{{ reasoning }}\n</think>\n\n{{ content }}"
        "{% for f in calls %}{{ '\n' if not loop.first else '\n\n' if content }}"
        "<tool_call>\n<function={{ f.name }}>\n{% for key, v in f.arguments.items() %}"
        "<parameter={{ key }}>\n{{ v if v is string else v | tojson }}\n{{ '</parameter>\n' }}{% endfor %}"
        "</function>\n</tool_call>{% endfor %}<|im_end|>\n",
        opens="<think>\n",
        no_tokens=("<function=", "</function>", "<parameter=", "</parameter>"),
        renders="qwen3-xml/q38",
    ),
    "deepseek": FamilyTemplate(
        "deepseek-ai/DeepSeek-V3.1",
        "<｜Assistant｜></think>",
        "{{ content }}{{ '<｜tool▁calls▁begin｜>' if calls }}{% for f in calls %}"
        "{{ '<｜tool▁call▁begin｜>' + f.name + '<｜tool▁sep｜>' + f.arguments + '<｜tool▁call▁end｜>' }}"
        "{% endfor %}{{ '<｜tool▁calls▁end｜>' if calls }}<｜end▁of▁sentence｜>",
        takes_text=True,
    ),
    "deepseek-v4.1": FamilyTemplate(
        "deepseek-ai/DeepSeek-V4.1-Flash",
        "<｜Assistant｜>",
        "<think>{{ reasoning }}</think>{{ content }}{{ '\n\n<｜DSML｜ calls>\n' if calls }}"
        '{% for f in calls %}<｜DSML｜ invoke name="{{ f.name }}">{{ "\n" if not f.arguments }}'
        "{% for key, v in f.arguments.items() %}"
        '{{ "\n" }}<｜DSML｜ parameter name="{{ key }}" string="{{ (v is string) | tojson }}">'
        "{{ v if v is string else v | tojson }}</｜DSML｜ parameter>{% endfor %}"
        "{{ '\n</｜DSML｜ invoke>\n' }}{% endfor %}{{ '</｜DSML｜ calls>' if calls }}<｜end▁of▁sentence｜>",
        opens="<think>",
    ),
    "glm": FamilyTemplate(
        "zai-org/GLM-4.7",
        "<|assistant|>",
        "<think>{{ reasoning }}</think>{{ content }}{% for f in calls %}<tool_call>{{ f.name }}"
        "{% for key, v in f.arguments.items() %}<arg_key>{{ key }}</arg_key>"
        "<arg_value>{{ v if v is string else v | tojson }}</arg_value>{% endfor %}</tool_call>{% endfor %}",
        opens="<think>",
    ),
    "kimi": FamilyTemplate(
        "moonshotai/Kimi-K2.6",
        "<|im_assistant|>assistant<|im_middle|>",
        "<think>{{ reasoning }}</think>{{ content }}{{ '<|tool_calls_section_begin|>' if calls }}"
        "{% for c in m.tool_calls or [] %}<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
        "{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}"
        "{{ '<|tool_calls_section_end|>' if calls }}<|im_end|>",
        opens="<think>",
        no_tokens=("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
    ),
    "kimi-k3": FamilyTemplate(
        "moonshotai/Kimi-K3",
        '<|open|>message role="assistant"<|sep|>',
        "<|open|>think<|sep|>{{ reasoning }}{{ '<|close|>' + 'think' }}<|sep|><|open|>{{ 'response' }}<|sep|>"
        "{{ content }}<|close|>response<|sep|>{{ '<|open|>tools<|sep|>' if calls }}{% for f in calls %}"
        '<|open|>call tool="{{ f.name }}" index="{{ loop.index }}"<|sep|>'
        "{% for key, v in f.arguments.items() %}"
        """<|open|>argument key="{{ key | replace('&', '&amp;') | replace('"', '&quot;') }}" type="{{"""
        "'boolean' if v is boolean else 'null' if v is none else 'number' if v is number else "
        "'string' if v is string else 'object' if v is mapping else 'array' }}\"<|sep|>"
        "{{ v if v is string else v | tojson }}<|close|>argument<|sep|>{% endfor %}<|close|>call<|sep|>"
        "{% endfor %}{{ '<|close|>tools<|sep|>' if calls }}<|close|>message<|sep|><|end_of_msg|>",
        opens="<|open|>think<|sep|>",
    ),
    "gpt-oss": FamilyTemplate(
        "openai/gpt-oss-20b",
        "<|start|>assistant",
        "{% if reasoning %}<|channel|>analysis<|message|>{{ reasoning }}<|end|><|start|>assistant{% endif %}"
        "{% if content %}<|channel|>final<|message|>{{ content }}<|return|>{% endif %}"
        "{% for f in calls %}{{ '<|start|>assistant' if not loop.first }} to=functions.{{ f.name }}"
        "<|channel|>commentary json<|message|>{{ f.arguments | tojson }}<|call|>{% endfor %}",
        renders="gpt-oss/hf-template",
    ),
    "gemma4": FamilyTemplate(
        "google/gemma-4-31B-it",
        "<|turn>model\n",
        "{{ '<|channel>thought\n' + reasoning + '\n<channel|>' if reasoning }}{% for f in calls %}"
        '<|tool_call>call:{{ f.name + "{" + pairs(f.arguments) + "}" }}<tool_call|>{% endfor %}'
        "{{ content }}<turn|>\n",
        macros=_GEMMA_VALUES,
    ),
    "llama": FamilyTemplate(
        "meta-llama/Llama-3.3-70B-Instruct",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "{{ content }}{% for f in calls %}{{ '; ' if not loop.first }}"
        '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}{% endfor %}<|eot_id|>',
    ),
    "mistral": FamilyTemplate(
        "mistralai/Magistral-Small-2509",
        "[/INST]",
        "{{ '[THINK]' + reasoning + '[/THINK]' if reasoning }}{{ content }}"
        "{% for f in calls %}[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}{% endfor %}</s>",
        no_tokens=("<think>", "</think>"),
    ),
}
"""The templates by their families. gpt-oss' and Llama's own write one call a turn, these a second, too."""


@cache
def family_tokenizer(family: str) -> Tokenizer:
    """Bytes, the family's markers as special tokens, and its template."""
    template = TEMPLATES[family]
    markers = [marker for marker in template.family.markers if marker not in template.no_tokens]
    return byte_tokenizer(*markers, template=template.source)


def written_answer(family: str, asked: list[dict[str, Any]], answer: dict[str, Any]) -> str:
    """What the family's template writes for an answer, from where the prompt ends to the end of the turn."""
    template, chat, messages = TEMPLATES[family], family_tokenizer(family).chat, [*asked, answer]
    if template.takes_text:
        messages = [_with_text_arguments(message) for message in messages]
    prompt = chat.render(messages[:-1], divides=False)
    whole = chat.render(messages, add_generation_prompt=False, divides=False)
    assert whole.startswith(prompt)
    reference = template.family.reference_for(template.model)
    text = whole.removeprefix(prompt).rstrip("\n")
    for stop in reference.stop_tokens if reference else ():
        text = text.removesuffix(stop)
    return text


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """The message with arguments encoded once more, as JSON that stands for an object is read before a
    template gets it."""
    functions = (call["function"] for call in message.get("tool_calls") or ())
    encoded = [{"function": {**each, "arguments": json.dumps(each["arguments"])}} for each in functions]
    return {**message, "tool_calls": encoded}
