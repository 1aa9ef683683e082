"""How several models are named, in a file, a folder or on the command line, and which cannot be served so."""

from pathlib import Path

import pytest

from server.options import model_list
from server.options.model_list import ModelEntry, uses_cards
from server.options.option_parsing import OptionError
from server.options.parse_server_options import parse, read

FILE = """
[[models]]
model = "demo"
name = "story"
aliases = ["prod", "gpt-4o"]
max-model-len = 512

[[models]]
model = "org/other"
kv_cache_memory_bytes = "64M"
"""


def models(*arguments: str) -> list[ModelEntry]:
    return read(arguments, {}).read_models()


def test_a_file_has_names_and_options_of_each(tmp_path: Path) -> None:
    (tmp_path / "models.toml").write_text(FILE)
    story, other = models("--models", str(tmp_path / "models.toml"), "--max-model-len", "1k", "--port", "0")
    assert (story.name, story.aliases, story.id) == ("story", ("prod", "gpt-4o"), 0)
    assert (other.name, other.aliases, other.id) == ("org/other", (), 1)
    assert story.config.model_names == ("story",)
    assert [one.config.engine.worker.max_model_len for one in (story, other)] == [512, 1000]
    assert other.config.engine.worker.kv_cache_memory_bytes == 64 << 20
    assert other.config.port == 0


def test_a_folder_has_models_by_the_names_of_what_is_in_it(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "c.gguf").write_bytes(b"")
    (tmp_path / "notes").mkdir()
    assert [one.name for one in models("--models", str(tmp_path))] == ["a", "b", "c"]


def test_a_command_line_may_name_several() -> None:
    assert [one.name for one in models("demo", "org/b", "--port", "0", "org/c")] == ["demo", "org/b", "org/c"]
    assert [one.name for one in models("demo", "org/b", "--model", "org/c")] == ["demo", "org/b", "org/c"]
    assert not read(["demo"], {}).has_several


def test_adapters_are_those_of_one_model(tmp_path: Path) -> None:
    own = "lora-modules = ['sql=./sql', {name = 'tell', path = 'owner/repo/tell'}]\nlora-dir = ['.']"
    (tmp_path / "sql").mkdir()
    (tmp_path / "models.toml").write_text(FILE + own)
    story, other = models("--models", str(tmp_path / "models.toml"), "--max-loras", "2", "--enable-lora")
    assert (story.adapters, other.adapters) == ([], ["sql", "tell"])
    assert [each.path for each in other.config.adapters.modules] == [str(tmp_path / "sql"), "owner/repo/tell"]
    assert other.config.adapters.lora_dir == [str(tmp_path)]
    assert [one.config.engine.worker.lora.max_loras for one in (story, other)] == [2, 2]


def test_a_model_that_has_not_changed_keeps_its_id(tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text(FILE)
    given = read(["--models", str(path)], {})
    before = given.read_models()
    path.write_text(FILE.replace("512", "256").replace("prod", "test"))
    after = given.read_models(before)
    assert [one.id for one in after] == [2, 1]
    path.write_text(FILE.replace("prod", "test"))
    assert [one.id for one in given.read_models(before)] == [0, 1]


def test_the_memory_is_a_size_or_a_share() -> None:
    for text, asked in (("2.5G", 5 << 29), ("50%", 0.5), ("1", 1)):
        assert models("demo", "org/b", "--memory", text)[0].config.memory == asked
    for text, words in (
        ("0", "not a share"),
        ("0%", "not a share"),
        ("2.5.1", "not a share"),
        ("lots", "or 50%"),
    ):
        with pytest.raises(OptionError, match=words):
            models("demo", "org/b", "--memory", text)


def test_ranks_and_replicas_of_each_are_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "models.toml").write_text(FILE + "tensor-parallel-size = 2\ndata-parallel-size = 3\n")
    story, other = models("--models", str(tmp_path / "models.toml"))
    assert (story.config.engine.ranks, story.config.replicas.size) == (1, 1)
    assert (other.config.engine.ranks, other.config.replicas.size) == (2, 3)


def test_cards_are_used_where_torch_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_list, "cards_here", lambda: [Path("/dev/nvidia0")])
    monkeypatch.setattr(model_list, "why_unusable", lambda cuda: None)
    monkeypatch.setattr(model_list, "hides_cards", lambda: False)

    def used(*flags: str) -> bool:
        return uses_cards(models("demo", "org/b", *flags)[0].config)

    for cuda, expected in (("13.0", True), (None, False)):
        monkeypatch.setattr(model_list, "cuda_of_torch", lambda cuda=cuda: cuda)
        assert used() is expected
        assert used("--device", "cuda") and not used("--device", "cpu")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["demo", "demo"], "would both be called demo"),
        (["demo", "org/b", "--served-model-name", "x"], "--served-model-name is for one model"),
        (["demo", "org/b", "-dp", "2", "--data-parallel-hybrid-lb"], "external-lb is for a server of one"),
        (["demo", "org/b", "--nnodes", "2"], "--nnodes"),
        (["demo", "org/b", "--distributed-executor-backend", "ray"], "backend ray is for a server of one"),
        (["demo", "org/b", "--api-server-count", "2"], "--api-server-count"),
        (["demo", "org/b", "--enable-sleep-mode"], "--enable-sleep-mode"),
        (["demo", "org/b", "--lora-modules", "a=b"], "--lora-modules are those of one model"),
        (["demo", "--trust-remote-code", "True"], "True is no model: switches have no value"),
        (["demo", "./nowhere"], "there is no ./nowhere"),
        (["demo", "--models", "x"], "leave out the others"),
    ],
)
def test_what_cannot_be_served_together_is_refused_by_name(arguments: list[str], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        models(*arguments)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "a table \\[\\[models\\]\\]"),
        ("port = 1", "a table \\[\\[models\\]\\]"),
        ("[[models]]\nname = 'x'", "model 1: it needs `model`"),
        ("[[models]]\nmodel = 'demo'\nport = 1", "port is of the whole server"),
        ("[[models]]\nmodel = 'demo'\ndevice = 'cpu'", "device is of the whole server"),
        ("[[models]]\nmodel = 'demo'\nmax-model-lem = 1", "did you mean max_model_len"),
        ("[[models]]\nmodel = 'demo'\naliases = 'x'", "a list of names"),
        ("[[models]]\nmodel = 'demo'\nname = ''", "1 to 200 characters"),
        (
            "[[models]]\nmodel = 'demo'\nlora-modules = ['x']",
            "model 1: --lora-modules: 'x' should be name=path",
        ),
        (
            "[[models]]\nmodel = 'demo'\nlora-modules = ['a=b']\n[[models]]\nmodel = 'org/b'\nname = 'a'",
            "would both be called a",
        ),
        ("[[models]", "is not TOML"),
    ],
)
def test_a_mistake_in_the_file_is_told(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "models.toml").write_text(text)
    with pytest.raises(OptionError, match=words):
        models("--models", str(tmp_path / "models.toml"))


@pytest.mark.parametrize("arguments", [["demo", "org/b"], ["--memory", "1G"]])
def test_commands_for_one_model_take_no_more(arguments: list[str]) -> None:
    with pytest.raises(OptionError):
        parse(arguments, {})
