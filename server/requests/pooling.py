"""Turns texts into the items that the engine pools: checks tasks and parameters, tokenizes.

The HTTP API and `LLM` share this. All of it is plain computation: the caller decides on threads and waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from operator import attrgetter

import msgspec

from engine_core.prompt_media import Media
from models.pooling.representations import Expansion
from server.errors import BadRequest, invalid
from server.media.media_cache import KeptItem as MediaItem
from server.media.prompt import Placed, as_media
from server.model_facts import OUTPUTS, Facts, find_outputs, find_task
from server.requests.prompt_length import check_query_or_document, check_text_characters, check_text_tokens
from server.requests.unsupported_parameters import UnsupportedPooling
from server.text.control_tokens import CUT, without_cuts
from server.text.tokenizer import TokenIds, Tokenizer, count_ids, unpack
from worker.protocol import Pooling, Task

Source = str | list[int]
"""A text as a string or as its token ids."""

CUT_MARGIN = 64
"""Tokens beyond those asked for in a text that is cut before it is encoded, since tokens at the cut may
differ."""

TEXTS_AT_ONCE = 256
"""Texts that are tokenized in one go."""

TOKENS_AT_ONCE = 1 << 17
"""Tokens of one request's texts that are sent in one turn of the event loop."""

QUERIES = ("query", "search_query")
"""The names of prompts and purposes of texts that are queries."""


_unsupported = attrgetter(*UnsupportedPooling.__struct_fields__)
_NOTHING = (None,) * len(UnsupportedPooling.__struct_fields__)


class PoolingParams(UnsupportedPooling, kw_only=True, repr_omit_defaults=True):
    """The task and the form of its result. None is the model's own default."""

    task: str | None = None
    use_activation: bool | None = None
    """True normalises vectors, or turns logits into probabilities; False gives them raw."""
    normalize: bool | None = None
    """An older name of use_activation, as are softmax and activation."""
    softmax: bool | None = None
    activation: bool | None = None
    dimensions: int | None = None
    """The length to which each vector is cut."""
    truncate_prompt_tokens: int | None = None
    """The length in tokens to which a text is cut; -1 is what the model can read. None refuses too long a
    text."""
    outputs: list[str] | None = None
    """What the model gives of each text from one pass, in place of the task: dense, sparse, tokens."""
    query: bool = False
    """Whether the texts are queries, which some models read in another way than documents."""

    def resolve(self, facts: Facts) -> Pooling:
        if _unsupported(self) != _NOTHING:
            self.check_unsupported(UnsupportedPooling.__struct_fields__)
        if self.outputs is not None:
            task, *others = find_outputs(self.outputs, facts.tasks)
        else:
            task, others = find_task(self.task, facts.tasks, facts.pooling.task), []
        if self.dimensions is not None:
            for each in (task, *others):
                _check_dimensions(self.dimensions, each, facts, lone=not others)
        if self.query and others and "token_embed" in (task, *others) and facts.pooling.texts.expansion:
            raise BadRequest("This model fills queries up for `tokens`, which come alone then.", "outputs")
        activates = self.activates()
        if activates is not None and task == "sparse_embed" and not others:
            raise BadRequest(
                "Weights of tokens are not normalised; leave out `use_activation`.", "use_activation"
            )
        return Pooling(
            task=task,
            use_activation=activates,
            dimensions=self.dimensions,
            outputs=tuple(others),
            query=self.query,
        )

    def activates(self) -> bool | None:
        """The value of `use_activation`, by whichever of its names it was given."""
        if self.normalize is None and self.softmax is None and self.activation is None:
            return self.use_activation
        names = ("use_activation", "normalize", "softmax", "activation")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if len(set(given.values())) > 1:
            raise BadRequest(
                f"{' and '.join(given)} mean the same, but differ; use `use_activation`.", "use_activation"
            )
        return next(iter(given.values()), None)


class PooledText(msgspec.Struct, frozen=True, gc=False):
    """One text for the engine, as tokens, and how to pool it."""

    tokens: TokenIds
    params: Pooling
    media: list[Placed] = []
    """The media items in it, in order."""
    windows: list[PooledText] = []
    """The rest of a text that is longer than the model reads, each part of which is read by itself."""

    @property
    def length(self) -> int:
        """The number of tokens."""
        ids = self.tokens
        return count_ids(ids) if isinstance(ids, bytes) else len(ids)


Span = tuple[int, int]
"""Where a word of a text begins, and where it ends."""


class ReadTexts(msgspec.Struct, frozen=True, gc=False):
    """The texts of a request as items for the engine."""

    items: list[PooledText]
    repeated: list[bytes] = []
    """The texts as JSON, if the answer repeats them."""
    many: bool = True
    """Whether the texts came in a list, as the answer then does."""
    spans: list[list[Span]] = []
    """The words of each text in which entities are looked for."""


TextToSend = tuple[list[int], Pooling, *tuple[Media, ...]]
"""The tokens of a text, how to pool it, and its media."""


def items_to_send(
    items: Sequence[PooledText], start: int, stop: int, media: Mapping[bytes, MediaItem]
) -> list[TextToSend]:
    """The next items to send: not more than take a moment to write. `media` has each item by its hash."""
    batch: list[TextToSend] = []
    tokens = 0
    for item in items[start:stop]:
        length = item.length
        if tokens and tokens + length > TOKENS_AT_ONCE:
            break
        placed = as_media(item.media, media) if item.media else ()
        batch.append((unpack(item.tokens), item.params, *placed))
        tokens += length
    return batch


@dataclass(frozen=True, slots=True)
class Truncation:
    """The number of tokens of a text that are kept, special ones included, and from which end."""

    keep: int | None = None
    left: bool = False
    """True drops the beginning of the text."""

    @classmethod
    def from_request(cls, tokens: int | None, side: str | None, facts: Facts) -> Truncation:
        """Reads truncate_prompt_tokens, where -1 is the whole window, and truncation_side."""
        if tokens is not None and tokens > facts.max_text_len:
            raise invalid(
                "truncate_prompt_tokens",
                f"truncate_prompt_tokens={tokens} cannot be greater than max_model_len = "
                f"{facts.max_text_len}. Please request a smaller truncation size.",
                tokens,
            )
        if tokens == 0:
            raise invalid("truncate_prompt_tokens", "truncate_prompt_tokens=0 would keep no token.", tokens)
        if tokens is not None and tokens < -1:
            problem = f"truncate_prompt_tokens={tokens} must be at least -1."
            raise invalid("truncate_prompt_tokens", problem, tokens)
        return cls(facts.max_text_len if tokens == -1 else tokens, side == "left")


NO_TRUNCATION = Truncation()
"""Cuts nothing: too long a text is refused."""


@dataclass(frozen=True, slots=True)
class TextReader:
    """Makes items of texts in the way in which the model was trained, according to its files."""

    facts: Facts
    tokenizer: Tokenizer
    truncation: Truncation = NO_TRUNCATION
    prompt: str = ""
    """An instruction that is written before each text. Token ids are taken as they are."""
    add_special_tokens: bool = True
    name: str = "input"
    """Name of the request's field, for errors."""
    in_windows: bool = False
    """Whether texts may be longer than the model reads at a time, because their vectors can be joined."""
    is_written: bool = False
    """Whether a template has written the texts, so that no more text is put around them."""
    write: Callable[[str], str] | None = None
    """What has written the texts into a template, with whose end a text ends even if it is cut."""

    def read_all(self, sources: Sequence[Source], params: Pooling, first: int = 0) -> list[PooledText]:
        """Makes the items of many texts. The tokenizer, which needs much memory, gets a part at a time."""
        items: list[PooledText] = []
        for start in range(0, len(sources), TEXTS_AT_ONCE):
            items += self.read(sources[start : start + TEXTS_AT_ONCE], params, first + start)
        return items

    def read(self, sources: Sequence[Source], params: Pooling, first: int = 0) -> list[PooledText]:
        """Makes the items. `first` is the index of these texts among the request's."""
        texts = [
            self._written(source, index)
            for index, source in enumerate(sources, first)
            if isinstance(source, str)
        ]
        keep, texts_of = self._keep(params), self.facts.pooling.texts
        special = self._adds_special(texts[:1], params)
        ids_of = self.tokenizer.encode_many(texts, special, keep, left=self.truncation.left)
        encoded = iter(ids_of if keep is None else self._ended(ids_of, keep, special))
        of_text = self._without_prompt(params)
        expansion = texts_of.expansion if params.query and "token_embed" in outputs_of(params) else None
        cuts_prompt = of_text.skip and keep is not None and self.truncation.left
        return [
            _filled(
                ids := self._checked(next(encoded), index, params),
                self._with_rest(source, len(ids), params, of_text.skip) if cuts_prompt else of_text,
                expansion,
            )
            if isinstance(source, str)
            else _filled(self._checked(self._cut(source, keep), index, params), params, expansion)
            for index, source in enumerate(sources, first)
        ]

    def _adds_special(self, texts: Sequence[str], params: Pooling) -> bool:
        """Whether special tokens come with such texts: not with queries whose tokens have static weights."""
        weighed = params.query and self.facts.pooling.static_queries
        return not weighed and self.adds_special_to(texts[0] if texts else "")

    def _keep(self, params: Pooling) -> int | None:
        """The number of tokens to which a text is cut: models may read shorter queries than documents."""
        keep = self.truncation.keep
        most = None if keep is None else self.facts.pooling.texts.most_tokens(query=params.query)
        return keep if keep is None or most is None else min(keep, most)

    def _written(self, text: str, index: int) -> str:
        written = text if self.is_written else self._with_form(text)
        if self.truncation.keep is None:
            size, text = len(without_cuts(written) if CUT in written else written), f"{self.name} {index}"
            check_text_characters(size, text, self.facts, self.tokenizer, in_windows=self.in_windows)
        elif CUT not in written:  # Text beyond this would be cut after encoding anyway.
            most = (self.truncation.keep + CUT_MARGIN) * self.tokenizer.longest_token
            written = written[-most:] if self.truncation.left else written[:most]
        return written.lower() if self.facts.pooling.texts.lower_case else written

    def adds_special_to(self, text: str) -> bool:
        """Whether the tokenizer's own tokens come with this text, which has been written."""
        texts, chat = self.facts.pooling.texts, self.facts.pooling.texts.chat
        if chat is None or not self.add_special_tokens:
            return self.add_special_tokens and not texts.has_special
        return (self.is_written or chat.add_special_tokens) and not self.tokenizer.chat.begins(text)

    def _with_form(self, text: str) -> str:
        """The text in the form in which the model was trained."""
        texts = self.facts.pooling.texts
        if texts.chat is None:
            return f"{self.prompt}{text}{texts.suffix}"
        said = [("system", self.prompt), ("user", text)] if self.prompt else [("user", text)]
        return self.tokenizer.chat.render(
            [{"role": role, "content": content} for role, content in said],
            add_generation_prompt=texts.chat.add_generation_prompt,
            kwargs=texts.chat.kwargs,
            divides=False,
        )

    def _ended(self, found: list[list[int]], keep: int, special: bool) -> list[list[int]]:
        """The texts, of which those that were cut end with what the template writes behind any text: there
        models are read."""
        chat = self.facts.pooling.texts.chat
        is_form = chat is not None and chat.keeps_ending and not self.is_written
        write = self._with_form if is_form else self.write
        if write is None or self.truncation.left or all(len(ids) < keep for ids in found):
            return found
        one, other = self.tokenizer.encode_many([write("0"), write("1 2 3 4")], special)
        same = takewhile(lambda pair: pair[0] == pair[1], zip(reversed(one), reversed(other), strict=False))
        ending = [id for id, _ in same][:keep][::-1]
        return [[*ids[: keep - len(ending)], *ending] if len(ids) == keep else ids for ids in found]

    def _without_prompt(self, params: Pooling) -> Pooling:
        """The parameters for a text with an instruction: some models leave its tokens out of the vector."""
        facts = self.facts.pooling
        if not self.prompt or facts.include_prompt or facts.texts.chat is not None:
            return params
        ids = self.tokenizer.encode(self.prompt, self.add_special_tokens)
        closing = ids[-1:] and ids[-1] in self.tokenizer.special_ids
        return msgspec.structs.replace(params, skip=len(ids) - bool(closing))

    def _with_rest(self, text: str, tokens: int, params: Pooling, skip: int) -> Pooling:
        """The same where the beginning may be cut off, so that `tokens` are left: those of the instruction
        are the ones that the text alone would not have. `skip` are those that are left out uncut."""
        rest = tokens - replace(self, prompt="").read([text], params)[0].length
        before = skip - len(self.tokenizer.encode(self.prompt, False))
        return msgspec.structs.replace(params, skip=min(skip, rest + before) if rest else 0)

    def _cut(self, ids: list[int], keep: int | None) -> list[int]:
        if keep is None or len(ids) <= keep:
            return ids
        return ids[-keep:] if self.truncation.left else ids[:keep]

    def _checked(self, ids: list[int], index: int, params: Pooling) -> list[int]:
        check_text_tokens(ids, self.name, index, self.facts, in_windows=self.in_windows)
        check_query_or_document(ids, self.name, index, self.facts, query=params.query)
        return ids


def outputs_of(params: Pooling) -> tuple[Task, ...]:
    """The tasks that are answered of a text."""
    return (params.task, *params.outputs)


def _filled(ids: list[int], params: Pooling, expansion: Expansion | None) -> PooledText:
    """The item of a text. A query is filled up if the model was trained so."""
    missing = 0 if expansion is None else max(0, expansion.length - len(ids))
    if expansion is None or not missing:
        return PooledText(ids, params)
    unseen = 0 if expansion.attends else missing
    return PooledText([*ids, *[expansion.token] * missing], msgspec.structs.replace(params, unseen=unseen))


def find_prompt(name: str | None, facts: Facts, task: Task = "embed", param: str = "prompt_name") -> str:
    """The instruction of that name. None is the default one, which is for vectors, if there is any."""
    prompts = facts.pooling.texts.prompts
    if name is None and task not in OUTPUTS.values():
        return ""
    if name is None:
        return prompts.get(facts.default_prompt_name or "", "")
    if name not in prompts:
        known = ", ".join(map(repr, prompts)) or "none"
        raise invalid(param, f"This model has no prompt named {name[:64]!r}. Its prompts: {known}.", name)
    return prompts[name]


_INPUT_TYPES: dict[str, tuple[str, ...]] = {
    "query": ("query",),
    "document": ("document", "passage", "corpus"),
    "search_query": ("search_query", "query"),
    "search_document": ("search_document", "document", "passage", "corpus"),
    "image": ("document", "passage", "corpus"),
    "classification": ("classification",),
    "clustering": ("clustering",),
}
"""Purposes of a text as clients name them, and the names that models give to their prompts for it."""


def prompt_for(input_type: str, facts: Facts, param: str = "input_type") -> str:
    """The instruction for a purpose; an empty one for usual purposes that the model does not distinguish.

    `param` is the field in which the client gives the purpose.
    """
    prompts = facts.pooling.texts.prompts
    for name in (input_type, *_INPUT_TYPES.get(input_type, ())):
        if name in prompts:
            return prompts[name]
    if input_type in _INPUT_TYPES or input_type == "passage":
        return find_prompt(None, facts)
    return find_prompt(input_type, facts, param=param)


def _check_dimensions(asked: int, task: Task, facts: Facts, *, lone: bool) -> None:
    if task == "sparse_embed" and not lone:
        return
    if task not in ("embed", "token_embed"):
        raise BadRequest(
            f"Task {task!r} only supports ['use_activation'] parameters, "
            "does not support ['dimensions'] parameters",
            "dimensions",
        )
    width = facts.ready.worker.widths[task]
    if asked == width:
        return
    name, allowed = facts.model_names[0], facts.pooling.matryoshka_dimensions
    if not facts.pooling.matryoshka:
        message = (
            f"Model {name!r} does not support Matryoshka embeddings; dimensions must be unset (received "
            f"dimensions={asked}). If it was trained for them, start the server with --hf-overrides "
            """'{"is_matryoshka": true}'."""
        )
    elif allowed and asked not in allowed:
        message = f"Model {name!r} only supports Matryoshka dimensions {list(allowed)}, got {asked}."
    elif not 1 <= asked <= width:
        message = f"Model {name!r} only supports dimensions in range [1, {width}], got {asked}."
    else:
        return
    raise invalid("dimensions", message, asked)
