"""The tokenizer: a checkpoint's files, texts to ids, and ids to texts."""

import json
from pathlib import Path

import pytest
import zoo

from server.errors import BadRequest
from server.text.tokenizer import Tokenizer
from server.text.tokenizer_files import TokenizerError, TokenizerFiles


def write(folder: Path, kind: str = "byte_level", **config: object) -> Path:
    zoo.KINDS[kind]().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def load(folder: Path, chat_template: str | None = None) -> Tokenizer:
    return TokenizerFiles(str(folder), str(folder / "cache"), chat_template).load()


MESSAGES = [{"role": "user", "content": "hi"}]


def test_text_comes_back(tmp_path: Path) -> None:
    tokenizer = load(write(tmp_path))
    text = "the fox 🙂 日本 <|im end|>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids) == "the fox 🙂 日本 "


def test_single_tokens(tmp_path: Path) -> None:
    tokenizer = load(write(tmp_path))
    [space_the] = [id for id in range(tokenizer.vocab_size) if tokenizer.token_text(id) == " the"]
    assert tokenizer.token_bytes(space_the) == b" the"
    half = tokenizer.encode("🙂")[0]
    assert tokenizer.token_text(half) == "\ufffd"
    assert "🙂".encode().startswith(tokenizer.token_bytes(half))
    end = tokenizer.token_id("<|im end|>")
    assert end is not None
    assert end in tokenizer.special_ids
    assert tokenizer.token_text(end) == "<|im end|>"


@pytest.mark.parametrize("kind", ["sentencepiece", "wordpiece"])
def test_single_tokens_of_other_kinds(tmp_path: Path, kind: str) -> None:
    tokenizer = load(write(tmp_path, kind))
    ids = tokenizer.encode("the fox")
    joined = "".join(map(tokenizer.token_text, ids))
    assert joined.replace(" ", "").replace("##", "") == "thefox"


def test_tokens_named_special_are_special(tmp_path: Path) -> None:
    plain = load(write(tmp_path)).token_id("<plain>")
    assert plain not in load(tmp_path).special_ids
    eos = {"content": "</s>", "lstrip": False}
    tokenizer = load(write(tmp_path, bos_token="<s>", eos_token=eos))
    assert tokenizer.eos_id == tokenizer.token_id("</s>")


def test_templates_read_the_tokens_that_only_this_model_has_by_their_names(tmp_path: Path) -> None:
    template = "{{ bos_token }}{{ image_token }}{{ messages[0].content }}"
    extra = {"image_token": "<plain>", "other": {"content": "</s>"}}
    tokenizer = load(write(tmp_path, bos_token="<s>", extra_special_tokens=extra, chat_template=template))
    assert tokenizer.chat.render([{"role": "user", "content": "hi"}]) == "<s><plain>hi"


def test_tokens_that_the_files_beside_tokenizer_json_describe(tmp_path: Path) -> None:
    size = load(write(tmp_path)).vocab_size
    new = {"content": "<tool>", "normalized": False}
    end = {"content": "</s>", "normalized": False, "rstrip": True, "special": True}
    tokenizer = load(write(tmp_path, added_tokens_decoder={f"{size}": new, "1": end}))
    eos, tool = tokenizer.token_id("</s>"), tokenizer.token_id("<tool>")
    assert (tool, tokenizer.vocab_size) == (size, size + 1)
    assert tool not in tokenizer.special_ids
    assert tokenizer.encode("</s> \n<tool>", add_special_tokens=False) == [eos, tool]
    assert tokenizer.decode([size]) == "<tool>"
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<tool>": size, "<pad>": size + 1}))
    older = load(write(tmp_path, pad_token="<pad>", additional_special_tokens=["<plain>", "<none>"]))
    assert older.encode("<tool><pad>", add_special_tokens=False) == [size, size + 1]
    assert {size, size + 1} & older.special_ids == {size + 1}
    assert older.token_id("<none>") is None


def test_the_first_token_is_added_where_only_the_configuration_asks_for_it(tmp_path: Path) -> None:
    tokenizer = load(write(tmp_path, bos_token="<s>", add_bos_token=True))
    bos = tokenizer.token_id("<s>")
    assert tokenizer.encode("the")[0] == bos
    assert bos not in tokenizer.encode("the", add_special_tokens=False)
    assert bos not in load(write(tmp_path, bos_token="<s>", add_bos_token=False)).encode("the")


def test_the_last_token_is_added_for_vectors_where_only_the_configuration_asks_for_it(tmp_path: Path) -> None:
    """As code that comes with gte-Qwen2 adds it, whose vectors are those of that token."""
    asked = {"bos_token": "<s>", "eos_token": "</s>", "add_eos_token": True}
    plain = load(write(tmp_path, **asked)).encode("the")
    (tmp_path / "modules.json").write_text('[{"type": "sentence_transformers.models.Pooling"}]')
    tokenizer = load(tmp_path)
    end, pair = tokenizer.token_id("</s>"), tokenizer.encode_pairs([("the", "the")])
    assert end not in plain
    assert tokenizer.encode("the") == [*plain, end]
    assert tokenizer.encode_many(["the the the"], keep=2) == [[plain[0], end]]
    assert pair == [([*plain, end, *plain, end], len(plain) + 1)]
    [both] = load(write(tmp_path, **asked, add_bos_token=True)).encode_many(["the"])
    assert both == [tokenizer.token_id("<s>"), *plain, end]


def test_siglip2_reads_small_letters(tmp_path: Path) -> None:
    plain = load(write(tmp_path)).encode("a cat", add_special_tokens=False)
    (tmp_path / "config.json").write_text('{"model_type": "siglip2"}')
    assert load(tmp_path).encode("A Cat", add_special_tokens=False) == plain


def test_truncation_and_padding_of_the_file_do_not_apply(tmp_path: Path) -> None:
    write(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert len(load(tmp_path).encode("the quick brown fox jumps")) > 2


def test_templates_by_precedence(tmp_path: Path) -> None:
    def rendered(**arguments: str) -> str:
        return load(tmp_path, **arguments).chat.render(MESSAGES)

    write(tmp_path, chat_template="config:{{ bos_token }}", bos_token="<s>")
    assert rendered() == "config:<s>"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert rendered() == "file"
    given = tmp_path / "mine.jinja"
    given.write_text("mine")
    assert rendered(chat_template=str(given)) == "mine"
    assert rendered(chat_template="{{ 'text' }}") == "text"
    with pytest.raises(TokenizerError, match="neither a template"):
        rendered(chat_template="nowhere.jinja")


def test_deepseek_ocr_is_asked_as_its_authors_ask(tmp_path: Path) -> None:
    write(tmp_path, bos_token="<s>")
    (tmp_path / "config.json").write_text('{"architectures": ["DeepseekOCRForCausalLM"]}')
    parts = [{"type": "image_url"}, {"type": "text", "text": "Free OCR."}]
    asked = load(tmp_path).chat.render([{"role": "user", "content": parts}], written={"image_url": "<image>"})
    assert asked == "<s><image>\nFree OCR."


def test_a_template_that_knows_no_videos_gets_their_placeholder_as_text(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% for c in m.content %}{% if c.type == 'image' %}<image>"
        "{% elif c.type == 'text' %}{{ c.text }}{% endif %}{% endfor %}{% endfor %}"
    )
    parts = [{"type": "image_url"}, {"type": "video_url"}, {"type": "text", "text": " is it"}]
    messages, written = [{"role": "user", "content": parts}], {"image_url": "<i>", "video_url": "<video>"}
    chat = load(write(tmp_path, chat_template=template)).chat
    assert chat.render(messages, written=written) == "<image><video> is it"
    knows = template.replace("{% elif", "{% elif c.type == 'video' %}<film>{% elif")
    assert chat.render(messages, written=written, template=knows) == "<image><film> is it"


def test_a_broken_template_stops_the_start_only_if_the_operator_gave_it(tmp_path: Path) -> None:
    broken = "{% for %}"
    chat = load(write(tmp_path, chat_template=broken)).chat
    with pytest.raises(BadRequest, match="not valid Jinja"):
        chat.render(MESSAGES)
    with pytest.raises(BadRequest, match="not valid Jinja"):
        load(tmp_path, chat_template=broken)
    with pytest.raises(TokenizerError, match="unknown form"):
        load(write(tmp_path, chat_template=[{"name": "default"}]))


def test_named_templates(tmp_path: Path) -> None:
    listed = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    for named in (listed, {"default": "plain", "tool_use": "tools"}):
        chat = load(write(tmp_path, chat_template=named)).chat
        assert chat.render(MESSAGES) == "plain"
        assert chat.render(MESSAGES, tools=[{"type": "function"}]) == "tools"


def test_a_file_of_sentencepiece_alone_is_a_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(folder: Path, target: Path, **_: bool) -> None:
        target.mkdir(parents=True)
        write(target)

    monkeypatch.setattr("server.text.tokenizer_files._run_conversion", convert)
    for name in ("tokenizer.model", "sentencepiece.bpe.model", "spm.model", "spiece.model"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_bytes(b"pieces")
        assert TokenizerFiles(str(folder), str(tmp_path / "cache")).load().encode("the")


@pytest.mark.slow
def test_older_files_are_converted_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    raw = json.loads(zoo.byte_level().to_str())["model"]
    vocab = {**raw["vocab"], "<|endoftext|>": len(raw["vocab"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    merges = "\n".join(" ".join(pair) for pair in raw["merges"])
    (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    tokenizer = load(tmp_path)
    assert tokenizer.decode(tokenizer.encode("the fox")) == "the fox"
    assert "Converting" in capfd.readouterr().err
    load(tmp_path)
    assert "Converting" not in capfd.readouterr().err
