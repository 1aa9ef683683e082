"""Reads a tokenizer and its chat templates from the files of a checkpoint.

These are tokenizer.json, and what tokenizer_config.json and its neighbours say of special tokens and chat
templates. A checkpoint without tokenizer.json is converted once; what is not tekken.json, by another process.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, cast

import msgspec
import tokenizers

from models.gguf.folder import NO_TOKENIZER
from models.mistral.tokenizer import write_tokenizer
from models.plain_files import ConfigError, check_regular, read_json, read_text, typed
from models.pooling.sentence_files import makes_vectors, read_markers
from server.text.chat_template import AskedFormat, ChatTemplate, compile_template
from server.text.tokenizer import NoTokenizer, Tokenizer

CONVERSION_SECONDS = 300
_SOURCES = (
    "tokenizer.model", "sentencepiece.bpe.model", "spm.model", "spiece.model", "source.spm", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer_config.json", "tekken.json",
)  # fmt: skip

_PALIGEMMA = """
{%- if messages | length != 1 or messages[0].role != "user" -%}
{{ raise_exception("PaliGemma answers one message of a user: it has not learned conversations.") }}
{%- endif -%}
{%- for part in messages[0].content if part.type == "image" -%}<image>{%- endfor -%}
<bos>
{%- for part in messages[0].content if part.type == "text" -%}
{{ part.text if loop.first else "\n" + part.text }}
{%- endfor -%}
{{ "\n" }}
"""
_AS_IT_IS = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"


class TokenizerError(ValueError):
    """Raised when there is no tokenizer; the message says why, and what to do."""


class TokenizerFiles(msgspec.Struct, frozen=True):
    """The files of a tokenizer and how to read them, so that several processes can load the same one."""

    folder: str
    cache: str
    """The folder in which tokenizers are kept that were converted."""
    chat_template: str | None = None
    """A file, or a template, that replaces the folder's."""
    content_format: AskedFormat = "auto"
    trust_remote_code: bool = False
    skipped: bool = False
    """Whether nothing is read, because clients send and get token ids."""
    special_in_messages: bool = False
    """Whether control tokens that users write in messages stay control tokens."""

    def load(self, make_chat: Callable[..., ChatTemplate] = ChatTemplate) -> Tokenizer:
        """Loads the tokenizer. `make_chat` takes the arguments of ChatTemplate."""
        if self.skipped:
            return NoTokenizer(make_chat({}, {}, self.content_format))
        try:
            return self._load(Path(self.folder), make_chat)
        except ConfigError as error:
            raise TokenizerError(str(error)) from None

    def _load(self, folder: Path, make_chat: Callable[..., ChatTemplate]) -> Tokenizer:
        path = folder / "tokenizer.json"
        if path.exists():
            check_regular(path)
        else:
            path = self._converted(folder) / "tokenizer.json"
        settings = "tokenizer_config.json"
        config = _read_json(folder / settings) or _read_json(path.with_name(settings))
        named = {**_named_tokens(_read_json(folder / "special_tokens_map.json")), **_named_tokens(config)}
        named |= {f"marker {name}": name for name in read_markers(folder)}
        if self.chat_template is not None:
            templates = {"default": template_text(self.chat_template)}
            # The operator's template is checked now. One of the checkpoint may be broken while it is unused.
            compile_template(templates["default"])
        else:
            templates = _read_templates(folder, config) or _family_templates(folder)
        try:
            model = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise TokenizerError(f"{path.name} of the model cannot be read: {error}") from error
        _add_tokens(model, folder, config, named.values())
        if config.get("add_eos_token") is True and makes_vectors(folder):
            _end_texts(model, named.get("eos_token", ""))
        if _read_json(folder / "config.json").get("model_type") == "siglip2":
            # It was trained on small letters, which transformers' class of tokenizer makes, and not the file.
            own = filter(None, [model.normalizer])
            model.normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.Lowercase(), *own])
        described = config.get("response_template")
        return Tokenizer(
            model,
            make_chat(templates, named, self.content_format),
            named_tokens=named,
            add_bos=config.get("add_bos_token") is True,
            path=str(path),
            response_template=described if isinstance(described, dict) else None,
            special_in_messages=self.special_in_messages,
        )

    def _converted(self, folder: Path) -> Path:
        """A folder with the tokenizer.json made from older files of a checkpoint: made once, then reused."""
        if (why := folder / NO_TOKENIZER).is_file():
            raise TokenizerError(why.read_text())
        sources = [folder / name for name in _SOURCES if (folder / name).is_file()]
        if not sources:
            raise TokenizerError(
                "the model has no tokenizer.json, nor older tokenizer files to make one from; "
                "name a folder or hub id that has one with --tokenizer"
            )
        stamp = "|".join(f"{path.resolve()}:{path.stat().st_mtime_ns}" for path in sources)
        target = Path(self.cache) / "tokenizers" / hashlib.sha256(stamp.encode()).hexdigest()[:16]
        if not (target / "tokenizer.json").is_file():
            print("Converting the model's tokenizer to tokenizer.json (once)", file=sys.stderr)
            if (tokens := folder / "tekken.json").is_file():
                write_tokenizer(tokens, target)
            else:
                _run_conversion(folder, target, trust_remote_code=self.trust_remote_code)
        return target


def tokenizer_info(tokenizer: Tokenizer, folder: Path) -> dict[str, object]:
    """The content of tokenizer_config.json beside the tokenizer, or else in `folder`; and the template."""
    folders = [Path(tokenizer.path).parent, folder]
    found = next((each for each in folders if (each / "tokenizer_config.json").is_file()), folder)
    said, template = _read_json(found / "tokenizer_config.json"), found / "chat_template.jinja"
    if "chat_template" not in said and template.is_file():
        said["chat_template"] = template_text(str(template))
    return {"tokenizer_class": "PreTrainedTokenizerFast", **said}


def _read_templates(folder: Path, config: dict[str, object]) -> dict[str, str]:
    try:
        return _templates_of(folder, config)
    except (KeyError, TypeError) as error:
        raise TokenizerError(
            f"the chat templates of the model have an unknown form ({type(error).__name__}: {error}); "
            "give one with --chat-template"
        ) from error


def _templates_of(folder: Path, config: dict[str, object]) -> dict[str, str]:
    """Reads the templates beside a tokenizer. Files of their own win over tokenizer_config.json."""
    found: dict[str, str] = {}
    match config.get("chat_template"):
        case str() as source:
            found["default"] = source
        case dict() as named:
            found.update({str(name): str(source) for name, source in named.items()})
        case list() as named:
            found.update({str(entry["name"]): str(entry["template"]) for entry in named})
        case _:
            pass
    legacy = folder / "chat_template.json"
    if legacy.exists():
        found["default"] = str(_read_json(legacy)["chat_template"])
    for path in sorted(folder.glob("additional_chat_templates/*.jinja")):
        found[path.stem] = read_text(path)
    single = folder / "chat_template.jinja"
    if single.exists():
        found["default"] = read_text(single)
    return found


def _family_templates(folder: Path) -> dict[str, str]:
    """The templates of an architecture whose checkpoints have none: what its authors' code writes."""
    match _read_json(folder / "config.json").get("architectures"):
        case ["PaliGemmaForConditionalGeneration"]:
            return {"default": _PALIGEMMA}
        case ["DeepseekOCRForCausalLM" | "DeepseekOCR2ForCausalLM"]:
            return {"default": _AS_IT_IS}
        case _:
            return {}


def template_text(given: str) -> str:
    """The template's text. Jinja text has braces or line breaks; anything else must be a file."""
    if "{" in given or "\n" in given:
        return given
    try:
        return Path(given).expanduser().read_text("utf-8")
    except OSError as error:
        raise TokenizerError(
            f"--chat-template {given!r} is neither a template (it has no braces) nor a file that can be "
            f"read: {error.strerror}"
        ) from error


def _named_tokens(config: dict[str, object]) -> dict[str, str]:
    """Named tokens such as bos_token; each is text, or an object with its text as `content`."""
    others = config.get("additional_special_tokens") or config.get("extra_special_tokens")
    listed = [(f"additional {_content(each)}", each) for each in others] if isinstance(others, list) else []
    for field in ("extra_special_tokens", "model_specific_special_tokens"):  # a model's own, by name
        listed += own.items() if isinstance(own := config.get(field), dict) else ()
    listed += [(key, value) for key, value in config.items() if key.endswith("_token")]
    return {key: text for key, value in listed if isinstance(text := _content(value), str)}


def _content(token: object) -> object:
    return token.get("content") if isinstance(token, dict) else token


_Id = Annotated[str, msgspec.Meta(pattern="^[0-9]{1,9}$")]


class _AddedToken(msgspec.Struct, frozen=True):
    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True
    special: bool = False


def _add_tokens(
    model: tokenizers.Tokenizer, folder: Path, config: Mapping[str, object], special: Collection[str]
) -> None:
    """Adds the tokens that the files beside tokenizer.json describe, and it does not, or otherwise."""
    known = {token.content: token.__getstate__() for token in model.get_added_tokens_decoder().values()}
    described = config.get("added_tokens_decoder")
    if described is None:  # an older file has ids by texts
        ids = {text: id for text, id in _read_json(folder / "added_tokens.json").items() if text not in known}
        flags = {text: {"special": text in special, "normalized": text not in special} for text in ids}
        described = {str(id): {"content": text, **flags[text]} for text, id in ids.items()}
    found = typed(described, dict[_Id, _AddedToken], f"{folder}: the added tokens")
    tokens = [tokenizers.AddedToken(**msgspec.structs.asdict(found[id])) for id in sorted(found, key=int)]
    model.add_tokens([token for token in tokens if token.__getstate__() != known.get(token.content)])


def _end_texts(model: tokenizers.Tokenizer, end: str) -> None:
    """Has each text end with a token, if the model knows it and tokenizer.json does not add it."""
    id, one = model.token_to_id(end), model.encode("a")
    if id is None or one.ids[-1:] == [id]:
        return
    before = one.tokens[: (*one.special_tokens_mask, 0).index(0)]
    ids = [(token, model.token_to_id(token)) for token in {*before, end}]
    behind = [f"{token}:1" for token in (*before, "$B", end)]
    single = [*before, "$A", end]
    model.post_processor = tokenizers.processors.TemplateProcessing(single, [*single, *behind], ids)


def _read_json(path: Path) -> dict[str, object]:
    if not path.exists():
        return {}
    content = read_json(path)
    if not isinstance(content, dict):
        raise TokenizerError(f"{path.name} of the model must hold an object")
    return cast("dict[str, object]", content)


def _run_conversion(folder: Path, target: Path, *, trust_remote_code: bool) -> None:
    command = [sys.executable, "-P", "-m", "models.checkpoint.tokenizer_export", str(folder), str(target)]
    if trust_remote_code:
        command.append("--trust-remote-code")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CONVERSION_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise TokenizerError(f"converting the tokenizer took more than {CONVERSION_SECONDS} s") from error
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise TokenizerError(
            f"the model has no tokenizer.json, and none can be made: {reason}; "
            "name a folder or hub id that has one with --tokenizer"
        )
