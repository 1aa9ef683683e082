"""Renders chat messages as the text a model was trained on, with the templates of its checkpoint.

Knows nothing of tokens. A failure of a template is the request's: 400, with what `raise_exception` said.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Set
from functools import cached_property, lru_cache
from typing import Any, Literal

import msgspec
from jinja2 import TemplateError, TemplateSyntaxError, nodes

from server.errors import BadRequest
from server.text.control_tokens import TextDivider, divider_of, without_cuts
from server.text.template_sandbox import make_sandbox

Format = Literal["string", "openai"]
"""The form of a message's content in a template: one string, or the parts as the client sent them."""

AskedFormat = Literal["auto", "string", "openai"]
"""The form that the operator or a request asks for; "auto" takes the one that the template reads."""

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]

RESERVED = {
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
}
"""The arguments of `render` that `chat_template_kwargs` may not replace."""

SWITCHES = ("enable_thinking", "thinking", "reasoning")
"""The names under which templates ask whether the model shall think."""

_PROBE = "facet asks whether this is written"
"""A text that no template writes by itself."""

_END = "facet ends the last message here "
"""A text that is put behind the message to be continued, as its own may stand once more in what follows."""

_INSTEAD = (
    "Start the server with --chat-template FILE, or send plain text: `prompt` of /v1/completions if the "
    "model writes, `input` of /v1/embeddings if it embeds."
)
"""What can be done where no template writes a conversation."""

_IMAGE = {"type": "image"}
_MEDIA = {
    "image_url": _IMAGE,
    "image_embeds": _IMAGE,
    "video_url": {"type": "video"},
    "audio_url": {"type": "audio", "audio_url": ""},  # older templates look for the field
}
"""Media parts by the type with which `Message` has them, and what templates see of them."""

_sandbox = make_sandbox()


class AnswerStyle(msgspec.Struct, frozen=True, gc=False):
    """The manner of an answer that a request asks for. None is what the template does by itself."""

    effort: Effort | None = None
    verbosity: Verbosity | None = None
    thinks: bool | None = None
    """Whether the model thinks first, if the client says so itself: no effort at all is no thinking too."""
    budget: int | None = None
    """The most tokens of thinking."""

    def variables(self, read: Set[str]) -> dict[str, object]:
        """The variables to set, of those that a template reads."""
        thinks = self.thinks
        if thinks is None and self.effort is not None:
            thinks = self.effort != "none"
        said = {
            **dict.fromkeys(SWITCHES, thinks),
            "reasoning_effort": self.effort,
            "verbosity": self.verbosity,
            "thinking_budget": self.budget,
        }
        return {name: value for name, value in said.items() if value is not None and name in read}


class Compiled:
    """A compiled template, and what its text says about the form of its input."""

    def __init__(self, source: str) -> None:
        tree = _sandbox.parse(source)
        self.render: Callable[[dict[str, object]], str] = _sandbox.from_string(source).render
        self.format: Format = "openai" if _iterates_content(tree) else "string"
        self.variables = frozenset(name.name for name in tree.find_all(nodes.Name) if name.ctx == "load")
        """The names of the variables that it reads."""
        self.takes_both = any(test.name == "string" for test in tree.find_all(nodes.Test))
        """True if the template asks whether a content is a string: strings then need not be wrapped into
        parts."""
        constants = (constant.value for constant in tree.find_all(nodes.Const))
        self.words = named = frozenset(value for value in constants if isinstance(value, str))
        """The texts with which it compares, roles among them."""
        self.writes_videos = "video" in named
        """True if the template has a place for parts that are videos."""
        self.writes_pairs = {"query", "document"} <= named
        """True if the template has the roles of two texts that are to be compared."""


@lru_cache(maxsize=16)
def compile_template(source: str) -> Compiled:
    try:
        return Compiled(source)
    except TemplateSyntaxError as error:
        raise BadRequest(
            f"The chat template is not valid Jinja: {error.message} (line {error.lineno}).", "chat_template"
        ) from error
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        # Python's compiler has bounds of its own, for depth and for numbers.
        raise BadRequest(
            f"The chat template cannot be compiled ({type(error).__name__}): it is nested too deeply, or too "
            "long.",
            "chat_template",
        ) from error


class ChatTemplate:
    """The templates of one tokenizer: "default", and others by name such as "tool_use"."""

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
        content_format: AskedFormat = "auto",
    ) -> None:
        self._templates = dict(templates)
        self._special_tokens = dict(special_tokens)
        self._format: AskedFormat = content_format
        self.divider: TextDivider | None = None
        """What divides the control tokens that users write, unless they stay what they are."""

    @cached_property
    def overhead(self) -> int:
        """The characters that the default template writes of a conversation without any text."""
        try:
            return len(self.render([{"role": "user", "content": ""}]))
        except BadRequest:
            return 0

    @cached_property
    def takes_late_system(self) -> bool:
        """Whether the default template writes a system message that comes after others."""
        said = [("user", "a"), ("assistant", "b"), ("system", _PROBE), ("user", "c")]
        try:
            return _PROBE in self.render([{"role": role, "content": text} for role, text in said])
        except BadRequest:
            return False

    def with_default(self, source: str) -> ChatTemplate:
        """The same with one other template in place of all."""
        own = copy.copy(self)
        own._templates = {"default": source}
        for name in ("overhead", "takes_late_system"):
            vars(own).pop(name, None)
        return own

    @property
    def knows_developer(self) -> bool:
        """Whether a template has the role of a developer beside that of the system."""
        return any("developer" in source for source in self._templates.values())

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        template: str | None = None,
        kwargs: Mapping[str, object] | None = None,
        content_format: AskedFormat | None = None,
        written: Mapping[str, str] | None = None,
        defaults: Mapping[str, object] | None = None,
        quoted: Set[str] = frozenset(),
        divides: bool = True,
    ) -> str:
        """Renders a conversation, with marks where control tokens are to be encoded as ordinary text.

        `content_format` replaces the one that the server was started with, and `written` has what stands for
        media parts of each type in a template that takes texts only. `defaults` are the operator's arguments
        where `kwargs` has none. `quoted` are further words that are ordinary text where users write them;
        `divides` is False for a text that is no message.
        """
        messages = [_with_arguments(each) if "tool_calls" in each else each for each in messages]
        if divides:
            said: tuple[Any, ...] = (messages, tools, documents, kwargs)
            for divider in filter(None, (self.divider, divider_of(frozenset(quoted)))):
                said = tuple([each and divider.divide(each) for each in said])
            messages, tools, documents, kwargs = said
        compiled = self.compiled(template, with_tools=tools is not None)
        asked = content_format or self._format
        wanted = compiled.format if asked == "auto" else asked
        shaped = [_shaped(message, compiled, wanted, written or {}) for message in messages]
        own = {**(defaults or {}), **(kwargs or {})}
        variables: dict[str, object] = {
            **self._special_tokens,
            **{key: value for key, value in own.items() if key not in RESERVED},
            "messages": shaped,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        return (
            _continued(compiled, variables, shaped)
            if continue_final_message
            else _rendered(compiled, variables)
        )

    def begins(self, text: str) -> bool:
        """Whether a text has the token that stands at the beginning of prompts."""
        bos = self._special_tokens.get("bos_token")
        return bool(bos) and text.startswith(str(bos))

    @property
    def sources(self) -> list[str]:
        """The text of each template."""
        return list(self._templates.values())

    @property
    def writes_pairs(self) -> bool:
        """Whether the default template is one for scoring a document for a query."""
        try:
            return "default" in self._templates and compile_template(self._templates["default"]).writes_pairs
        except BadRequest:  # the requests that use a broken template of a checkpoint get its error
            return False

    @property
    def faults(self) -> list[str]:
        """A sentence on each template that cannot be used."""
        found: list[str] = []
        for name in self._templates:
            try:
                self.compiled(name, with_tools=False)
            except BadRequest as error:
                found.append(error.message)
        return found

    def compiled(self, template: str | None, *, with_tools: bool) -> Compiled:
        """The template to use: one of the checkpoint's by name, the request's own, or the default."""
        name = self._choose(with_tools=with_tools) if template is None else template
        if name not in self._templates:
            return compile_template(name)
        try:
            return compile_template(self._templates[name])
        except BadRequest as error:
            fault = error.message.removeprefix("The chat template ")
            raise BadRequest(
                f"This model's chat template {name!r} {fault} {_INSTEAD}",
                "messages",
            ) from error

    def _choose(self, *, with_tools: bool) -> str:
        """The name of the checkpoint's template for a conversation."""
        if with_tools and "tool_use" in self._templates:
            return "tool_use"
        if "default" in self._templates:
            return "default"
        names = ", ".join(map(repr, sorted(self._templates)))
        raise BadRequest(
            "This model has no default chat template, so a conversation cannot be written as its prompt. "
            + (f"Its templates are named {names}. " if names else "")
            + _INSTEAD,
            "messages",
        )


def _shaped(
    message: dict[str, Any], compiled: Compiled, wanted: Format, written: Mapping[str, str]
) -> dict[str, Any]:
    """The message with its content in the form that the template reads."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [_as_part(part, compiled, written) for part in content]
        content = _joined_text(content, written) if wanted == "string" else parts
    elif isinstance(content, str) and wanted == "openai" and not compiled.takes_both:
        content = [{"type": "text", "text": content}]
    return {**message, "content": content}


def _as_part(part: dict[str, Any], compiled: Compiled, written: Mapping[str, str]) -> dict[str, Any]:
    """A part as templates read it. For those that know no videos, what stands for one is text."""
    known = _MEDIA.get(part.get("type", ""), part)
    if known.get("type") == "video" and not compiled.writes_videos:
        return {"type": "text", "text": written.get(part["type"], "")}
    return known


def _rendered(compiled: Compiled, variables: dict[str, object]) -> str:
    try:
        return compiled.render(variables)
    except TemplateError as error:
        why = without_cuts(error.message or "")
        raise BadRequest(f"The chat template refused these messages: {why}", "messages") from error
    except MemoryError as error:
        raise BadRequest(
            "The chat template took more memory on these messages than it may. Send fewer of them, or use "
            "another template.",
            "chat_template",
        ) from error
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise BadRequest(
            f"The chat template failed on these messages ({type(error).__name__}). "
            "Check roles and contents, or give another template with --chat-template.",
            "messages",
        ) from error


def _joined_text(parts: list[dict[str, Any]], written: Mapping[str, str]) -> str:
    """The texts of parts, and what is `written` in the place of each media item."""
    known = [
        part
        for part in parts
        if part.get("type") in _MEDIA or (part.get("type") == "text" and "text" in part)
    ]
    return "\n".join(
        str(part["text"]) if part["type"] == "text" else written.get(part["type"], "") for part in known
    )


def _with_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """The message with the arguments of tool calls as objects."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_read_call(call) for call in calls]} if calls else message


def _read_call(call: dict[str, Any]) -> dict[str, Any]:
    """The tool call with its arguments as an object, as templates write them, not as JSON text."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"]) if function["arguments"] else {}
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _continued(compiled: Compiled, variables: Mapping[str, object], messages: list[dict[str, Any]]) -> str:
    """Renders the text up to the end of the last message, so that the model continues it.

    Where a template writes no answers (as Qwen3-ASR's), the message stands behind what begins one.
    """
    *others, last = copy.deepcopy(messages) or [{}]
    holder, key = last, "content"
    if isinstance(parts := last.get("content"), list):
        holder, key = next((part for part in reversed(parts) if part.get("type") == "text"), {}), "text"
    if (given := holder.get(key)) is not None:
        content = str(given)
        holder[key] = content + _END
        marked = _rendered(compiled, {**variables, "messages": [*others, last]})
        text, found, behind = marked.rpartition(_END[:-1])
        text = text if behind.startswith(" ") else text.rstrip()  # the template trims messages
        if found and text.rstrip().endswith(content.strip()):
            return text
        before = {**variables, "messages": others}
        if others and last.get("role") == "assistant" and _rendered(compiled, before) == marked:
            return _rendered(compiled, {**before, "add_generation_prompt": True}) + content
    raise BadRequest(
        "continue_final_message is set, but the final message does not appear in the chat after the chat "
        "template was applied. The template may change or drop it, or the message may have no text.",
        "continue_final_message",
    )


def _iterates_content(tree: nodes.Template) -> bool:
    """Whether the template loops over a message's content, under that name or one it was given."""
    aliases: set[str] = set()
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, aliases):
            aliases.add(assign.target.name)
    return any(_is_content(loop.iter, aliases) for loop in tree.find_all(nodes.For))


def _is_content(node: nodes.Node, aliases: set[str]) -> bool:
    match node:
        case nodes.Name(name=name):
            return name in aliases
        case nodes.Getattr(attr="content"):
            return True
        case nodes.Getitem(arg=nodes.Const(value="content")):
            return True
        case nodes.Filter(node=nodes.Node() as inner) | nodes.Getitem(node=inner, arg=nodes.Slice()):
            return _is_content(inner, aliases)
        case _:
            return False
