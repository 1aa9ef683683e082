"""Sounds in chats at a real server with a tiny Qwen2-Audio: answers are those of transformers."""

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from heard import AUDIO, Heard, publish_tokenizer
from live import LiveServer, serving
from pictured import Prompts, expected
from pictured_chat import write_chat_files
from sounds import noise, tone, written
from tekken import write_tekken
from tokenizers import Tokenizer

pytestmark = pytest.mark.turns(4)

SIZES = ("--dtype", "float32", "--num-gpu-blocks-override", "200", "--max-num-seqs", "8", "--block-size", "4")
TOKENS = {AUDIO: "<|AUDIO|>", 311: "<|audio_bos|>", 312: "<|audio_eos|>"}
QWEN3_TOKENS = {AUDIO: "<|audio_pad|>", 311: "<|audio_start|>", 312: "<|audio_end|>"}


class Model:
    def __init__(self, family: str, folder: Path, tokens: dict[int, str]) -> None:
        self.heard, self.folder = Heard(family, folder), folder
        written = "".join(tokens[id] for id in (311, AUDIO, 312))
        self.tokenizer: Tokenizer = write_chat_files(folder, tokens, written)
        path = folder / "tokenizer_config.json"
        path.write_text(path.read_text().replace("c.type == 'image'", "c.type == 'audio'"))

    def answer(self, *pieces: str | np.ndarray) -> list[int]:
        given: list[Any] = []
        for piece in pieces:
            if isinstance(piece, str):
                given.append(self.tokenizer.encode(piece, add_special_tokens=False).ids)
            else:
                given += [[311], piece, [312]]
        prompt = Prompts(self.folder).make(*given)
        return expected(self.heard.model, prompt, 8, lambda sounds, ids: self.heard.inputs(sounds)).tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model("qwen2 audio", tmp_path_factory.mktemp("qwen2-audio"), TOKENS)


@pytest.fixture(scope="module")
def server(model: Model) -> Iterator[LiveServer]:
    with serving(str(model.folder), *SIZES) as server:
        yield server


def in_base64(file: bytes) -> str:
    return base64.b64encode(file).decode()


def asked(*content: dict[str, Any]) -> dict[str, Any]:
    body = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"messages": [{"role": "user", "content": list(content)}], **body}


def heard_by_decoder(samples: np.ndarray) -> np.ndarray:
    """The samples as a file of 16 bits has them."""
    return (samples * 32767).astype(np.int16) / np.float32(32768)


def test_answers_are_those_of_transformers_for_long_and_short_files(model: Model, server: LiveServer) -> None:
    short, long = tone(0.11), noise(3)  # the file of one is cut out of the body, and of the other is not
    right = model.answer("user: hear ", heard_by_decoder(short), " and ", heard_by_decoder(long), " ")
    files = [written(short), written(long)]
    assert len(files[0]) * 4 / 3 < 8 << 10 < len(files[1])
    parts = [
        {"type": "input_audio", "input_audio": {"data": in_base64(each), "format": "wav"}} for each in files
    ]
    texts = [{"type": "text", "text": value} for value in ("hear ", " and ")]
    content = [texts[0], parts[0], texts[1], parts[1]]
    response = server.post("/v1/chat/completions", asked(*content))
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["token_ids"] == right
    url = {"type": "audio_url", "audio_url": {"url": f"data:audio/flac;base64,{in_base64(files[1])}"}}
    again = server.post("/v1/chat/completions", asked(*content[:3], url)).json()
    assert again["choices"][0]["token_ids"] == right
    said = [{"type": "input_text", "text": part["text"]} if "text" in part else part for part in content]
    body = {"input": [{"role": "user", "content": said}], "temperature": 0, "max_output_tokens": 8}
    answered = server.post("/v1/responses", body).json()
    assert answered["output"][0]["content"][0]["text"] == again["choices"][0]["message"]["content"]
    body = {"model": again["model"], "messages": asked(parts[0])["messages"], "max_tokens": 8}
    refused = server.post("/v1/messages", body)
    assert refused.status_code == 400 and "Sounds are parts in" in refused.json()["error"]["message"]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
        answer = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": content}],  # pyright: ignore[reportArgumentType]
            max_tokens=8,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
    assert answer.usage is not None and answer.usage.completion_tokens == 8


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "input_audio", "input_audio": {"format": "wav"}}, "base64 as `data`"),
        (
            {"type": "input_audio", "input_audio": {"data": in_base64(b"no sound " * 9)}},
            "A recording must be one of",
        ),
        (
            {"type": "input_audio", "input_audio": {"data": in_base64(written(tone(31)))}},
            "30 seconds of a sound",
        ),
        (
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
            "only text and audio are",
        ),
    ],
)
def test_what_is_no_sound_is_refused(server: LiveServer, part: dict[str, Any], words: str) -> None:
    response = server.post("/v1/chat/completions", asked(part))
    assert response.status_code == 400, response.text
    assert words in response.json()["error"]["message"]


def test_a_recording_is_transcribed_by_a_chat_that_its_language_begins(tmp_path: Path) -> None:
    model = Model("qwen3 asr as published", tmp_path, QWEN3_TOKENS)
    model.tokenizer = publish_tokenizer(tmp_path)
    sound, path = noise(1.4), "/v1/audio/transcriptions"
    heard = heard_by_decoder(sound)
    with serving(str(tmp_path), *SIZES) as server:

        def send(path: str = path, **fields: Any) -> Any:
            asked = {"max_completion_tokens": 8, **fields}
            return httpx.post(
                server.url + path, timeout=60, files={"file": ("a", written(sound))}, data=asked
            )

        for fields, said, begun in (
            ({}, "", ""),
            ({"language": "de", "prompt": "gulls"}, "gulls", "language German<asr_text>"),
        ):
            right = model.answer(f"system: {said} user: ", heard, f" assistant: {begun}")
            answer = send(**fields)
            assert answer.status_code == 200, answer.text
            assert answer.json() == {
                "text": model.tokenizer.decode(right).strip(),
                "usage": {"type": "duration", "seconds": 2},
            }
        assert send(response_format="text").text == f"{send().json()['text']}\n"
        for language in ({}, {"language": "German"}):
            streamed = send(stream="true", stream_include_usage="true", **language).text.split("\n\n")
            assert streamed[-2] == "data: [DONE]"
            *deltas, done = [json.loads(line.removeprefix("data: ")) for line in streamed[:-2]]
            assert (
                "".join(each["delta"] for each in deltas) == done["text"] == send(**language).json()["text"]
            )
            assert deltas[-1]["choices"][0]["finish_reason"] == "length"
            assert done["usage"]["completion_tokens"] == done["usage"]["output_tokens"] == 8
        page = server.get("/metrics").text
        assert re.search(r"facet:audio_seconds_total{.*} 11\.2", page), "eight times 1.4 seconds"
        assert re.search(r"facet:audio_pieces_total{.*} 8\.0", page)
        assert server.get("/v1/models").json()["data"][0]["tasks"] == ["generate", "transcription", "embed"]
        for fields, words in (
            ({"response_format": "srt"}, "does not tell"),
            ({"language": "klingon"}, "not a language of this model"),
            ({"chunking_strategy": "auto"}, "reads a recording whole"),
            ({"path": "/v1/audio/translations"}, "translates nothing"),
        ):
            refused = send(**fields)
            assert refused.status_code == 400 and words in refused.json()["error"]["message"]


def test_a_model_with_mistrals_tokenizer_chats_and_transcribes(tmp_path: Path) -> None:
    heard, sound = Heard("voxtral", tmp_path, audio_token_id=24), noise(1.2)
    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", *[f"<{id}>" for id in range(5, 24)], "[AUDIO]"]
    write_tekken(tmp_path / "tekken.json", [*names, "[BEGIN_AUDIO]", "[TRANSCRIBE]"])
    samples, byte = heard_by_decoder(sound), len(names) + 3

    def right(before: str, *behind: int | str) -> list[int]:
        ids = [byte + value for value in before.encode()]
        after = [id for each in behind for id in ([each] if isinstance(each, int) else spelled(each))]
        prompt = Prompts(tmp_path).make([1, 3, *ids, 25], samples, after)
        return expected(heard.model, prompt, 8, lambda sounds, ids: heard.inputs(sounds)).tokens

    def spelled(text: str) -> list[int]:
        return [byte + value for value in text.encode()]

    with serving(
        str(tmp_path), *SIZES, "--num-gpu-blocks-override", "400", "--enable-prompt-tokens-details"
    ) as server:
        part = {"type": "input_audio", "input_audio": {"data": in_base64(written(sound)), "format": "wav"}}
        for cached in (0, 376):
            answer = server.post("/v1/chat/completions", asked({"type": "text", "text": "X"}, part)).json()
            assert answer["choices"][0]["token_ids"] == right("X", 4)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
        path, files = f"{server.url}/v1/audio/transcriptions", {"file": ("a", written(sound))}
        for fields, behind in (({}, (4, 26)), ({"language": "german"}, (4, "lang:de", 26))):
            data = {"max_completion_tokens": 8, **fields}
            told = httpx.post(path, timeout=60, files=files, data=data).json()
            ids = right("", *behind)
            text = bytes(id - byte for id in ids if byte <= id < byte + 256).decode("utf-8", "replace")
            assert told["usage"] == {"type": "duration", "seconds": 2}
            assert told["text"] == text.strip(), ids
        refused = httpx.post(path, timeout=60, files=files, data={"prompt": "gulls"})
        assert refused.status_code == 400 and "without one" in refused.json()["error"]["message"]
